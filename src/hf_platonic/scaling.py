"""Standardised features: columns of very different scales under one ridge, and the operator back on the raw ones.

A design `[f, 1] / |z|` with features `f` of several layers has columns whose means and spreads differ by orders of
magnitude, and a ridge would keep the small ones out. So the solve sees `[(f - centre) * scale, 1] / |z|`, and what it
finds is folded into an operator on the raw features: `B = S B~` with the same affine map `S`, exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._checks import matrix
from .errors import PlatonicError

__all__ = ["FeatureScaling", "scaled", "unscaled"]

_DEAD = 1e-6  # of a column's largest value: rounding in a float32 tower, not a signal
_CHUNK = 2048  # rows in float64 at a time: bounds memory whatever n is


@dataclass(frozen=True, eq=False)
class FeatureScaling:
    """The affine map that gives features mean 0 and standard deviation 1 on some probes.

    Attributes:
        centre: Means, shape (p - 1,), float64.
        scale: One over the standard deviations, shape (p - 1,), float64; 0 for a column that is constant.
    """

    centre: Tensor
    scale: Tensor

    @classmethod
    def of(cls, *designs: Tensor) -> FeatureScaling:
        """The scaling by the probes of some designs together, each probe counting once.

        Equal to `sklearn.preprocessing.StandardScaler` on the features.

        Args:
            *designs: Each `[f, 1] / |z|`, shape (n, p), any float dtype.

        Returns:
            The scaling, on the designs' device.

        Raises:
            PlatonicError: If there are no probes, or the last column isn't above 0 as one over a norm is.
        """
        for design in designs:
            matrix(design, "design", (None, designs[0].shape[1]))
        n = sum(len(design) for design in designs)
        if not n:
            raise PlatonicError("Expected at least one probe to take means over, got none.")
        total, largest, square = (torch.zeros_like(designs[0][0, :-1], dtype=torch.float64) for _ in range(3))
        for features in _features(designs):
            total += features.sum(dim=0)
            largest = torch.maximum(largest, features.abs().amax(dim=0))
        centre = total / n
        for features in _features(designs):  # a second pass: sums of squares would lose a small spread beside a mean
            square += (features - centre).square().sum(dim=0)
        spread = (square / n).sqrt()
        alive = spread > _DEAD * largest
        return cls(centre, torch.where(alive, 1 / torch.where(alive, spread, 1), 0.0))

    def apply(self, design: Tensor) -> Tensor:
        """`[(f - centre) * scale, 1] / |z|` of a design `[f, 1] / |z|`: shape (n, p), the dtype of `design`."""
        matrix(design, "design", (None, len(self.centre) + 1))
        scaled_rows = torch.empty_like(design)
        for start in range(0, len(design), _CHUNK):
            wide = design[start : start + _CHUNK].double()
            part = scaled_rows[start : start + _CHUNK]
            part[:, :-1] = ((wide[:, :-1] - wide[:, -1:] * self.centre) * self.scale).to(design.dtype)
            part[:, -1] = design[start : start + _CHUNK, -1]
        return scaled_rows

    def fold(self, left: Tensor) -> Tensor:
        """The left factor on raw features that does what `left` does on scaled ones.

        `apply(D) @ left = D @ fold(left)`.

        Args:
            left: Shape (p, r).

        Returns:
            Shape (p, r), float64.
        """
        matrix(left, "left", (len(self.centre) + 1, None))
        rows = left[:-1].double() * self.scale[:, None]
        return torch.cat([rows, left[-1:].double() - self.centre[None] @ rows])


def _features(designs: Sequence[Tensor]) -> Iterator[Tensor]:
    """`f` of designs `[f, 1] / |z|`, float64, some rows at a time."""
    for design in designs:
        for start in range(0, len(design), _CHUNK):
            wide = design[start : start + _CHUNK].double()
            if not bool((wide[:, -1] > 0).all()):
                raise PlatonicError(
                    "Expected a design whose last column is one over the embeddings' norms, got values that aren't "
                    'above 0. Take the design of an encoder at site="features".'
                )
            yield wide[:, :-1] / wide[:, -1:]


def scaled(designs: Sequence[Tensor], site: str) -> tuple[list[Tensor], FeatureScaling | None]:
    """What a solve sees of the designs of its grids, and how its solution gets back.

    Args:
        designs: Each of shape (n, p); where one tensor stands for several grids, so does its scaled form.
        site: The kind of edit site. At most it's the designs themselves, and None.
    """
    if site != "features":
        return list(designs), None
    different = {id(design): design for design in designs}
    scaling = FeatureScaling.of(*different.values())
    moved = {key: scaling.apply(design) for key, design in different.items()}
    return [moved[id(design)] for design in designs], scaling


def unscaled(factors: Sequence[tuple[Tensor, Tensor]], scaling: FeatureScaling | None) -> list[tuple[Tensor, Tensor]]:
    """Thin factors `(left, right)` on the raw design from those on a scaled one."""
    return list(factors) if scaling is None else [(scaling.fold(left), right) for left, right in factors]
