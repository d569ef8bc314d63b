"""Tasks: named classes, prompts, and seeded splits that are drawn when asked for.

Seven image tasks and four sound tasks are rendered under a domain shift. The eighth image task is scikit-learn's
scanned handwriting, which the models, having only seen printed and drawn digits, know little about. Controls come
from the unshifted corpus.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from PIL import Image

from . import scenes, shifts, sounds
from .architectures import SAMPLING_RATE

SplitName = Literal["train", "probes", "test"]
Modality = Literal["image", "audio"]

SIZES: dict[SplitName, int] = {"train": 1200, "probes": 400, "test": 400}
"""Items of a rendered split when no number is asked for."""

_DIGIT_SIZES: dict[SplitName, int] = {"train": 800, "probes": 400, "test": 597}


@dataclass(frozen=True)
class Split:
    """Inputs in a fixed order, with labels unless they are probes.

    Attributes:
        inputs: RGB PIL images, or dictionaries with a mono float32 `array` and its `sampling_rate` in Hz.
        labels: Index into the task's class names for each input; None for probes.
    """

    inputs: list[Any]
    labels: tuple[int, ...] | None

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class _Source:
    """How a task's items are rendered: the labelled factors, what the other factors may be, and the shift."""

    factors: tuple[str, ...]
    fixed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shift: shifts.Shift | None = None


@dataclass(frozen=True)
class Task:
    """A classification task with seeded splits.

    Attributes:
        name: Its name in `load_task` or `load_control`.
        modality: What its inputs are.
        class_names: The classes, in label order.
        templates: Prompt templates with one `{}`; the first is the one that grids are made of.
        description: What is asked and what separates the inputs from the pre-training corpus.
    """

    name: str
    modality: Modality
    class_names: tuple[str, ...]
    templates: tuple[str, ...]
    description: str

    def prompts(self, template: str | None = None) -> tuple[str, ...]:
        """Return one prompt per class, from the first template unless another is given."""
        return tuple((template or self.templates[0]).format(name) for name in self.class_names)

    def split(self, name: SplitName, n: int | None = None) -> Split:
        """Return a split, the same on every call; a smaller `n` gives the head of a larger one.

        Args:
            name: `train`, `probes` (no labels) or `test`; the three share no item. Controls have only `test`.
            n: Number of items, `SIZES[name]` when None. Rendered splits may be longer than that, handwriting may not.

        Returns:
            The split.

        Raises:
            ValueError: The split does not exist, or `n` is out of range.
        """
        names = ("test",) if self.name in CONTROLS else tuple(SIZES)
        if name not in names:
            raise ValueError(
                f"Expected a split of {self.name!r} out of {names}, got {name!r}. Pass one of these names."
            )
        limit = split_size(self.name, name) if self.name == "handwritten_digits" else None
        n = split_size(self.name, name) if n is None else n
        if n < 1 or (limit is not None and n > limit):
            upper = f" to {limit}" if limit else ""
            raise ValueError(
                f"Expected `n` from 1{upper} for split {name!r} of {self.name!r}, got {n}. Lower or raise it."
            )
        if limit is not None:
            inputs, labels = _handwriting(name, n)
        else:
            inputs, labels = _rendered(self, name, n)
        return Split(inputs, None if name == "probes" else tuple(labels))


def split_size(task: str, split: SplitName) -> int:
    """Number of items of a task's split as it is shipped."""
    return (_DIGIT_SIZES if task == "handwritten_digits" else SIZES)[split]


def load_task(name: str) -> Task:
    """Return a task by name.

    Raises:
        ValueError: There is no such task.
    """
    return _load(name, TASKS, "task", "IMAGE_TASKS or AUDIO_TASKS")


def load_control(name: str) -> Task:
    """Return a control by name: a task of the unshifted corpus, with only a `test` split.

    Raises:
        ValueError: There is no such control.
    """
    return _load(name, CONTROLS, "control", "`controls(modality)`")


def _load(name: str, table: Mapping[str, Task], noun: str, remedy: str) -> Task:
    if name not in table:
        raise ValueError(f"Expected a {noun} out of {tuple(table)}, got {name!r}. Take one from {remedy}.")
    return table[name]


def corpus_items(modality: Modality, seed: int) -> Iterator[tuple[dict[str, str], np.ndarray, np.random.Generator]]:
    """Yield unshifted items without end: factors, rendered pixels or samples, and the generator to caption with."""
    rng = np.random.default_rng(seed)
    while True:
        if modality == "image":
            scene = scenes.sample_scene(rng)
            yield scene, scenes.render(scene, rng), rng
        else:
            sound = sounds.sample_sound(rng)
            yield sound, sounds.render(sound, rng), rng


def _rendered(task: Task, split: str, n: int) -> tuple[list[Any], list[int]]:
    source = _SOURCES[task.name]
    values = (scenes if task.modality == "image" else sounds).FACTORS
    classes = [source.fixed.get(factor, values[factor]) for factor in source.factors]
    # One stream per task and split, from a hash that does not change between interpreters.
    rng = np.random.default_rng([zlib.crc32(task.name.encode()), zlib.crc32(split.encode())])
    inputs: list[Any] = []
    labels = []
    for _ in range(n):
        label = int(rng.integers(len(task.class_names)))
        picks = np.unravel_index(label, [len(c) for c in classes])
        fixed = {**source.fixed, **{f: c[int(i)] for f, c, i in zip(source.factors, classes, picks, strict=True)}}
        if fixed.get("count", "one") != "one" and task.modality == "image":
            fixed["kind"] = "group"
        inputs.append(_item(task.modality, fixed, source.shift, rng))
        labels.append(label)
    return inputs, labels


def _item(
    modality: Modality, fixed: Mapping[str, Any], shift: shifts.Shift | None, rng: np.random.Generator
) -> Image.Image | dict[str, Any]:
    if modality == "image":
        pixels = scenes.render(scenes.sample_scene(rng, fixed), rng)
        return scenes.to_image(shift(pixels, rng) if shift else pixels)
    samples = sounds.render(sounds.sample_sound(rng, fixed), rng)
    samples = np.clip(shift(samples, rng) if shift else samples, -1, 1).astype(np.float32)
    return {"array": samples, "sampling_rate": SAMPLING_RATE}


@lru_cache(maxsize=1)
def _scans() -> tuple[np.ndarray, np.ndarray]:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            "Expected scikit-learn, whose scanned digits are the task 'handwritten_digits', got no such package. "
            "Install it with `pip install scikit-learn`."
        ) from error
    digits = load_digits()
    order = np.random.default_rng(1797).permutation(len(digits.target))
    return digits.images[order], digits.target[order]


def _handwriting(split: SplitName, n: int) -> tuple[list[Image.Image], list[int]]:
    scans, targets = _scans()
    start = sum(
        size
        for name, size in _DIGIT_SIZES.items()
        if tuple(_DIGIT_SIZES).index(name) < tuple(_DIGIT_SIZES).index(split)
    )
    images = []
    for scan in scans[start : start + n]:
        framed = np.pad(scan / 16 * 255, 1).astype(np.uint8)
        images.append(
            Image.fromarray(framed).resize((scenes.SIDE, scenes.SIDE), Image.Resampling.BICUBIC).convert("RGB")
        )
    return images, [int(t) for t in targets[start : start + n]]


_SINGLE: dict[str, tuple[str, ...]] = {"kind": ("single",)}
_BIG = {"size": ("large", "huge")}
_CONTROL_COLOURS, _CONTROL_SHAPES = (
    ("red", "green", "blue", "yellow"),
    ("circle", "triangle", "star", "cross", "heart"),
)

_SOURCES: dict[str, _Source] = {
    "shapes": _Source(("shape",), {**_SINGLE, "size": ("small", "large", "huge")}, shifts.invert()),
    "colours": _Source(("colour",), _SINGLE, shifts.cast(1.0, 0.62, 0.4)),
    "sizes": _Source(("size",), _SINGLE, shifts.chain(shifts.invert(), shifts.blend(0.7))),
    "positions": _Source(("position",), {**_SINGLE, "size": ("tiny", "small", "large")}, shifts.fade(0.25, 0.9)),
    "counts": _Source(("count",), {**_SINGLE, "size": ("tiny", "small")}, shifts.fade(0.4, 0.0)),
    "textures": _Source(("texture",), _SINGLE, shifts.invert()),
    "backgrounds": _Source(("background",), _SINGLE, shifts.fade(0.72, 0.9)),
    "timbres": _Source(("timbre",), {}, shifts.distort(6.0)),
    "pitches": _Source(("pitch",), {}, shifts.hum(1000.0, 0.2, SAMPLING_RATE)),
    "motions": _Source(("motion",), {}, shifts.noise(0.09)),
    "rhythms": _Source(("count",), {}, shifts.reverberate(0.1, SAMPLING_RATE, 0.5)),
    "objects": _Source(("colour", "shape"), {**_SINGLE, **_BIG, "colour": _CONTROL_COLOURS, "shape": _CONTROL_SHAPES}),
    "letters": _Source(("letter",), {"kind": ("letter",)}),
    "places": _Source(("place",)),
    "tones": _Source(("pitch", "timbre")),
}


def _image_task(name: str, class_names: tuple[str, ...], templates: tuple[str, ...], description: str) -> Task:
    return Task(name, "image", class_names, templates, description)


def _sound_task(name: str, class_names: tuple[str, ...], templates: tuple[str, ...], description: str) -> Task:
    return Task(name, "audio", class_names, templates, description)


def _counted(noun: str) -> tuple[str, ...]:
    return tuple(f"{word} {noun}" + ("" if word == "one" else "s") for word in scenes.FACTORS["count"])


_ON = ("a thing on a {} background", "a {} background")

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        _image_task(
            "shapes", scenes.FACTORS["shape"], ("a {}", "one {}"), "The object's shape, in photographic negatives."
        ),
        _image_task(
            "colours",
            scenes.FACTORS["colour"],
            ("a {} thing", "one {} thing"),
            "The object's colour, under reddish light.",
        ),
        _image_task(
            "sizes",
            scenes.FACTORS["size"],
            ("a {} thing", "one {} thing"),
            "The object's size, in negatives that have lost most colour.",
        ),
        _image_task(
            "positions",
            scenes.FACTORS["position"],
            ("a thing at the {}", "one thing at the {}"),
            "Where the object is, in mist.",
        ),
        _image_task("counts", _counted("thing"), ("{}",), "How many objects there are, at night."),
        _image_task(
            "textures", scenes.FACTORS["texture"], _ON, "The background's texture, in photographic negatives."
        ),
        _image_task("backgrounds", scenes.FACTORS["background"], _ON, "The background's colour, in thin mist."),
        _image_task(
            "handwritten_digits",
            scenes.FACTORS["digit"],
            ("the digit {}",),
            "Scanned handwriting, 8 by 8 pixels enlarged.",
        ),
        _sound_task("timbres", sounds.FACTORS["timbre"], ("a {} sound",), "The tone's timbre, overdriven."),
        _sound_task("pitches", sounds.FACTORS["pitch"], ("a {} sound",), "The tone's pitch, against a steady hum."),
        _sound_task("motions", sounds.FACTORS["motion"], ("a sound {}",), "How the pitch moves, in white noise."),
        _sound_task("rhythms", _counted("sound"), ("{}",), "How many strokes there are, in a hall."),
    )
}

CONTROLS: dict[str, Task] = {
    task.name: task
    for task in (
        _image_task("letters", scenes.FACTORS["letter"], ("the letter {}",), "Typeset letters, as in the corpus."),
        _image_task(
            "objects",
            tuple(f"{colour} {shape}" for colour in _CONTROL_COLOURS for shape in _CONTROL_SHAPES),
            ("a {}", "one {}"),
            "Colour and shape of a large object, as in the corpus.",
        ),
        _sound_task("places", sounds.FACTORS["place"], ("a sound {}",), "What surrounds the tone, as in the corpus."),
        _sound_task(
            "tones",
            tuple(f"{pitch} {timbre}" for pitch in sounds.FACTORS["pitch"] for timbre in sounds.FACTORS["timbre"]),
            ("a {} sound",),
            "Pitch and timbre together, as in the corpus.",
        ),
    )
}
