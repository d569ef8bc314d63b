"""Transfer: terms become one adapter in the target's model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ._checks import finite_rows
from .encoders.encoder import DualEncoder, ProbeFeatures
from .encoders.families import SiteKind, Tower, bare_model
from .errors import EncoderError, PlatonicError
from .solutions import Solution, Terms, probe_sets_of, solve_transfer, term_list, unedited
from .solve import PROBE_RIDGE, PROMPT_RIDGE
from .tuner import PlatonicConfig, PlatonicLayer, PlatonicModel

if TYPE_CHECKING:
    from peft import PeftModel
    from torch import Tensor

    from .probes import ProbeSet

__all__ = ["initialize_platonic_weights", "transfer"]

_VERIFIED = 8
_TOLERANCE = 1e-3  # on unit embeddings; rounding in a float32 tower stays below 1e-5, a wrong site is far above


def transfer(
    terms: Terms,
    target: DualEncoder,
    *,
    probes: ProbeSet | Sequence[ProbeSet] | None = None,
    strength: float | None = None,
    probe_ridge: float = PROBE_RIDGE,
    prompt_ridge: float = PROMPT_RIDGE,
    site: SiteKind | None = None,
    tower: Tower | None = None,
    adapter_name: str = "default",
    batch_size: int = 32,
    num_workers: int = 0,
    progress: bool | None = None,
) -> PeftModel:
    """The target with the terms written into it as one PEFT adapter, by the closed form.

    The adapter is put into the target's model in place, as PEFT does: `target` is edited from here on, and
    `model.disable_adapter()` or `model.unload()` gives the base back. A target that is a PEFT model already gets one
    more adapter, solved against its base and active alongside those that were.

    Args:
        terms: Descriptors, or sums of them, with coefficients multiplied in: `a + b`, `-a`, `0.5 * a`, `[a, b]`.
        target: The model that receives them; any family, any embedding size.
        probes: The probe sets behind the grids, where the descriptors have them neither at hand nor by reference.
        strength: `s`, signed and finite; None takes the paper's, 0.5 where anything is added, 1 for pure negation.
        probe_ridge: Relative ridge on the probe side, above 0.
        prompt_ridge: Relative ridge on the prompt side, above 0.
        site: "output" of the layer that writes the embedding, or its "input": exact for every family with such a
            layer, and with one column more for each of the layer's inputs. None: as the family needs.
        tower: "probe", or "text" to move the prompts' embeddings instead, by the transposed operator: the same
            least-squares solution, for targets whose probe tower can't be edited. None: the probes'.
        adapter_name: The adapter's name in the PEFT model.
        batch_size: Probes a forward pass.
        num_workers: Processes that decode while the model computes.
        progress: Whether to show a bar, on the main process; None: where stderr is a terminal.

    Returns:
        The PEFT model; `merge_and_unload()` makes it an ordinary one. The adapter's `provenance["verified"]` says how
        far the live and the merged model are from the operator on some of the grid, as the largest difference of
        unit embeddings.

    Raises:
        GridMismatchError: If no probe set at hand has a term's grid.
        PlatonicError: If there are no terms, or a strength or ridge isn't usable.
        EncoderError: If the target can't be edited there, or the edited model doesn't do what the operator says
            (checked on some of the grid); the target is then as it was.

    Reference:
        Park and Cho 2026, arXiv 2610.00929.
    """
    from peft import PeftModel, get_peft_model

    edited = target.at(site=site, tower=tower)
    solution = solve_transfer(
        terms,
        edited,
        probes=probes,
        strength=strength,
        probe_ridge=probe_ridge,
        prompt_ridge=prompt_ridge,
        batch_size=batch_size,
        num_workers=num_workers,
        progress=progress,
    )
    config = PlatonicConfig(
        r=solution.operator.rank,
        site=solution.operator.site,
        target_modules=[edited.site.module],
        strength=solution.strength,
        revision=target.identity.revision,
    )
    former = target.model
    active: list[str] = []
    if isinstance(target.model, PeftModel):
        model = target.model
        tuner = _tuner(model)
        earlier = tuner.peft_config.get(adapter_name)
        if earlier is not None and set(earlier.target_modules) != {edited.site.module}:
            raise PlatonicError(
                f"Expected a new adapter name, got {adapter_name!r}, which edits {sorted(earlier.target_modules)}. "
                "Delete that adapter first, or pass another `adapter_name`."
            )
        active = [name for name in tuner.active_adapters if name != adapter_name]
        model.add_adapter(adapter_name, config)
        tuner.set_adapter([*active, adapter_name])
    else:
        model = get_peft_model(target.model, config, adapter_name=adapter_name)
        target.model = edited.model = model
    _write(model, solution, adapter_name)
    try:
        verified = _verify(model, solution, edited, terms, probes, adapter_name)
    except EncoderError:
        if active or model is former:
            model.delete_adapter(adapter_name)
            _tuner(model).set_adapter(active)
        else:
            target.model = model.unload()
        raise
    _tuner(model).peft_config[adapter_name].provenance = {**solution.provenance, "verified": verified}
    return model


def initialize_platonic_weights(
    model: PeftModel,
    terms: Terms,
    processor: Any,
    *,
    probes: ProbeSet | Sequence[ProbeSet] | None = None,
    adapter_name: str = "default",
    probe_ridge: float = PROBE_RIDGE,
    prompt_ridge: float = PROMPT_RIDGE,
    batch_size: int = 32,
    num_workers: int = 0,
    progress: bool | None = None,
) -> None:
    """Writes the closed-form operator of the terms into a `PLATONIC` adapter that `get_peft_model` made.

    The adapter keeps the strength of its config; its rank becomes the operator's.

    Args:
        model: From `get_peft_model(base, PlatonicConfig(...))`, on the model's own edit site.
        terms: As in `transfer`.
        processor: The model's processor.
        probes: As in `transfer`.
        adapter_name: The adapter to fill.
        probe_ridge: Relative ridge on the probe side, above 0.
        prompt_ridge: Relative ridge on the prompt side, above 0.
        batch_size: Probes a forward pass.
        num_workers: Processes that decode while the model computes.
        progress: Whether to show a bar, on the main process; None: where stderr is a terminal.

    Raises:
        PlatonicError: If the model has no such adapter, or it edits another place than the model's edit site.
        GridMismatchError: If no probe set at hand has a term's grid.
    """
    tuner = _tuner(model)
    config = tuner.peft_config.get(adapter_name)
    if not isinstance(config, PlatonicConfig):
        raise PlatonicError(
            f"Expected a PLATONIC adapter named {adapter_name!r}, got adapters {sorted(tuner.peft_config)}. "
            "Make one with get_peft_model(model, PlatonicConfig())."
        )
    target = DualEncoder(model, processor).at(site=config.site)
    solution = solve_transfer(
        terms,
        target,
        probes=probes,
        probe_ridge=probe_ridge,
        prompt_ridge=prompt_ridge,
        batch_size=batch_size,
        num_workers=num_workers,
        progress=progress,
    )
    site = solution.operator.site
    if config.site != site or set(config.target_modules or ()) != {target.site.module}:
        raise PlatonicError(
            f"Expected an adapter on {target.site.module} ({site} site), got one on "
            f"{sorted(config.target_modules or ())} ({config.site} site). Leave `target_modules` and `site` out of "
            "the PlatonicConfig to get the model's own edit site."
        )
    _write(model, solution, adapter_name)


def _tuner(model: PeftModel) -> PlatonicModel:
    tuner = model.base_model
    if not isinstance(tuner, PlatonicModel):
        raise EncoderError(
            f"Expected a PEFT model of type PLATONIC, got {type(tuner).__name__}: PEFT doesn't mix adapter types "
            "in one model. Merge the other adapter first with `merge_and_unload()`."
        )
    return tuner


def _write(model: PeftModel, solution: Solution, adapter_name: str) -> None:
    tuner = _tuner(model)
    tuner.load_factors(adapter_name, solution.operator.left, solution.operator.right)
    tuner.peft_config[adapter_name].provenance = solution.provenance


def _verify(
    model: PeftModel,
    solution: Solution,
    target: DualEncoder,
    terms: Terms,
    probes: ProbeSet | Sequence[ProbeSet] | None,
    adapter_name: str,
) -> dict[str, Any]:
    """How far the live and the merged model are from the operator; a wrong edit site would be silent otherwise."""
    probe_set = next(iter(probe_sets_of(term_list(terms), probes).values()))
    tower, tuner = target.site.tower, _tuner(model)
    if tower == "text":
        prompts = list(dict.fromkeys(prompt for column in probe_set.columns for prompt in column))[:_VERIFIED]

        def read(*, design: bool) -> ProbeFeatures:
            unit = target.encode_prompts(prompts)
            return ProbeFeatures(unit, unit)
    else:
        inputs = target.preprocess([probe_set[i] for i in range(min(_VERIFIED, len(probe_set)))])

        def read(*, design: bool) -> ProbeFeatures:
            return target.probe_features(inputs, design=design)

    with unedited(target):
        before = read(design=True)
    expected = solution.operator.apply(before.unit.cpu(), before.design.cpu(), strength=solution.strength)
    layer = bare_model(model).get_submodule(target.site.module)
    active = list(tuner.active_adapters)
    deviations: dict[str, float | None] = {"live": None, "merged": None}
    try:
        tuner.set_adapter([adapter_name])
        deviations["live"] = _distance(read(design=False), expected)
        if isinstance(layer, PlatonicLayer) and layer.can_merge:
            layer.merge(adapter_names=[adapter_name])
            try:
                deviations["merged"] = _distance(read(design=False), expected)
            finally:
                layer.unmerge()
    finally:
        tuner.set_adapter(active)
    worst = max(value for value in deviations.values() if value is not None)
    if worst > (_TOLERANCE if target.dtype is torch.float32 else 30 * _TOLERANCE):
        raise EncoderError(
            f"Expected the edited {target.family.name} model to move its embeddings as the operator does, got a "
            f"deviation of {worst:.2e}. Its edit site {target.site.module} doesn't write the embedding as the "
            "family's row says; register the family with another one."
        )
    return {"tower": tower, "rows": len(expected), **deviations}


def _distance(features: ProbeFeatures, expected: Tensor) -> float:
    return float((finite_rows(features.unit.cpu(), "edited embedding") - expected).abs().max())
