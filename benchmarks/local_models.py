"""Builds the models of the suites `local` and `local_towers`: bases, and a fine-tune of each on each task.

    python benchmarks/local_models.py --data DATA --out MODELS

DATA holds a folder with train.parquet and test.parquet for every task. The weights come from packages that
`local_parts.py` names; they're no dependency of this project, and nothing of them is part of it. MODELS gets

    <model>                   a dual encoder out of a pre-trained classifier and a sentence encoder
    <model>--<task>           its classifier and a residual perceptron on the pooled features, fine-tuned
    <model>--<task>--tower    all weights of the probe tower and the classifier, fine-tuned

with how each was made and what it scores in `training.json`. What is there already is kept, and a folder appears
only when it's whole, so a run that was cut off can be started again. A head takes about half a minute of one core, a
tower a few minutes (`--no-towers` leaves them out).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import local_families as families
import local_parts as parts
import torch
from local_training import Split, accuracy, pooled, tune_head, tune_tower
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from hf_platonic import DualEncoder
from hf_platonic.benchmark.loading import load_items
from hf_platonic.benchmark.suites import TaskSpec, load_suite

START, END = "<!-- fine-tunes -->", "<!-- /fine-tunes -->"
SUITE, TOWERS = load_suite("local"), load_suite("local_towers")
MIRRORED = {"clothing", "fashion_mnist", "emoji"}
"""Tasks in which a picture's mirror image is of the same class."""


@dataclass(frozen=True)
class Lite:
    """An EfficientNet-lite and a sentence encoder: the size, and what the configuration says."""

    size: int
    sentences: str
    options: Mapping[str, Any]
    modality = "image"


@dataclass(frozen=True)
class Tagger:
    """A music tagger and a sentence encoder."""

    kind: Literal["musicnn", "vgg"]
    sentences: str
    options: Mapping[str, Any]
    modality = "audio"


_DEEP = {"stage_blocks": (1, 3, 3, 4, 4, 5, 1)}
_WIDE = {**_DEEP, "stage_channels": (16, 24, 48, 88, 120, 208, 352)}
MODELS: dict[str, Lite | Tagger] = {
    "lite0-minilm6": Lite(0, "all-MiniLM-L6-v2", {"image_size": 96}),
    "lite1-minilm3": Lite(1, "paraphrase-MiniLM-L3-v2", {"image_size": 88, "temperature": 2.0, **_DEEP}),
    "lite2-minilm6-256": Lite(2, "all-MiniLM-L6-v2", {"image_size": 80, "projection_dim": 256, **_WIDE}),
    "musicnn-minilm6": Tagger("musicnn", "all-MiniLM-L6-v2", {"temperature": 1.0, "feature_channels": 200}),
    "vgg-minilm3": Tagger(
        "vgg", "paraphrase-MiniLM-L3-v2", {"temperature": 1.5, "channels": 128, "feature_channels": 256}
    ),
}


def whole(folder: Path, write: Callable[[Path], object]) -> None:
    """Write a folder that is there only once it's complete; one that is there is kept."""
    if folder.exists():
        return
    partial = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write(partial)
    partial.rename(folder)


def save(folder: Path, model: Any, processor: Any, note: Mapping[str, Any]) -> None:
    """Model, processor and `training.json`."""
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    (folder / "training.json").write_text(json.dumps(note, indent=2) + "\n")


def join(model: Any, sentences: parts.Sentences, classes: list[str]) -> None:
    """Give the model the sentence encoder, and the two projections that make one space of both."""
    rows, size = sentences(classes), model.config.projection_dim
    mean = rows.mean(0)
    basis = torch.eye(rows.shape[1])
    if size < len(basis):  # the directions in which the classes differ most
        basis = torch.linalg.svd(rows - mean, full_matrices=False).Vh[:size].T
    model.text_model.load_state_dict(sentences.bert.state_dict())
    with torch.no_grad():
        model.probe_projection.weight.copy_((functional.normalize(rows - mean, dim=-1) @ basis).T)
        model.text_projection.weight.copy_(basis.T)
        model.text_projection.bias.copy_(-mean @ basis)
        model.adapter.fc2.weight.zero_()
        model.adapter.fc2.bias.zero_()


def build_base(row: Lite | Tagger) -> tuple[Any, Any]:
    """An untuned dual encoder and its processor."""
    torch.manual_seed(0)  # of the residual perceptron's first layer, the only weights that aren't given
    sentences = parts.sentence_encoder(row.sentences)
    text = sentences.bert.config.to_dict()
    if isinstance(row, Lite):
        model = families.LiteConse(families.LiteConfig(text_config=text, **row.options)).eval()
        weights, weight, bias = parts.lite_weights(row.size, model.probe_model)
        classes = [f"a photo of a {name}" for name in parts.imagenet_names()]
    else:
        options = {"tower": row.kind, "concepts": 50, **row.options}
        model = families.TagsConse(families.TagsConfig(text_config=text, **options)).eval()
        weights, weight, bias = parts.tagger_weights(row.kind, model.probe_model)
        classes = [f"the sound of {name}" for name in parts.tag_names()]
    model.probe_model.load_state_dict(weights)
    model.classifier.load_state_dict({"weight": weight, "bias": bias})
    join(model, sentences, classes)
    return model, build_processor(model.config, sentences.tokenizer)


def build_processor(config: Any, tokenizer: Any) -> Any:
    """What prepares pixels, or spectrograms in dB, as the classifiers were trained."""
    import transformers as hf

    if config.model_type == families.TagsConfig.model_type:
        extractor = hf.ClapFeatureExtractor(
            feature_size=config.mels,
            sampling_rate=16000,
            hop_length=256,
            fft_window_size=512,
            max_length_s=3,
            frequency_min=0,
            frequency_max=8000,
            truncation="rand_trunc",
            padding="repeatpad",
        )
        return hf.ClapProcessor(extractor, tokenizer)
    size = {"height": config.image_size, "width": config.image_size}
    images = hf.SiglipImageProcessorPil(size=size, image_mean=[127 / 255] * 3, image_std=[128 / 255] * 3)
    return hf.VisionTextDualEncoderProcessor(images, tokenizer)


def read_split(encoder: DualEncoder, task: TaskSpec, data: Path, split: Literal["train", "test"]) -> Split:
    """A split as the model's processor sees it, with labels in the suite's order."""
    train, test = load_items(task, data, None)
    items = test if split == "test" else train
    key, rows = encoder.model.main_input_name, range(len(items))
    chunks = [encoder.preprocess([items.source[row] for row in rows[i : i + 256]])[key] for i in rows[::256]]
    return Split(torch.cat(chunks), torch.tensor(items.labels))


def cached(file: Path, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Tensors from a file, made first if it isn't there."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        save_file(make(), partial)
        partial.rename(file)
    return load_file(file)


class Bench:
    """One model with what its fine-tunes need; features of the frozen tower are kept in a file.

    Args:
        name: Of the model.
        data: Folder of the data sets.
        out: Folder of the models.
    """

    def __init__(self, name: str, data: Path, out: Path) -> None:
        self.name, self.data, self.out, self.row = name, data, out, MODELS[name]
        note = {"model": name, "sentences": self.row.sentences}
        whole(out / name, lambda folder: save(folder, *build_base(self.row), note))
        self.encoder = DualEncoder.from_pretrained(out / name)

    def features(self, task: TaskSpec, split: Literal["train", "test"]) -> Split:
        """Pooled features of the frozen tower, and labels."""

        def make() -> dict[str, Tensor]:
            read = read_split(self.encoder, task, self.data, split)
            return {"inputs": pooled(self.encoder.model, read.inputs), "labels": read.labels}

        return Split(**cached(self.out / ".features" / f"{self.name}-{task.name}-{split}.safetensors", make))

    def fine_tune(self, task: TaskSpec, *, tower: bool) -> None:
        """One fine-tune, unless it's there."""
        folder = self.out / (f"{self.name}--{task.name}" + ("--tower" if tower else ""))
        if folder.exists():
            return
        start, base = time.perf_counter(), self.encoder.model
        prompts = self.encoder.encode_prompts([task.templates[0].format(name) for name in task.class_names])
        seed = [spec.name for spec in SUITE.tasks].index(task.name)
        seen = self.features(task, "test")
        zero_shot = accuracy(base, seen, prompts)
        if tower:
            train = read_split(self.encoder, task, self.data, "train")
            tuned, note = tune_tower(base, train, prompts, mirrored=task.name in MIRRORED, seed=seed)
            seen = replace(seen, inputs=pooled(tuned, read_split(self.encoder, task, self.data, "test").inputs))
        else:
            tuned, note = tune_head(base, self.features(task, "train"), prompts, seed=seed)
        found = accuracy(tuned, seen, prompts)
        spent = round(time.perf_counter() - start, 1)
        note |= {"seed": seed, "zero_shot": zero_shot, "fine_tuned": found, "seconds": spent}
        whole(folder, lambda path: save(path, tuned, self.encoder.processor, note))
        kind = "tower" if tower else "head"
        print(f"{self.name:18} {task.name:17} {kind:5} {zero_shot:.3f} -> {found:.3f} ({spent} s)", flush=True)


def table(out: Path) -> str:
    """Zero-shot and fine-tuned accuracy of every fine-tune in a folder, as Markdown."""
    lines = ["| model | task | trained | zero-shot | fine-tuned |", "|---|---|---|---|---|"]
    for file in sorted(out.glob("*--*/training.json")):
        note = json.loads(file.read_text())
        model, task, *_ = file.parent.name.split("--")
        trained = " and ".join(note["trained"])
        lines.append(f"| {model} | {task} | {trained} | {note['zero_shot']:.3f} | {note['fine_tuned']:.3f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with <task>/{train,test}.parquet")
    parser.add_argument("--out", type=Path, required=True, help="folder for the models")
    parser.add_argument("--model", choices=sorted(MODELS), action="append", help="this one only; may be repeated")
    parser.add_argument("--no-towers", action="store_true", help="leave the whole-tower fine-tunes out")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the table into this Markdown file, too")
    options = parser.parse_args()
    benches = [Bench(name, options.data, options.out) for name in options.model or MODELS]
    for suite, tower in ((SUITE, False), *(() if options.no_towers else ((TOWERS, True),))):
        for task in suite.tasks:
            for bench in benches:
                if task.modality == bench.row.modality:
                    bench.fine_tune(task, tower=tower)
    print(table(options.out))
    if options.docs is not None:
        head, _, rest = options.docs.read_text().partition(START)
        text = "\n".join([head + START, table(options.out), END + rest.partition(END)[2]])
        options.docs.write_text(text)


if __name__ == "__main__":
    main()
