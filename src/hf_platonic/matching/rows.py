"""Rows: the probes of all grids in one order, preprocessed as they are needed, batch by batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..encoders.encoder import DualEncoder
from ..probes import ProbeSet

__all__ = ["Batch", "Rows", "Steps", "held_out_rows", "loader"]

Inputs = dict[str, Tensor]
Batch = tuple[list[int], Inputs]
"""Row numbers, and their preprocessed inputs."""


class Rows:
    """The probes of all grids, one grid after the other, as the target's probe tower takes them.

    Attributes:
        places: For each row, the index of its grid and of the probe within it.
        cached: Whether rows are kept once seen; decided by `keep_within`.
    """

    def __init__(self, encoder: DualEncoder, probe_sets: Sequence[ProbeSet]) -> None:
        self.encoder, self.probe_sets = encoder, probe_sets
        self.places = [(grid, i) for grid, probes in enumerate(probe_sets) for i in range(len(probes))]
        self.cached = False
        self._kept: dict[int, Inputs] = {}

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, row: int) -> Inputs:
        if row in self._kept:
            return self._kept[row]
        grid, index = self.places[row]
        ready = self.encoder.preprocess([self.probe_sets[grid][index]], offset=index)
        if self.cached:
            self._kept[row] = ready
        return ready

    def keep_within(self, gibibytes: float) -> None:
        """Keeps rows from now on, if all of them fit: as many as there are, each of the first one's size."""
        size = sum(value.numel() * value.element_size() for value in self[0].values())
        self.cached = size * len(self) <= gibibytes * 2**30

    def batch(self, rows: Sequence[int]) -> Inputs:
        """The inputs of several rows as one batch."""
        inputs = [self[row] for row in rows]
        return {key: torch.cat([one[key] for one in inputs]) for key in inputs[0]}


class Steps(Sequence[list[int]]):
    """This process's micro-batches, optimizer step by optimizer step, from any step on.

    Each epoch is one seeded permutation, and the batches run on across epochs, so that all are full. Which rows a
    step sees depends on the seed and the step alone.

    Args:
        rows: The rows to train on.
        batch_size: Rows an optimizer step, at most as many as there are.
        start: First step.
        stop: Step to stop before.
        parts: Micro-batches a step and process.
        processes: Number of processes.
        process: Index of this one.
        seed: Of the permutations.
    """

    def __init__(
        self,
        rows: Sequence[int],
        batch_size: int,
        *,
        start: int,
        stop: int,
        parts: int = 1,
        processes: int = 1,
        process: int = 0,
        seed: int,
    ) -> None:
        self.rows, self.batch_size, self.start, self.stop = rows, batch_size, start, stop
        self.parts, self.processes, self.process, self.seed = parts, processes, process, seed
        self._orders: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return (self.stop - self.start) * self.parts

    @overload
    def __getitem__(self, index: int) -> list[int]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[int]]: ...
    def __getitem__(self, index: int | slice) -> list[int] | list[list[int]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(f"Expected an index below {len(self)}, got {index}.")
        step, part = divmod(index, self.parts)
        first = (self.start + step) * self.batch_size
        slot, slots = part * self.processes + self.process, self.parts * self.processes
        own = range(first + self.batch_size * slot // slots, first + self.batch_size * (slot + 1) // slots)
        return [self._row(position) for position in own]

    def _row(self, position: int) -> int:
        epoch, place = divmod(position, len(self.rows))
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self.seed + 1_000_003 * (epoch + 1))
            # One step sees two epochs at most.
            self._orders = {key: order for key, order in self._orders.items() if key == epoch - 1}
            self._orders[epoch] = torch.randperm(len(self.rows), generator=generator).tolist()
        return self.rows[self._orders[epoch][place]]


class _Loaded(Dataset[Batch]):
    """Micro-batches of rows, ready for the model."""

    def __init__(self, rows: Rows, batches: Sequence[list[int]]) -> None:
        self.rows, self.batches = rows, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Batch:
        chosen = self.batches[index]
        return chosen, self.rows.batch(chosen)


def loader(rows: Rows, batches: Sequence[list[int]], *, num_workers: int) -> DataLoader[Batch]:
    """A loader of `Batch`es; workers only where rows aren't kept in this process."""
    return DataLoader(
        _Loaded(rows, batches),
        batch_size=None,
        num_workers=0 if rows.cached else num_workers,
        pin_memory=rows.encoder.device.type == "cuda",
        generator=torch.Generator(),  # or the loader would draw its seed from the global one
    )


def held_out_rows(rows: Rows, share: float, seed: int) -> list[int]:
    """A seeded share of each grid's rows, at least one where the share isn't 0, never all; sorted."""
    generator = torch.Generator().manual_seed(seed)
    chosen: list[int] = []
    start = 0
    for probes in rows.probe_sets:
        n = len(probes)
        count = min(max(1, math.floor(share * n + 0.5)), n - 1) if share else 0
        order = torch.randperm(n, generator=generator)
        chosen += [start + int(i) for i in order[:count]]
        start += n
    return sorted(chosen)
