"""Checks that more than one module needs; each raises with what was expected, what came and what to do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .errors import PlatonicError, ProbeError

if TYPE_CHECKING:
    from torch import Tensor


def finite(value: float, name: str) -> float:
    """The value as a float.

    Raises:
        PlatonicError: If it's NaN, infinite, or not a number at all.
    """
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise PlatonicError(
            f"Expected `{name}` to be a finite number, got {value!r}. Pass a float such as 1.0."
        ) from None
    if not math.isfinite(number):
        raise PlatonicError(f"Expected `{name}` to be finite, got {number}. Pass a float such as 1.0.")
    return number


def instance(value: object, name: str, kind: type, remedy: str) -> None:
    """Nothing, where the value is of this class.

    Raises:
        PlatonicError: If it isn't; with the remedy, and what came.
    """
    if not isinstance(value, kind):
        raise PlatonicError(f"Expected `{name}` to be a {kind.__name__}, got {type(value).__name__}. {remedy}")


def positive(value: float, name: str) -> float:
    """The value as a float above zero.

    Raises:
        PlatonicError: If it's not finite or not above zero.
    """
    number = finite(value, name)
    if number <= 0.0:
        raise PlatonicError(f"Expected `{name}` above 0, got {number}. A ridge of 1e-6 is nearly none.")
    return number


def matrix(tensor: Tensor, name: str, shape: Sequence[int | None]) -> Tensor:
    """The tensor itself, once its number of axes and each given size agree with `shape` (None: any size).

    Raises:
        PlatonicError: If they don't.
    """
    expected = tuple("any" if size is None else size for size in shape)
    got = tuple(tensor.shape)
    if len(got) != len(expected) or any(s is not None and s != g for s, g in zip(shape, got, strict=True)):
        raise PlatonicError(f"Expected `{name}` of shape {expected}, got {got}.")
    return tensor


def finite_rows(tensor: Tensor, what: str, *, offset: int = 0) -> Tensor:
    """The tensor itself, once every row is finite.

    Args:
        tensor: Shape (b, d), one row per probe.
        what: The noun for the message, e.g. "embedding".
        offset: Index of the first row within the whole set.

    Raises:
        ProbeError: Naming the first probe whose row has a NaN or an infinity.
    """
    bad = (~tensor.isfinite().all(dim=1)).nonzero()
    if len(bad):
        index = offset + int(bad[0])
        raise ProbeError(
            f"Expected a finite {what} for every probe, got NaN or infinity for probe {index} "
            f"({len(bad)} of {len(tensor)} in this batch). Look at that input, or load the model in float32.",
            index=index,
        )
    return tensor
