"""Edits for other people: as a plain LoRA that needs PEFT alone, and as adapter repos on the Hub."""

from __future__ import annotations

import json
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ._files import write_atomic, write_json
from ._hub import Pushed, fetch_folder
from ._publish import inherited_license, push_saved
from .cards import Results, adapter_card, hub_repo, made_of
from .encoders.families import supported_families
from .encoders.identity import EncoderIdentity
from .errors import EncoderError, PlatonicError
from .operator import Operator
from .tuner import PlatonicConfig, PlatonicLayer, PlatonicModel, factors_digest

if TYPE_CHECKING:
    from peft import PeftModel

__all__ = [
    "ADAPTER_FILES",
    "PROVENANCE_NAME",
    "export_lora",
    "push_adapter",
    "push_adapter_folder",
    "without_false_alarms",
]

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
PROVENANCE_NAME = "provenance.json"


def export_lora(model: PeftModel, save_directory: str | Path, *, adapters: Sequence[str] | None = None) -> None:
    """Writes adapters, at their strengths, as one plain LoRA that loads with PEFT alone.

    An edit changes one linear layer by a matrix of rank at most r (and its bias, if it has one), which is what a LoRA
    with a bias says. It is exact for the base weights it was made from, and for no others: the `PLATONIC` form knows
    its base and refuses another one, a LoRA doesn't.

    Args:
        model: A PEFT model with `PLATONIC` adapters, none of them merged.
        save_directory: Made if it isn't there; gets `adapter_config.json` and `adapter_model.safetensors`, and
            `provenance.json` for its card.
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
    write_json(folder / PROVENANCE_NAME, _record(tuner, names))


@contextmanager
def without_false_alarms() -> Iterator[None]:
    """Without two warnings that don't apply here.

    PEFT 0.21 takes a `lora_bias`, which has one axis, for the shard of a matrix; and FSDP warns of embeddings that are
    a view, which only an operation in place would harm.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".* LoRA tensor\(s\) have invalid shape")
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
        yield


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
        model: A PEFT model with `PLATONIC` adapters, or one that was trained by `transfer(method="lora")`.
        repo_id: Made if it isn't there.
        adapter_name: Which adapter.
        form: "platonic", an operator head that knows its base; or "lora", which loads with PEFT alone, and is the one
            form of a trained LoRA.
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
        EncoderError: If the adapter is of another PEFT method, or can't have that form.
        PlatonicError: If there is no such adapter.
        HubError: If the Hub refuses or can't be reached; `kind` says which.
    """
    config = _adapter_config(model, adapter_name, form)
    made = getattr(config, "provenance", None)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if isinstance(config, PlatonicConfig) and form == "lora":
            export_lora(model, folder, adapters=[adapter_name])
            made = json.loads((folder / PROVENANCE_NAME).read_text(encoding="utf-8"))
        else:
            # No look at the base's config on the Hub, which PEFT would take for embeddings that no adapter here has.
            with without_false_alarms():
                model.save_pretrained(folder, selected_adapters=[adapter_name], save_embedding_layers=False)
            folder = folder if adapter_name == "default" else folder / adapter_name
        return push_adapter_folder(
            folder,
            repo_id,
            provenance=made,
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
        provenance: How the edit came about, where the config doesn't say (a LoRA's can't); None: what `export_lora`
            or a training wrote beside it.
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
    kind = config.get("peft_type")
    if kind not in ("PLATONIC", "LORA"):
        raise PlatonicError(f"Expected a PLATONIC adapter or a LoRA in {folder}, got {kind}. Push it by PEFT itself.")
    made = dict(config.get("provenance") or provenance or _recorded(source))
    if kind == "PLATONIC":
        made = _as_it_is(made, source / ADAPTER_FILES[1])
    targets = {json.dumps(part["target"]) for part, _ in made_of(made) if isinstance(part.get("target"), dict)}
    identity = EncoderIdentity.from_dict(json.loads(targets.pop())) if len(targets) == 1 else None
    base = hub_repo(identity)
    # A base on this machine's disk has a path that means nothing elsewhere.
    config["base_model_name_or_path"] = base or Path(str(config.get("base_model_name_or_path") or "")).name or None
    config["revision"] = None if identity is None or base is None else identity.revision
    if license is None and base is not None:
        license = inherited_license([base], token=token)
    family = supported_families().get(identity.model_type) if identity is not None else None
    modality = next((part["modality"] for part, _ in made_of(made) if "modality" in part), None)
    names = config.get("target_modules") or []
    names = [names] if isinstance(names, str) else sorted(names)
    mapping = config.get("auto_mapping") or {}
    shipped = str(mapping.get("parent_library", "")).startswith("transformers")
    card = adapter_card(
        repo_id=repo_id,
        kind="lora" if kind == "LORA" else "platonic",
        modality=modality or ("image" if family is None else family.modality),
        layers=[f"{n} ({config.get('site', 'weight')})" for n in names],
        rank=int(config["r"]),
        strength=config.get("strength"),
        provenance=made,
        base_repo=base,
        base_revision=config["revision"],
        base_class=mapping.get("base_model_class") if shipped else None if mapping else "AutoModel",
        open_clip=identity is not None and identity.model_type.startswith("open_clip"),
        license=license,
        results=results,
    )

    def save(goal: Path) -> None:
        write_json(goal / ADAPTER_FILES[0], config)
        shutil.copyfile(source / ADAPTER_FILES[1], goal / ADAPTER_FILES[1])

    message = commit_message or f"Upload {'LoRA' if kind == 'LORA' else 'operator head'}"
    return push_saved(save, card, repo_id, token=token, commit_message=message, **options)


def _recorded(folder: Path) -> dict[str, Any]:
    """What lies beside a LoRA, whose own config can't say how it came about; nothing where nobody wrote it down."""
    for name in (PROVENANCE_NAME, "matching.json"):
        if (folder / name).is_file():
            found: dict[str, Any] = json.loads((folder / name).read_text(encoding="utf-8"))
            return found
    return {}


def _record(tuner: PlatonicModel, names: Sequence[str]) -> dict[str, Any]:
    """How one adapter, or the sum of several, came about: for the latter as `add_weighted_adapter` records it."""
    parts = []
    for name in names:
        config = tuner.peft_config[name]
        made = dict(config.provenance or {})
        if "factors" in made:
            operator = tuner.get_operator(name)
            if made["factors"] != factors_digest(operator.left, operator.right):
                made["changed"] = True
        parts.append({"adapter": name, "weight": 1.0, "strength": config.strength, "provenance": made})
    return {"sum": parts} if len(parts) > 1 else {**parts[0]["provenance"], "strength": parts[0]["strength"]}


def _as_it_is(made: Mapping[str, Any], tensors: Path) -> dict[str, Any]:
    """The record, with `changed` where the factors aren't those that it was written with."""
    from safetensors.torch import load_file

    factors = {key.rpartition("_")[2]: tensor for key, tensor in load_file(tensors).items()}
    same = "factors" not in made or made["factors"] == factors_digest(factors["left"], factors["right"])
    return dict(made) if same else {**made, "changed": True}


def _adapter_config(model: PeftModel, adapter_name: str, form: str) -> Any:
    if adapter_name not in getattr(model, "peft_config", {}):
        got = sorted(getattr(model, "peft_config", {}))
        raise PlatonicError(f"Expected a PEFT model with an adapter {adapter_name!r}, got one with {got}.")
    config = model.peft_config[adapter_name]
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if form not in ("platonic", "lora") or (kind, form) not in (
        ("PLATONIC", "platonic"),
        ("PLATONIC", "lora"),
        ("LORA", "lora"),
    ):
        raise EncoderError(
            f'Expected a PLATONIC adapter in form "platonic" or "lora", or a LoRA in form "lora", got {kind} in form '
            f"{form!r}. Make one with `transfer`, or pass the form that it has."
        )
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
