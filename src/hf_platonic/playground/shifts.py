"""Domain shifts: what separates the playground's tasks from the corpus that its models were pre-trained on.

An image shift takes float pixels (height, width, 3) in [0, 1], a sound shift float samples in [-1, 1], and both a
generator. The caller clips the result.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from PIL import Image, ImageFilter

Shift = Callable[[np.ndarray, np.random.Generator], np.ndarray]


def chain(*shifts: Shift) -> Shift:
    """Return the shift that applies several in turn."""

    def apply(values: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        for shift in shifts:
            values = shift(values, rng)
        return values

    return apply


def noise(deviation: float) -> Shift:
    """Add white noise of this standard deviation, to pixels or samples."""
    return lambda values, rng: values + rng.normal(0, deviation, values.shape).astype(np.float32)


def fade(factor: float, level: float = 0.5) -> Shift:
    """Shrink the contrast around a grey level; level 0 darkens."""
    return lambda pixels, rng: level + factor * (pixels - level)


def invert() -> Shift:
    """Return the photographic negative."""
    return lambda pixels, rng: 1 - pixels


def cast(red: float, green: float, blue: float) -> Shift:
    """Multiply the channels, as coloured light does."""
    gains = np.array([red, green, blue], dtype=np.float32)
    return lambda pixels, rng: pixels * gains


def blend(amount: float) -> Shift:
    """Mix the channels with their mean, which takes colour away."""
    return lambda pixels, rng: (1 - amount) * pixels + amount * pixels.mean(-1, keepdims=True)


def blur(radius: float) -> Shift:
    """Blur with a Gaussian of this radius in pixels."""

    def apply(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        image = Image.fromarray((np.clip(pixels, 0, 1) * 255).astype(np.uint8)).filter(
            ImageFilter.GaussianBlur(radius)
        )
        return np.asarray(image, dtype=np.float32) / 255

    return apply


def occlude(side: int, patches: int = 1) -> Shift:
    """Cover square patches with random flat colours."""

    def apply(pixels: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        pixels = pixels.copy()
        for _ in range(patches):
            row, column = rng.integers(0, pixels.shape[0] - side + 1, 2)
            pixels[row : row + side, column : column + side] = rng.random(3)
        return pixels

    return apply


def muffle(hertz: float, sampling_rate: int) -> Shift:
    """Remove what lies above a frequency, with a slope of about an octave."""

    def apply(samples: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        frequencies = np.fft.rfftfreq(len(samples), 1 / sampling_rate)
        gain = 1 / (1 + (frequencies / hertz) ** 4)
        return np.fft.irfft(np.fft.rfft(samples) * gain, len(samples)).astype(np.float32)

    return apply


def reverberate(seconds: float, sampling_rate: int, level: float = 1.0) -> Shift:
    """Add an echo tail that decays by a factor e in the given time."""

    def apply(samples: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        length = len(samples)
        tail = rng.normal(size=length) * np.exp(-np.arange(length) / (seconds * sampling_rate))
        tail *= level / np.sqrt((tail**2).sum())
        wet = np.fft.irfft(np.fft.rfft(samples, 2 * length) * np.fft.rfft(tail, 2 * length))[:length]
        return (samples + wet).astype(np.float32)

    return apply


def distort(gain: float) -> Shift:
    """Overdrive: amplify and cut, which adds overtones."""
    return lambda samples, rng: 0.7 * np.clip(gain * samples, -1, 1)


def hum(hertz: float, level: float, sampling_rate: int) -> Shift:
    """Add a steady tone with one overtone."""

    def apply(samples: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        turn = 2 * np.pi * (hertz * np.arange(len(samples)) / sampling_rate + rng.random())
        return (samples + level * (np.sin(turn) + 0.5 * np.sin(2 * turn))).astype(np.float32)

    return apply
