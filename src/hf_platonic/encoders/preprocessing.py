"""From decoded probes and raw prompts to the tensors a tower takes, the same on every call and in every batch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import EncoderError, ProbeError, PromptError
from .resampling import resample

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from .media import Audio

__all__ = [
    "RULES",
    "audio_inputs",
    "cut_prompts",
    "frame_inputs",
    "image_inputs",
    "in_chunks",
    "prompt_ids",
    "prompt_limit",
]

RULES = {
    "version": 2,
    "image": "rgb, white background, upright, 16-bit/257",
    "audio": "mono; other rates: windowed sinc; longer clips: centre crop, or for fusion models three crops drawn "
    "with seed 0 per clip",
    "text": "right padding, truncation keeps the end token",
}
"""What this package decides itself about a probe or a prompt; part of the preprocessing digest."""

_MAX_ASPECT = 200  # 40 MB of pixels at 224 for the shorter edge

# These add the padding id plus one to every position, so that many positions are never used.
_ROBERTA_LIKE = ("roberta", "camembert", "clap_text", "altclip_text", "xmod")


def image_inputs(processor: Any, config: Any, probes: Sequence[Image], offset: int = 0) -> dict[str, Tensor]:
    """Keyword arguments of `get_image_features`.

    Args:
        processor: The model's processor.
        config: The model's configuration (unused).
        probes: b RGB images.
        offset: Index of the first probe within its set, for messages.

    Returns:
        `pixel_values` of shape (b, 3, height, width), float32, on the CPU.

    Raises:
        ProbeError: If a picture is so long and thin that scaling its shorter edge would fill the memory.
    """
    size = getattr(processor.image_processor, "size", None) or {}
    for index, probe in enumerate(probes, start=offset):
        if "shortest_edge" in size and max(probe.size) > _MAX_ASPECT * min(probe.size):
            raise ProbeError(
                f"Expected a picture at most {_MAX_ASPECT} times as long as wide for probe {index}, got "
                f"{probe.width} x {probe.height}: this model scales the shorter edge. Crop or remove it.",
                index=index,
            )
    # Channels last is said aloud: an image three pixels high would be taken for channels first.
    made = processor.image_processor(images=list(probes), return_tensors="pt", input_data_format="channels_last")
    return dict(made)


def frame_inputs(processor: Any, config: Any, probes: Sequence[Image], offset: int = 0) -> dict[str, Tensor]:
    """Keyword arguments of X-CLIP's `get_video_features`: each picture as a clip in which nothing moves.

    Args:
        processor: The model's processor, with the `image_processor` of a video model.
        config: The model's configuration; `vision_config.num_frames` is the length.
        probes: b RGB frames.
        offset: Index of the first probe within its set (unused).

    Returns:
        `pixel_values` of shape (b, frames, 3, height, width), float32, on the CPU.
    """
    made = processor.image_processor([[probe] for probe in probes], return_tensors="pt")["pixel_values"]
    frames = int(config.vision_config.num_frames)
    return {"pixel_values": made.reshape(len(probes), 1, *made.shape[-3:]).repeat(1, frames, 1, 1, 1)}


def audio_inputs(processor: Any, config: Any, probes: Sequence[Audio], offset: int = 0) -> dict[str, Tensor]:
    """Keyword arguments of `get_audio_features`, without the extractor's two draws from NumPy's global generator.

    A clip of another rate than the extractor's is resampled first.

    A clip longer than the extractor's `max_length_s` is cut to its centre. A model trained with feature fusion gets
    the whole clip and three crops instead, drawn by the extractor under a fixed seed for each clip; `is_longer` then
    says so, and for no other clip (the extractor itself marks a random one when none is long).

    Args:
        processor: The model's processor.
        config: The model's configuration; `audio_config.enable_fusion` decides.
        probes: b clips.
        offset: Index of the first probe within its set (unused).

    Returns:
        `input_features` of shape (b, 4 or 1, frames, mels), float32, and `is_longer` of shape (b, 1), bool.
    """
    import torch
    from threadpoolctl import threadpool_limits

    extractor = processor.feature_extractor
    fused = bool(config.audio_config.enable_fusion)
    limit, hop = int(extractor.nb_max_samples), int(extractor.hop_length)
    features, longer = [], []
    # The extractor multiplies many small matrices in NumPy, which several threads make several times slower.
    with threadpool_limits(limits=1, user_api="blas"):
        for clip in probes:
            samples = resample(clip.array, clip.sampling_rate, int(extractor.sampling_rate))
            if not fused and samples.size > limit:
                start = (samples.size - limit) // 2
                samples = samples[start : start + limit]
            with _numpy_seed(0):
                made = extractor(
                    samples,
                    sampling_rate=extractor.sampling_rate,
                    truncation="fusion" if fused else "rand_trunc",
                    return_tensors="pt",
                )
            features.append(made["input_features"].float())
            longer.append([fused and samples.size // hop > limit // hop])
    return {"input_features": torch.cat(features), "is_longer": torch.tensor(longer)}


def in_chunks(clip: Audio, extractor: Any) -> list[Audio]:
    """The clip in the fewest parts of one length (to a sample) that the extractor takes whole.

    Args:
        clip: Any clip.
        extractor: The model's feature extractor.

    Returns:
        One part, the clip itself, unless it's too long.
    """
    longest = int(extractor.nb_max_samples) * clip.sampling_rate // int(extractor.sampling_rate)
    parts = np.array_split(clip.array, -(-clip.array.size // max(longest, 1)))
    return [replace(clip, array=part) for part in parts]


@contextmanager
def _numpy_seed(seed: int) -> Iterator[None]:
    """NumPy's global generator at a fixed seed, and back where it was."""
    state = np.random.get_state()
    np.random.seed(seed)
    try:
        yield
    finally:
        np.random.set_state(state)


def prompt_limit(tokenizer: Any, text_config: Any) -> int:
    """The most tokens a prompt may have: what the tokenizer says, within the text tower's positions."""
    positions = int(getattr(text_config, "max_position_embeddings", 0) or tokenizer.model_max_length)
    if any(word in str(getattr(text_config, "model_type", "")) for word in _ROBERTA_LIKE):
        positions -= int(text_config.pad_token_id) + 1
    return min(positions, int(tokenizer.model_max_length))


def prompt_ids(
    tokenizer: Any, prompts: Sequence[str], canonical: Sequence[str], limit: int, *, end: int | None = None
) -> list[list[int]]:
    """Token ids of each prompt, cut to the limit with the end token kept.

    Args:
        tokenizer: The model's tokenizer.
        prompts: k different prompts, for messages.
        canonical: The same as the text tower should see them.
        limit: Most tokens a prompt may have, special ones included.
        end: Id of the end token where the text tower reads its embedding there: every prompt must have it.

    Returns:
        k lists of ids, without padding.

    Raises:
        PromptError: If two prompts have the same ids.
        EncoderError: If a prompt has no end token.
    """
    rows: list[list[int]] = tokenizer(list(canonical), truncation=True, max_length=limit, padding=False)["input_ids"]
    seen: dict[tuple[int, ...], str] = {}
    for prompt, row in zip(prompts, rows, strict=True):
        other = seen.setdefault(tuple(row), prompt)
        if other is not prompt:
            raise PromptError(
                f"Expected different prompts, got {other!r} and {prompt!r}, which are the same to this model after "
                f"tokenisation and truncation to {limit} tokens. Shorten the template or rename a class."
            )
        if end is not None and end not in row:
            raise EncoderError(
                f"Expected the end token (id {end}) in every tokenised prompt, got none for {prompt!r}. The text "
                "tower reads its embedding there: load the tokenizer that belongs to this model."
            )
    return rows


def cut_prompts(
    tokenizer: Any, prompts: Sequence[str], canonical: Sequence[str], rows: Sequence[Sequence[int]], limit: int
) -> None:
    """Says which prompts lost their end, if any did.

    Args:
        tokenizer: The model's tokenizer.
        prompts: k prompts, for the message.
        canonical: The same as the text tower sees them.
        rows: Their ids, from `prompt_ids`.
        limit: The most tokens a prompt may have.

    Warns:
        UserWarning: If prompts were cut.
    """
    full = [index for index, row in enumerate(rows) if len(row) >= limit]
    cut = [i for i in full if len(tokenizer(canonical[i], truncation=False, padding=False)["input_ids"]) > limit]
    if cut:
        warnings.warn(
            f"{len(cut)} of {len(prompts)} prompts are longer than the {limit} tokens this model reads and were cut, "
            f"the first: {prompts[cut[0]][:80]!r}. Shorten the template or the class name.",
            UserWarning,
            stacklevel=3,
        )
