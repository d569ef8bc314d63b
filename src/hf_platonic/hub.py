"""Saved objects by repo id or folder, whatever their kind: pull, push and look at them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ._hub import Pushed, RepoType, fetch_folder
from .bank import OperatorBank
from .descriptor import TaskDescriptor
from .errors import DescriptorFormatError, HubError
from .export import ADAPTER_FILES, push_adapter_folder
from .grid import Grid
from .probes import ProbeSet
from .sources import Source

__all__ = ["Found", "describe", "find", "pull", "push"]

Kind = Literal["descriptor", "bank", "adapter", "probes"]

_CONFIGS: dict[Kind, tuple[str, RepoType]] = {
    "descriptor": ("descriptor_config.json", "model"),
    "bank": ("bank_config.json", "model"),
    "adapter": (ADAPTER_FILES[0], "model"),
    "probes": ("probes_config.json", "dataset"),
}
_SPECTRUM = 8  # leading singular values shown


@dataclass(frozen=True)
class Found:
    """A saved object: what it is, and where its config lies.

    Attributes:
        kind: "descriptor", "bank", "adapter" or "probes".
        folder: With the config file.
        revision: Commit hash, or None for a local folder.
    """

    kind: Kind
    folder: Path
    revision: str | None


def find(repo_or_path: str | Path, **options: Any) -> Found:
    """What a repo or a folder holds.

    Args:
        repo_or_path: Folder or repo id.
        **options: `subfolder`, `revision`, `token`, `cache_dir`, `local_files_only`, `force_download`.

    Raises:
        DescriptorFormatError: If it holds nothing of this package.
        HubError: If it can't be had from the Hub.
    """
    last: Exception | None = None
    for kind, (name, repo_type) in _CONFIGS.items():
        try:
            fetched = fetch_folder(repo_or_path, files=[name], repo_type=repo_type, **options)
            return Found(kind, fetched.folder, fetched.revision)
        except DescriptorFormatError as error:
            last = last or error
        except HubError as error:
            if error.kind not in ("file_not_found", "repo_not_found", "not_cached", "unauthorized"):
                raise
            # The model repo's own error says most, unless there is only a data set of that name.
            last = last or error
    names = ", ".join(name for name, _ in _CONFIGS.values())
    if isinstance(last, HubError) and last.kind != "file_not_found":
        raise last
    raise DescriptorFormatError(
        f"Expected one of {names} in {str(repo_or_path)!r}, found none. Pass a folder that `save_pretrained` wrote, "
        "or the id of a repo that was pushed."
    ) from last


def pull(repo_or_path: str | Path, folder: str | Path, **options: Any) -> Found:
    """Copies an object from the Hub into a folder, once it has been read whole.

    Args:
        repo_or_path: Repo id.
        folder: Made if missing; must be empty.
        **options: As `find`.

    Returns:
        What was pulled.

    Raises:
        DescriptorFormatError: If the folder isn't empty, or the object isn't whole.
        HubError: If it can't be had from the Hub.
    """
    goal = Path(folder)
    if goal.is_dir() and any(goal.iterdir()):
        raise DescriptorFormatError(f"Expected an empty folder to pull into, got {str(goal)!r} with files.")
    found = find(repo_or_path, **options)
    pinned = {**options, "revision": found.revision} if found.revision else options
    if found.kind == "descriptor":
        TaskDescriptor.from_pretrained(repo_or_path, **pinned)
    elif found.kind == "probes":
        ProbeSet.from_pretrained(repo_or_path, **pinned)
    elif found.kind == "bank":
        bank = OperatorBank.from_pretrained(repo_or_path, **pinned)
        for key in bank.operators:
            bank.operators[key]
        fetch_folder(repo_or_path, files=["bank_config.json", f"*/{ADAPTER_FILES[0]}"], **pinned)
    else:
        fetch_folder(repo_or_path, files=ADAPTER_FILES, **pinned)
    temporary = goal.with_name(f".{goal.name}.pulling")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        shutil.copytree(found.folder, temporary)
        if goal.is_dir():
            goal.rmdir()
        temporary.rename(goal)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return found


def push(folder: str | Path, repo_id: str, **options: Any) -> Pushed:
    """Pushes a saved object, with a card, as one commit.

    Args:
        folder: That `save_pretrained` or `export_lora` wrote.
        repo_id: Made if it isn't there.
        **options: `private`, `revision`, `commit_message`, `token`, `create_pr`, `license`.

    Returns:
        The commit.
    """
    found = find(Path(folder))
    if found.kind == "descriptor":
        descriptor = TaskDescriptor.from_pretrained(found.folder)
        config = json.loads((found.folder / "descriptor_config.json").read_text(encoding="utf-8"))
        dtype = getattr(torch, config["dtype"])
        return descriptor.push_to_hub(repo_id, include_probes=descriptor.probes is not None, dtype=dtype, **options)
    if found.kind == "bank":
        return OperatorBank.from_pretrained(found.folder).push_to_hub(repo_id, **options)
    if found.kind == "probes":
        probes = ProbeSet.from_pretrained(found.folder)
        by: Literal["value", "reference"] = "value" if (found.folder / "probes.parquet").is_file() else "reference"
        return probes.push_to_hub(repo_id, by=by, **options)
    return push_adapter_folder(found.folder, repo_id, **options)


def describe(repo_or_path: str | Path, **options: Any) -> dict[str, Any]:
    """What an object is, as plain values in the order to show them.

    Args:
        repo_or_path: Folder or repo id.
        **options: As `find`.

    Returns:
        Grid, prompts, sources, norms, spectra and how to use it, as far as the kind has them.

    Raises:
        DescriptorFormatError: If it holds nothing of this package, or isn't whole.
        HubError: If it can't be had from the Hub.
    """
    found = find(repo_or_path, **options)
    pinned = {**options, "revision": found.revision} if found.revision else options
    head: dict[str, Any] = {"kind": found.kind, "commit": found.revision or "a local folder"}
    if found.kind == "descriptor":
        return head | _of_descriptor(TaskDescriptor.from_pretrained(repo_or_path, **pinned), repo_or_path)
    if found.kind == "bank":
        return head | _of_bank(OperatorBank.from_pretrained(repo_or_path, **pinned), repo_or_path)
    if found.kind == "probes":
        config = json.loads((found.folder / "probes_config.json").read_text(encoding="utf-8"))
        use = f"ProbeSet.from_pretrained({str(repo_or_path)!r})"
        return head | _of_grid(Grid.from_dict(config.get("grid", {}))) | {"how to use": use}
    fetch_folder(repo_or_path, files=ADAPTER_FILES, **pinned)
    return head | _of_adapter(found.folder, repo_or_path)


def _of_grid(grid: Grid) -> dict[str, Any]:
    where = "not by reference"
    if grid.reference is not None:
        where = f"{grid.reference.get('repo')} split {grid.reference.get('split')} at {grid.reference.get('revision')}"
    return {
        "grid": f"{grid.n} {grid.modality} probes x {grid.m} prompts, fingerprint {grid.fingerprint}",
        "probes": where,
        "templates": list(grid.templates),
        "classes": list(grid.class_names),
    }


def _of_descriptor(descriptor: TaskDescriptor, name: str | Path) -> dict[str, Any]:
    values = torch.linalg.svdvals(descriptor.delta.double())
    use = f"transfer(TaskDescriptor.from_pretrained({str(name)!r}), DualEncoder.from_pretrained(...))"
    return {
        "name": descriptor.name or "unnamed",
        **_of_grid(descriptor.grid),
        "sources": [
            "; ".join([f"{source.coefficient:+g} x {_origin(source)}", *source.changes])
            for source in descriptor.sources
        ],
        "norm": f"{descriptor.norm():.6g}",
        "base spread": f"{descriptor.spread:.6g}",
        "base affinity": "stored" if descriptor.base_affinity is not None else "not stored",
        "spectrum": _spectrum(values),
        "how to use": use,
    }


def _of_bank(bank: OperatorBank, name: str | Path) -> dict[str, Any]:
    return {
        "target": _who(bank.target.to_dict()),
        "edited layer": f"{bank.site.module} ({bank.site.kind} site)",
        "entries": [
            f"{key}: rank {operator.rank}, norm {float(torch.linalg.matrix_norm(operator.dense())):.6g}"
            for key, operator in bank.operators.items()
        ],
        "how to use": f"OperatorBank.from_pretrained({str(name)!r}).compose({{...}})",
    }


def _of_adapter(folder: Path, name: str | Path) -> dict[str, Any]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        config = json.loads((folder / ADAPTER_FILES[0]).read_text(encoding="utf-8"))
        tensors = load_file(folder / ADAPTER_FILES[1])
        made: Mapping[str, Any] = config.get("provenance") or {}
        norms = [f"{key}: {tuple(t.shape)}, norm {float(t.double().norm()):.6g}" for key, t in sorted(tensors.items())]
        terms = [f"{term.get('name')} on grid {term.get('grid')}" for term in made.get("terms", [])]
        platonic = config.get("peft_type") == "PLATONIC"
        return {
            "form": "operator head (PLATONIC)" if platonic else f"plain {config.get('peft_type')}",
            "base": f"{config.get('base_model_name_or_path')} at {config.get('revision') or 'no recorded commit'}",
            "edited layer": config.get("target_modules"),
            "rank": config.get("r"),
            "strength": config.get("strength", "folded in"),
            "terms": terms,
            "tensors": norms,
            "how to use": ("import hf_platonic; " if platonic else "")
            + f"PeftModel.from_pretrained(base, {str(name)!r})",
        }
    except (SafetensorError, OSError, ValueError, AttributeError, TypeError) as error:
        raise DescriptorFormatError(
            f"Expected a whole PEFT adapter in {folder}, got something else ({error}). Save or download it again."
        ) from error


def _spectrum(values: torch.Tensor) -> str:
    shares = values.square() / values.square().sum().clamp_min(torch.finfo(values.dtype).tiny)
    effective = float(torch.exp(-(shares * shares.clamp_min(1e-300).log()).sum()))
    shown = ", ".join(f"{value:.4g}" for value in values[:_SPECTRUM].tolist())
    return f"{shown}{', …' if len(values) > _SPECTRUM else ''}; effective rank {effective:.1f} of {len(values)}"


def _origin(source: Source) -> str:
    if source.base is None or source.tuned is None:
        return f"scores of teacher {source.teacher}"
    return f"{_who(source.tuned.to_dict())} over {_who(source.base.to_dict())}"


def _who(identity: Mapping[str, Any]) -> str:
    name = str(identity["repo"] or identity["model_type"])
    if identity["revision"]:
        name += f"@{identity['revision'][:12]}"
    return name + (f" + {identity['adapter']}" if identity["adapter"] else "")
