"""What one forward pass of a probe tower says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["ProbeFeatures", "group_means"]


@dataclass(frozen=True, eq=False)
class ProbeFeatures:
    """What one forward pass says about b probes.

    Attributes:
        unit: Unit embeddings, shape (b, d), float32.
        design: What an operator multiplies, shape (b, p), float32: `unit` itself for output sites, `[u, 1] / |z|` for
            input sites, with `u` the input of the edited layer and `z` the embedding before normalisation (no 1 where
            the layer has no bias).
    """

    unit: Tensor
    design: Tensor


def group_means(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Means over consecutive groups of rows.

    Args:
        rows: Shape (sum of sizes, ...).
        sizes: Rows in each of b groups, at least 1.

    Returns:
        Shape (b, ...).
    """
    return torch.stack([group.mean(dim=0) for group in torch.split(rows, list(sizes))])
