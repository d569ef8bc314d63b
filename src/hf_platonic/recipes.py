"""Recipes: which way terms become an operator, by name, and option by option."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ._checks import positive
from .descriptor import TaskDescriptor
from .errors import PlatonicError
from .objectives import Calibration, Objective
from .probes import ProbeSet
from .selection import Ridge
from .solve import PROBE_RIDGE

__all__ = ["Choices", "Combination", "Preserved", "Recipe", "choices_of"]

Combination = Literal["sum", "joint"]
Preserved = ProbeSet | Sequence[ProbeSet] | Literal["default"]
Recipe = Literal["paper", "auto"]


@dataclass(frozen=True)
class Choices:
    """Which way terms become an operator.

    Attributes:
        objective: What is asked of the target, see `objectives`.
        calibration: In which scale, see `objectives`.
        combine: "sum" adds one closed form per grid, "joint" solves for all grids at once, see `joint`.
        preserve: What a joint solve leaves alone: probe sets with prompts of their own, or "default", every term's
            probes with the other terms' prompts.
        preserve_weight: Of each of those grids, relative to a term's 1.
        probe_ridge: A number, or how it's chosen without labels, see `selection`.
        site: Where the target is edited if the caller doesn't say and its family can; None: the family's own site.
    """

    objective: Objective = "change"
    calibration: Calibration = "none"
    combine: Combination = "sum"
    preserve: Literal["default"] | tuple[ProbeSet, ...] = ()
    preserve_weight: float = 1.0
    probe_ridge: Ridge = PROBE_RIDGE
    site: Literal["features"] | None = None

    @property
    def as_in_the_paper(self) -> bool:
        """Whether it's the paper's own way, at any ridge."""
        return replace(self, probe_ridge=PROBE_RIDGE) == Choices()

    @property
    def streams(self) -> bool:
        """Whether sums over probes suffice, so that nothing of a probe has to be kept."""
        return self.as_in_the_paper and not isinstance(self.probe_ridge, str)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; grids by their fingerprints."""
        found: dict[str, Any] = {
            "objective": self.objective,
            "calibration": self.calibration,
            "combine": self.combine,
        }
        if self.preserve:
            grids = [probes.grid.fingerprint for probes in self.preserve if isinstance(probes, ProbeSet)]
            found["preserve"] = {
                "grids": "default" if self.preserve == "default" else grids,
                "weight": self.preserve_weight,
            }
        return found


def choices_of(
    recipe: Recipe,
    descriptors: Sequence[TaskDescriptor],
    *,
    objective: Objective | None = None,
    calibration: Calibration | None = None,
    combine: Combination | None = None,
    preserve: Preserved | None = None,
    preserve_weight: float = 1.0,
    probe_ridge: Ridge | None = None,
) -> Choices:
    """The recipe with the given options in place of its own.

    Args:
        recipe: "paper", or "auto": see `automatic`.
        descriptors: What is to be written.
        objective: None: the recipe's.
        calibration: None: "spread" for the endpoint, whose two affinities are compared, else the recipe's.
        combine: None: "joint" where something is to be preserved, else the recipe's.
        preserve: As in `Choices`; one probe set or several.
        preserve_weight: Above 0.
        probe_ridge: None: the recipe's.

    Raises:
        PlatonicError: If a value is unknown, or `preserve` is given for a sum of separate solves.
    """
    options: dict[str, tuple[Any, Any]] = {
        "recipe": (recipe, Recipe),
        "objective": (objective, Objective),
        "calibration": (calibration, Calibration),
        "combine": (combine, Combination),
    }
    for name, (value, known) in options.items():
        if value is not None and value not in get_args(known):
            raise PlatonicError(f"Expected `{name}` out of {get_args(known)}, got {value!r}.")
    asked = _preserved(preserve)
    choices = Choices() if recipe == "paper" else automatic(descriptors, preserving=bool(asked))
    kept = asked or (choices.preserve if combine != "sum" else ())
    if preserve is not None and combine == "sum":
        raise PlatonicError(
            'Expected combine="joint" with `preserve`, got combine="sum": separate solves don\'t see what is to be '
            "left alone. Leave `combine` out."
        )
    objective = objective or choices.objective
    return replace(
        choices,
        objective=objective,
        calibration=calibration or ("spread" if objective == "endpoint" else choices.calibration),
        combine=combine or ("joint" if kept else choices.combine),
        preserve=kept,
        preserve_weight=positive(preserve_weight, "preserve_weight"),
        probe_ridge=choices.probe_ridge if probe_ridge is None else probe_ridge,
    )


def automatic(descriptors: Sequence[TaskDescriptor], *, preserving: bool = False) -> Choices:
    """The best way known that needs no labels, by what the descriptors carry.

    Edits read inner features where the family has them, with the ridge by generalised cross-validation for each grid,
    and descriptors that are alone on their grid and keep their base affinity are matched at their endpoints. Where
    something is taken away and nobody says what to preserve, that would take much else away with it: then it's the
    change, at the family's own site, with the paper's ridge. All in the target's own spread where spreads are known.
    Terms on several grids are solved jointly, each grid's probes kept where they are with respect to the other grids'
    prompts.

    Args:
        descriptors: What is to be written.
        preserving: Whether the caller says what is to be left alone.
    """
    grids = {descriptor.grid.fingerprint: descriptor.grid for descriptor in descriptors}
    single = len(grids) == len(descriptors)
    added = all(source.coefficient > 0 for descriptor in descriptors for source in descriptor.sources)
    strong = added or preserving
    whole = all(descriptor.base_affinity is not None for descriptor in descriptors)
    measured = all(descriptor.spread > 0 for descriptor in descriptors)
    columns = [set(grid.columns) for grid in grids.values()]
    differ = any(other - own for own in columns for other in columns)
    return Choices(
        objective="endpoint" if strong and single and whole and measured else "change",
        calibration="spread" if measured else "none",
        combine="joint" if len(grids) > 1 else "sum",
        preserve="default" if differ else (),
        probe_ridge="gcv" if strong else PROBE_RIDGE,
        site="features" if strong else None,
    )


def _preserved(preserve: Preserved | None) -> Literal["default"] | tuple[ProbeSet, ...]:
    if preserve is None or preserve == "default":
        return () if preserve is None else "default"
    found = (preserve,) if isinstance(preserve, ProbeSet) else tuple(preserve)
    if isinstance(preserve, str) or not all(isinstance(probes, ProbeSet) for probes in found):
        raise PlatonicError(f'Expected `preserve` to be a ProbeSet, several, or "default", got {preserve!r:.200}.')
    return found
