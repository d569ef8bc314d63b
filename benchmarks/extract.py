"""What extraction costs over the bare forward passes of the same two models.

    python benchmarks/extract.py [--json FILE] [--only NAME]

Names: playground (the shipped CLIP), vit-l-14 (CLIP ViT-L/14) and siglip2-large (SigLIP 2 large at 256 px), the two
large ones with random weights. Each runs in a process of its own; the bare passes are the towers' own
`get_image_features` and `get_text_features` on inputs that are ready. About six minutes on two cores, nearly all of
it the large models' passes.

Figures per model: `time_over_forward` (preprocessing left out on both sides: ready inputs against extraction from the
same ready inputs, which still decodes and hashes the images), `peak_memory_over_forward`, and for the small model
`time_over_forward_and_preprocessing`.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from _figures import arguments, child, peak_mebibytes, ratio, report
from PIL import Image

from hf_platonic import DualEncoder, ProbeSet, extract, playground

NAMES = ("playground", "vit-l-14", "siglip2-large")


class Ready(DualEncoder):
    """An encoder that remembers preprocessed batches, to leave preprocessing out of a measurement."""

    def preprocess(self, inputs: Any, *, offset: int = 0) -> dict[str, torch.Tensor]:
        ready = self.__dict__.setdefault("_ready", {})
        key = (offset, len(inputs))
        if key not in ready:
            ready[key] = super().preprocess(inputs, offset=offset)
        return dict(ready[key])


def large(name: str) -> tuple[torch.nn.Module, Any]:
    """A full-size model with random weights, and a processor at its resolution with a shipped vocabulary."""
    from transformers import AutoProcessor, CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

    source = "clip-wide" if name == "vit-l-14" else "siglip2"
    processor = AutoProcessor.from_pretrained(playground.model_path(source), backend="pil")
    side = 224 if name == "vit-l-14" else 256
    processor.image_processor.size = {"height": side, "width": side}
    end = processor.tokenizer.eos_token_id
    if name == "vit-l-14":
        processor.image_processor.size = {"shortest_edge": side}
        processor.image_processor.crop_size = {"height": side, "width": side}
        vision = dict(
            hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16, patch_size=14
        )
        text = dict(
            hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, eos_token_id=end
        )
        return CLIPModel(CLIPConfig(vision_config=vision, text_config=text, projection_dim=768)).eval(), processor
    tower = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16)
    vision = dict(tower, patch_size=16, image_size=256)
    text = dict(tower, vocab_size=256_000, projection_size=1024)
    return SiglipModel(SiglipConfig(vision_config=vision, text_config=text)).eval(), processor


def encoders(name: str) -> tuple[Ready, Ready]:
    """A base and a fine-tune."""
    torch.manual_seed(0)
    if name == "playground":
        path = playground.model_path("clip-wide")
        base = DualEncoder.from_pretrained(path)
        tuned = DualEncoder.from_pretrained(
            path, adapter=playground.adapter_path("clip-wide", playground.IMAGE_TASKS[0])
        )
        return Ready(base.model, base.processor), Ready(tuned.model, tuned.processor)
    (first, processor), (second, _) = large(name), large(name)
    return Ready(first, processor), Ready(second, processor)


def measure(name: str, kind: str) -> dict[str, float]:
    """Time ratios, or the peak memory of one of the two ways, for one model."""
    n, batch = (400, 100) if name == "playground" else (4, 2)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (n, 64, 64, 3), dtype=torch.uint8, generator=generator).numpy()
    probes = ProbeSet([Image.fromarray(p) for p in pixels], class_names=["circle", "star"], templates=("a {}",))
    base, tuned = encoders(name)
    inputs = [probes[i] for i in range(n)]
    batches = [base.preprocess(inputs[i : i + batch], offset=i) for i in range(0, n, batch)]
    prompts = base._tokenise(list(probes.prompts))
    width = max(map(len, prompts)) if base.family.padding == "longest" else base._prompt_limit
    ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in prompts])

    @torch.no_grad()
    def forward(preprocess: bool = False) -> None:
        for i, ready in zip(range(0, n, batch), batches, strict=True):
            inputs_now = DualEncoder.preprocess(base, inputs[i : i + batch], offset=i) if preprocess else ready
            for encoder in (base, tuned):
                encoder.model.get_image_features(**inputs_now)
        for encoder in (base, tuned):
            encoder.model.get_text_features(input_ids=ids)

    def extraction() -> None:
        extract(base, tuned, probes, batch_size=batch)

    if kind == "memory-forward":
        forward()
        return {"mebibytes": peak_mebibytes()}
    if kind == "memory-extract":
        extraction()
        return {"mebibytes": peak_mebibytes()}
    if name != "playground":  # passes of seconds: few rounds will do, and preprocessing is nothing beside them
        return {"time_over_forward": ratio(extraction, forward, rounds=3)}
    plain = DualEncoder(base.model, base.processor), DualEncoder(tuned.model, tuned.processor)
    return {
        "time_over_forward": ratio(extraction, forward, rounds=15),
        "time_over_forward_and_preprocessing": ratio(
            lambda: extract(*plain, probes, batch_size=batch), lambda: forward(preprocess=True), rounds=15
        ),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=NAMES)
    parser.add_argument(
        "--kind", choices=("time", "memory-forward", "memory-extract"), help="one measurement, in this process"
    )
    options = parser.parse_args()
    if options.kind:
        print(json.dumps(measure(options.only, options.kind)))
        return
    figures: dict[str, float] = {}
    for name in NAMES if options.only is None else (options.only,):
        found = child("--only", name, "--kind", "time")
        memory = [child("--only", name, "--kind", f"memory-{way}")["mebibytes"] for way in ("extract", "forward")]
        found["peak_memory_over_forward"] = memory[0] / memory[1]
        figures.update({f"{name}: {key}": value for key, value in found.items()})
    report(figures, options.json)


if __name__ == "__main__":
    main()
