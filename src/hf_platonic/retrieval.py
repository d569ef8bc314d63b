"""Retrieval: how often a probe's own caption, or a caption's own probe, is among the nearest few."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._checks import matrix
from .affinities import affinity
from .errors import PlatonicError

__all__ = ["caption_recall", "recall_at_k"]


def recall_at_k(ranked: Sequence[Sequence[int]], own: Sequence[int], k: int = 1) -> float:
    """Share of queries whose own item is among the first k found.

    Args:
        ranked: For each query the items found, best first; at least k each, or all there are.
        own: For each query the item that belongs to it.
        k: At least 1.

    Returns:
        In [0, 1].

    Raises:
        PlatonicError: If there are no queries, not one own item for each, or k is below 1.

    Example:
        >>> recall_at_k([[0, 1], [2, 1]], [0, 1], k=1)
        0.5
        >>> recall_at_k([[0, 1], [2, 1]], [0, 1], k=2)
        1.0
    """
    if k < 1 or not len(own) or len(ranked) != len(own):
        raise PlatonicError(
            f"Expected k of at least 1 and one own item for each query, got k = {k}, {len(ranked)} queries and "
            f"{len(own)} own items."
        )
    return sum(int(item) in list(found)[:k] for found, item in zip(ranked, own, strict=True)) / len(own)


def caption_recall(unit: Tensor, prompts: Tensor, ks: Sequence[int] = (1, 5)) -> dict[str, dict[int, float]]:
    """Recall in both directions where row i of the probes belongs to row i of the captions.

    Args:
        unit: Shape (n, d), the probes' unit embeddings.
        prompts: Shape (n, d), the captions' unit embeddings.
        ks: How many of the nearest count, each at least 1.

    Returns:
        Shares in [0, 1] by k: "to_caption", from a probe to its caption, and "to_probe", from a caption to its probe.

    Raises:
        PlatonicError: If the shapes differ, or a k is below 1.

    Example:
        >>> caption_recall(torch.eye(2), torch.eye(2), ks=[1])
        {'to_caption': {1: 1.0}, 'to_probe': {1: 1.0}}
    """
    matrix(prompts, "prompts", tuple(unit.shape))
    similar = affinity(unit, prompts)
    own = range(len(unit))
    # A stable order, so that ties fall the same way everywhere.
    found = {
        "to_caption": torch.sort(similar, dim=1, descending=True, stable=True).indices.tolist(),
        "to_probe": torch.sort(similar.T, dim=1, descending=True, stable=True).indices.tolist(),
    }
    return {name: {k: recall_at_k(ranked, own, k) for k in ks} for name, ranked in found.items()}
