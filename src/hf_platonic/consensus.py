"""Consensus: one descriptor from several sources of one task, in which what is peculiar to each source cancels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from .affinities import row_centred
from .descriptor import DescriptorSum, TaskDescriptor, require_descriptors
from .errors import PlatonicError
from .grid import require_same_grid
from .objectives import calibrated

__all__ = ["Consensus", "Weighting", "agreement_weights"]

Weighting = Literal["agreement", "equal"]
_ROUNDS = 200


@dataclass(frozen=True, eq=False)
class Consensus:
    """A consensus and what it was made of.

    Attributes:
        descriptor: The weighted mean, at the geometric mean of the sources' spreads.
        weights: One per source, at least 0, sum 1.
        agreement: Of each source, the cosine of its change with the weighted mean of the others', in [-1, 1].
        shared: Share of the mean squared norm that sources have in common, in [0, 1]: with calibrated, row-centred
            descriptors `U_i` and their mean M, `|M|^2 / sum_i w_i |U_i|^2`. The rest, `residual`, is each one's own.
    """

    descriptor: TaskDescriptor
    weights: tuple[float, ...]
    agreement: tuple[float, ...]
    shared: float

    @property
    def residual(self) -> float:
        """`sum_i w_i |U_i - M|^2 / sum_i w_i |U_i|^2`, which is `1 - shared`."""
        return 1.0 - self.shared

    @classmethod
    def of(cls, descriptors: Sequence[TaskDescriptor], *, weighting: Weighting = "agreement") -> Consensus:
        """The weighted mean of one task's descriptors from several sources.

        Each is first brought to the geometric mean of their spreads. Where all of them keep their base affinity, so
        does the consensus (row-centred, weighted alike), and the endpoint objective asks for the mean of their
        endpoints. The consensus' `spread` is that common one, not the spread of the averaged base affinity, which is
        smaller since what families don't share cancels; so a later calibration scales each source's part as it would
        have alone. Its predictions are those of the mean endpoint, or the weighted vote where bases aren't kept.

        Args:
            descriptors: At least one, all on one grid, each with a spread above 0.
            weighting: "agreement" as in `agreement_weights`, or "equal".

        Returns:
            The consensus and how it came about.

        Raises:
            PlatonicError: If there are none, a spread isn't above 0, or the weighting is unknown.
            GridMismatchError: If they lie on several grids.
        """
        require_descriptors(descriptors)
        if weighting not in get_args(Weighting):
            raise PlatonicError(f"Expected `weighting` out of {get_args(Weighting)}, got {weighting!r}.")
        for other in descriptors[1:]:
            require_same_grid(descriptors[0].grid, other.grid)
        spreads = [descriptor.spread for descriptor in descriptors]
        common = math.exp(sum(map(math.log, spreads)) / len(spreads)) if min(spreads) > 0 else 0.0
        ready = [calibrated(descriptor, common) for descriptor in descriptors]
        changes = [row_centred(descriptor.delta.double()) for descriptor in ready]
        weights, agreement = agreement_weights(changes)
        if weighting == "equal":
            weights = [1 / len(ready)] * len(ready)
        bases = [row_centred(d.base_affinity) for d in ready if d.base_affinity is not None]
        (mean,) = DescriptorSum.of([d * w for d, w in zip(ready, weights, strict=True)]).terms
        base = _weighted(bases, weights) if len(bases) == len(ready) else None
        endpoints = None if base is None else base + mean.delta
        votes = [d.predictions for d in ready if d.predictions is not None]
        if endpoints is None and len(votes) == len(ready):
            endpoints = _weighted([one_hot(v.long(), mean.grid.m).double() for v in votes], weights)
        predictions = None if endpoints is None else endpoints.argmax(dim=1).int()
        total = sum(w * float(change.square().sum()) for w, change in zip(weights, changes, strict=True))
        together = float(_weighted(changes, weights).square().sum())
        return cls(
            replace(mean, spread=common, base_affinity=base, predictions=predictions),
            tuple(weights),
            tuple(agreement),
            min(1.0, together / total) if total > 0 else 1.0,
        )


def agreement_weights(changes: Sequence[Tensor]) -> tuple[list[float], list[float]]:
    """Weights by how much each source agrees with the weighted mean of the others, and those agreements.

    A fixed point of `w_i ~ max(cos(U_i, sum_{j != i} w_j U_j), 0) * min(1, median |U| / |U_i|)`, starting from the
    cosines of pairs. A source that agrees with no other gets next to nothing, one that contradicts them nothing, and
    one of outsize norm no more say than the median one. Where nobody agrees, weights are equal.

    Args:
        changes: k row-centred descriptors in one scale, each of shape (n, m).

    Returns:
        k weights, at least 0, sum 1; k cosines in [-1, 1], of a single source 1.

    Example:
        >>> good, other, bad = torch.tensor([[1.0, -1.0]]), torch.tensor([[0.9, -0.9]]), torch.tensor([[-1.0, 1.0]])
        >>> weights, agreement = agreement_weights([good, other, bad])
        >>> [round(w, 3) for w in weights], [round(a, 3) for a in agreement]
        ([0.5, 0.5, 0.0], [1.0, 1.0, -1.0])
    """
    k = len(changes)
    if k == 1:
        return [1.0], [1.0]
    flat = torch.stack([change.double().flatten() for change in changes])
    gram = flat @ flat.T
    norms = gram.diagonal().sqrt().clamp(min=1e-150)
    cap = (norms.median() / norms).clamp(max=1.0)
    others = 1.0 - torch.eye(k, dtype=torch.float64)

    def normalised(votes: Tensor) -> Tensor:
        votes = votes.clamp(min=0) * cap
        return votes / votes.sum() if float(votes.sum()) > 0 else torch.full_like(votes, 1 / k)

    cosines = gram / norms / norms[:, None]
    weights = normalised((cosines.clamp(min=0) * others).sum(dim=1))
    agreement = torch.zeros(k, dtype=torch.float64)
    for _ in range(_ROUNDS):
        mixes = others * weights  # row i: the others' weights
        sizes = torch.einsum("ij,jk,ik->i", mixes, gram, mixes).clamp(min=1e-300).sqrt()
        agreement = (mixes * gram).sum(dim=1) / (norms * sizes)
        former = weights
        weights = (former + normalised(agreement)) / 2  # half a step: whole ones may go to and fro
        if float((weights - former).abs().max()) < 1e-12:
            break
    return weights.tolist(), agreement.clamp(-1, 1).tolist()


def _weighted(matrices: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    total = torch.zeros_like(matrices[0])
    for matrix, weight in zip(matrices, weights, strict=True):
        total += weight * matrix
    return total
