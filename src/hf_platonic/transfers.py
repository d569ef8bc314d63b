"""Transfer: terms become one adapter in the target's model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from ._checks import finite_rows
from ._pooling import features_of
from .encoders.encoder import DualEncoder, ProbeFeatures
from .encoders.families import SiteKind, Tower, bare_model
from .errors import EncoderError, PlatonicError
from .matching import MatchingArguments, match_affinities
from .objectives import Calibration, Objective
from .readings import unedited
from .recipes import Combination, Preserved, Recipe, choices_of
from .selection import Ridge, Strength
from .solutions import Solution, solve_transfer
from .solve import PROMPT_RIDGE
from .terms import Terms, probe_sets_of, term_list
from .tuner import PlatonicConfig, PlatonicLayer, PlatonicModel, factors_digest
from .wording import Wording

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from torch import Tensor

    from .probes import ProbeSet

__all__ = ["initialize_platonic_weights", "transfer"]

_VERIFIED = 8
_TOLERANCE = 1e-3  # on unit embeddings; rounding in a float32 tower stays below 1e-5, a wrong site is far above


def transfer(
    terms: Terms,
    target: DualEncoder,
    *,
    method: Literal["closed_form", "lora"] = "closed_form",
    probes: ProbeSet | Sequence[ProbeSet] | None = None,
    prompts: Wording | None = None,
    recipe: Recipe = "paper",
    objective: Objective | None = None,
    calibration: Calibration | None = None,
    combine: Combination | None = None,
    preserve: Preserved | None = None,
    preserve_weight: float = 1.0,
    strength: Strength | None = None,
    probe_ridge: Ridge | None = None,
    prompt_ridge: float = PROMPT_RIDGE,
    site: SiteKind | None = None,
    tower: Tower | None = None,
    lora_config: PeftConfig | None = None,
    training_args: MatchingArguments | None = None,
    adapter_name: str = "default",
    batch_size: int = 32,
    num_workers: int = 0,
    progress: bool | None = None,
) -> PeftModel:
    """The target with the terms written into it as one PEFT adapter, by the closed form or by training a LoRA.

    The adapter is put into the target's model in place, as PEFT does: `target` is edited from here on, and
    `model.disable_adapter()` or `model.unload()` gives the base back. A target that is a PEFT model already gets one
    more adapter, solved against its base and active alongside those that were.

    Args:
        terms: Descriptors, or sums of them, with coefficients multiplied in: `a + b`, `-a`, `0.5 * a`, `[a, b]`.
        target: The model that receives them; any family, any embedding size.
        method: "closed_form", one least-squares solve on the layer that writes the embedding; or "lora", a plain
            adapter inside the probe tower, trained on all terms jointly at full strength (see `match_affinities`).
        probes: The probe sets behind the grids, where the descriptors have them neither at hand nor by reference.
        prompts: The receiver's own texts for the columns, by class name: another wording, several templates, another
            language. Text or texts for every class of every term. None: the grids' own prompts.
        recipe: What holds for the options below where they are None: "paper" is the paper's, "change", "none", "sum";
            "auto" the best way known that needs no labels, by what the terms carry and the family allows.
        objective: "change" adds what the fine-tune changed; "endpoint" asks for the fine-tune's own affinities, and
            needs descriptors extracted with `store_base=True`, a consensus of such or a teacher's.
        calibration: "spread" brings descriptors to the target's own spread of cosines; "none" takes them as they are.
            None: "spread" for the endpoint, else the recipe's.
        combine: "sum" adds one solve per grid; "joint" solves for all grids at once, so that terms don't disturb each
            other. None: "joint" with `preserve`, else the recipe's.
        preserve: What a joint solve leaves alone: probe sets with their own prompts, unlabelled, or "default", each
            term's probes with the other terms' prompts, which needs no further data.
        preserve_weight: Of each preserved grid, relative to a term's 1; above 0.
        strength: `s`, signed and finite, or "agreement" for the one at which the edited target answers most often as
            the fine-tune does, on probes held out of the solve. None takes the paper's for the paper's recipe, 0.5
            where anything is added and 1 for pure negation, and 1 for any other. Like `prompts`, `combine`,
            `preserve`, the ridges, the site and the tower it's the closed form's alone.
        probe_ridge: Relative ridge on the probe side, above 0; "gcv" chooses it for each grid by generalised
            cross-validation, "agreement" as for the strength, both together if both are. None: the recipe's.
        prompt_ridge: Relative ridge on the prompt side, above 0.
        site: "output" of the layer that writes the embedding, or its "input": exact for every family with such a
            layer, and with one column more for each of the layer's inputs; or "features", which reads inner layers
            of the tower as well, reaches further and can't be merged. None: as the family
            needs, of the recipe "auto" the inner layers where the family's are known.
        tower: "probe", or "text" to move the prompts' embeddings instead, by the transposed operator: the same
            least-squares solution, for targets whose probe tower can't be edited. None: the probes'.
        lora_config: For "lora": any PEFT config whose parameters live in the probe tower; None: the paper's recipe.
        training_args: For "lora": settings of the training; None: the paper's recipe.
        adapter_name: The adapter's name in the PEFT model.
        batch_size: Probes a forward pass.
        num_workers: Processes that decode while the model computes.
        progress: Whether to show a bar, on the main process; None: where stderr is a terminal.

    Returns:
        The PEFT model; `merge_and_unload()` makes it an ordinary one. After a solve, the adapter's
        `provenance["verified"]` says how far the live and the merged model are from the operator on some of the grid,
        as the largest difference of unit embeddings (merged: None where it can't be); where the terms carry the
        fine-tunes' predictions, `provenance["forecast"]` on how many probes it answered as they do before and after,
        measured on probes that a solve didn't see.

    Raises:
        GridMismatchError: If no probe set at hand has a term's grid.
        PlatonicError: If there are no terms, an option, strength or ridge isn't usable with them, or an option is the
            other method's.
        PromptError: If `prompts` don't fit the terms' classes.
        EncoderError: If the target can't be edited there, or the edited model doesn't do what the operator says
            (checked on some of the grid); the target is then as it was.

    Reference:
        Park and Cho 2026, arXiv 2610.00929.
    """
    from peft import PeftModel, get_peft_model

    if method not in ("closed_form", "lora"):
        raise PlatonicError(f'Expected `method` "closed_form" or "lora", got {method!r}.')
    if method == "lora":
        given = {
            "strength": strength is not None,
            "prompts": prompts is not None,
            "combine": combine is not None,
            "preserve": preserve is not None,
            "probe_ridge": probe_ridge is not None,
            "prompt_ridge": prompt_ridge != PROMPT_RIDGE,
            "site": site is not None,
            "tower": tower is not None,
        }
        _refuse(given, "closed_form", " The terms' coefficients are the strengths here, as in 0.5 * term.")
        choices = choices_of(recipe, term_list(terms), objective=objective, calibration=calibration)
        return match_affinities(
            terms,
            target,
            objective=choices.objective,
            calibration=choices.calibration,
            lora_config=lora_config,
            training_args=training_args,
            probes=probes,
            adapter_name=adapter_name,
            batch_size=batch_size,
            num_workers=num_workers,
            progress=progress,
        ).model
    _refuse({"lora_config": lora_config is not None, "training_args": training_args is not None}, "lora")
    solution = solve_transfer(
        terms,
        target,
        probes=probes,
        prompts=prompts,
        recipe=recipe,
        objective=objective,
        calibration=calibration,
        combine=combine,
        preserve=preserve,
        preserve_weight=preserve_weight,
        strength=strength,
        probe_ridge=probe_ridge,
        prompt_ridge=prompt_ridge,
        site=site,
        tower=tower,
        batch_size=batch_size,
        num_workers=num_workers,
        progress=progress,
    )
    edited = solution.target
    config = PlatonicConfig(
        r=solution.operator.rank,
        site=solution.operator.site,
        features=edited.site.features or None,
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
        if earlier is not None:
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
    _tuner(model).peft_config[adapter_name].provenance["verified"] = verified
    return model


def initialize_platonic_weights(
    model: PeftModel,
    terms: Terms,
    processor: Any,
    *,
    probes: ProbeSet | Sequence[ProbeSet] | None = None,
    adapter_name: str = "default",
    strength: Strength | None = None,
    probe_ridge: Ridge | None = None,
    prompt_ridge: float = PROMPT_RIDGE,
    batch_size: int = 32,
    num_workers: int = 0,
    progress: bool | None = None,
    **choices: Any,
) -> None:
    """Writes the closed-form operator of the terms into a `PLATONIC` adapter that `get_peft_model` made.

    Its rank becomes the operator's.

    Args:
        model: From `get_peft_model(base, PlatonicConfig(...))`, on the model's own edit site.
        terms: As in `transfer`.
        processor: The model's processor.
        probes: As in `transfer`.
        adapter_name: The adapter to fill.
        strength: `s`, or "agreement" as in `transfer`: the adapter's from then on. None keeps that of its config, at
            which ridges are then chosen and gains forecast.
        probe_ridge: As in `transfer`.
        prompt_ridge: Relative ridge on the prompt side, above 0.
        batch_size: Probes a forward pass.
        num_workers: Processes that decode while the model computes.
        progress: Whether to show a bar, on the main process; None: where stderr is a terminal.
        **choices: Further options of `solve_transfer`: `prompts`, `recipe` and what may take the place of its parts.

    Raises:
        PlatonicError: If the model has no such adapter, it edits another place than the model's edit site, or a place
            is asked for here.
        GridMismatchError: If no probe set at hand has a term's grid.
    """
    tuner = _tuner(model)
    config = tuner.peft_config.get(adapter_name)
    if not isinstance(config, PlatonicConfig):
        raise PlatonicError(
            f"Expected a PLATONIC adapter named {adapter_name!r}, got adapters {sorted(tuner.peft_config)}. "
            "Make one with get_peft_model(model, PlatonicConfig())."
        )
    if placed := sorted({"site", "tower"} & choices.keys()):
        raise PlatonicError(
            f"Expected the place of the edit in the PlatonicConfig, got {placed} here. Make the adapter with "
            "`PlatonicConfig(site=..., target_modules=[...])`, or use `transfer`."
        )
    target = DualEncoder(model, processor)
    read = features_of(config.features or ())
    target = target.at(site=config.site, features=read) if read else target.at(site=config.site)
    solution = solve_transfer(
        terms,
        target,
        probes=probes,
        strength=config.strength if strength is None else strength,
        probe_ridge=probe_ridge,
        prompt_ridge=prompt_ridge,
        site=None if read else config.site,
        batch_size=batch_size,
        num_workers=num_workers,
        progress=progress,
        **choices,
    )
    site = solution.operator.site
    if config.site != site or set(config.target_modules or ()) != {target.site.module}:
        raise PlatonicError(
            f"Expected an adapter on {target.site.module} ({site} site), got one on "
            f"{sorted(config.target_modules or ())} ({config.site} site). Leave `target_modules` and `site` out of "
            "the PlatonicConfig to get the model's own edit site."
        )
    _write(model, solution, adapter_name)
    tuner.set_strength(adapter_name, solution.strength)


def _refuse(given: dict[str, bool], method: str, hint: str = "") -> None:
    """Nothing, once no option that belongs to the other method was given."""
    names = ", ".join(f"`{name}`" for name, was in given.items() if was)
    if names:
        raise PlatonicError(
            f'Expected {names} with method="{method}" alone. Leave it out, or choose that method.{hint}'
        )


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
    made = {**solution.provenance, "factors": factors_digest(solution.operator.left, solution.operator.right)}
    tuner.peft_config[adapter_name].provenance = made


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
        if isinstance(layer, PlatonicLayer) and layer.can_merge and solution.operator.site != "features":
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
