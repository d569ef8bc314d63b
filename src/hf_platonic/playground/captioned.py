"""Retrieval: pictures with captions that fit one picture each, so that every caption is its picture's prompt."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image

from . import scenes

SIZE = 400
"""Pictures when no number is asked for."""

_KEEP = 0.8  # each factor is named with this probability, for captions that tell pictures apart
_SEED = 41


@dataclass(frozen=True)
class CaptionedSplit:
    """Pictures in a fixed order, each with its caption.

    Attributes:
        inputs: RGB images.
        captions: As many, all different; each fits its own picture alone.
    """

    inputs: list[Image.Image]
    captions: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class CaptionedTask:
    """A retrieval task.

    Attributes:
        name: Its name in `load_captioned`.
        description: What is asked.
    """

    name: str
    description: str

    def split(self, n: int | None = None) -> CaptionedSplit:
        """The pictures and captions, the same on every call; a smaller `n` gives the head of a larger one.

        Args:
            n: Number of pictures from 1 to 1000; `SIZE` when None.

        Raises:
            ValueError: `n` is out of range.
        """
        n = SIZE if n is None else n
        if not 1 <= n <= 1000:
            raise ValueError(f"Expected `n` from 1 to 1000 for {self.name!r}, got {n}. Lower or raise it.")
        inputs, captions = _captioned(n)
        return CaptionedSplit(list(inputs), captions)


CAPTIONED = {"captions": CaptionedTask("captions", "Which caption belongs to which picture, as in the corpus.")}


def load_captioned(name: str) -> CaptionedTask:
    """Return a retrieval task by name.

    Raises:
        ValueError: There is no such task.
    """
    if name not in CAPTIONED:
        raise ValueError(f"Expected a retrieval task out of {tuple(CAPTIONED)}, got {name!r}. Take one of these.")
    return CAPTIONED[name]


@lru_cache(maxsize=2)
def _captioned(n: int) -> tuple[tuple[Image.Image, ...], tuple[str, ...]]:
    rng = np.random.default_rng(_SEED)
    kept: list[tuple[scenes.Scene, dict[str, str]]] = []  # each scene with what its caption says of it
    images, captions = [], []
    while len(kept) < n:
        scene = scenes.sample_scene(rng)
        caption, named = scenes.describe(scene, rng, _KEEP)
        said = {factor: scene[factor] for factor in named}
        # The corpus calls a picture and a caption a pair when the picture has all that the caption names.
        if any(_fits(said, other) or _fits(other_said, scene) for other, other_said in kept):
            continue
        kept.append((scene, said))
        images.append(scenes.to_image(scenes.render(scene, rng)))
        captions.append(caption)
    return tuple(images), tuple(captions)


def _fits(said: dict[str, str], scene: scenes.Scene) -> bool:
    return all(scene.get(factor) == value for factor, value in said.items())
