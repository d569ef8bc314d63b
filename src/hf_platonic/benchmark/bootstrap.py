"""Bootstrap: how far a mean over tasks and test inputs could be off, were both drawn anew."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import PlatonicError

__all__ = ["Bootstrap"]


class Bootstrap:
    """Replicates of every accuracy of a modality: tasks drawn with replacement, and within each its test inputs.

    All models and methods see the same draws, so that differences between them are paired. Vectors of replicates have
    shape (1 + replicates,), float64; the first entry is the figure on the data as they are.

    Args:
        sizes: Test inputs by task and control.
        tasks: The names among these that are tasks, which are drawn too; controls are all kept.
        replicates: Draws.
        seed: Of the draws.
    """

    def __init__(self, sizes: Mapping[str, int], tasks: Iterable[str], *, replicates: int = 1000, seed: int = 0):
        self._weights: dict[str, Tensor] = {}
        for name, n in sizes.items():
            # A generator per set: leaving a task out doesn't change the draws of the others.
            rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
            counts = rng.multinomial(n, np.full(n, 1 / n), size=replicates)
            weights = torch.from_numpy(np.vstack([np.ones((1, n)), counts])).T / n
            self._weights[name] = weights
        self.tasks = tuple(tasks)
        drawn = np.random.default_rng(seed).multinomial(
            len(self.tasks), np.full(len(self.tasks), 1 / len(self.tasks)), size=replicates
        )
        self._draws = torch.from_numpy(np.vstack([np.ones((1, len(self.tasks))), drawn])).double()

    def accuracy(self, name: str, correct: Tensor) -> Tensor:
        """Replicates of an accuracy.

        Args:
            name: The task or control.
            correct: Shape (n,), bool.
        """
        return correct.double() @ self._weights[name]

    def over_tasks(self, values: Mapping[str, Tensor]) -> Tensor:
        """Replicates of the mean over tasks, each with its replicates; tasks that aren't there don't count.

        Raises:
            PlatonicError: If there's none.
        """
        rows = [index for index, task in enumerate(self.tasks) if task in values]
        if not rows:
            raise PlatonicError("Expected replicates of at least one task to average, got none.")
        draws = self._draws[:, rows]
        # A replicate may have drawn none of a few tasks; it says nothing then.
        total = draws.sum(dim=1)
        stacked = torch.stack([values[self.tasks[row]] for row in rows], dim=1)
        return (draws * stacked).sum(dim=1) / torch.where(total > 0, total, torch.nan)

    @staticmethod
    def estimate(replicates: Tensor) -> dict[str, Any] | None:
        """The figure with its 95 % interval: `value`, `low`, `high`; None where the figure isn't finite."""
        value, drawn = float(replicates[0]), replicates[1:]
        if not np.isfinite(value):
            return None
        drawn = drawn[drawn.isfinite()]
        low, high = torch.quantile(drawn, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
        return {"value": round(value, 6), "low": round(low, 6), "high": round(high, 6)}
