"""Resampling against tones whose values at any rate are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from tiny import RATE, tiny_clips, tiny_encoder

from hf_platonic.encoders import Audio
from hf_platonic.encoders.resampling import resample

RATES = [(44100, 48000), (16000, 48000), (8000, 48000), (48000, 16000), (48000, 8000), (22050, 48000), (11025, 8000)]


def tone(hertz: float, rate: int, seconds: float = 0.25, phase: float = 0.3) -> np.ndarray:
    return np.sin(2 * np.pi * hertz * np.arange(math.ceil(seconds * rate)) / rate + phase).astype(np.float32)


@pytest.mark.parametrize(("rate", "to"), [*RATES, (44101, 48000), (96000, 44100), (7919, 8000)])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.9])
def test_a_tone_stays_that_tone(rate: int, to: int, share: float) -> None:
    hertz = share * min(rate, to) / 2
    found, wanted = resample(tone(hertz, rate), rate, to), tone(hertz, to)
    assert 0 <= len(found) - len(wanted) <= math.ceil(to / rate)
    edge = math.ceil(80 * max(1, to / rate))  # silence is assumed beyond the ends
    inner = slice(edge, min(len(found), len(wanted)) - edge)
    np.testing.assert_allclose(found[inner], wanted[inner], rtol=0, atol=2e-4)


@pytest.mark.parametrize(("rate", "to"), [(48000, 16000), (48000, 8000), (11025, 8000), (96000, 44100)])
def test_what_the_new_rate_cannot_hold_is_gone(rate: int, to: int) -> None:
    found = resample(tone(1.02 * to / 2, rate), rate, to)
    assert np.abs(found[100:-100]).max() < 1e-3


@pytest.mark.parametrize(("rate", "to"), RATES)
def test_length_level_and_type(rate: int, to: int) -> None:
    flat = resample(np.full(3000, 0.25, dtype=np.float32), rate, to)
    assert len(flat) == math.ceil(3000 * to / rate)
    assert flat.dtype == np.float32
    edge = math.ceil(80 * max(1, to / rate))
    np.testing.assert_allclose(flat[edge:-edge], 0.25, rtol=0, atol=1e-6)


def test_pieces_of_work_leave_no_seam_and_short_clips_survive() -> None:
    noise = np.random.default_rng(0).standard_normal(20000).astype(np.float32)
    whole = resample(noise, 8000, 48000)
    late = resample(noise[4000:], 8000, 48000)
    np.testing.assert_allclose(whole[24000 + 600 :], late[600:], rtol=0, atol=1e-5)
    assert resample(noise[:1], 8000, 48000).shape == (6,)
    assert resample(noise[:1], 48000, 8000).shape == (1,)
    assert np.array_equal(resample(noise, 8000, 8000), noise)


def test_there_and_back_is_the_clip() -> None:
    clip = tone(700, 16000, seconds=1.0) + 0.5 * tone(2900, 16000, seconds=1.0)
    back = resample(resample(clip, 16000, 44100), 44100, 16000)
    np.testing.assert_allclose(back[200:-200], clip[200:-200], rtol=0, atol=2e-4)


@pytest.mark.parametrize("family", ["clap", "clap_fused"])
@pytest.mark.parametrize("rate", [16000, 11025, 44100])
def test_an_encoder_hears_the_same_at_any_rate(family: str, rate: int) -> None:
    encoder = tiny_encoder(family)
    clips = [Audio(sum(tone(f * k, r, 0.4) for k in (1, 2, 3)) / 3, r) for r in (RATE, rate) for f in (220.0, 510.0)]
    unit = encoder.encode_probes(clips).unit
    same = (unit[:2] * unit[2:]).sum(dim=1)
    assert float(same.min()) > 0.999
    assert float((unit[0] * unit[1]).sum()) < 0.995


def test_the_rate_of_a_clip_is_its_own_business() -> None:
    encoder = tiny_encoder("clap")
    clips = [*tiny_clips(2), *tiny_clips(2, rate=16000)]
    together = encoder.encode_probes(clips).unit
    for row, clip in enumerate(clips):
        np.testing.assert_allclose(together[row], encoder.encode_probes([clip]).unit[0], rtol=0, atol=2e-6)
