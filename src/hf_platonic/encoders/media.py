"""One probe in, one plain picture or clip out: whatever a data set hands over becomes RGB or mono float32.

Two machines that decode the same file get the same values, so their content hashes agree.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..errors import ProbeError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["Audio", "content_hash", "decode_audio", "decode_image", "modality_of"]

BACKGROUND = (255, 255, 255)
"""Colour behind transparent pixels (white, as on most pages that logos and drawings come from)."""

_AUDIO_MAGIC = (b"fLaC", b"OggS", b"ID3", b"FORM", b"\xff\xfb", b"\xff\xf3", b"\xff\xf2")
_MAX_CHANNELS = 16


@dataclass(frozen=True, eq=False)
class Audio:
    """One clip.

    Attributes:
        array: Samples, shape (t,), float32, mono, nominally in [-1, 1].
        sampling_rate: In Hz.
    """

    array: np.ndarray[Any, np.dtype[np.float32]]
    sampling_rate: int


def modality_of(probe: object) -> Literal["image", "audio"]:
    """Which kind of probe this is, from its form or its first bytes; nothing is decoded.

    Args:
        probe: Anything `decode_image` or `decode_audio` takes.

    Raises:
        ProbeError: If it's neither.
    """
    if isinstance(probe, Audio) or hasattr(probe, "get_all_samples"):
        return "audio"
    if isinstance(probe, Mapping):
        if "array" in probe:
            return "audio"
        probe = _source(probe)
    if isinstance(probe, tuple) and len(probe) == 2 and np.ndim(probe[1]) == 0:
        return "audio"
    if isinstance(probe, np.ndarray):
        return "audio" if probe.ndim == 1 else "image"
    if isinstance(probe, (bytes, bytearray)):
        return "audio" if _sounds(bytes(probe[:12])) else "image"
    if isinstance(probe, (str, os.PathLike)):
        try:
            with open(probe, "rb") as file:
                return "audio" if _sounds(file.read(12)) else "image"
        except OSError as error:
            raise ProbeError(f"Expected a readable file, got {os.fspath(probe)!r}: {error}.") from error
    if hasattr(probe, "convert") and hasattr(probe, "mode"):
        return "image"
    raise ProbeError(
        f"Expected an image (PIL, array, bytes, path) or an audio clip ((array, rate), dict, bytes, path), got "
        f"{type(probe).__name__}."
    )


def decode_image(probe: object, *, index: int | None = None) -> Image:
    """The probe as an RGB image, upright.

    Transparent pixels are laid over white; 16-bit grey is scaled by 1/257; the EXIF orientation is applied; of an
    animation the first frame is taken; CMYK and palettes are converted by Pillow.

    Args:
        probe: A PIL image of any mode; an array (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), of uint8 (or integers in
            [0, 255]), uint16, bool, or floats in [0, 1]; encoded bytes; a dict with "bytes" or "path"; a path.
        index: The probe's position, for messages.

    Returns:
        A new PIL image of mode RGB.

    Raises:
        ProbeError: If it's no image, or a damaged one; `index` is set and the cause kept.
    """
    from PIL import Image, ImageOps

    _expect("image", probe, index)
    raw = _source(probe) if isinstance(probe, Mapping) else probe
    try:
        if isinstance(raw, np.ndarray):
            image = Image.fromarray(_pixels(raw))
        elif isinstance(raw, (bytes, bytearray)):
            image = Image.open(io.BytesIO(raw))
        elif isinstance(raw, (str, os.PathLike)):
            with open(raw, "rb") as file:
                image = Image.open(io.BytesIO(file.read()))
        else:
            image = raw  # type: ignore[assignment]  # `_expect` left PIL images only
        image.load()  # a cut-off file shows here, not at open
        image = ImageOps.exif_transpose(image)
        return _rgb(image)
    except (OSError, SyntaxError, ValueError, EOFError, Image.DecompressionBombError) as error:
        raise ProbeError(
            f"Expected a readable image for {_name(index)}, got {_describe(raw)}: {error}. "
            "Remove or repair that probe.",
            index=index,
        ) from error


def decode_audio(probe: object, *, index: int | None = None) -> Audio:
    """The probe as mono float32 samples at its own rate; nothing is resampled.

    Channels are averaged; integer samples are scaled to [-1, 1).

    Args:
        probe: `Audio`; a pair (array, rate); a dict with "array" and "sampling_rate", or with "bytes" or "path"; a
            decoded audio object of `datasets`; encoded bytes or a path (both need the soundfile package). Arrays have
            shape (t,), (channels, t) or (t, channels): the shorter axis is taken as the channels.
        index: The probe's position, for messages.

    Raises:
        ProbeError: If it's no clip, a damaged or empty one, or one without a sampling rate; `index` is set.
        ImportError: If an encoded clip is given and soundfile isn't installed.
    """
    _expect("audio", probe, index)
    samples: Any
    rate: Any
    if isinstance(probe, Audio):
        samples, rate = probe.array, probe.sampling_rate
    elif hasattr(probe, "get_all_samples"):
        decoded = probe.get_all_samples()
        samples, rate = decoded.data, decoded.sample_rate
    elif isinstance(probe, Mapping) and "array" in probe:
        samples, rate = probe["array"], probe.get("sampling_rate")
    elif isinstance(probe, tuple):
        samples, rate = probe
    else:
        raw = _source(probe) if isinstance(probe, Mapping) else probe
        if isinstance(raw, np.ndarray):
            samples, rate = raw, None
        else:
            samples, rate = _read_sound(raw, index)
    if hasattr(rate, "item") and np.ndim(rate) == 0:
        rate = rate.item()
    real = isinstance(rate, (int, float)) and not isinstance(rate, bool)
    if not real or not np.isfinite(rate) or int(rate) != rate or rate <= 0:
        raise ProbeError(
            f"Expected a sampling rate in Hz for {_name(index)}, got {rate!r}. Pass (array, rate) or "
            '{"array": ..., "sampling_rate": ...}.',
            index=index,
        )
    array = _mono(np.asarray(samples), index)
    if not array.size or not np.isfinite(array).all():
        what = "an empty one" if not array.size else "NaN or infinite samples"
        raise ProbeError(f"Expected a clip with finite samples for {_name(index)}, got {what}.", index=index)
    return Audio(array, int(rate))


def content_hash(decoded: Image | Audio) -> str:
    """The first 32 hex digits of the SHA-256 of a decoded probe: size and pixels, or rate and samples."""
    if isinstance(decoded, Audio):
        head = f"audio:{decoded.sampling_rate}:{decoded.array.size}:"
        body = np.ascontiguousarray(decoded.array, dtype="<f4").tobytes()
    else:
        head = f"image:{decoded.mode}:{decoded.width}x{decoded.height}:"
        body = decoded.tobytes()
    digest = hashlib.sha256(head.encode())
    digest.update(body)
    return digest.hexdigest()[:32]


def decoder(modality: str) -> Callable[..., Image | Audio]:
    """`decode_image` or `decode_audio`."""
    return decode_image if modality == "image" else decode_audio


def _name(index: int | None) -> str:
    return "the probe" if index is None else f"probe {index}"


def _describe(raw: object) -> str:
    if isinstance(raw, np.ndarray):
        return f"an array of shape {raw.shape} and dtype {raw.dtype}"
    if isinstance(raw, (bytes, bytearray)):
        return f"{len(raw)} bytes"
    if isinstance(raw, (str, os.PathLike)):
        return f"file {os.path.basename(os.fspath(raw))!r}"
    return type(raw).__name__


def _source(probe: Mapping[Any, Any]) -> Any:
    raw = probe.get("bytes")
    raw = probe.get("path") if raw is None else raw
    if raw is None:
        raise ProbeError(f'Expected a dict with "bytes", "path" or "array", got the keys {sorted(map(str, probe))}.')
    return raw


def _sounds(head: bytes) -> bool:
    return head.startswith(_AUDIO_MAGIC) or (head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE")


def _expect(wanted: str, probe: object, index: int | None) -> None:
    try:
        got = modality_of(probe)
    except ProbeError as error:
        raise ProbeError(f"Can't read {_name(index)}. {error}", index=index) from error.__cause__
    if got != wanted:
        raise ProbeError(
            f"Expected an {wanted} probe, got {'an audio clip' if got == 'audio' else 'an image'} for {_name(index)}. "
            f"This encoder reads {wanted} probes only.",
            index=index,
        )


def _pixels(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """uint8 pixels of shape (H, W), (H, W, 3) or (H, W, 4)."""
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    if not (array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))) or 0 in array.shape:
        raise ValueError("expected shape (H, W), (H, W, 1), (H, W, 3) or (H, W, 4), channels last")
    if array.dtype == np.uint8:
        return np.ascontiguousarray(array)
    if array.dtype == np.uint16:
        return _eight_bits(array)
    if array.dtype == bool:
        return np.where(array, 255, 0).astype(np.uint8)
    if np.issubdtype(array.dtype, np.floating):
        if not ((array >= 0) & (array <= 1)).all():
            raise ValueError("expected floats in [0, 1]; divide by 255, or pass uint8")
        return np.asarray(np.rint(array * 255.0), dtype=np.uint8)
    if np.issubdtype(array.dtype, np.integer) and array.min() >= 0 and array.max() <= 255:
        return np.asarray(array, dtype=np.uint8)
    raise ValueError("expected uint8, uint16, bool, integers in [0, 255] or floats in [0, 1]")


def _eight_bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if array.min() < 0 or array.max() > 65535:
        raise ValueError("expected 16-bit grey values in [0, 65535]")
    return np.asarray(np.rint(array.astype(np.float64) / 257.0), dtype=np.uint8)


def _rgb(image: Image) -> Image:
    from PIL import Image

    if not (image.width and image.height):
        raise ValueError("the image has no pixels")
    if image.mode == "RGB" and "transparency" not in image.info:
        return image  # a copy already: turning it upright made one
    if image.mode == "I" or image.mode.startswith("I;16"):
        # Pillow's own conversion clips at 255, which turns a 16-bit scan white.
        return Image.fromarray(_eight_bits(np.asarray(image))).convert("RGB")
    if image.mode == "F":
        return Image.fromarray(_pixels(np.asarray(image))).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        if image.mode == "La":
            image = image.convert("LA")
        layer = image.convert("RGBA")
        page = Image.new("RGBA", layer.size, (*BACKGROUND, 255))
        return Image.alpha_composite(page, layer).convert("RGB")
    return image.convert("RGB")


def _mono(samples: np.ndarray[Any, Any], index: int | None) -> np.ndarray[Any, np.dtype[np.float32]]:
    if samples.ndim == 2:
        axis = int(samples.shape[1] < samples.shape[0])
        if samples.shape[axis] > _MAX_CHANNELS:
            raise ProbeError(
                f"Expected at most {_MAX_CHANNELS} channels for {_name(index)}, got shape {samples.shape}.",
                index=index,
            )
    elif samples.ndim != 1:
        raise ProbeError(
            f"Expected samples of shape (t,), (channels, t) or (t, channels) for {_name(index)}, got {samples.shape}.",
            index=index,
        )
    if samples.dtype == np.uint8:  # the one unsigned sample format in use
        samples = (samples.astype(np.float32) - 128.0) / 128.0
    elif np.issubdtype(samples.dtype, np.signedinteger) and samples.dtype.itemsize < 8:
        samples = samples.astype(np.float64) / float(-np.iinfo(samples.dtype).min)
    elif not np.issubdtype(samples.dtype, np.floating):
        raise ProbeError(
            f"Expected float, int16, int32 or uint8 samples for {_name(index)}, got {samples.dtype}.", index=index
        )
    mono = samples.mean(axis=axis) if samples.ndim == 2 else samples
    return np.ascontiguousarray(mono, dtype=np.float32)


def _read_sound(raw: Any, index: int | None) -> tuple[np.ndarray[Any, Any], int]:
    try:
        import soundfile
    except ImportError as error:
        raise ImportError(
            "Encoded audio needs the soundfile package: pip install soundfile. Or pass decoded (array, rate) pairs."
        ) from error
    try:
        samples, rate = soundfile.read(
            io.BytesIO(raw) if isinstance(raw, (bytes, bytearray)) else os.fspath(raw), dtype="float32", always_2d=True
        )
    except (OSError, RuntimeError) as error:
        raise ProbeError(
            f"Expected a readable clip for {_name(index)}, got {_describe(raw)}: {error}. "
            "Remove or repair that probe.",
            index=index,
        ) from error
    return samples.mean(axis=1), int(rate)
