"""Sweeps: accuracy against the number of probes, the operator's rank and the ridge, on a fixed few cases.

They show how sensitive a transfer is. Nothing is chosen by them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ..operator import Operator
from .setting import Setting, unsupported
from .targets import Edit, Target

__all__ = ["RIDGES", "measure_sweeps", "truncated"]

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
COUNTS = (10, 20, 50, 100, 200, 400, 1000, 4000)
RANKS = (1, 2, 4, 8, 16, 32, 64, 128)
TASKS = 4
"""Sweeps run on the first so many tasks of a modality, from the next model and from the target itself."""


def truncated(operator: Operator, rank: int) -> Operator:
    """The operator's best approximation of a rank, by its singular values.

    Args:
        operator: Any.
        rank: At least 1; at the operator's own rank or above it comes back as it is, up to rounding.
    """
    q_left, r_left = torch.linalg.qr(operator.left.double())
    q_right, r_right = torch.linalg.qr(operator.right.double().T)
    u, s, vh = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
    left, right = q_left @ (u * s)[:, :rank], vh[:rank] @ q_right.T
    return replace(operator, left=left.to(operator.left.dtype), right=right.to(operator.right.dtype))


def measure_sweeps(setting: Setting, model: str) -> None:
    """Finishes the cells with the sweeps of one target, for the first seed and the suite's first closed form.

    Args:
        setting: The run, with all sources measured.
        model: The target's name.
    """
    methods = [m for m in setting.suite.methods if m.realisation == "closed_form" and unsupported(m) is None]
    if not methods:
        return
    seed = setting.suite.seeds[0]
    target = Target(setting, seed, model)
    for task in target.tasks[:TASKS]:
        if setting.store.has("sweep", model, task):
            continue
        start = time.perf_counter()
        cases = []
        for source in dict.fromkeys([*target.others[:1], model]):
            for curve, x, edit in _edits(target, source, task, dict(methods[0].options)):
                accuracy = round(float(target.correct(edit, task).double().mean()), 6)
                cases.append({"curve": curve, "x": x, "source": source, "accuracy": accuracy})
        seconds = time.perf_counter() - start
        setting.store.put("sweep", model, task, method=methods[0].name, cases=cases, seconds=seconds)


def _edits(target: Target, source: str, task: str, options: dict[str, Any]) -> Iterator[tuple[str, float, Edit]]:
    descriptor = target.descriptor(source, task)
    n = descriptor.grid.n
    order = np.random.default_rng(target.seed).permutation(n).tolist()
    for count in [count for count in COUNTS if count < n] + [n]:
        term = descriptor if count == n else descriptor.select(sorted(order[:count]))
        yield "probes", count, target.solve(term, options)
    for ridge in RIDGES:
        yield "ridge", ridge, target.solve(descriptor, {**options, "probe_ridge": ridge})
    whole = target.solve(descriptor, options)
    for rank in [rank for rank in RANKS if rank < whole.operator.rank] + [whole.operator.rank]:
        yield "rank", rank, replace(whole, operator=truncated(whole.operator, rank))
