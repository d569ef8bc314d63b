"""What a LoRA matching step costs over a bare forward and backward pass of the same model and batch.

    python benchmarks/lora.py [--json FILE] [--only NAME]

Names: playground (the shipped wide CLIP, 64 probes) and vit-b-32 (CLIP ViT-B/32 with random weights, 8 probes). The
bare pass is the model with the same adapter in it, on inputs that are ready: embeddings, mean square, backward. The
step is the package's own loop from its first to its last step (batches from memory, loss on the grid, AdamW, schedule,
gradients cleared, a loss value every ten steps), set up beforehand. Each name runs in a process of its own; about two
minutes on one core.

Figures: `<name>: step over bare`, the median over rounds of the ratio, taken in turn.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _figures import arguments, child, report
from accelerate.tracking import GeneralTracker
from PIL import Image

from hf_platonic import DualEncoder, MatchingArguments, ProbeSet, TaskDescriptor, match_affinities, playground
from hf_platonic.matching import ProbeTower

NAMES = ("playground", "vit-b-32")


class Rounds(GeneralTracker):
    """Runs the bare passes between rounds of the loop's steps, and takes both times.

    The loop reports a value at the end of each round, which is where something can be put between.
    """

    name = "rounds"
    requires_logging_directory = False

    def __init__(self, bare: Callable[[], object]) -> None:
        super().__init__()
        self.bare, self.ratios, self.started = bare, [], 0.0

    @property
    def tracker(self) -> list[float]:
        return self.ratios

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        took = time.perf_counter() - self.started
        started = time.perf_counter()
        self.bare()
        if self.started:  # the first round warms up
            self.ratios.append(took / (time.perf_counter() - started))
        self.started = time.perf_counter()


def target_of(name: str) -> DualEncoder:
    """A model with its processor."""
    if name == "playground":
        return DualEncoder.from_pretrained(playground.model_path("clip-wide"))
    from transformers import AutoProcessor, CLIPConfig, CLIPModel

    processor = AutoProcessor.from_pretrained(playground.model_path("clip-wide"), backend="pil")
    processor.image_processor.size = {"shortest_edge": 224}
    processor.image_processor.crop_size = {"height": 224, "width": 224}
    config = CLIPConfig()  # ViT-B/32
    config.text_config.eos_token_id = processor.tokenizer.eos_token_id
    torch.manual_seed(0)
    return DualEncoder(CLIPModel(config).eval(), processor)


def measure(name: str) -> float:
    """The ratio for one model."""
    n, batch, steps, rounds = (128, 64, 10, 15) if name == "playground" else (16, 8, 2, 7)
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (n, 64, 64, 3), dtype=torch.uint8, generator=generator).numpy()
    probes = ProbeSet([Image.fromarray(p) for p in pixels], class_names=["circle", "star"], templates=("a {}",))
    target = target_of(name)
    delta = 0.1 * torch.randn(n, 2, generator=generator)
    term = TaskDescriptor(delta=delta, grid=probes.grid, sources=(), spread=1.0, probes=probes)
    inputs = target.preprocess([probes[i] for i in range(batch)])
    tower = ProbeTower(target)

    def bare() -> None:
        for _ in range(steps):
            tower(inputs).square().mean().backward()
        for parameter in tower.parameters():
            parameter.grad = None

    watch = Rounds(bare)
    options = MatchingArguments(
        batch_size=batch,
        max_steps=steps * (rounds + 1),
        num_train_epochs=10_000,
        logging_steps=steps,
        report_to=(watch,),
    )
    match_affinities(term, target, training_args=options, progress=False)
    return statistics.median(watch.ratios)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=NAMES)
    parser.add_argument("--here", action="store_true", help="measure in this process, and print JSON")
    options = parser.parse_args()
    names = NAMES if options.only is None else (options.only,)
    if options.here:
        print(json.dumps({f"{name}: step over bare": measure(name) for name in names}))
        return
    figures: dict[str, float] = {}
    for name in names:
        figures.update(child("--only", name, "--here"))
    report(figures, options.json)


if __name__ == "__main__":
    main()
