"""Edits for other people: as a plain LoRA that needs PEFT alone, and as adapter repos on the Hub."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ._files import write_atomic, write_json
from ._hub import Pushed, fetch_folder
from ._publish import inherited_license, push_saved
from .cards import Results, adapter_card, hub_repo
from .encoders.families import supported_families
from .encoders.identity import EncoderIdentity
from .errors import EncoderError, PlatonicError
from .operator import Operator
from .tuner import PlatonicConfig, PlatonicLayer, PlatonicModel

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = ["ADAPTER_FILES", "export_lora", "push_adapter", "push_adapter_folder"]

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def export_lora(model: PeftModel, save_directory: str | Path, *, adapters: Sequence[str] | None = None) -> None:
    """Writes adapters, at their strengths, as one plain LoRA that loads with PEFT alone.

    An edit changes one linear layer by a matrix of rank at most r (and its bias, if it has one), which is what a LoRA
    with a bias says. It is exact for the base weights it was made from, and for no others: the `PLATONIC` form knows
    its base and refuses another one, a LoRA doesn't.

    Args:
        model: A PEFT model with `PLATONIC` adapters, none of them merged.
        save_directory: Made if it isn't there; gets `adapter_config.json` and `adapter_model.safetensors`.
        adapters: Which adapters, summed; None takes the active ones.

    Raises:
        EncoderError: If the model isn't a `PLATONIC` PEFT model.
        PlatonicError: If there is no such adapter, one is merged or reads inner features, or the base layer can't be
            read (quantised).
    """
    from peft import LoraConfig
    from safetensors.torch import save_file

    tuner = model.base_model
    if not isinstance(tuner, PlatonicModel):
        raise EncoderError(
            f"Expected a PEFT model of type PLATONIC, got {type(tuner).__name__}. Make one with `transfer`."
        )
    names = list(tuner.active_adapters if adapters is None else adapters)
    unknown = [name for name in names if name not in tuner.peft_config]
    if unknown or not names:
        raise PlatonicError(f"Expected adapters among {sorted(tuner.peft_config)}, got {names}.")
    factors = {}
    for key, layer in tuner.model.named_modules():
        if isinstance(layer, PlatonicLayer) and any(name in layer.platonic_left for name in names):
            if layer.merged:
                raise PlatonicError("Expected live adapters, got merged ones. Call `unmerge_adapter()` first.")
            layer.require_mergeable(names)
            factors[key] = _lora_factors(layer, names)
    rank = max(down.shape[0] for down, _, _ in factors.values())
    tensors: dict[str, Tensor] = {}
    for key, (down, up, offset) in factors.items():
        extra = rank - down.shape[0]
        tensors[f"base_model.model.{key}.lora_A.weight"] = torch.nn.functional.pad(down, (0, 0, 0, extra))
        tensors[f"base_model.model.{key}.lora_B.weight"] = torch.nn.functional.pad(up, (0, extra))
        if offset is not None:
            tensors[f"base_model.model.{key}.lora_B.bias"] = offset
    biased = {offset is not None for _, _, offset in factors.values()}
    if len(biased) > 1:
        raise PlatonicError("Expected edited layers all with or all without a bias. Export their adapters one by one.")
    config = LoraConfig(
        r=rank,
        lora_alpha=rank,  # a scaling of 1
        target_modules=sorted(factors),
        lora_bias=biased.pop(),
        base_model_name_or_path=tuner.peft_config[names[0]].base_model_name_or_path,
        inference_mode=True,
    )
    base = type(tuner.model)
    config.auto_mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    contiguous = {key: tensor.float().contiguous() for key, tensor in tensors.items()}
    write_atomic(
        folder / "adapter_model.safetensors", lambda path: save_file(contiguous, path, metadata={"format": "pt"})
    )
    config.save_pretrained(folder)


def push_adapter(
    model: PeftModel,
    repo_id: str,
    *,
    adapter_name: str = "default",
    form: Literal["platonic", "lora"] = "platonic",
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str | None = None,
    token: str | bool | None = None,
    create_pr: bool = False,
    license: str | None = None,
    results: Results | None = None,
) -> Pushed:
    """Pushes one adapter to a model repo, with a card, as one commit.

    PEFT's own `model.push_to_hub` works too, and writes a card that says nothing of the edit.

    Args:
        model: A PEFT model with `PLATONIC` adapters.
        repo_id: Made if it isn't there.
        adapter_name: Which adapter.
        form: "platonic", an operator head that knows its base; or "lora", which loads with PEFT alone.
        private: Of a new repo; None takes the owner's default.
        revision: Branch, made if missing.
        commit_message: Of the commit.
        token: To write with.
        create_pr: Opens a pull request instead of committing.
        license: Licence id for the card; None takes the base model's.
        results: Accuracies for the card, an `EvaluationReport`.

    Returns:
        The commit: `repo`, `revision`, `url`.

    Raises:
        EncoderError: If the model isn't a `PLATONIC` PEFT model.
        PlatonicError: If there is no such adapter.
        HubError: If the Hub refuses or can't be reached; `kind` says which.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = _adapter_config(model, adapter_name)
        if form == "lora":
            export_lora(model, folder, adapters=[adapter_name])
        else:
            # No look at the base's config on the Hub, which PEFT would take for embeddings that this method hasn't.
            model.save_pretrained(folder, selected_adapters=[adapter_name], save_embedding_layers=False)
            folder = folder if adapter_name == "default" else folder / adapter_name
        return push_adapter_folder(
            folder,
            repo_id,
            provenance=config.provenance,
            private=private,
            revision=revision,
            commit_message=commit_message,
            token=token,
            create_pr=create_pr,
            license=license,
            results=results,
        )


def push_adapter_folder(
    folder: str | Path,
    repo_id: str,
    *,
    provenance: Mapping[str, Any] | None = None,
    token: str | bool | None = None,
    license: str | None = None,
    results: Results | None = None,
    commit_message: str | None = None,
    **options: Any,
) -> Pushed:
    """Pushes a saved adapter, an operator head or a LoRA made of one; as `push_adapter`.

    Args:
        folder: With `adapter_config.json` and `adapter_model.safetensors`.
        repo_id: Made if it isn't there.
        provenance: How the edit came about, where the config doesn't say (a LoRA's can't).
        token: To write with.
        license: Licence id for the card; None takes the base model's.
        results: Accuracies for the card.
        commit_message: Of the commit.
        **options: `private`, `revision`, `create_pr`.

    Returns:
        The commit.
    """
    source = fetch_folder(Path(folder), files=ADAPTER_FILES).folder
    config = json.loads((source / ADAPTER_FILES[0]).read_text(encoding="utf-8"))
    made = dict(config.get("provenance") or provenance or {})
    target = made.get("target") if isinstance(made.get("target"), dict) else None
    identity = None if target is None else EncoderIdentity.from_dict(target)
    base = hub_repo(identity)
    # A base on this machine's disk has a path that means nothing elsewhere.
    config["base_model_name_or_path"] = base or Path(str(config.get("base_model_name_or_path") or "")).name or None
    config["revision"] = None if identity is None or base is None else identity.revision
    if license is None and base is not None:
        license = inherited_license([base], token=token)
    family = supported_families().get(identity.model_type) if identity is not None else None
    card = adapter_card(
        repo_id=repo_id,
        kind="lora" if config.get("peft_type") == "LORA" else "platonic",
        modality="image" if family is None else family.modality,
        layers=[f"{layer} ({config.get('site', 'weight')})" for layer in config.get("target_modules") or []],
        rank=int(config["r"]),
        strength=config.get("strength"),
        provenance=made,
        base_repo=base,
        base_revision=config["revision"],
        license=license,
        results=results,
    )

    def save(goal: Path) -> None:
        write_json(goal / ADAPTER_FILES[0], config)
        shutil.copyfile(source / ADAPTER_FILES[1], goal / ADAPTER_FILES[1])

    message = commit_message or f"Upload {'LoRA' if config.get('peft_type') == 'LORA' else 'operator head'}"
    return push_saved(save, card, repo_id, token=token, commit_message=message, **options)


def _adapter_config(model: PeftModel, adapter_name: str) -> PlatonicConfig:
    tuner = model.base_model
    if not isinstance(tuner, PlatonicModel):
        raise EncoderError(
            f"Expected a PEFT model of type PLATONIC, got {type(tuner).__name__}. Make one with `transfer`."
        )
    if adapter_name not in tuner.peft_config:
        raise PlatonicError(f"Expected an adapter among {sorted(tuner.peft_config)}, got {adapter_name!r}.")
    config: PlatonicConfig = tuner.peft_config[adapter_name]
    return config


def _lora_factors(layer: PlatonicLayer, names: Sequence[str]) -> tuple[Tensor, Tensor, Tensor | None]:
    """`A (r, in)`, `B (out, r)` and the bias delta `(out,)` of the adapters' sum on one layer, float64."""
    original, offset = layer.original()
    weight, bias = original.cpu(), None if offset is None else offset.cpu()
    downs, ups, offsets = [], [], []
    for name in names:
        if name not in layer.platonic_left:
            continue
        operator = layer.operator(name)
        left = layer.platonic_strength[name] * operator.left.cpu().double()
        down, up, change = Operator(left, operator.right.cpu().double(), operator.site).update(weight, bias)
        downs.append(down)
        ups.append(up)
        offsets.append(change)
    # Written as an input-site operator W' = (down' up')', the sum takes the smallest exact width like any other.
    total = Operator(torch.cat(downs).T, torch.cat(ups, dim=1).T, "input").compressed()
    deltas = [delta for delta in offsets if delta is not None]
    return total.left.T, total.right.T, torch.stack(deltas).sum(dim=0) if deltas else None
