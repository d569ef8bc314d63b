"""Safetensors files that are whole, of the expected shapes, and of the same save as their config, or refused."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ._files import write_atomic
from .errors import DescriptorFormatError

__all__ = ["DTYPES", "load_tensors", "save_tensors"]

DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}
"""What may stand in a file, by safetensors' names."""


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Writes the tensors atomically and returns their digest, which is also in the file's metadata.

    Args:
        path: The file.
        tensors: On the CPU, of one of `DTYPES`.

    Returns:
        SHA-256 over names and bytes, in hex.
    """
    from safetensors.torch import save_file

    contiguous = {name: tensors[name].detach().contiguous() for name in sorted(tensors)}
    total = hashlib.sha256()
    for name, tensor in contiguous.items():
        total.update(name.encode())
        total.update(tensor.view(torch.uint8).numpy().data)
    metadata = {"format": "pt", "digest": total.hexdigest()}
    write_atomic(path, lambda temporary: save_file(contiguous, temporary, metadata=metadata))
    return total.hexdigest()


def load_tensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], *, dtype: str, digest: str, config: str
) -> dict[str, Tensor]:
    """The tensors of a file, once its header agrees with what the config says; only then is memory taken.

    Args:
        path: The file.
        shapes: Name and shape of every tensor that should be in it.
        dtype: Their dtype as the config names it, e.g. "float32".
        digest: The save's digest as the config has it.
        config: The config's file name, for messages.

    Returns:
        The tensors, by name, in the file's dtype.

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
                if str(DTYPES.get(got, got)).removeprefix("torch.") != dtype or got not in DTYPES:
                    found = str(DTYPES.get(got, got)).removeprefix("torch.")
                    raise DescriptorFormatError(f"Expected `{name}` in {dtype} in {path}, got {found}.")
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
