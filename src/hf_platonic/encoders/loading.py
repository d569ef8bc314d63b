"""Models, processors and adapters from folders and the Hub, pinned to a commit and whole, or an error."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import EncoderError, PlatonicError
from .families import supported_families
from .open_clip_models import import_open_clip, load_open_clip, open_clip_keys, open_clip_name
from .weights import lay_over, read_tensors

if TYPE_CHECKING:
    import torch

__all__ = ["load_adapter", "load_model", "load_weights", "public_name", "recorded_base"]


def public_name(name: str) -> str:
    """A Hub id as it is; of a local folder only the last part, since paths say nothing elsewhere."""
    name = open_clip_name(name) or name
    return Path(name).resolve().name if os.path.isdir(name) else name


def _commit(name: str, file: str, options: Mapping[str, Any]) -> str | None:
    """The commit hash that a revision on the Hub stands for now; None for a local folder.

    Asked once and then passed on, so that model, processor and weights can't come from different commits.
    """
    from huggingface_hub import hf_hub_download

    if os.path.isdir(name):
        return None
    found = re.search(r"snapshots[/\\]([0-9a-f]{40})[/\\]", hf_hub_download(name, file, **options))
    return found[1] if found else None


@contextmanager
def _explain(what: str, name: str, revision: str | None) -> Iterator[None]:
    """Loading errors of other libraries as one that says what to do."""
    try:
        yield
    except PlatonicError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        at = f" at revision {revision!r}" if revision else ""
        raise EncoderError(
            f"Can't load the {what} {name!r}{at}: {type(error).__name__}: {str(error).strip()[:500]} "
            "Expected a local folder or a Hub repo with all its files. Check the spelling and the revision, pass "
            "`token=` for a private repo, or unset `local_files_only` and HF_HUB_OFFLINE to download it."
        ) from error


def load_model(
    name: str, revision: str | None, dtype: torch.dtype | str, hub: Mapping[str, Any]
) -> tuple[Any, Any, str | None]:
    """A two-tower model with its processor, and the commit hash they're from.

    Args:
        name: Repo id or folder; with open_clip's prefix "hf-hub:" or "local-dir:", one of its models.
        revision: Of the repo.
        dtype: Of the weights.
        hub: `token`, `cache_dir` and `local_files_only`.

    Raises:
        EncoderError: If it can't be loaded or lacks weights.
        ImportError: If it's an open_clip model and the extra isn't installed.
    """
    import transformers
    from transformers import AutoConfig, AutoModel, AutoProcessor

    place = open_clip_name(name)
    if place is not None:
        import_open_clip()
        with _explain("open_clip model", name, revision):
            commit = _commit(place, "open_clip_config.json", {**hub, "revision": revision})
            return *load_open_clip(name, commit or revision, dtype, hub), commit
    with _explain("model", name, revision):
        commit = _commit(name, "config.json", {**hub, "revision": revision})
        options = {**hub, "revision": commit or revision}
        # Of a model type with several classes, those with a row of their own aren't what AutoModel would take.
        made_as = getattr(AutoConfig.from_pretrained(name, **options), "architectures", None) or ()
        own = [getattr(transformers, cls) for cls in made_as if cls in supported_families()]
        loader = own[0] if own else AutoModel
        model, info = loader.from_pretrained(name, dtype=dtype, output_loading_info=True, **options)
        # torchvision's resampling, the default where it's installed, gives other pixels.
        processor = AutoProcessor.from_pretrained(name, backend="pil", **options)
    lost = sorted(info["missing_keys"]) + sorted(map(str, info["mismatched_keys"]))
    if lost:
        raise EncoderError(
            f"Expected all weights of {type(model).__name__} in {name!r}, got none for {lost[:3]} "
            f"({len(lost)} in all). It's another architecture or an incomplete copy; load the whole model."
        )
    return model, processor, commit


def load_adapter(
    model: Any, name: str, revision: str | None, subfolder: str | None, hub: Mapping[str, Any]
) -> tuple[Any, str | None]:
    """The model inside a PeftModel with every weight of the adapter in place, and the adapter's commit hash.

    Args:
        model: The bare model; its layers are changed.
        name: Repo id or folder of the adapter.
        revision: Of the adapter.
        subfolder: Within it.
        hub: `token`, `cache_dir` and `local_files_only`.

    Raises:
        EncoderError: If it can't be loaded, or a weight has no place or no value.
    """
    from peft import PeftModel

    options: dict[str, Any] = {**hub, "revision": revision}
    if subfolder is not None:
        options["subfolder"] = subfolder
    with _explain("adapter", name, revision):
        commit = _commit(name, "adapter_config.json", options)
        options["revision"] = commit or revision
        mapping = getattr(model, "_checkpoint_conversion_mapping", {})
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Found missing adapter keys")  # an error below
            tuned = PeftModel.from_pretrained(model, name, key_mapping=mapping, **options)
        # PEFT reports what it couldn't place only from this method; the weights are small.
        report = tuned.load_adapter(name, "default", key_mapping=mapping, **options)
    if report.missing_keys or report.unexpected_keys:
        raise EncoderError(
            f"Expected the adapter {name!r} to fit this model, got {len(report.missing_keys)} weights without a value "
            f"{report.missing_keys[:2]} and {len(report.unexpected_keys)} unused ones {report.unexpected_keys[:2]}. "
            "Load it on the base model it was trained on; to move its behaviour to another one, use a task descriptor."
        )
    return tuned, commit


def load_weights(
    model: Any, name: str, revision: str | None, hub: Mapping[str, Any], *, add: bool
) -> tuple[str | None, str | None]:
    """Lay a checkpoint's tensors over the model, or add a task vector's, in place.

    Args:
        model: The bare base model.
        name: File, folder or repo id; see `read_tensors`.
        revision: Of the repo.
        hub: `token`, `cache_dir` and `local_files_only`.
        add: Whether the tensors are differences to the base.

    Returns:
        A name for the identity, and the commit hash.

    Raises:
        EncoderError: If they can't be read, or don't all fit the model.
    """
    with _explain("weights", name, revision):
        if os.path.isfile(name):
            commit, shown = None, Path(name).name
        else:
            commit, shown = _first_commit(name, {**hub, "revision": revision}), public_name(name)
        lay_over(model, open_clip_keys(model, read_tensors(name, commit or revision, hub)), add=add)
    return shown, commit


def _first_commit(name: str, options: Mapping[str, Any]) -> str | None:
    from huggingface_hub.errors import EntryNotFoundError

    try:
        return _commit(name, "model.safetensors", options)
    except EntryNotFoundError:
        return _commit(name, "model.safetensors.index.json", options)


def recorded_base(
    name: str, revision: str | None, subfolder: str | None, hub: Mapping[str, Any]
) -> tuple[str, str | None] | None:
    """The base model and its revision that an adapter was made for; None if the repo or folder is no adapter.

    Args:
        name: Repo id or folder.
        revision: Of the repo.
        subfolder: Within it.
        hub: `token`, `cache_dir` and `local_files_only`.
    """
    import json

    from huggingface_hub import hf_hub_download

    try:
        if os.path.isdir(name):
            path = os.path.join(name, subfolder or "", "adapter_config.json")
        else:
            path = hf_hub_download(name, "adapter_config.json", revision=revision, subfolder=subfolder, **hub)
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError):
        return None
    base = config.get("base_model_name_or_path")
    return (base, config.get("revision")) if base else None
