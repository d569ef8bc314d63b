"""Analysis: how alike descriptors are across models and tasks, and how alike the models' embeddings are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._checks import matrix
from ..descriptor import TaskDescriptor
from ..encoding import encode_probes
from ..errors import PlatonicError
from .setting import Setting

__all__ = ["linear_cka", "measure_likeness", "mutual_neighbours", "rank_correlation", "shared_share"]

_NEIGHBOURS = 10
_AT_MOST = 1000  # probes a task that alignment is measured on: it is quadratic in them


def mutual_neighbours(a: Tensor, b: Tensor, *, k: int = _NEIGHBOURS) -> float:
    """Share of each input's k nearest neighbours that two models agree on, in the mean over inputs (mutual k-NN).

    Args:
        a: Unit embeddings of one model, shape (n, d).
        b: Of another, shape (n, d'), same inputs.
        k: Neighbours, below n.

    Returns:
        In [0, 1]; k / (n - 1) by chance.

    Reference:
        Huh et al. 2024, arXiv 2405.07987.

    Example:
        >>> x = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [1.0, 0.1], [0.0, 1.0], [0.1, 1.0]]), dim=1)
        >>> mutual_neighbours(x, x, k=1)
        1.0
    """
    matrix(b, "b", (len(a), None))
    if not 1 <= k < len(a):
        raise PlatonicError(f"Expected `k` from 1 to {len(a) - 1} for {len(a)} inputs, got {k}.")
    near = []
    for rows in (a, b):
        cosines = rows.double() @ rows.double().T
        cosines.fill_diagonal_(-torch.inf)
        near.append(torch.zeros_like(cosines, dtype=torch.bool).scatter_(1, cosines.topk(k, dim=1).indices, True))
    return float((near[0] & near[1]).double().sum() / (k * len(a)))


def linear_cka(a: Tensor, b: Tensor) -> float:
    """Linear centred kernel alignment of two models' embeddings of the same inputs.

    `|A'B|^2 / (|A'A| |B'B|)` with centred columns, Frobenius norms.

    Args:
        a: Shape (n, d).
        b: Shape (n, d').

    Returns:
        In [0, 1]; 1 where one is a rotated and scaled copy of the other.

    Reference:
        Kornblith et al. 2019, arXiv 1905.00414.

    Example:
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-1.0, 0.5]])
        >>> round(linear_cka(x, 3 * x.flip(1)), 6)
        1.0
    """
    matrix(b, "b", (len(a), None))
    x, y = (rows.double() - rows.double().mean(dim=0) for rows in (a, b))
    scale = float(torch.linalg.norm(x.T @ x) * torch.linalg.norm(y.T @ y))
    return float(torch.linalg.norm(x.T @ y) ** 2) / scale if scale > 0 else 0.0


def shared_share(descriptors: Sequence[TaskDescriptor]) -> list[float]:
    """For each model's descriptor, the share of its squared norm along what the other models agree on.

    The squared cosine with the mean of the others, each at unit norm; the rest is the model's own residual.

    Args:
        descriptors: Of one task, at least two models, one grid.

    Returns:
        One share in [0, 1] a model.
    """
    units = [d.delta.double().flatten() / max(d.norm(), 1e-12) for d in descriptors]
    total = torch.stack(units).sum(dim=0)
    shares = []
    for unit in units:
        others = total - unit
        norm = float(others.norm())
        shares.append(float(unit @ others / norm) ** 2 if norm > 0 else 0.0)
    return shares


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float | None:
    """Spearman's rank correlation, ties at their mean rank; None below three pairs or where one side is constant.

    Example:
        >>> rank_correlation([1, 2, 3, 4], [10, 20, 40, 30])
        0.8
    """
    if len(x) < 3 or len(set(x)) < 2 or len(set(y)) < 2:
        return None
    return round(float(np.corrcoef(_ranks(x), _ranks(y))[0, 1]), 12)


def _ranks(values: Sequence[float]) -> np.ndarray[Any, Any]:
    _, inverse, counts = np.unique(np.asarray(values, float), return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[inverse]


def measure_likeness(setting: Setting, modality: str) -> None:
    """Finishes the cell with the cosines and alignments of one modality's models, for the first seed.

    Args:
        setting: The run, with all sources measured.
        modality: "image" or "audio".
    """
    seed = setting.suite.seeds[0]
    models, tasks = setting.models_of(modality), setting.tasks_of(modality)
    key = ("likeness", modality)
    if setting.store.has(*key) or not models or not tasks:
        return
    start = time.perf_counter()
    data = {task: setting.data_of(seed, task) for task in tasks}
    found = {m: {t: setting.descriptor(seed, m, data[t]) for t in tasks} for m in models}
    pooled = {m: {t: TaskDescriptor.from_pretrained(setting.pooled_folder(m, t)) for t in tasks} for m in models}
    units: dict[str, dict[str, Tensor]] = {}
    for model in models:
        base = setting.base(model)
        units[model] = {
            task: encode_probes(base, data[task].probes, **setting.passes).unit[:_AT_MOST] for task in tasks
        }
    pairs = [(a, b) for i, a in enumerate(models) for b in models[i + 1 :]]

    def alignment(a: str, b: str) -> dict[str, Any]:
        both = [(units[a][task], units[b][task]) for task in tasks]
        neighbours = [mutual_neighbours(x, y, k=min(_NEIGHBOURS, len(x) - 1)) for x, y in both]
        return {
            "models": [a, b],
            "mutual_neighbours": _rounded(float(np.mean(neighbours))),
            "linear_cka": _rounded(float(np.mean([linear_cka(x, y) for x, y in both]))),
        }

    setting.store.put(
        *key,
        models=list(models),
        tasks=list(tasks),
        across_models={
            task: [[_rounded(found[a][task].cosine(found[b][task])) for b in models] for a in models] for task in tasks
        },
        across_tasks={
            m: [[_rounded(pooled[m][a].cosine(pooled[m][b])) for b in tasks] for a in tasks] for m in models
        },
        shared={
            task: dict(zip(models, map(_rounded, shared_share([found[m][task] for m in models])), strict=True))
            for task in tasks
            if len(models) > 1
        },
        alignment=[alignment(a, b) for a, b in pairs],
        seconds=time.perf_counter() - start,
    )


def _rounded(value: float) -> float:
    return round(value, 6)
