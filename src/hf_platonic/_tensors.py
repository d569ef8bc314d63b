"""Safetensors files that are whole, of the expected shapes, and of the same save as their config, or refused.

Writing streams: a tensor goes to disk in pieces, so that it may be larger than memory. Reading maps: a loaded tensor
is a view of the file, and its pages come in when looked at.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._files import write_atomic
from .errors import DescriptorFormatError

__all__ = ["DTYPES", "Stream", "blocks", "load_tensors", "save_tensors", "stream_tensors"]

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
"""What a descriptor or a bank may hold, by safetensors' names."""

_OTHERS = {"I32": torch.int32}
"""What may stand beside that, where a caller says so."""

_NAMES = {
    **{dtype: name for name, dtype in (DTYPES | _OTHERS).items()},
    torch.float64: "F64",
    torch.uint8: "U8",
}
_BLOCK = 2**20  # bytes at a time: bounds memory whatever the size, and is enough for full disk speed


@dataclass(frozen=True)
class Stream:
    """A tensor that is written piece by piece.

    Attributes:
        dtype: Of the file: float16, bfloat16, float32, float64, int32 or uint8.
        shape: Of the whole tensor.
        pieces: Runs of its rows on the CPU, in order, of any float dtype (or the file's).
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: Iterable[Tensor]

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Runs of a tensor's rows, a megabyte each, in order: for passes that shouldn't copy the whole."""
    if tensor.ndim == 0 or not tensor.numel():
        yield tensor
        return
    rows = max(1, _BLOCK * len(tensor) // (tensor.numel() * tensor.element_size()))
    for start in range(0, len(tensor), rows):
        yield tensor[start : start + rows]


def save_tensors(path: Path, tensors: Mapping[str, Tensor], *, dtype: torch.dtype | None = None) -> str:
    """Writes the tensors atomically and returns their digest, which is also in the file's metadata.

    Args:
        path: The file.
        tensors: On the CPU, of one of `DTYPES`, or int32.
        dtype: To write floats in; None: their own.

    Returns:
        SHA-256 over names and bytes, in hex.
    """
    return stream_tensors(
        path,
        {
            name: Stream((t.is_floating_point() and dtype) or t.dtype, tuple(t.shape), blocks(t.detach()))
            for name, t in tensors.items()
        },
    )


def stream_tensors(path: Path, streams: Mapping[str, Stream]) -> str:
    """Writes a safetensors file atomically from pieces; as `save_tensors`, with no more than a piece in memory."""
    # Wide types first: every tensor then starts at a multiple of its item size, which readers that map the file need.
    names = sorted(streams, key=lambda name: (-streams[name].dtype.itemsize, name))
    total = hashlib.sha256()

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            file.write(_header(streams, names, total.hexdigest()))
            for name in names:
                total.update(name.encode())
                stream, written = streams[name], 0
                for piece in stream.pieces:
                    raw = piece.to(stream.dtype).contiguous().reshape(-1).view(torch.uint8).numpy().data
                    total.update(raw)
                    written += file.write(raw)
                if written != stream.nbytes:
                    raise DescriptorFormatError(
                        f"Expected {stream.nbytes} bytes of `{name}` for {path}, got {written}. Nothing was written."
                    )
            file.seek(0)  # the digest is known now, and takes as many bytes as the one that stood in for it
            file.write(_header(streams, names, total.hexdigest()))

    write_atomic(path, write)
    return total.hexdigest()


def _header(streams: Mapping[str, Stream], names: Iterable[str], digest: str) -> bytes:
    """Length and JSON that a safetensors file begins with, padded to a multiple of eight bytes."""
    entries: dict[str, Any] = {"__metadata__": {"digest": digest, "format": "pt"}}
    start = 0
    for name in names:
        stream = streams[name]
        end = start + stream.nbytes
        entries[name] = {"dtype": _NAMES[stream.dtype], "shape": list(stream.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def load_tensors(
    path: Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: str,
    digest: str,
    config: str,
    integers: Collection[str] = (),
) -> dict[str, Tensor]:
    """The tensors of a file, once its header agrees with what the config says; only then is the file mapped.

    Args:
        path: The file.
        shapes: Name and shape of every tensor that should be in it.
        dtype: Their dtype as the config names it, e.g. "float32".
        digest: The save's digest as the config has it.
        config: The config's file name, for messages.
        integers: Names of those that are int32 instead.

    Returns:
        The tensors, by name, in the file's dtype; views of the mapped file.

    Raises:
        DescriptorFormatError: If the file is missing, truncated, oversized or foreign, or of another save.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise DescriptorFormatError(f"Expected {path.name} in {path.parent}, found none. Save or download it again.")
    try:
        with safe_open(path, framework="pt") as file:
            names = sorted(file.keys())
            if names != sorted(shapes):
                raise DescriptorFormatError(f"Expected tensors {sorted(shapes)} in {path}, got {names}.")
            for name in names:
                entry = file.get_slice(name)
                shape, got = tuple(entry.get_shape()), entry.get_dtype()
                if shape != shapes[name]:
                    raise DescriptorFormatError(f"Expected `{name}` of shape {shapes[name]} in {path}, got {shape}.")
                known = DTYPES | _OTHERS
                found = str(known.get(got, got)).removeprefix("torch.")
                wanted = "int32" if name in integers else dtype
                if found != wanted or got not in known:
                    raise DescriptorFormatError(f"Expected `{name}` in {wanted} in {path}, got {found}.")
            saved = (file.metadata() or {}).get("digest")
            if saved != digest:
                raise DescriptorFormatError(
                    f"{path.name} and {config} in {path.parent} are of different saves ({saved} and {digest}): a "
                    "write was interrupted or a file was replaced. Save or download it again."
                )
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError, OverflowError) as error:
        raise DescriptorFormatError(
            f"Expected a whole safetensors file at {path}, got something else ({error}). Save or download it again."
        ) from error
