"""The training loop, on one process or many, by accelerate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from .._checks import finite_rows
from .._processes import (
    gather_objects,
    gather_rows,
    own_slice,
    passes_to_keep_step,
    process_state,
    sharded_modules,
)
from ..errors import PlatonicError
from .arguments import MatchingArguments
from .checkpoints import Checkpoints, Progress
from .objective import ProbeTower, matching_losses
from .rows import Rows, Steps, held_out_rows, loader
from .sharded import average_gradients

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = ["Bars", "Task", "base_affinities", "start_accelerator", "train"]


@dataclass(frozen=True, eq=False)
class Task:
    """What is trained, and on what."""

    tower: ProbeTower
    rows: Rows
    columns: list[Tensor]
    goals: list[Tensor]

    def losses(self, unit: Tensor, rows: Sequence[int]) -> Tensor:
        """One loss per row, from its unit embedding."""
        places = [self.rows.places[row] for row in rows]
        goals = [self.goals[grid][index] for grid, index in places]
        return matching_losses(unit, self.columns, goals, [grid for grid, _ in places])


class Bars:
    """Progress bars, on the main process."""

    def __init__(self, progress: bool | None) -> None:
        hidden = None if progress is None else not progress  # None: tqdm looks whether there is a terminal
        self.hidden = hidden if process_state().is_local_main_process else True

    def bar(self, total: int, description: str, *, initial: int = 0) -> Any:
        """A bar of so many steps or batches."""
        unit = "step" if description == "matching" else "batch"
        return tqdm(total=total, initial=initial, desc=description, unit=unit, leave=False, disable=self.hidden)


def start_accelerator(arguments: MatchingArguments) -> Accelerator:
    """Accelerate's view of the processes, devices, precision and trackers.

    Raises:
        ImportError: If a tracker isn't installed.
        PlatonicError: If a tracker needs a folder and there's none, or the launcher shards models.
    """
    from accelerate import Accelerator
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS, get_available_trackers

    state = process_state()
    available = [str(getattr(name, "value", name)) for name in get_available_trackers()]
    for name in arguments.report_to:
        if isinstance(name, str) and name not in available:
            known = sorted(str(getattr(key, "value", key)) for key in LOGGER_TYPE_TO_CLASS)
            raise ImportError(
                f"Expected an installed tracker among {known}, got {name!r}. Install it with `pip install {name}`."
            )
    if "tensorboard" in arguments.report_to and arguments.output_dir is None:
        raise PlatonicError("Expected `output_dir` with the tensorboard tracker, which writes there, got None.")
    accelerator = Accelerator(
        cpu=state.device.type == "cpu",
        mixed_precision=arguments.mixed_precision,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        log_with=list(arguments.report_to) or None,
        project_dir=arguments.output_dir,
    )
    if str(accelerator.distributed_type.value) in ("FSDP", "DEEPSPEED", "MEGATRON_LM"):
        raise PlatonicError(
            f"Expected a launch with `--multi_gpu` or torchrun, got {accelerator.distributed_type.value}, which would "
            "shard the adapter, too. Shard the frozen target alone, with `fully_shard` before this call, as "
            "docs/cluster.md shows."
        )
    if arguments.report_to:
        plain = {k: v if isinstance(v, (int, float, str)) else str(v) for k, v in arguments.recipe().items()}
        accelerator.init_trackers(arguments.run_name, config=plain)
    return accelerator


@torch.no_grad()
def base_affinities(
    tower: ProbeTower,
    rows: Rows,
    columns: Sequence[Tensor],
    accelerator: Accelerator,
    batch_size: int,
    num_workers: int,
    bars: Bars,
) -> list[Tensor]:
    """`A_base` of each grid, shape (n_l, m_l), from the mode and precision in which the adapter will be trained."""
    batches = _own_batches(range(len(rows)), batch_size)
    found: list[list[Tensor]] = [[] for _ in columns]
    with bars.bar(len(batches), "base affinities") as bar:
        for chosen, unit in _embedded(tower, rows, batches, accelerator, num_workers):
            finite_rows(unit, "embedding", offset=chosen[0])
            grids = torch.tensor([rows.places[row][0] for row in chosen])
            for grid in sorted(set(grids.tolist())):
                found[grid].append((unit[grids.to(unit.device) == grid] @ columns[grid].T).cpu())
            bar.update()
    empty = [torch.zeros(0, len(column)) for column in columns]
    return [gather_rows(torch.cat(a) if a else none) for a, none in zip(found, empty, strict=True)]


def train(
    task: Task,
    accelerator: Accelerator,
    arguments: MatchingArguments,
    checkpoints: Checkpoints,
    batch_size: int,
    num_workers: int,
    bars: Bars,
) -> Progress:
    """How the training went; the adapter in the task's tower is trained afterwards.

    Args:
        task: Its tower in evaluation mode, with every trainable tensor's gradient checked.
        accelerator: From `start_accelerator`.
        arguments: Settings.
        checkpoints: Where the state is kept.
        batch_size: Probes a forward pass for held-out losses.
        num_workers: Processes that decode, where rows aren't kept.
        bars: Progress bars.

    Raises:
        PlatonicError: If a batch has fewer probes than there are micro-batches, the loss isn't finite, or a
            checkpoint is of another training.
    """
    held = held_out_rows(task.rows, arguments.held_out, arguments.seed)
    trained = sorted(set(range(len(task.rows))) - set(held))
    size = min(arguments.batch_size, len(trained))
    parts, processes = arguments.gradient_accumulation_steps, accelerator.num_processes
    if size < parts * processes:
        raise PlatonicError(
            f"Expected at least one probe for each of {processes} processes and {parts} accumulation steps in a batch "
            f"of {size}. Use fewer of them, a larger `batch_size`, or more probes."
        )
    per_epoch = math.ceil(len(trained) / size)
    total = min(math.ceil(arguments.num_train_epochs * len(trained) / size), arguments.max_steps)
    optimizer, scheduler = _optimizer(task.tower, arguments, total)
    task.tower.train()
    sharded = bool(sharded_modules(task.tower.model))
    if sharded:  # DDP takes no shards; what it would do for the adapter is done in the loop
        tower, optimizer = accelerator.prepare_model(task.tower, evaluation_mode=True), accelerator.prepare(optimizer)
    else:
        tower, optimizer = accelerator.prepare(task.tower, optimizer)
    trainable = [parameter for parameter in task.tower.parameters() if parameter.requires_grad]
    # The scheduler isn't prepared: accelerate would step it once per process.
    state = Progress()
    accelerator.register_for_checkpointing(scheduler, state)
    with torch.random.fork_rng([accelerator.device] if accelerator.device.type == "cuda" else []):
        torch.manual_seed(arguments.seed)
        checkpoints.resume()
        if held and state.step == 0:
            before = _mean_loss(task, held, accelerator, batch_size, num_workers)
            state.judge(before, arguments.patience, checkpoints.weights)
        steps = Steps(
            trained,
            size,
            start=state.step,
            stop=total,
            parts=parts,
            processes=processes,
            process=accelerator.process_index,
            seed=arguments.seed,
        )
        batches = iter(loader(task.rows, steps, num_workers=num_workers))
        with bars.bar(total, "matching", initial=state.step) as bar:
            while state.step < total and not state.stopped:
                for _ in range(parts):
                    rows, inputs = next(batches)
                    with accelerator.accumulate(tower):
                        losses = task.losses(tower(inputs), rows)
                        # Divided by the parts and averaged over processes; the mean is over all rows.
                        accelerator.backward(losses.sum() * (parts * processes / size))
                        if accelerator.sync_gradients and sharded:
                            average_gradients(trainable)
                        if accelerator.sync_gradients and arguments.max_grad_norm is not None:
                            accelerator.clip_grad_norm_(trainable, arguments.max_grad_norm)
                        optimizer.step()
                        optimizer.zero_grad()
                    state.note(losses.detach())
                if not accelerator.optimizer_step_was_skipped:
                    scheduler.step()
                state.step += 1
                bar.update()
                if state.step % arguments.logging_steps == 0 or state.step == total:
                    loss = _logged(state, size)
                    bar.set_postfix(loss=f"{loss:.3g}")
                    accelerator.log({"loss": loss, "learning_rate": scheduler.get_last_lr()[0]}, step=state.step)
                if held and (state.step % per_epoch == 0 or state.step == total):
                    loss = _mean_loss(task, held, accelerator, batch_size, num_workers)
                    state.judge(loss, arguments.patience, checkpoints.weights)
                    accelerator.log({"held_out_loss": loss}, step=state.step)
                if arguments.save_steps is not None and state.step % arguments.save_steps == 0:
                    checkpoints.save(state.step)
    if state.best is not None:
        checkpoints.load_weights(state.best)
    return state


def _own_batches(chosen: Sequence[int], batch_size: int) -> list[list[int]]:
    """This process's share of the rows, batch by batch."""
    own = [chosen[i] for i in own_slice(len(chosen))]
    return [own[i : i + batch_size] for i in range(0, len(own), batch_size)]


def _embedded(
    tower: ProbeTower, rows: Rows, batches: Sequence[list[int]], accelerator: Accelerator, num_workers: int
) -> Iterator[tuple[list[int], Tensor]]:
    """Row numbers and unit embeddings of these batches, in as many passes as any process makes where it has to be."""
    further = passes_to_keep_step([tower.model], len(batches))
    for chosen, inputs in loader(rows, batches, num_workers=num_workers):
        with accelerator.autocast():
            unit = tower(inputs)
        yield chosen, unit
    for _ in range(further):
        with accelerator.autocast():
            tower(rows.batch([0]))


def _optimizer(tower: ProbeTower, arguments: MatchingArguments, total: int) -> tuple[Any, Any]:
    """AdamW on what is trainable, and its schedule."""
    from transformers import get_scheduler

    trainable = [parameter for parameter in tower.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=arguments.learning_rate, weight_decay=arguments.weight_decay)
    scheduler = get_scheduler(
        arguments.lr_scheduler_type, optimizer, num_warmup_steps=arguments.warmup_steps, num_training_steps=total
    )
    return optimizer, scheduler


def _logged(state: Progress, size: int) -> float:
    """The mean loss since the last entry, over all processes; noted."""
    since = state.losses[-1][0] if state.losses else 0
    loss = sum(gather_objects(float(state.running))) / ((state.step - since) * size)
    if not math.isfinite(loss):
        raise PlatonicError(
            f"Expected a finite loss, got {loss} at step {state.step}. Lower `learning_rate`, or set "
            'mixed_precision="no".'
        )
    state.losses.append((state.step, loss))
    state.running = torch.zeros(())
    return loss


@torch.no_grad()
def _mean_loss(
    task: Task, chosen: Sequence[int], accelerator: Accelerator, batch_size: int, num_workers: int
) -> float:
    """The mean loss of these rows, over all processes; without the wrapper, whose collectives need equal shares."""
    total = 0.0
    task.tower.eval()
    for rows, unit in _embedded(task.tower, task.rows, _own_batches(chosen, batch_size), accelerator, num_workers):
        total += float(task.losses(unit, rows).double().sum())
    task.tower.train()
    return sum(gather_objects(total)) / len(chosen)
