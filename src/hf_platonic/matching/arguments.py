"""How the matching is trained; the defaults are the paper's recipe."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import PlatonicError

__all__ = ["MatchingArguments"]


@dataclass(frozen=True)
class MatchingArguments:
    """Settings of LoRA matching, named as in `transformers.TrainingArguments` where that has the same.

    The result doesn't depend, beyond rounding, on the number of processes or of accumulation steps: `batch_size` is
    that of an optimizer step, over all of them. Processes and devices are the launcher's.

    Attributes:
        learning_rate: Of AdamW, above 0.
        weight_decay: Of AdamW, at least 0.
        batch_size: Probes an optimizer step, of all grids mixed, at least 1; all of them where there are fewer.
        num_train_epochs: Passes over the probes, above 0.
        max_steps: Most optimizer steps, at least 1.
        lr_scheduler_type: A name that `transformers.get_scheduler` knows.
        warmup_steps: Steps of linear warm-up, at least 0.
        max_grad_norm: Largest gradient norm, above 0; None doesn't clip.
        gradient_accumulation_steps: Parts an optimizer step is computed in, at least 1.
        gradient_checkpointing: Whether layers are recomputed in the backward pass, to save memory.
        mixed_precision: "no", "bf16" or "fp16"; None takes the launcher's. The base affinities are read in the same.
            Accelerate knows one precision a process: the first.
        warm_start: "closed_form" writes the closed-form operator of the same terms, at s = 1 and the paper's ridges,
            into the last layer as a frozen part of the same LoRA, which then learns only the rest. Where that layer
            has a bias, PEFT 0.21 warns of an "invalid shape" if the model is saved by its own `save_pretrained`: a
            false alarm, the files are whole. `output_dir` and `push_adapter` save without it.
        held_out: Share of each grid's probes that isn't trained on, in [0, 1); their loss is taken once an epoch.
        patience: Epochs without a smaller held-out loss until training stops; the best epoch's adapter is kept,
            or the initial one. None trains to the end. Needs `held_out`.
        seed: Of the adapter's initial values, the order of probes and the held-out slice.
        cache_gib: Memory for preprocessed probes, in GiB a process, at least 0. If they fit, each is decoded once;
            otherwise once an epoch, by `num_workers` processes.
        output_dir: Folder for checkpoints, and in the end the adapter and `matching.json`; None writes nothing.
        save_steps: Optimizer steps between checkpoints, at least 1; only the newest is kept. None: no checkpoints.
            Needs `output_dir`.
        resume_from_checkpoint: Whether to go on from the checkpoint in `output_dir`, where there is one.
        report_to: Trackers by accelerate's name ("tensorboard", "trackio", "wandb", ...), or tracker objects.
        run_name: The project under which trackers file the run.
        logging_steps: Optimizer steps between loss values, at least 1.

    Raises:
        PlatonicError: If a value isn't in its range.

    Reference:
        Park and Cho 2026, arXiv 2610.00929.
    """

    learning_rate: float = 3e-4
    weight_decay: float = 1e-4
    batch_size: int = 64
    num_train_epochs: float = 20.0
    max_steps: int = 540
    lr_scheduler_type: str = "cosine"
    warmup_steps: int = 0
    max_grad_norm: float | None = None
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    mixed_precision: Literal["no", "bf16", "fp16"] | None = None
    warm_start: Literal["closed_form"] | None = None
    held_out: float = 0.0
    patience: int | None = None
    seed: int = 0
    cache_gib: float = 2.0
    output_dir: str | Path | None = None
    save_steps: int | None = None
    resume_from_checkpoint: bool = False
    report_to: tuple[Any, ...] = ()
    run_name: str = "hf_platonic"
    logging_steps: int = 10

    def __post_init__(self) -> None:
        for name in ("learning_rate", "num_train_epochs", "max_grad_norm"):
            self._require(name, "a finite number above 0", lambda v: v > 0)
        for name in ("weight_decay", "cache_gib", "warmup_steps"):
            self._require(name, "a finite number of at least 0", lambda v: v >= 0)
        for name in (
            *("batch_size", "max_steps", "gradient_accumulation_steps"),
            *("patience", "save_steps", "logging_steps"),
        ):
            self._require(name, "a whole number of at least 1", lambda v: v >= 1 and v == int(v))
        self._require("held_out", "a share in [0, 1)", lambda v: 0 <= v < 1)
        if self.warm_start not in (None, "closed_form"):
            raise PlatonicError(f'Expected `warm_start` to be "closed_form" or None, got {self.warm_start!r}.')
        if self.mixed_precision not in (None, "no", "bf16", "fp16"):
            raise PlatonicError(
                f'Expected `mixed_precision` to be "no", "bf16", "fp16" or None, got {self.mixed_precision!r}.'
            )
        if self.patience is not None and not self.held_out:
            raise PlatonicError("Expected `held_out` above 0 with `patience`, got 0. Pass held_out=0.1, say.")
        if self.output_dir is None and (self.save_steps is not None or self.resume_from_checkpoint):
            raise PlatonicError("Expected `output_dir` with `save_steps` or `resume_from_checkpoint`, got None.")
        if isinstance(self.report_to, str):
            raise PlatonicError(f"Expected a tuple of trackers, got {self.report_to!r}. Pass ({self.report_to!r},).")

    def _require(self, name: str, what: str, fits: Any) -> None:
        value = getattr(self, name)
        if value is None and name in ("max_grad_norm", "patience", "save_steps"):
            return
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not math.isfinite(value)
            or not fits(value)
        ):
            raise PlatonicError(f"Expected `{name}` to be {what}, got {value!r}.")

    def recipe(self) -> dict[str, Any]:
        """What decides the result, as plain JSON; not where it is written, logged or cached."""
        elsewhere = {
            *("cache_gib", "output_dir", "save_steps", "resume_from_checkpoint"),
            *("report_to", "run_name", "logging_steps"),
        }
        return {key: value for key, value in asdict(self).items() if key not in elsewhere}
