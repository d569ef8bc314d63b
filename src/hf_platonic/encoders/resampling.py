"""Sound at another sampling rate, the same on every machine."""

from __future__ import annotations

from math import ceil, gcd
from typing import Any

import numpy as np

__all__ = ["resample"]

_ZEROS = 64  # zero crossings of the sinc on each side
_ROLLOFF = 0.95  # centre of the transition band, which then ends at the Nyquist frequency
_BETA = 10.0  # of the Kaiser window: what folds back is 100 dB down
_CHUNK = 8192


def resample(samples: np.ndarray[Any, Any], rate: int, to: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The clip at another rate, by a Kaiser-windowed sinc evaluated at each new sample (polyphase interpolation).

    Below 0.9 of the lower Nyquist frequency a tone keeps its amplitude and phase to 1e-4; above the lower Nyquist
    frequency it's gone. Silence is assumed before and after the clip.

    Args:
        samples: Shape (t,), float32.
        rate: Of the samples, in Hz.
        to: The wanted rate, in Hz.

    Returns:
        Shape (ceil(t * to / rate),), float32; the samples themselves where the rates agree.

    Example:
        >>> time = np.arange(4410) / 44100
        >>> tone = np.sin(2 * np.pi * 440 * time).astype(np.float32)
        >>> again = resample(tone, 44100, 48000)
        >>> wanted = np.sin(2 * np.pi * 440 * np.arange(4800) / 48000)
        >>> len(again), bool(np.abs(again - wanted)[200:-200].max() < 1e-4)
        (4800, True)

    Reference:
        Smith, "Digital Audio Resampling Home Page", 1984 to 2002, for band-limited interpolation.
    """
    if rate == to:
        return np.asarray(samples, dtype=np.float32)
    common = gcd(rate, to)
    up, down = to // common, rate // common
    cutoff = _ROLLOFF * min(1.0, up / down)
    half = ceil(_ZEROS / cutoff)
    offsets = np.arange(1 - half, half + 1)
    padded = np.pad(np.asarray(samples, dtype=np.float64), half)
    windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * half)
    length = ceil(len(samples) * up / down)
    out = np.empty(length, dtype=np.float32)
    for start in range(0, length, _CHUNK):
        # Integers of Python's width: a long clip's position times its rate doesn't fit 32 bits.
        ticks = np.arange(start, min(start + _CHUNK, length), dtype=np.int64) * down
        base, phase = ticks // up, ticks % up
        phases, which = np.unique(phase, return_inverse=True)
        distance = offsets - phases[:, None] / up
        window = np.i0(_BETA * np.sqrt(np.clip(1 - (distance / half) ** 2, 0, None)))
        kernel = np.sinc(cutoff * distance) * window
        kernel /= kernel.sum(axis=1, keepdims=True)  # a constant stays what it is
        out[start : start + len(ticks)] = np.einsum("nk,nk->n", windows[base + 1], kernel[which])
    return out
