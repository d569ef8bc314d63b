"""Fine-tunes that come as bare tensors: a tower's checkpoint, a state dict or a task vector, laid over the base."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import EncoderError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["lay_over", "read_tensors"]

_WRAPPERS = ("", "module.", "model.", "base_model.model.")
"""What trainers put before every key."""
_INDEX = "model.safetensors.index.json"


def read_tensors(name: str, revision: str | None, hub: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a checkpoint, by key, on the CPU; nothing is unpickled but plain tensors.

    Args:
        name: A file (`.safetensors`, or `.pt`, `.pth` and `.bin`, which are read with `weights_only=True`), or a
            folder or Hub repo with `model.safetensors`, in one piece or sharded.
        revision: Of the repo.
        hub: `token`, `cache_dir` and `local_files_only`.

    Raises:
        EncoderError: If the file holds something else than named tensors.
        OSError: If there's no such file; as the Hub's client does.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    if os.path.isfile(name):
        return _read(Path(name))

    def local(file: str) -> Path:
        if os.path.isdir(name):
            return Path(name, file)
        return Path(hf_hub_download(name, file, revision=revision, **hub))

    try:
        whole = local("model.safetensors")
        if whole.is_file():
            return _read(whole)
    except EntryNotFoundError:
        pass  # sharded, then
    files = sorted(set(json.loads(local(_INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    if any(Path(file).name != file for file in files):
        raise EncoderError(f"Expected shards beside {_INDEX}, got {files[:3]}. Save the checkpoint again.")
    return {key: value for file in files for key, value in _read(local(file)).items()}


def lay_over(model: nn.Module, tensors: Mapping[str, Tensor], *, add: bool) -> None:
    """Write a checkpoint's tensors into the model, or add a task vector's; all of them, or none and an error.

    The keys may be the model's own, or those of one of its towers (`CLIPVisionModel`, say), with or without the
    prefix that trainers put before them.

    Args:
        model: The bare model; changed in place, its dtypes kept.
        tensors: By key.
        add: Whether they are differences to the base rather than weights.

    Raises:
        EncoderError: If a key has no place, the keys fit two places, or a value isn't finite.
    """
    own = model.state_dict()
    given = {key: value for key, value in tensors.items() if not key.endswith("position_ids")}  # a buffer, once saved
    if not given:
        raise EncoderError("Expected at least one tensor, got none. Pass the file that holds the weights.")
    towers = ["", *(f"{name}." for name, _ in model.named_modules() if name and name.count(".") <= 1)]
    fits: dict[str, dict[str, str]] = {}
    nearest: list[str] = sorted(given)
    for wrapper in _WRAPPERS:
        if not all(key.startswith(wrapper) for key in given):
            continue
        for tower in towers:
            placed = {key: tower + key[len(wrapper) :] for key in given}
            lost = sorted(key for key, to in placed.items() if to not in own or own[to].shape != given[key].shape)
            if not lost:
                fits.setdefault(",".join(sorted(placed.values())), placed)
            elif len(lost) < len(nearest):
                nearest = lost
    if len(fits) != 1:
        got = f"{nearest[:3]} ({len(nearest)} of {len(given)}) without one" if not fits else f"{len(fits)} places"
        raise EncoderError(
            f"Expected a place in {type(model).__name__} for every tensor, got {got}. Pass weights of this model or "
            "of one of its towers, without a classifier head; keys may carry the tower's name as a prefix."
        )
    (placed,) = fits.values()
    broken = sorted(key for key, value in given.items() if not bool(torch.isfinite(value).all()))
    if broken:
        raise EncoderError(f"Expected finite weights, got NaN or infinity in {broken[:3]} ({len(broken)} in all).")
    with torch.no_grad():
        for key, to in placed.items():
            here, value = own[to], given[key].to(own[to].device)
            here.copy_(here.float() + value.float() if add and here.is_floating_point() else value)


def _read(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        return dict(load_file(path))
    import pickle

    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, EOFError) as error:
        raise EncoderError(
            f"Expected plain tensors in {path.name}, got a damaged file, or a pickle that would run code and is never "
            "loaded. Save `model.state_dict()` with safetensors instead."
        ) from error
    inner = found.get("state_dict", found) if isinstance(found, Mapping) else found
    if not isinstance(inner, Mapping) or not all(
        isinstance(key, str) and torch.is_tensor(value) for key, value in inner.items()
    ):
        raise EncoderError(
            f"Expected named tensors in {path.name}, got {type(inner).__name__}. Save `model.state_dict()` with "
            "safetensors instead."
        )
    return dict(inner)
