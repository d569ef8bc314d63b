"""The verb: descriptors become a trained adapter in the target's model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._checks import instance
from .._files import whole_folder, write_json
from .._processes import sharded_modules
from ..descriptor import DescriptorSum, TaskDescriptor
from ..encoders.encoder import DualEncoder
from ..encoders.families import bare_model, evaluating
from ..encoding import encode_columns
from ..errors import PlatonicError
from ..export import without_false_alarms
from ..objectives import Calibration, Objective, wanted_change
from ..probes import ProbeSet
from ..solutions import solve_transfer
from ..solve import PROBE_RIDGE, PROMPT_RIDGE
from ..terms import Terms, probe_sets_of, provenance_of, term_list
from .adapters import (
    add_adapter,
    default_lora_config,
    require_gradients,
    taken_back_on_errors,
    with_closed_form,
    write_closed_form,
)
from .arguments import MatchingArguments
from .checkpoints import Checkpoints
from .loop import Bars, Task, base_affinities, start_accelerator, train
from .objective import ProbeTower, recomputed_layers
from .rows import Rows
from .sharded import require_fitting_target

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

__all__ = ["Matching", "match_affinities"]


@dataclass(frozen=True, eq=False)
class Matching:
    """What came of a training.

    Attributes:
        model: The target's model with the trained adapter.
        losses: (optimizer step, mean training loss since the entry before).
        held_out: (optimizer step, loss on the held-out slice); the first entry, at step 0, is before training.
        steps: Optimizer steps that were taken.
        provenance: How the adapter came about, as plain JSON.
    """

    model: PeftModel
    losses: list[tuple[int, float]]
    held_out: list[tuple[int, float]]
    steps: int
    provenance: dict[str, Any]


def match_affinities(
    terms: Terms,
    target: DualEncoder,
    *,
    objective: Objective = "change",
    calibration: Calibration = "none",
    lora_config: PeftConfig | None = None,
    training_args: MatchingArguments | None = None,
    probes: ProbeSet | Sequence[ProbeSet] | None = None,
    adapter_name: str = "default",
    batch_size: int = 32,
    num_workers: int = 0,
    progress: bool | None = None,
) -> Matching:
    """The target with an adapter trained in its probe tower until its affinities change as the terms say.

    Minimises the mean over probes of the mean over the probe's own prompts of
    `(<f(x), g(p)> - A_base(x, p) - c U(x, p))^2`, all terms jointly and at full strength; with another objective or
    calibration what `objectives.wanted_change` asks for stands in the place of `c U`. `f` is the adapted tower in
    evaluation mode, `A_base` comes from the same mode and precision, so that an adapter that changes nothing has the
    loss `mean (c U)^2`. Prompts are encoded once, by the frozen text tower. Processes, devices and precision are
    accelerate's. The target is whole on every process, or its weights are sharded by `fully_shard`; the adapter is
    whole in either case.

    Args:
        terms: As in `transfer`.
        target: The model that receives them, without adapters.
        objective: As in `transfer`.
        calibration: As in `transfer`.
        lora_config: Any PEFT config whose parameters live in the probe tower; None takes `default_lora_config`.
        training_args: Settings; None takes the paper's.
        probes: As in `transfer`.
        adapter_name: The adapter's name in the PEFT model.
        batch_size: Probes a forward pass where nothing is trained.
        num_workers: Processes that decode while the model computes, where probes aren't kept in memory.
        progress: Whether to show a bar, on the main process; None: where stderr is a terminal.

    Returns:
        The model and how its losses went. `target.model` is the same PEFT model, and an ordinary one:
        `save_pretrained` writes what PEFT alone loads.

    Raises:
        PlatonicError: If there are no terms, the settings don't go together, the adapter is none that trains on
            shards, some trainable tensor gets no gradient, the loss isn't finite, or a checkpoint is of another
            training; the target is then as it was.
        GridMismatchError: If no probe set at hand has a term's grid.
        EncoderError: If the target has adapters already, no layers that the default adapter could go to, or weights
            that are split in another way.
        ImportError: If a tracker isn't installed.

    Reference:
        Park and Cho 2026, arXiv 2610.00929.
    """
    arguments = MatchingArguments() if training_args is None else training_args
    if not isinstance(arguments, MatchingArguments):
        raise PlatonicError(f"Expected `training_args` to be MatchingArguments, got {type(arguments).__name__}.")
    descriptors = term_list(terms)
    instance(target, "target", DualEncoder, "Load one with `DualEncoder.from_pretrained`.")
    if calibration == "none" or objective == "endpoint":
        descriptors = list(DescriptorSum.of(descriptors))
    at_hand = probe_sets_of(descriptors, probes)
    of_grid = [[d for d in descriptors if d.grid.fingerprint == key] for key in at_hand]
    rows = Rows(target, list(at_hand.values()))
    rows.keep_within(arguments.cache_gib)
    accelerator = start_accelerator(arguments)
    bare = bare_model(target.model)
    require_fitting_target(target, accelerator.device)
    if target.device != accelerator.device and not sharded_modules(bare):
        bare.to(accelerator.device)
    try:
        with taken_back_on_errors(target), evaluating(bare), without_false_alarms():
            columns = [encode_columns(target, found.columns).to(accelerator.device) for found in at_hand.values()]
            tower = ProbeTower(target)
            bars = Bars(progress)
            base = base_affinities(tower, rows, columns, accelerator, batch_size, num_workers, bars)
            goals = [
                a + wanted_change(together, a, objective=objective, calibration=calibration).float()
                for a, together in zip(base, of_grid, strict=True)
            ]
            sample = rows.batch(range(min(2, len(rows))))
            config = default_lora_config(target, sample) if lora_config is None else lora_config
            operator = None
            if arguments.warm_start is not None:
                operator = solve_transfer(
                    descriptors,
                    target,
                    probes=list(at_hand.values()),
                    objective=objective,
                    calibration=calibration,
                    strength=1.0,
                    batch_size=batch_size,
                    num_workers=num_workers,
                    progress=progress,
                ).operator
                config = with_closed_form(config, target, operator)
            model = add_adapter(target, config, adapter_name, arguments.seed)
            if operator is not None:
                write_closed_form(model, target, operator, adapter_name)
            require_gradients(tower, sample)
            task = Task(tower, rows, columns, goals)
            asked = {"objective": objective, "calibration": calibration}
            provenance = _provenance(descriptors, target, arguments, asked, model, adapter_name)
            checkpoints = Checkpoints(
                accelerator, model, adapter_name, arguments, provenance, [d.delta for d in descriptors]
            )
            with recomputed_layers(tower, sample, arguments.gradient_checkpointing):
                state = train(task, accelerator, arguments, checkpoints, batch_size, num_workers, bars)
            provenance["steps"] = state.step
            if arguments.output_dir is not None and accelerator.is_main_process:
                losses = {"losses": state.losses, "held_out_losses": state.held_out}
                with whole_folder(Path(arguments.output_dir)) as folder:
                    model.save_pretrained(folder, selected_adapters=[adapter_name], save_embedding_layers=False)
                    write_json(folder / "matching.json", {**provenance, **losses})
    finally:
        for tracker in accelerator.trackers if accelerator.is_main_process else ():
            tracker.finish()  # end_training() would also close the process group
    model.eval()
    model.peft_config[adapter_name].provenance = provenance  # for its card; PEFT doesn't save it
    accelerator.wait_for_everyone()
    return Matching(model, state.losses, state.held_out, state.step, provenance)


def _provenance(
    descriptors: Sequence[TaskDescriptor],
    target: DualEncoder,
    arguments: MatchingArguments,
    asked: Mapping[str, str],
    model: PeftModel,
    adapter_name: str,
) -> dict[str, Any]:
    full = provenance_of(descriptors, target, probe_ridge=PROBE_RIDGE, prompt_ridge=PROMPT_RIDGE)
    config = json.loads(json.dumps(model.peft_config[adapter_name].to_dict(), default=_plain))
    chosen = {**full, **asked, "method": "lora", "arguments": arguments.recipe(), "adapter": config}
    if arguments.warm_start is None:
        del chosen["probe_ridge"], chosen["prompt_ridge"]
    return chosen


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)
