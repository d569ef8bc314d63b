"""Solutions: terms become one operator for a target, by the closed form; nothing is written into the target yet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ._checks import finite, positive
from .descriptor import DescriptorSum, TaskDescriptor, require_same_grid
from .encoders.encoder import DualEncoder
from .encoders.families import SiteKind, Tower
from .encoding import encode_columns, encode_probes
from .errors import GridMismatchError, PlatonicError
from .operator import Operator
from .probes import ProbeSet
from .solve import PROBE_RIDGE, PROMPT_RIDGE, GridSolver
from .tuner import PlatonicModel

__all__ = [
    "Solution",
    "Terms",
    "paper_strength",
    "probe_sets_of",
    "provenance_of",
    "solve_operators",
    "solve_transfer",
    "term_list",
    "unedited",
]

Terms = TaskDescriptor | DescriptorSum | Sequence[TaskDescriptor]


@dataclass(frozen=True, eq=False)
class Solution:
    """What a transfer writes into its target.

    Attributes:
        operator: Of all terms together, for the edit site that was asked for.
        strength: `s`, at which it is applied.
        provenance: How it came about, as plain JSON.
    """

    operator: Operator
    strength: float
    provenance: dict[str, Any]


def paper_strength(terms: Terms) -> float:
    """The strength of the paper's closed-form scripts: 0.5 where anything is added, 1 for pure negation.

    Args:
        terms: Descriptors with their coefficients multiplied in.

    Returns:
        0.5 or 1.0.
    """
    coefficients = [source.coefficient for term in term_list(terms) for source in term.sources]
    return 1.0 if coefficients and all(c < 0 for c in coefficients) else 0.5


def solve_transfer(
    terms: Terms,
    target: DualEncoder,
    *,
    probes: ProbeSet | Sequence[ProbeSet] | None = None,
    strength: float | None = None,
    probe_ridge: float = PROBE_RIDGE,
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
        strength: `s`, signed and finite; None takes the paper's.
        probe_ridge: Relative ridge on the probe side, above 0.
        prompt_ridge: Relative ridge on the prompt side, above 0.
        site: As in `transfer`.
        tower: As in `transfer`.
        batch_size: Probes a forward pass.
        num_workers: Processes that decode while the model computes.
        progress: Whether to show a bar, on the main process; None: where stderr is a terminal.

    Returns:
        The solution: a sum of one operator per term, as thin as it can be.

    Raises:
        GridMismatchError: If no probe set at hand has a term's grid.
        PlatonicError: If there are no terms, or a strength or ridge isn't usable.
        EncoderError: If the target can't be edited there.

    Reference:
        Park and Cho 2026, arXiv 2610.00929.
    """
    s = paper_strength(terms) if strength is None else finite(strength, "strength")
    descriptors = list(DescriptorSum.of(term_list(terms)))
    operators = solve_operators(
        descriptors,
        target,
        probes=probes,
        probe_ridge=probe_ridge,
        prompt_ridge=prompt_ridge,
        site=site,
        tower=tower,
        batch_size=batch_size,
        num_workers=num_workers,
        progress=progress,
    )
    total = operators[0]
    for operator in operators[1:]:
        total = total + operator
    provenance = provenance_of(descriptors, target, probe_ridge=probe_ridge, prompt_ridge=prompt_ridge)
    return Solution(total.compressed(), s, provenance)


def solve_operators(
    descriptors: Sequence[TaskDescriptor],
    target: DualEncoder,
    *,
    probes: ProbeSet | Sequence[ProbeSet] | None = None,
    probe_ridge: float = PROBE_RIDGE,
    prompt_ridge: float = PROMPT_RIDGE,
    site: SiteKind | None = None,
    tower: Tower | None = None,
    batch_size: int = 32,
    num_workers: int = 0,
    progress: bool | None = None,
) -> list[Operator]:
    """One operator per descriptor, on the target's embeddings; one pass and one factorisation per grid.

    Args:
        descriptors: Any number, on any grids.
        target: The model that receives them, read with its own `PLATONIC` adapters switched off.
        probes: The probe sets behind the grids, where the descriptors have them neither at hand nor by reference.
        probe_ridge: Relative ridge on the probe side, above 0.
        prompt_ridge: Relative ridge on the prompt side, above 0.
        site: Which side of the edited layer; None: as the target's family needs. See `DualEncoder.at`.
        tower: Which tower is edited, "probe" or "text"; None: the probes'. The text tower moves every prompt, and
            leaves probe embeddings as they are.
        batch_size: Probes a forward pass.
        num_workers: Processes that decode while the model computes.
        progress: Whether to show a bar, on the main process; None: where stderr is a terminal.

    Returns:
        Operators in the order of the descriptors, float32 factors on the CPU.

    Raises:
        PlatonicError: If there are no descriptors, or a ridge isn't a finite number above 0.
        GridMismatchError: If no probe set at hand has a descriptor's grid.
        EncoderError: If the target can't be edited there exactly.

    Reference:
        Park and Cho 2026, arXiv 2610.00929.
    """
    if not descriptors:
        raise PlatonicError("Expected at least one descriptor, got none.")
    positive(probe_ridge, "probe_ridge")
    positive(prompt_ridge, "prompt_ridge")
    at_hand = probe_sets_of(descriptors, probes)
    target = target.at(site=site, tower=tower)
    place = target.site
    operators: dict[int, Operator] = {}
    with unedited(target):
        for fingerprint, probe_set in at_hand.items():
            features = encode_probes(
                target,
                probe_set,
                batch_size=batch_size,
                num_workers=num_workers,
                progress=progress,
                description="solve",
            )
            columns = encode_columns(target, probe_set.columns)
            solver = GridSolver.of(features.design, columns, probe_ridge=probe_ridge, prompt_ridge=prompt_ridge)
            chosen = [index for index, d in enumerate(descriptors) if d.grid.fingerprint == fingerprint]
            solved = solver.solve([descriptors[index].delta for index in chosen], features.design)
            right = solved[0][1].float()  # one tensor for all: their sums stay as thin as each of them
            for index, (left, _) in zip(chosen, solved, strict=True):
                operator = Operator(left.float(), right, place.kind)
                operators[index] = operator.transposed if place.tower == "text" else operator
    return [operators[index] for index in range(len(descriptors))]


def probe_sets_of(
    descriptors: Sequence[TaskDescriptor], probes: ProbeSet | Sequence[ProbeSet] | None
) -> dict[str, ProbeSet]:
    """The probe set of each descriptor's grid, by fingerprint, in the order of the descriptors.

    Args:
        descriptors: On any grids, with or without their probes at hand.
        probes: Further probe sets to look in. Without any, probes that aren't at hand are loaded by reference from the
            Hub, where the grid has one.

    Raises:
        GridMismatchError: If a grid's probe set isn't among them.
    """
    given = [] if probes is None else [probes] if isinstance(probes, ProbeSet) else list(probes)
    by_grid = {probe_set.grid.fingerprint: probe_set for probe_set in given}
    found: dict[str, ProbeSet] = {}
    for descriptor in descriptors:
        fingerprint = descriptor.grid.fingerprint
        probe_set = by_grid.get(fingerprint, descriptor.probes)
        if probe_set is None and descriptor.grid.reference is not None and not given:
            probe_set = ProbeSet.from_reference(descriptor.grid)
        if probe_set is None:
            if len(given) == 1:
                require_same_grid(descriptor.grid, given[0].grid)
            raise GridMismatchError(
                f"Expected the probe set of grid {fingerprint[:16]} ({descriptor.grid.n} probes, {descriptor.grid.m} "
                f"prompts), got grids {[key[:16] for key in by_grid] or 'none'}. A descriptor from disk doesn't carry "
                "its probes unless saved with include_probes=True: pass them as `probes=`."
            )
        require_same_grid(descriptor.grid, probe_set.grid)
        found[fingerprint] = probe_set
    return found


def provenance_of(
    descriptors: Sequence[TaskDescriptor], target: DualEncoder, *, probe_ridge: float, prompt_ridge: float
) -> dict[str, Any]:
    """How a closed-form edit came about, as plain JSON, for an adapter's config and card."""
    return {
        "method": "closed_form",
        "probe_ridge": probe_ridge,
        "prompt_ridge": prompt_ridge,
        "target": target.identity.to_dict(),
        "terms": [
            {
                "name": descriptor.name,
                "descriptor": list(descriptor.origin) if descriptor.origin else None,
                "grid": descriptor.grid.fingerprint,
                "sources": [source.to_dict() for source in descriptor.sources],
            }
            for descriptor in descriptors
        ],
    }


@contextmanager
def unedited(target: DualEncoder) -> Iterator[None]:
    """The target with its `PLATONIC` adapters switched off for a while, if it has any."""
    from peft import PeftModel

    if isinstance(target.model, PeftModel) and isinstance(target.model.base_model, PlatonicModel):
        with target.model.disable_adapter():
            yield
    else:
        yield


def term_list(terms: Terms) -> list[TaskDescriptor]:
    """The terms as a list of descriptors.

    Raises:
        PlatonicError: If there are none, or one isn't a descriptor.
    """
    found = [terms] if isinstance(terms, TaskDescriptor) else list(terms)
    for term in found:
        if not isinstance(term, TaskDescriptor):
            raise PlatonicError(
                f"Expected TaskDescriptor terms, got {type(term).__name__}. Extract or load one first."
            )
    if not found:
        raise PlatonicError("Expected at least one term, got none. Pass a descriptor, a sum of them or a list.")
    return found
