"""The processes a run is spread over, as accelerate sees them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from accelerate import PartialState
    from torch.distributed.fsdp import FSDPModule

__all__ = [
    "gather_objects",
    "gather_rows",
    "own_slice",
    "passes_to_keep_step",
    "process_state",
    "sharded_modules",
    "sum_over_processes",
    "worker_processes",
]


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


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules whose weights FSDP 2 spreads over the processes; none of a whole model."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def passes_to_keep_step(models: Iterable[nn.Module], own: int) -> int:
    """How many passes through these models this process has to add to its own.

    One whose weights are sharded over the processes gathers them in every pass, so all must make as many.
    """
    return max(gather_objects(own)) - own if any(map(sharded_modules, models)) else 0


@contextmanager
def worker_processes(
    count: int, start: Callable[..., object], *arguments: Any
) -> Iterator[Callable[..., Future[Any]]]:
    """Fresh processes on this machine that end when this one does, however that comes about, and don't see Ctrl-C.

    Args:
        count: How many at most.
        start: What each calls first, with `arguments`.
        *arguments: Pickled.

    Yields:
        `submit(function, *arguments)`, which gives a future.
    """
    context, others = get_context("spawn"), set(active_children())
    # Its sending end is here alone: the workers see it closed when this process is no more.
    receiver, sender = context.Pipe(duplex=False)
    with ProcessPoolExecutor(count, context, initializer=_begin, initargs=(receiver, start, arguments)) as pool:

        def submit(function: Callable[..., Any], *values: Any) -> Future[Any]:
            if not hasattr(signal, "pthread_sigmask"):
                return pool.submit(function, *values)
            # A new process inherits what is blocked, and so is spared Ctrl-C while it still imports.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            try:
                return pool.submit(function, *values)
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

        try:
            yield submit
        except BaseException:
            sender.close()
            for child in set(active_children()) - others:  # which may still be importing
                child.terminate()
            pool.shutdown(cancel_futures=True)
            raise


def _begin(receiver: Connection, start: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """What a new process does first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process sees Ctrl-C, and ends this one
    threading.Thread(target=_follow, args=(receiver,), daemon=True).start()
    start(*arguments)


def _follow(receiver: Connection) -> None:
    """Ends this process when the one that started it has ended."""
    wait([receiver])
    os._exit(1)
