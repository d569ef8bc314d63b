"""Terms: what a transfer is asked to write, the probes behind it, and the record of how it was written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ._checks import instance
from .descriptor import DescriptorSum, TaskDescriptor
from .encoders.encoder import DualEncoder
from .errors import GridMismatchError, PlatonicError
from .grid import require_same_grid
from .probes import ProbeSet
from .selection import Ridge
from .wording import Wording

__all__ = ["Terms", "paper_strength", "probe_sets_of", "provenance_of", "term_list"]

Terms = TaskDescriptor | DescriptorSum | Sequence[TaskDescriptor]


def term_list(terms: Terms) -> list[TaskDescriptor]:
    """The terms as a list of descriptors.

    Raises:
        PlatonicError: If there are none, or one isn't a descriptor.
    """
    if not isinstance(terms, TaskDescriptor | Iterable):
        raise PlatonicError(
            f"Expected TaskDescriptor terms, got {type(terms).__name__}. Pass the descriptors first, then the target."
        )
    found = [terms] if isinstance(terms, TaskDescriptor) else list(terms)
    for term in found:
        if not isinstance(term, TaskDescriptor):
            raise PlatonicError(
                f"Expected TaskDescriptor terms, got {type(term).__name__}. Extract or load one first."
            )
    if not found:
        raise PlatonicError("Expected at least one term, got none. Pass a descriptor, a sum of them or a list.")
    return found


def paper_strength(terms: Terms) -> float:
    """The strength of the paper's closed-form scripts: 0.5 where anything is added, 1 for pure negation.

    Args:
        terms: Descriptors with their coefficients multiplied in.

    Returns:
        0.5 or 1.0.
    """
    coefficients = [source.coefficient for term in term_list(terms) for source in term.sources]
    return 1.0 if coefficients and all(c < 0 for c in coefficients) else 0.5


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
    for probe_set in given:
        instance(probe_set, "probes", ProbeSet, "Make one with `ProbeSet(inputs, class_names=...)`.")
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
    descriptors: Sequence[TaskDescriptor],
    target: DualEncoder,
    *,
    probe_ridge: Ridge,
    prompt_ridge: float,
    prompts: Wording | None = None,
    **choices: Any,
) -> dict[str, Any]:
    """How a closed-form edit came about, as plain JSON, for an adapter's config and card."""
    found = {
        "method": "closed_form",
        "probe_ridge": probe_ridge,
        "prompt_ridge": prompt_ridge,
        "target": target.identity.to_dict(),
        "modality": target.modality,
        **_read(target),
        "terms": [
            {
                "name": descriptor.name,
                "descriptor": list(descriptor.origin) if descriptor.origin else None,
                "grid": descriptor.grid.fingerprint,
                "sources": [source.to_dict() for source in descriptor.sources],
            }
            for descriptor in descriptors
        ],
        **choices,
    }
    if prompts is not None:
        found["prompts"] = dict(prompts) if isinstance(prompts, Mapping) else list(prompts)
    return found


def _read(target: DualEncoder) -> dict[str, Any]:
    """The inner features an edit reads, for its provenance."""
    features = target.site.features if target.reads_input else ()
    return {"features": [list(feature) for feature in features]} if features else {}
