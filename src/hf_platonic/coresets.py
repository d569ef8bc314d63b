"""Coresets: which of many unlabelled probes to keep, by what a base encoder says about them.

A closed form is a ridge regression on the probes' embeddings. With `M_S = lambda I + X_S' X_S` of the chosen rows, how
well they determine it is measured in two ways:

- "logdet", `log det(I + X_S X_S' / lambda)`, the volume they span: D-optimal, indifferent to where most probes lie.
- "variance", the mean over all rows of `x_i' M_S^-1 x_i`, the uncertainty that remains about them: transductive
  experimental design, which prefers rows that stand for many.

Both are maximised greedily, a row at a time. For "logdet" that takes the row with the largest ridge leverage score
`x_i' M_S^-1 x_i` given those already chosen, which is a pivoted Cholesky factorisation of `X X' + lambda I`, or greedy
inference in a determinantal point process; it reaches at least 1 - 1/e of the best value.

Reference:
    Alaoui and Mahoney 2015, "Fast randomized kernel ridge regression with statistical guarantees", arXiv 1411.0306;
    Chen, Zhang and Zhou 2018, "Fast greedy MAP inference for determinantal point process to improve recommendation
    diversity", arXiv 1709.05135; Yu, Bi and Tresp 2006, "Active learning via transductive experimental design", ICML.
"""

from __future__ import annotations

import operator
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from ._checks import finite_rows, instance, matrix, positive
from .encoders.encoder import DualEncoder
from .encoding import encode_probes
from .errors import PlatonicError, ProbeError
from .probes import ProbeSet

__all__ = ["Criterion", "coreset", "select_probes"]

Criterion = Literal["variance", "logdet"]

_RIDGE = 1e-2  # the paper's on the probe side
_TIE = 1e-6  # relative; unit rows in float32 all tie at first, and rounding shouldn't decide


def coreset(rows: Tensor, k: int, *, criterion: Criterion = "variance", ridge: float = _RIDGE) -> list[int]:
    """The k rows that greedy maximisation takes, best first.

    The first j of them are the coreset of size j. A row equal to a chosen one waits until all different ones are
    taken. Ties go to the earlier row. Needs O(k p (n + p)) operations and O(n p + p^2) memory, in float64.

    Args:
        rows: `X`, shape (n, p), any float dtype: a design, or unit embeddings.
        k: How many to take, at least 1; all rows, in this order, where it's n or more.
        criterion: "variance" or "logdet", see the module.
        ridge: `lambda` relative to the mean squared norm of a row, above 0.

    Returns:
        At most k different positions.

    Raises:
        PlatonicError: If the criterion is unknown.
        ProbeError: If there are no rows, k is below 1, or a row isn't finite or all are zero.

    Example:
        >>> coreset(torch.tensor([[2.0, 0.0], [1.9, 0.1], [0.0, 1.0]]), 2)
        [0, 2]
    """
    if criterion not in get_args(Criterion):
        raise PlatonicError(f"Expected `criterion` out of {get_args(Criterion)}, got {criterion!r}.")
    x = finite_rows(matrix(rows, "rows", (None, None)).detach().to("cpu", torch.float64), "row").numpy()
    count = _count(k, len(x))
    squares = np.einsum("ij,ij->i", x, x)
    scale = positive(ridge, "ridge") * squares.mean()
    if not scale > 0:
        raise ProbeError("Expected rows that aren't all zero, got nothing else. Look at the probes and at the model.")
    _, first = np.unique(x, axis=0, return_index=True)
    repeated = np.ones(len(x), bool)
    repeated[first] = False
    inverse = np.eye(x.shape[1]) / scale
    gram = x.T @ x
    leverage = squares / scale
    reduction = np.einsum("ij,ij->i", x @ gram, x) / scale**2  # of the total variance, but for 1 + leverage
    eligible = ~repeated
    chosen: list[int] = []
    while len(chosen) < count:
        if not eligible.any():
            eligible = repeated
        scores = np.where(eligible, leverage if criterion == "logdet" else reduction / (1 + leverage), -1.0)
        best = int(np.argmax(scores >= scores.max() * (1 - _TIE)))
        chosen.append(best)
        eligible[best] = False
        direction = inverse @ x[best]
        update = direction / np.sqrt(1 + x[best] @ direction)
        seen, moved = x @ update, inverse @ (gram @ update)
        reduction = np.maximum(reduction - 2 * seen * (x @ moved) + (update @ gram @ update) * seen**2, 0.0)
        leverage = np.maximum(leverage - seen**2, 0.0)
        inverse -= np.outer(update, update)
    return chosen


def select_probes(
    encoder: DualEncoder,
    probes: ProbeSet,
    k: int,
    *,
    criterion: Criterion = "variance",
    ridge: float = _RIDGE,
    batch_size: int = 32,
    num_workers: int = 0,
    progress: bool | None = None,
) -> ProbeSet:
    """The k probes that tell most about an edit, best first: the `coreset` of an encoder's unit embeddings.

    Any encoder of the probes' modality will do; a fine-tune's base needs one pass, and the fine-tune then reads the
    chosen probes alone. Labels and prompts aren't looked at.

    Args:
        encoder: What the probes are seen by.
        probes: n unlabelled inputs.
        k: How many to keep, at least 1; all of them where it's n or more.
        criterion: As in `coreset`.
        ridge: As in `coreset`.
        batch_size: Probes a forward pass.
        num_workers: Processes that decode while the model computes.
        progress: Whether to show a bar, on the main process; None: where stderr is a terminal.

    Returns:
        The chosen probes with the same prompts; `select(range(j))` of it is the selection of size j.

    Raises:
        ProbeError: If k is below 1, or a probe can't be read or embedded.
    """
    instance(encoder, "encoder", DualEncoder, "Load one with `DualEncoder.from_pretrained`.")
    instance(probes, "probes", ProbeSet, "Make one with `ProbeSet(inputs, class_names=...)`.")
    _count(k, len(probes))
    features = encode_probes(
        encoder, probes, batch_size=batch_size, num_workers=num_workers, progress=progress, description="select"
    )
    return probes.select(coreset(features.unit, k, criterion=criterion, ridge=ridge))


def _count(k: int, n: int) -> int:
    wanted = operator.index(k)
    if wanted < 1 or n < 1:
        raise ProbeError(f"Expected at least one probe, and `k` of at least 1, got {n} probes and k = {wanted}.")
    return min(wanted, n)
