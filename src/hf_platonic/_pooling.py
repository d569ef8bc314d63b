"""Features of a tower's inner modules: which, and how a module's output becomes one row for each input."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

from .errors import PlatonicError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Feature", "Pooling", "features_of", "pool"]

Pooling = Literal["mean", "std", "first"]

_TINY = 1e-12  # keeps the derivative of a standard deviation finite where all tokens are equal


class Feature(NamedTuple):
    """A block of columns that a design reads from one module's output.

    Attributes:
        module: Dotted name within the bare model.
        pooling: "mean" or standard deviation ("std") over tokens or positions, or the "first" token, which is the
            class token where there's one.
        size: Columns.
    """

    module: str
    pooling: Pooling
    size: int


def features_of(rows: Iterable[Any]) -> tuple[Feature, ...]:
    """Features from their JSON form, a list of `[module, pooling, size]`.

    Raises:
        PlatonicError: If a row isn't one.
    """
    found = []
    for row in rows:
        feature = Feature(*row) if isinstance(row, (list, tuple)) and len(row) == len(Feature._fields) else None
        if (
            feature is None
            or not isinstance(feature.module, str)
            or feature.pooling not in get_args(Pooling)
            or isinstance(feature.size, bool)
            or not isinstance(feature.size, int)
            or feature.size < 1
        ):
            raise PlatonicError(
                f"Expected features as [module, {' or '.join(map(repr, get_args(Pooling)))}, size], got {row!r}. "
                'Take those of `DualEncoder.at(site="features").site.features`.'
            )
        found.append(feature)
    return tuple(found)


def pool(output: Any, pooling: Pooling) -> Tensor:
    """One row for each input from a module's output.

    Args:
        output: Rows (b, w), tokens (b, t, w) or a map (b, w, height, width); or a tuple that begins with one.
        pooling: "mean" or "std" (population standard deviation) over tokens or positions; "first" token. A row is
            its own mean, its own first, and has no deviation.

    Returns:
        Shape (b, w), at least float32.

    Raises:
        PlatonicError: If it's none of these.
    """
    import torch

    hidden = output[0] if isinstance(output, (tuple, list)) and len(output) else output
    if not isinstance(hidden, torch.Tensor) or hidden.ndim not in (2, 3, 4):
        shape = tuple(hidden.shape) if isinstance(hidden, torch.Tensor) else type(hidden).__name__
        raise PlatonicError(
            f"Expected rows, tokens or a map from a module that features are read from, got {shape}. "
            "Name other modules in the family's `feature_modules`."
        )
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    if hidden.ndim == 2:
        hidden = hidden[:, None]
    if hidden.ndim == 4:
        hidden = hidden.flatten(2).transpose(1, 2)
    if pooling == "first":
        return hidden[:, 0]
    return hidden.mean(dim=1) if pooling == "mean" else (hidden.var(dim=1, correction=0) + _TINY).sqrt()
