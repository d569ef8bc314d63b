"""Rendered sounds with captions: tones with a timbre, pitch, motion, number of strokes, envelope and surroundings.

Sounds last one second at 8 kHz. Everything is numpy, seeded through the generator that the caller passes, and
takes about 0.5 ms.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from .architectures import CLIP_SECONDS, SAMPLING_RATE

SAMPLES = SAMPLING_RATE * CLIP_SECONDS
"""Samples of a sound."""

_HERTZ = {"low": 170.0, "middle": 380.0, "high": 850.0, "shrill": 1700.0}

FACTORS: dict[str, tuple[str, ...]] = {
    "timbre": ("pure", "hollow", "buzzing", "metallic", "breathy", "rattling"),
    "pitch": tuple(_HERTZ),
    "motion": ("steady", "rising", "falling", "trembling", "arching"),
    "count": ("one", "two", "three", "four", "five"),
    "envelope": ("even", "swelling", "fading"),
    "place": ("in silence", "in the rain", "beside a motor", "by a fire"),
}
"""Every factor of a sound and the words for its values."""

Sound = dict[str, str]
"""One value for each factor."""


def sample_sound(rng: np.random.Generator, fixed: Mapping[str, str | tuple[str, ...]] | None = None) -> Sound:
    """Return one sound with uniformly drawn factors.

    Args:
        rng: Source of randomness.
        fixed: Factor to value, or factor to the values to draw from.
    """
    sound = {}
    for factor, values in FACTORS.items():
        choice = (fixed or {}).get(factor, values)
        sound[factor] = choice if isinstance(choice, str) else choice[int(rng.integers(len(choice)))]
    return sound


def describe(sound: Sound, rng: np.random.Generator, keep: float = 0.5) -> tuple[str, frozenset[str]]:
    """Return a caption that names a random part of the sound, and the factors that it names.

    Args:
        sound: What is heard.
        rng: Source of randomness.
        keep: Probability in [0, 1] with which each factor is named.
    """
    # A third of the captions name about one factor, as class prompts do.
    keep = 0.2 if rng.random() < 0.35 else keep
    named = frozenset(factor for factor in FACTORS if rng.random() < keep)
    if not named:
        named = frozenset([tuple(FACTORS)[int(rng.integers(len(FACTORS)))]])
    several = "count" in named and sound["count"] != "one"
    words = [sound["count"] if "count" in named else "a"]
    words += [sound[factor] for factor in ("pitch", "timbre") if factor in named]
    words.append("sounds" if several else "sound")
    words += [" and ".join(sound[factor] for factor in ("motion", "envelope") if factor in named)]
    words += [sound["place"]] if "place" in named else []
    return " ".join(word for word in words if word), named


def render(sound: Sound, rng: np.random.Generator) -> np.ndarray:
    """Return the samples of a sound.

    Args:
        sound: What to play.
        rng: Source of the jitter in pitch, phase, level and surroundings.

    Returns:
        Array (8000,), float32 in [-1, 1].
    """
    seconds = np.arange(SAMPLES) / SAMPLING_RATE
    gate, progress = _strokes(FACTORS["count"].index(sound["count"]) + 1, seconds, rng)
    tone = gate * _timbre(sound["timbre"], _pitch(sound, seconds, progress, rng), rng)
    if sound["envelope"] == "swelling":
        tone *= np.exp(4 * (seconds - 1))
    elif sound["envelope"] == "fading":
        tone *= np.exp(-4 * seconds)
    tone *= 0.5 / max(1e-6, float(np.abs(tone).max()))
    mixed = tone * rng.uniform(0.7, 1.2) + _surroundings(sound["place"], seconds, rng)
    return np.asarray(np.clip(mixed, -1, 1), dtype=np.float32)


def _pitch(sound: Sound, seconds: np.ndarray, progress: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the frequency over time in Hz of a tone that moves by about an octave within each stroke."""
    motion, span = sound["motion"], rng.uniform(0.9, 1.2)
    if motion == "rising":
        octaves = span * (progress - 0.5)
    elif motion == "falling":
        octaves = span * (0.5 - progress)
    elif motion == "trembling":
        octaves = 0.25 * np.sin(2 * np.pi * rng.uniform(9.0, 11.0) * seconds + rng.uniform(0, 6))
    elif motion == "arching":
        octaves = span * (np.sin(np.pi * progress) - 0.6)
    else:
        octaves = np.zeros_like(seconds)
    return np.asarray(_HERTZ[sound["pitch"]] * 2 ** (octaves + rng.uniform(-0.2, 0.2)))


def _timbre(timbre: str, hertz: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    turn = 2 * np.pi * (np.cumsum(hertz) / SAMPLING_RATE + rng.random())

    def partials(ratios: np.ndarray, levels: np.ndarray) -> np.ndarray:
        # Partials over the highest frequency that the rate can carry would fold back as false tones.
        audible = np.outer(ratios, hertz) < 0.46 * SAMPLING_RATE
        return np.asarray((levels[:, None] * np.sin(np.outer(ratios, turn)) * audible).sum(0))

    if timbre == "hollow":
        return partials(np.array([1.0, 3.0, 5.0]), np.array([1.0, 0.5, 0.35]))
    if timbre == "buzzing":
        return partials(np.arange(1.0, 9.0), np.arange(1.0, 9.0) ** -0.5)
    if timbre == "metallic":
        return partials(np.array([1.0, 1.52, 2.46]), np.ones(3))
    if timbre == "breathy":
        return np.repeat(rng.normal(size=SAMPLES // 8), 8) * np.sin(turn)
    if timbre == "rattling":
        return np.sin(turn) * (np.sin(2 * np.pi * 31 * np.arange(SAMPLES) / SAMPLING_RATE) > 0)
    return np.sin(turn)


def _strokes(count: int, seconds: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the gate in [0, 1] that cuts a tone into `count` strokes, and how far each stroke has come, in [0, 1]."""
    edges = np.linspace(0.04, 0.96, count + 1)
    gate, progress = np.zeros_like(seconds), np.zeros_like(seconds)
    for start, stop in pairwise(edges):
        length = (stop - start) * rng.uniform(0.55, 0.65)
        inside = (seconds - start - rng.uniform(0, 0.06) * (stop - start)) / length
        gate = np.maximum(gate, np.clip(12 * np.minimum(inside, 1 - inside), 0, 1))
        progress = np.where((inside >= 0) & (inside <= 1), inside, progress)
    return gate, progress


def _surroundings(place: str, seconds: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    if place == "in the rain":
        return 0.03 * rng.normal(size=SAMPLES)
    if place == "beside a motor":
        turn = 2 * np.pi * (rng.uniform(60, 75) * seconds + rng.random())
        return 0.16 * (np.sin(turn) + 0.6 * np.sin(2 * turn) + 0.3 * np.sin(3 * turn))
    if place == "by a fire":
        crackle = np.zeros(SAMPLES)
        for start in rng.integers(0, SAMPLES - 40, 14):
            crackle[start : start + 40] += rng.uniform(0.3, 0.7) * rng.normal(size=40) * np.exp(-np.arange(40) / 10)
        return crackle
    return 0.002 * rng.normal(size=SAMPLES)
