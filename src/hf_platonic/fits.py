"""Fits: from what a target sees of its grids to one operator, its ridges and its strength, and what to expect of it.

Everything here is arithmetic on tensors that are at hand; `solutions` reads the grids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from ._checks import finite, positive
from .affinities import affinity
from .errors import PlatonicError
from .joint import JointTerm, joint_solve
from .operator import Operator, SiteKind
from .recipes import Combination
from .scaling import FeatureScaling
from .selection import RIDGES, Forecast, GridSpectrum, Ridge, Strength, folds
from .solve import GridSolver

__all__ = [
    "AGREEMENT_RIDGES",
    "AGREEMENT_STRENGTHS",
    "Equation",
    "HeldOut",
    "Problem",
    "agreement",
    "best_by_agreement",
    "chosen_ridges",
    "forecast_of",
]

T = TypeVar("T")

AGREEMENT_RIDGES = (1.0, 0.1, 0.01, 1e-3, 1e-4)
"""The probe ridges that a choice by agreement tries; the first of equally good ones is taken."""
AGREEMENT_STRENGTHS = (1.0, 0.75, 1.25, 0.5, 1.5, 0.25, 2.0)
"""The strengths that it tries, in the same way."""

_TIED = 1e-9  # shares of probes differ by more, or by the rounding of their mean alone


@dataclass(frozen=True, eq=False)
class Equation:
    """One grid of a problem.

    Attributes:
        unit: The target's unit embeddings of the probes, shape (n, d).
        design: Shape (n, p), as a solve sees it.
        columns: Its unit embeddings of the prompts, shape (m, d).
        wanted: By how much its cosines should move, shape (n, m); None: not at all, a grid to be preserved.
        weight: Of the grid in a joint solve, above 0.
        predictions: The fine-tune's class index for each probe, shape (n,), where it is known.
        memo: Factorisations of this design and these prompts, which serve any number of descriptors.
    """

    unit: Tensor
    design: Tensor
    columns: Tensor
    wanted: Tensor | None = None
    weight: float = 1.0
    predictions: Tensor | None = None
    memo: dict[Any, Any] = field(default_factory=dict, repr=False)

    def known(self, key: Any, make: Callable[[], T]) -> T:
        """What was made of design and prompts under a key, now or earlier."""
        if key not in self.memo:
            self.memo[key] = make()
        found: T = self.memo[key]
        return found

    def at(self, rows: Tensor) -> Equation:
        """The equation on some of its probes."""
        wanted = None if self.wanted is None else self.wanted[rows]
        predictions = None if self.predictions is None else self.predictions[rows]
        return Equation(self.unit[rows], self.design[rows], self.columns, wanted, self.weight, predictions)


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Probes that a fit didn't see, and what its operator does to them.

    Attributes:
        equation: On these probes, with predictions.
        left: Left factor, on the design as the solve sees it.
        right: Right factor.
        text: Whether the transposed operator moves the prompts instead.
    """

    equation: Equation
    left: Tensor
    right: Tensor
    text: bool

    def share(self, strength: float) -> float:
        """Share of probes in [0, 1] on which the edited target answers as the fine-tune does."""
        e = self.equation
        unit, columns = e.unit.double(), e.columns.double()
        if self.text:
            columns = columns + strength * (columns @ self.right.T) @ self.left.T
        else:
            unit = unit + strength * (e.design.double() @ self.left) @ self.right
        answers = affinity(*(torch.nn.functional.normalize(rows, dim=1) for rows in (unit, columns))).argmax(dim=1)
        return float(torch.eq(answers, e.predictions).double().mean()) if e.predictions is not None else 0.0


@dataclass(frozen=True, eq=False)
class Problem:
    """All grids that an operator is asked to serve.

    Attributes:
        equations: At least one with something wanted; all of one p and one d.
        combine: "sum" adds one closed form per grid, "joint" solves for all at once.
        site: The kind of edit site.
        text: Whether the text tower is edited.
        scaling: Of features, where the designs are scaled ones.
    """

    equations: tuple[Equation, ...]
    combine: Combination
    site: SiteKind
    text: bool = False
    scaling: FeatureScaling | None = None

    @property
    def asking(self) -> tuple[Equation, ...]:
        """Those with something wanted."""
        return tuple(e for e in self.equations if e.wanted is not None)

    @property
    def can_forecast(self) -> bool:
        """Whether every grid that asks for something has the fine-tune's predictions, on two probes at least."""
        return all(e.predictions is not None and len(e.unit) > 1 for e in self.asking)

    def solve(self, probe_ridges: Sequence[float], prompt_ridge: float) -> tuple[Operator, dict[str, Any]]:
        """The operator on the raw design, float32, and how an iteration went.

        Args:
            probe_ridges: One for each equation, above 0.
            prompt_ridge: Above 0.
        """
        parts, report = self._factors(probe_ridges, prompt_ridge)
        operators = []
        for left, right in parts:
            raw = left if self.scaling is None else self.scaling.fold(left)
            operators.append(Operator(raw.float().cpu(), right.float().cpu(), self.site))
        total = operators[0]
        for operator in operators[1:]:
            total = total + operator
        return (total.transposed if self.text else total), report

    def held_out(self, probe_ridges: Sequence[float], prompt_ridge: float) -> list[HeldOut]:
        """What fits do to probes they didn't see: each probe in turn, of a joint solve every fourth.

        Means and spreads that were taken over all probes (of features, or to calibrate) are kept.

        Args:
            probe_ridges: As in `solve`.
            prompt_ridge: As in `solve`.
        """
        asking = {id(e.design): e for e in self.asking}
        joint = self.combine == "joint" and len(self.equations) > 1
        found = []
        for turn in range(1 if joint else max(len(folds(len(e.unit))) for e in self.asking)):
            # Grids that share their probes share what is held out of them, and one tensor, which a joint solve needs.
            out, rest = {}, {}
            for key, e in asking.items():
                parts = folds(len(e.unit))
                out[key] = parts[turn % len(parts)]
                keep = torch.ones(len(e.unit), dtype=torch.bool)
                keep[out[key]] = False
                rest[key] = keep.nonzero()[:, 0]
            designs = {key: e.design[rest[key]] for key, e in asking.items()}
            fitted = []
            for e in self.equations:
                key = id(e.design)
                if key in rest:
                    memo: dict[Any, Any] = e.known(("rest", turn), dict)
                    e = replace(e.at(rest[key]), design=designs[key], memo=memo)
                fitted.append(e)
            factors, _ = replace(self, equations=tuple(fitted))._factors(probe_ridges, prompt_ridge)
            left = torch.cat([part for part, _ in factors], dim=1)
            right = torch.cat([part for _, part in factors])
            found += [HeldOut(e.at(out[id(e.design)]), left, right, self.text) for e in self.asking]
        return found

    def _factors(
        self, probe_ridges: Sequence[float], prompt_ridge: float
    ) -> tuple[list[tuple[Tensor, Tensor]], dict[str, Any]]:
        if self.combine == "joint":
            terms = [
                JointTerm(e.design, e.columns, e.wanted, e.weight, ridge)
                for e, ridge in zip(self.equations, probe_ridges, strict=True)
            ]
            found = joint_solve(terms, prompt_ridge=prompt_ridge)
            return [(found.left, found.right)], {"iterations": found.iterations, "residual": found.residual}
        factors = []
        for e, ridge in zip(self.equations, probe_ridges, strict=True):
            if e.wanted is not None:
                ridges = {"probe_ridge": ridge, "prompt_ridge": prompt_ridge}
                make = partial(GridSolver.of, e.design, e.columns, **ridges)
                factors += e.known(("solver", ridge, prompt_ridge), make).solve([e.wanted], e.design)
        return factors, {}


def agreement(held_out: Sequence[HeldOut], strength: float) -> float:
    """The mean over grids and turns of the share on which the edited target answers as the fine-tune does."""
    return sum(part.share(strength) for part in held_out) / len(held_out)


def forecast_of(held_out: Sequence[HeldOut], strength: float) -> Forecast:
    """What to expect of an edit at a strength."""
    return Forecast(agreement(held_out, 0.0), agreement(held_out, strength))


def chosen_ridges(problem: Problem, probe_ridge: Ridge, prompt_ridge: float) -> list[float]:
    """The probe ridge of each equation: as given, or by generalised cross-validation for each grid by itself.

    A preserved grid takes the geometric mean of the others'.

    Raises:
        PlatonicError: If a given ridge isn't a finite number above 0.
    """
    if not isinstance(probe_ridge, str):
        return [positive(probe_ridge, "probe_ridge")] * len(problem.equations)
    found = {
        id(e): e.known("spectrum", partial(GridSpectrum.of, e.design, e.columns)).best(
            e.wanted, ridges=RIDGES, prompt_ridge=prompt_ridge
        )
        for e in problem.equations
        if e.wanted is not None
    }
    mean = float(torch.tensor(list(found.values()), dtype=torch.float64).log().mean().exp())
    of_design = {id(e.design): found[id(e)] for e in problem.asking}
    return [of_design.get(id(e.design), mean) for e in problem.equations]


def best_by_agreement(
    problem: Problem, probe_ridge: Ridge, strength: Strength, prompt_ridge: float
) -> tuple[list[float], float, list[HeldOut]]:
    """Ridges and strength, and the held-out probes at them.

    Where either is "agreement", the pair under which the edited target agrees most often with the fine-tune's
    predictions on probes that the fit didn't see is taken; of equally good ones the larger ridge, and the strength
    nearer to 1.

    Args:
        problem: With predictions where something is to be chosen by them.
        probe_ridge: Above 0, "gcv" or "agreement".
        strength: Signed and finite, or "agreement".
        prompt_ridge: Above 0.

    Returns:
        One ridge per equation, the strength, and the held-out parts; none where there are no predictions.

    Raises:
        PlatonicError: If a choice needs predictions that aren't there.
    """
    if not problem.can_forecast and "agreement" in (probe_ridge, strength):
        raise PlatonicError(
            'Expected the fine-tunes\' predictions on two probes or more of every grid for a choice by "agreement", '
            "got fewer. Extract again, or pass a number."
        )
    if probe_ridge == "agreement":
        candidates = [[ridge] * len(problem.equations) for ridge in AGREEMENT_RIDGES]
    else:
        candidates = [chosen_ridges(problem, probe_ridge, prompt_ridge)]
    strengths = AGREEMENT_STRENGTHS if isinstance(strength, str) else (finite(strength, "strength"),)
    if not problem.can_forecast:
        return candidates[0], strengths[0], []
    best: tuple[float, list[float], float, list[HeldOut]] | None = None
    for ridges in candidates:
        parts = problem.held_out(ridges, prompt_ridge)
        for s in strengths:
            score = agreement(parts, s)
            if best is None or score > best[0] + _TIED:
                best = (score, ridges, s, parts)
    if best is None:
        raise PlatonicError("Expected at least one ridge and one strength to choose from, got none.")
    return best[1], best[2], best[3]
