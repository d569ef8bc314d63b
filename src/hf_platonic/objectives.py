"""What a target is asked to do: by how much each of its cosines should move, from a descriptor and its own affinity.

With the source's base affinity `A_s` and descriptor `U`, the target's base affinity `A_t` on the same grid, `C` the
removal of each row's mean (classes are told apart within a row; the level of a row differs between families and says
nothing), and `r = spread(A_t) / spread(A_s)`, the root mean squares of `A_t C` and `A_s C`:

    change, as it is        U                          the paper's
    change, calibrated      r U
    endpoint                r (A_s + U) C - A_t C

At an output site and s = 1 the target's own affinity lies in the span of its design. The endpoint's second part then
cancels it up to the ridge, and what remains is a ridge regression of the source's fine-tuned affinity on the target's
embeddings: the target answers as the fine-tune would, not as itself plus a change.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from torch import Tensor

from .affinities import row_centred, spread
from .descriptor import DescriptorSum, TaskDescriptor
from .errors import PlatonicError

__all__ = ["Calibration", "Objective", "calibrated", "one_a_grid", "wanted_change"]

Objective = Literal["change", "endpoint"]
Calibration = Literal["none", "spread"]


def calibrated(descriptor: TaskDescriptor, to: float) -> TaskDescriptor:
    """The descriptor in the scale of a family that holds its cosines as far apart as `to`.

    Multiplies delta and base affinity by `to / descriptor.spread`; coefficients of the sources stay, and their
    `changes` say so.

    Args:
        descriptor: With the spread of its base affinity.
        to: The spread to have, above 0; `spread(A)` of the receiving family's base affinity on this grid.

    Returns:
        A descriptor whose `spread` is `to`.

    Raises:
        PlatonicError: If either spread isn't above 0.
    """
    if not (descriptor.spread > 0 and to > 0):
        raise PlatonicError(
            f"Expected spreads above 0 to calibrate {descriptor!r}, got {descriptor.spread:g} and {to:g}. A "
            'descriptor made by hand needs its `spread`; or use calibration="none".'
        )
    ratio = to / descriptor.spread
    base = None if descriptor.base_affinity is None else descriptor.base_affinity * ratio
    sources = descriptor.sources
    if not math.isclose(ratio, 1.0, rel_tol=1e-9):
        how = f"brought from spread {descriptor.spread:.6g} to {to:.6g}"
        sources = tuple(source.changed(how) for source in sources)
    return replace(
        descriptor, delta=descriptor.delta * ratio, sources=sources, base_affinity=base, spread=to, origin=None
    )


def wanted_change(
    descriptors: Sequence[TaskDescriptor],
    target_affinity: Tensor,
    *,
    objective: Objective = "change",
    calibration: Calibration = "none",
) -> Tensor:
    """By how much the target's cosines should move on one grid, for all its descriptors together.

    Args:
        descriptors: At least one, all of one grid, coefficients multiplied in. For the endpoint with coefficient c,
            the source's affinity after c times its change.
        target_affinity: `A_t`, shape (n, m).
        objective: "change" adds what the fine-tunes changed, "endpoint" asks for what the fine-tune ended at.
        calibration: "spread" brings each descriptor to the target's spread of cosines, "none" takes it as it is.

    Returns:
        Shape (n, m); the sum of the descriptors' own deltas for "change" without calibration.

    Raises:
        PlatonicError: If the endpoint is wanted of descriptors without a base affinity or with several, or a spread
            isn't above 0.
    """
    if calibration == "spread":
        to = spread(target_affinity)
        descriptors = [calibrated(descriptor, to) for descriptor in descriptors]
    total = one_a_grid(descriptors, objective)
    if objective == "change" or total.base_affinity is None:
        return total.delta
    return row_centred(total.base_affinity + total.delta) - row_centred(target_affinity)


def one_a_grid(descriptors: Sequence[TaskDescriptor], objective: Objective) -> TaskDescriptor:
    """The sum of one grid's descriptors, with the base affinity that an endpoint needs.

    Raises:
        PlatonicError: If the endpoint is wanted of descriptors without a base affinity or with several.
    """
    (total,) = DescriptorSum.of(descriptors).terms
    if objective == "change" or total.base_affinity is not None:
        return total
    if all(descriptor.base_affinity is not None for descriptor in descriptors):
        raise PlatonicError(
            f"Expected one source of a grid for the endpoint objective, got {len(descriptors)} on grid "
            f"{total.grid.fingerprint[:16]}: a sum of endpoints isn't one. Average them with "
            'TaskDescriptor.consensus, or use objective="change".'
        )
    raise PlatonicError(
        f"Expected descriptors with their base affinity for the endpoint objective, got {total!r} without. "
        'Extract with store_base=True, or use objective="change".'
    )
