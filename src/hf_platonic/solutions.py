"""Solutions: terms become one operator for a target, by the closed form; nothing is written into the target yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import Tensor

from ._checks import finite, instance, positive
from ._processes import process_state, sum_over_processes
from .descriptor import DescriptorSum, TaskDescriptor
from .encoders.encoder import DualEncoder
from .encoders.families import SiteKind, Tower
from .encoding import Varied, encode_columns, passes
from .errors import EncoderError, PlatonicError
from .fits import Equation, Problem, best_by_agreement, forecast_of
from .objectives import Calibration, Objective, one_a_grid, wanted_change
from .operator import Operator
from .probes import ProbeSet
from .readings import Reading, grid_texts, unedited
from .recipes import Choices, Combination, Preserved, Recipe, choices_of
from .scaling import scaled, unscaled
from .selection import Forecast, Ridge, Strength
from .solve import PROBE_RIDGE, PROMPT_RIDGE, GridSolver, ProbeSums
from .terms import Terms, paper_strength, probe_sets_of, provenance_of, term_list
from .wording import Wording

__all__ = [
    "Solution",
    "solve_operators",
    "solve_transfer",
]


_IN_MEMORY = 2**30  # bytes of a target's embeddings and design of one grid; more than that is summed as it comes


@dataclass(frozen=True, eq=False)
class Solution:
    """What a transfer writes into its target.

    Attributes:
        operator: Of all terms together, for the edit site.
        strength: `s`, at which it is applied.
        provenance: How it came about, as plain JSON.
        target: The target at the place where it is to be edited.
        forecast: What to expect, where the terms carry the fine-tunes' predictions and fit into memory.
    """

    operator: Operator
    strength: float
    provenance: dict[str, Any]
    target: DualEncoder
    forecast: Forecast | None = None


def solve_transfer(
    terms: Terms,
    target: DualEncoder,
    *,
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
    batch_size: int = 32,
    num_workers: int = 0,
    progress: bool | None = None,
) -> Solution:
    """The operator and strength that `transfer` writes into the target, which stays as it is.

    Args:
        terms: As in `transfer`.
        target: The model that receives them.
        probes: As in `transfer`.
        prompts: As in `transfer`.
        recipe: As in `transfer`; each option that isn't None takes the place of the recipe's.
        objective: As in `transfer`.
        calibration: As in `transfer`.
        combine: As in `transfer`.
        preserve: As in `transfer`.
        preserve_weight: As in `transfer`.
        strength: As in `transfer`.
        probe_ridge: As in `transfer`.
        prompt_ridge: Relative ridge on the prompt side, above 0.
        site: As in `transfer`.
        tower: As in `transfer`.
        batch_size: Probes a forward pass.
        num_workers: Processes that decode while the model computes.
        progress: Whether to show a bar, on the main process; None: where stderr is a terminal.

    Returns:
        The solution, its operator as thin as it can be.

    Raises:
        GridMismatchError: If no probe set at hand has a term's grid.
        PlatonicError: If there are no terms, or an option, strength or ridge isn't usable with them.
        PromptError: If `prompts` don't fit the terms' classes.
        EncoderError: If the target can't be edited there.

    Reference:
        Park and Cho 2026, arXiv 2610.00929.
    """
    descriptors = term_list(terms)
    instance(target, "target", DualEncoder, "Load one with `DualEncoder.from_pretrained`.")
    for name, value in (("probe_ridge", probe_ridge), ("prompt_ridge", prompt_ridge)):
        if value is not None and not isinstance(value, str):
            positive(value, name)
    if strength is not None and not isinstance(strength, str):
        finite(strength, "strength")
    choices = choices_of(
        recipe,
        descriptors,
        objective=objective,
        calibration=calibration,
        combine=combine,
        preserve=preserve,
        preserve_weight=preserve_weight,
        probe_ridge=probe_ridge,
    )
    if strength is None:
        # Only the paper's sum of solves overshoots and has to be held back.
        strength = paper_strength(terms) if choices.as_in_the_paper else 1.0
    place = _place(target, choices, site, tower)
    descriptors = _one_each(descriptors, choices)
    _require_choosable(descriptors, choices.probe_ridge, strength)
    at_hand = probe_sets_of(descriptors, probes)
    run: dict[str, Any] = {"batch_size": batch_size, "num_workers": num_workers, "progress": progress}
    ridge = choices.probe_ridge
    forecast: Forecast | None = None
    report: dict[str, Any] = {}
    if choices.streams and not isinstance(strength, str) and _must_stream(place, at_hand):
        s = finite(strength, "strength")
        operators = solve_operators(
            descriptors,
            place,
            probes=probes,
            prompts=prompts,
            probe_ridge=float(ridge),
            prompt_ridge=prompt_ridge,
            **run,
        )
        operator = operators[0]
        for other in operators[1:]:
            operator = operator + other
    else:
        problem = _problem(descriptors, place, choices, at_hand, prompts, run)
        ridges, s, held_out = best_by_agreement(problem, ridge, strength, prompt_ridge)
        operator, report = problem.solve(ridges, prompt_ridge)
        forecast = forecast_of(held_out, s) if held_out else None
        if isinstance(ridge, str):
            report["chosen_probe_ridges"] = ridges[: len(problem.asking)]
    if isinstance(strength, str):
        report["strength_by"] = strength
    if forecast is not None:
        report["forecast"] = forecast.to_dict()
    chosen = {} if choices.as_in_the_paper else choices.to_dict()
    provenance = provenance_of(
        descriptors, place, prompts=prompts, **chosen, **report, probe_ridge=ridge, prompt_ridge=prompt_ridge
    )
    return Solution(operator.compressed(), s, provenance, place, forecast)


def _place(target: DualEncoder, choices: Choices, site: SiteKind | None, tower: Tower | None) -> DualEncoder:
    """The target where it's edited: as asked for, else as the recipe has it where the family can."""
    if site is None and tower in (None, "probe") and choices.site is not None and target.site.kind != choices.site:
        try:
            return target.at(site=choices.site, tower=tower)
        except EncoderError:
            pass  # a family whose inner layers aren't known; its own site serves
    return target.at(site=site, tower=tower)


def _one_each(descriptors: list[TaskDescriptor], choices: Choices) -> list[TaskDescriptor]:
    """Descriptors that can be taken together before anything is known of the target are."""
    if choices.objective == "endpoint":
        grids = dict.fromkeys(descriptor.grid.fingerprint for descriptor in descriptors)
        groups = [[d for d in descriptors if d.grid.fingerprint == grid] for grid in grids]
        return [one_a_grid(group, "endpoint") for group in groups]
    return list(DescriptorSum.of(descriptors)) if choices.calibration == "none" else descriptors


def _require_choosable(descriptors: Sequence[TaskDescriptor], probe_ridge: Ridge, strength: Strength) -> None:
    """Nothing, once the choices are known ones and the descriptors carry what they go by."""
    for name, value, known in (("probe_ridge", probe_ridge, Ridge), ("strength", strength, Strength)):
        words = [word for kind in get_args(known) for word in get_args(kind)]
        if isinstance(value, str) and value not in words:
            raise PlatonicError(f"Expected `{name}` to be a number or one of {words}, got {value!r}.")
    if "agreement" not in (probe_ridge, strength):
        return
    grids = [descriptor.grid.fingerprint for descriptor in descriptors]
    for descriptor in descriptors:
        if descriptor.predictions is None or grids.count(descriptor.grid.fingerprint) > 1:
            raise PlatonicError(
                f'Expected the fine-tune\'s predictions for a choice by "agreement", got {descriptor!r} without its '
                "own: sums on one grid have none, nor have descriptors of an earlier version. Extract again, average "
                "with TaskDescriptor.consensus, or pass a number."
            )
        if any(source.coefficient < 0 for source in descriptor.sources):
            raise PlatonicError(
                f'Expected added terms for a choice by "agreement", got the negated {descriptor!r}: the setting '
                "that agrees best with what is to be taken away would be the one that does least. Pass a number."
            )


def _must_stream(target: DualEncoder, at_hand: Mapping[str, ProbeSet]) -> bool:
    """Whether a grid's features stay on their processes, or would take too much memory."""
    width = 4 * (target.design_dim + target.embedding_dim)
    return process_state().num_processes > 1 or any(len(found) * width > _IN_MEMORY for found in at_hand.values())


def _problem(
    descriptors: Sequence[TaskDescriptor],
    target: DualEncoder,
    choices: Choices,
    at_hand: Mapping[str, ProbeSet],
    prompts: Wording | None,
    run: Mapping[str, Any],
) -> Problem:
    """What the target sees of every grid, and what is asked of it there."""
    texts = grid_texts(at_hand, prompts)
    readings = {key: Reading.of(target, found, texts=texts[key], **run) for key, found in at_hand.items()}
    equations = []
    for key, reading in readings.items():
        of_grid = [d for d in descriptors if d.grid.fingerprint == key]
        wanted = wanted_change(of_grid, reading.affinity, objective=choices.objective, calibration=choices.calibration)
        predictions = of_grid[0].predictions if len(of_grid) == 1 else None
        equations.append(replace(reading.equation, wanted=wanted, predictions=predictions))
    if choices.preserve == "default":
        kept = _others(list(readings.values()), equations)
    else:
        controls = {probe_set.grid.fingerprint: probe_set for probe_set in choices.preserve}
        kept = [Reading.of(target, control, **run).equation for control in controls.values()]
    equations += [replace(e, weight=choices.preserve_weight) for e in kept]
    scaling = None
    if target.site.kind == "features" and len(equations) == 1:
        (reading,) = readings.values()
        alone, scaling = reading.scaled
        equations = [replace(equations[0], design=alone.design, memo=alone.memo)]
    elif target.site.kind == "features":
        designs, scaling = scaled([e.design for e in equations], target.site.kind)
        equations = [replace(e, design=design, memo={}) for e, design in zip(equations, designs, strict=True)]
    return Problem(tuple(equations), choices.combine, target.site.kind, target.site.tower == "text", scaling)


def _others(readings: Sequence[Reading], equations: Sequence[Equation]) -> list[Equation]:
    """Every grid's probes with the columns of the other grids that aren't its own."""
    columns = {text: row for r in readings for text, row in zip(r.texts, r.columns, strict=True)}
    found = []
    for reading, equation in zip(readings, equations, strict=True):
        rows = [row for text, row in columns.items() if text not in reading.texts]
        if rows:
            found.append(replace(equation, columns=torch.stack(rows), wanted=None, predictions=None, memo={}))
    if not found:
        raise PlatonicError(
            'Expected terms with different prompts for preserve="default", which keeps each term\'s probes where they '
            "are with respect to the other terms' prompts, got the same prompts everywhere. Pass a ProbeSet of what "
            "should be left alone."
        )
    return found


def solve_operators(
    descriptors: Sequence[TaskDescriptor],
    target: DualEncoder,
    *,
    probes: ProbeSet | Sequence[ProbeSet] | None = None,
    prompts: Wording | None = None,
    objective: Objective = "change",
    calibration: Calibration = "none",
    probe_ridge: float = PROBE_RIDGE,
    prompt_ridge: float = PROMPT_RIDGE,
    site: SiteKind | None = None,
    tower: Tower | None = None,
    batch_size: int = 32,
    num_workers: int = 0,
    progress: bool | None = None,
) -> list[Operator]:
    """One operator per descriptor, on the target's embeddings; one pass and one factorisation per grid.

    Under a launcher each process reads a share of the probes; `D'D` and `D'U` are exchanged, features never are.

    Args:
        descriptors: Any number, on any grids.
        target: The model that receives them, read with its own `PLATONIC` adapters switched off.
        probes: The probe sets behind the grids, where the descriptors have them neither at hand nor by reference.
        prompts: As in `transfer`.
        objective: As in `transfer`, for each descriptor by itself.
        calibration: As in `transfer`.
        probe_ridge: Relative ridge on the probe side, above 0.
        prompt_ridge: Relative ridge on the prompt side, above 0.
        site: Which side of the edited layer, or "features"; None: as the target's family needs. See `DualEncoder.at`.
        tower: Which tower is edited, "probe" or "text"; None: the probes'. The text tower moves every prompt, and
            leaves probe embeddings as they are.
        batch_size: Probes a forward pass.
        num_workers: Processes that decode while the model computes.
        progress: Whether to show a bar, on the main process; None: where stderr is a terminal.

    Returns:
        Operators in the order of the descriptors, float32 factors on the CPU.

    Raises:
        PlatonicError: If there are no descriptors, a ridge isn't a finite number above 0, or a descriptor lacks what
            the objective or the calibration needs.
        GridMismatchError: If no probe set at hand has a descriptor's grid.
        PromptError: If `prompts` don't fit the descriptors' classes.
        EncoderError: If the target can't be edited there exactly.

    Reference:
        Park and Cho 2026, arXiv 2610.00929.
    """
    if not descriptors:
        raise PlatonicError("Expected at least one descriptor, got none.")
    term_list(descriptors)
    instance(target, "target", DualEncoder, "Load one with `DualEncoder.from_pretrained`.")
    positive(probe_ridge, "probe_ridge")
    positive(prompt_ridge, "prompt_ridge")
    at_hand = probe_sets_of(descriptors, probes)
    target = target.at(site=site, tower=tower)
    operators: dict[int, Operator] = {}
    run: dict[str, Any] = {"batch_size": batch_size, "num_workers": num_workers, "progress": progress}
    ridges = {"probe_ridge": probe_ridge, "prompt_ridge": prompt_ridge}
    texts = grid_texts(at_hand, prompts)
    streams = objective == "change" and calibration == "none" and target.site.kind != "features"
    streams = streams and _must_stream(target, at_hand)
    for fingerprint, probe_set in at_hand.items():
        chosen = [index for index, d in enumerate(descriptors) if d.grid.fingerprint == fingerprint]
        if streams:
            deltas = [descriptors[index].delta for index in chosen]
            solved = _streamed(target, probe_set, texts[fingerprint], deltas, ridges, run)
        else:
            reading = Reading.of(target, probe_set, texts=texts[fingerprint], **run)
            wanted = [
                wanted_change([descriptors[index]], reading.affinity, objective=objective, calibration=calibration)
                for index in chosen
            ]
            (design,), scaling = scaled([reading.features.design], target.site.kind)
            solver = GridSolver.of(design, reading.columns, **ridges)
            solved = unscaled(solver.solve(wanted, design), scaling)
        right = solved[0][1].float().cpu()  # one tensor for all: their sums stay as thin as each of them
        for index, (left, _) in zip(chosen, solved, strict=True):
            operator = Operator(left.float().cpu(), right, target.site.kind)
            operators[index] = operator.transposed if target.site.tower == "text" else operator
    return [operators[index] for index in range(len(descriptors))]


def _streamed(
    target: DualEncoder,
    probes: ProbeSet,
    texts: Sequence[Sequence[str]],
    deltas: Sequence[Tensor],
    ridges: Mapping[str, float],
    run: Mapping[str, Any],
) -> list[tuple[Tensor, Tensor]]:
    """Factors of one operator per descriptor of a grid, from one pass that keeps sums only.

    Processes exchange `D'D` and `D'U`, never features; descriptors are read row by row, from disk perhaps. On one
    process with few probes the smaller dual system is solved; it has the same minimiser, and only the primal one adds
    across processes. The two agree to `n * 2e-16 / probe_ridge`, relatively.
    """
    widths = [delta.shape[1] for delta in deltas]
    # float64 on the spot, where the accelerator has it: a wide Gram would cost a processor more than the pass itself.
    place = target.device if target.device.type == "cuda" else torch.device("cpu")
    sums = ProbeSums.zeros(target.design_dim, sum(widths), device=place)
    varied = Varied()
    with unedited(target):
        columns = encode_columns(target, texts)
        for batch, (features,) in passes([target], probes, design=True, description="solve", **run):
            varied.update(features.unit)
            sums.update(features.design, [delta[batch.start : batch.stop] for delta in deltas])
    varied.require()
    total = ProbeSums(sum_over_processes(sums.gram), sum_over_processes(sums.cross), len(probes))
    solver = GridSolver.from_sums(total, columns.to(place), **ridges)
    return [solver.solve_cross(cross) for cross in torch.split(total.cross, widths, dim=1)]
