"""Affinities: cosines between probes and prompts, and the one number that calibrates them across families."""

from __future__ import annotations

from torch import Tensor

from ._checks import matrix

__all__ = ["affinity", "row_centred", "spread"]


def affinity(unit: Tensor, prompts: Tensor) -> Tensor:
    """`A = V T'`, the cosines of unit embeddings.

    Args:
        unit: `V`, shape (n, d), unit rows, one per probe.
        prompts: `T`, shape (m, d), unit rows, one per prompt.

    Returns:
        Shape (n, m), float32, values in [-1, 1].

    Example:
        >>> import torch
        >>> affinity(torch.eye(2), torch.tensor([[0.6, 0.8]]))
        tensor([[0.6000],
                [0.8000]])
    """
    matrix(prompts, "prompts", (None, unit.shape[-1]))
    return unit.float() @ prompts.float().T


def row_centred(affinities: Tensor) -> Tensor:
    """The affinity less each row's mean: what tells the prompts apart for one probe."""
    return affinities - affinities.mean(dim=1, keepdim=True)


def spread(affinities: Tensor) -> float:
    """Root mean square of the row-centred affinity: how far apart a family holds its cosines.

    Args:
        affinities: Shape (n, m).

    Returns:
        At least 0; families differ several-fold.

    Example:
        >>> import torch
        >>> round(spread(torch.tensor([[0.1, 0.3], [0.2, 0.4]])), 6)
        0.1
    """
    return float(row_centred(affinities.double()).square().mean().sqrt())
