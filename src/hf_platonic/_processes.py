"""The processes a run is spread over, as accelerate sees them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from accelerate import PartialState

__all__ = ["gather_objects", "gather_rows", "own_slice", "process_state", "sum_over_processes"]


_T = TypeVar("_T")


def process_state() -> PartialState:
    """Accelerate's process state, started on the accelerator if there is one and on the CPU otherwise.

    Raises:
        RuntimeError: If the launcher started another number of processes than accelerate found; each of them would
            then silently do all the work.
    """
    from accelerate import PartialState

    # Without cpu=True a machine that has no accelerator leaves every rank alone in a world of one.
    on_cpu = not (torch.cuda.is_available() or torch.backends.mps.is_available())
    state = PartialState(cpu=on_cpu)
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if launched != state.num_processes:
        raise RuntimeError(
            f"Expected {launched} processes (the launcher's WORLD_SIZE), but accelerate's state has "
            f"{state.num_processes}. Start CPU processes with `torchrun`, GPU ones with `accelerate launch`, and "
            "don't create an accelerate state with other settings before."
        )
    return state


def own_slice(n: int) -> range:
    """This process's run of the indices 0..n-1: contiguous, in rank order, none left out, empty if n is too small."""
    state = process_state()
    each, rest = divmod(n, state.num_processes)
    start = state.process_index * each + min(state.process_index, rest)
    return range(start, start + each + (state.process_index < rest))


def gather_objects(own: _T) -> list[_T]:
    """One object of every process, in rank order, on every process."""
    if process_state().num_processes == 1:
        return [own]
    from accelerate.utils import gather_object

    found: list[_T] = gather_object([own])
    return found


def gather_rows(rows: Tensor) -> Tensor:
    """The rows of all processes in rank order, on every process; on the CPU.

    Args:
        rows: Shape (own, columns), any dtype; `own` may differ between processes and may be 0.

    Returns:
        Shape (total, columns).
    """
    return torch.cat(gather_objects(rows.cpu()))


def sum_over_processes(own: Tensor) -> Tensor:
    """The sum of one tensor of every process, all of one shape, on every process; on the tensor's device.

    An all-reduce: what it sends doesn't grow with the number of probes behind the tensor.
    """
    state = process_state()
    if state.num_processes == 1:
        return own
    from accelerate.utils import reduce

    found: Tensor = reduce(own.to(state.device), reduction="sum")
    return found.to(own.device)
