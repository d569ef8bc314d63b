"""Checkpoints that an interruption can't leave half done, and that only the training they belong to takes up."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..encoders.identity import digest_of
from ..errors import PlatonicError
from ..export import without_false_alarms
from .arguments import MatchingArguments

if TYPE_CHECKING:
    from accelerate import Accelerator
    from peft import PeftModel

__all__ = ["Checkpoints", "Progress"]

_WEIGHTS = "adapter_model.safetensors"


class Progress:
    """How far a training is; a part of each checkpoint.

    Attributes:
        step: Optimizer steps taken.
        losses: (step, mean training loss since the entry before).
        held_out: (step, loss on the held-out slice).
        running: Sum of this process's losses since the last entry.
        best: The adapter's weights of the epoch with the smallest held-out loss, where training may stop early.
        stopped: Whether it did.
    """

    def __init__(self) -> None:
        self.step = 0
        self.losses: list[tuple[int, float]] = []
        self.held_out: list[tuple[int, float]] = []
        self.running = torch.zeros(())
        self.best: dict[str, Tensor] | None = None
        self.stopped = False

    def note(self, losses: Tensor) -> None:
        """Adds the losses of a micro-batch, without waiting for them."""
        self.running = self.running.to(losses.device) + losses.sum()

    def judge(self, loss: float, patience: int | None, weights: Callable[[], dict[str, Tensor]]) -> None:
        """Notes a held-out loss, keeps the weights if it's the smallest, and stops after too many that aren't."""
        self.held_out.append((self.step, loss))
        if patience is None:
            return
        smallest = min(range(len(self.held_out)), key=lambda i: self.held_out[i][1])
        if smallest == len(self.held_out) - 1:
            self.best = weights()
        self.stopped = len(self.held_out) - 1 - smallest >= patience

    def state_dict(self) -> dict[str, Any]:
        """For accelerate."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """For accelerate."""
        vars(self).update(state)


class Checkpoints:
    """The newest state of one training, in `output_dir/checkpoint-<step>`.

    The model's part is the adapter alone; accelerate writes the optimizer's, the scheduler's, the random number
    generators' and the progress.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: PeftModel,
        adapter_name: str,
        arguments: MatchingArguments,
        provenance: dict[str, Any],
        deltas: Sequence[Tensor],
    ) -> None:
        self.accelerator, self.model, self.adapter_name = accelerator, model, adapter_name
        self.resuming = arguments.resume_from_checkpoint
        self.folder = None if arguments.output_dir is None else Path(arguments.output_dir)
        hashes = [hashlib.sha256(delta.float().contiguous().numpy().data).hexdigest() for delta in deltas]
        self.fingerprint = digest_of({"provenance": provenance, "deltas": hashes})
        accelerator.register_save_state_pre_hook(self._save_adapter)
        accelerator.register_load_state_pre_hook(self._load_adapter)

    def weights(self) -> dict[str, Tensor]:
        """A copy of the adapter's tensors, on the CPU, named as PEFT saves them."""
        from peft import get_peft_model_state_dict

        with without_false_alarms():
            found = get_peft_model_state_dict(self.model, adapter_name=self.adapter_name, save_embedding_layers=False)
        return {name: tensor.detach().cpu().clone().contiguous() for name, tensor in found.items()}

    def load_weights(self, weights: dict[str, Tensor]) -> None:
        """Puts such tensors back."""
        from peft import set_peft_model_state_dict

        set_peft_model_state_dict(self.model, weights, adapter_name=self.adapter_name)

    def save(self, step: int) -> None:
        """Writes a checkpoint under a temporary name, renames it, and removes the one before."""
        if self.folder is None:
            return
        main = self.accelerator.is_main_process
        unfinished, goal = self.folder / ".checkpoint.tmp", self.folder / f"checkpoint-{step}"
        if main:
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(unfinished, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        try:
            self.accelerator.save_state(str(unfinished))
            self.accelerator.wait_for_everyone()
            if main:
                (unfinished / "training.json").write_text(json.dumps({"fingerprint": self.fingerprint}))
                earlier = self._found()
                shutil.rmtree(goal, ignore_errors=True)
                unfinished.rename(goal)
                for _, path in earlier:
                    if path != goal:
                        shutil.rmtree(path)
        finally:
            if main:
                shutil.rmtree(unfinished, ignore_errors=True)
        self.accelerator.wait_for_everyone()

    def resume(self) -> None:
        """Takes up the newest checkpoint, if that was asked for and there is one.

        Raises:
            PlatonicError: If it's of a training with other terms, settings, adapter or target.
        """
        found = self._found() if self.resuming else []
        if not found:
            return
        path = found[-1][1]
        written = json.loads((path / "training.json").read_text())["fingerprint"]
        if written != self.fingerprint:
            raise PlatonicError(
                f"Expected a checkpoint of training {self.fingerprint[:16]} in {path}, got {written[:16]}: terms, "
                "settings, adapter or target differ. Use another `output_dir`, or resume_from_checkpoint=False."
            )
        self.accelerator.load_state(str(path))

    def _found(self) -> list[tuple[int, Path]]:
        if self.folder is None:
            return []
        folders = [path for path in self.folder.glob("checkpoint-*") if (path / "training.json").is_file()]
        return sorted((int(path.name.rpartition("-")[2]), path) for path in folders)

    def _save_adapter(self, models: list[Any], weights: list[Any], folder: str) -> None:
        from safetensors.torch import save_file

        weights.clear()
        if self.accelerator.is_main_process:
            save_file(self.weights(), Path(folder) / _WEIGHTS)

    def _load_adapter(self, models: list[Any], folder: str) -> None:
        from safetensors.torch import load_file

        models.clear()
        self.load_weights(load_file(Path(folder) / _WEIGHTS))
