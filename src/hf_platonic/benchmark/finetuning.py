"""LoRA fine-tunes of any family on a task's class prompts, by a suite's recipe."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from .._processes import process_state
from ..encoders.encoder import DualEncoder
from ..encoders.families import Family, bare_model, call
from ..encoders.loading import public_name
from ..encoding import encode_columns
from ..errors import EncoderError
from ..evaluation import EvaluationSet
from .suites import Recipe

__all__ = ["fine_tune", "lora_layers"]


class _Tower(nn.Module):
    """A model's probe tower as a module of its own, so that accelerate can wrap it; gives unit embeddings."""

    def __init__(self, model: nn.Module, family: Family) -> None:
        super().__init__()
        self.model, self.family = model, family

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return functional.normalize(call(bare_model(self.model), self.family.probe_getter, inputs), dim=-1)


class _Collate:
    """Decodes and preprocesses the probes of a batch; a class, so that worker processes can be given it."""

    def __init__(self, encoder: DualEncoder, data: EvaluationSet) -> None:
        self.encoder, self.data = encoder, data

    def __call__(self, rows: Sequence[int]) -> tuple[dict[str, Tensor], Tensor]:
        inputs = self.encoder.preprocess([self.data.probes[row] for row in rows])
        return inputs, torch.tensor([int(self.data.labels[row]) for row in rows])


def lora_layers(encoder: DualEncoder, probe: Any, endings: Sequence[str]) -> list[str]:
    """Names of the linear layers that a probe passes through and whose last part is one of the endings.

    Args:
        encoder: Of any family.
        probe: A decoded probe.
        endings: E.g. `("q_proj", "v_proj")`.

    Raises:
        EncoderError: If there are none.
    """
    model = bare_model(encoder.model)
    passed: list[str] = []
    hooks = [
        module.register_forward_hook(lambda *_, name=name: passed.append(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    try:
        inputs = {name: value.to(encoder.device) for name, value in encoder.preprocess([probe]).items()}
        with torch.no_grad():
            call(model, encoder.family.probe_getter, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    found = [name for name in dict.fromkeys(passed) if name.rpartition(".")[2] in endings]
    if not found:
        raise EncoderError(
            f"Expected linear layers named {list(endings)} in the probe tower of {encoder.family.name}, got "
            f"{sorted({name.rpartition('.')[2] for name in passed})}. Name some of these as the recipe's "
            "`target_modules`."
        )
    return found


def fine_tune(
    encoder: DualEncoder,
    data: EvaluationSet,
    recipe: Recipe,
    folder: Path,
    *,
    seed: int = 42,
    num_workers: int = 0,
    progress: bool | None = None,
) -> None:
    """Trains a LoRA on labelled data and saves it as an ordinary PEFT adapter, whole or not at all.

    Cross-entropy over the class prompts at the model's own temperature, with AdamW at a constant rate. The text
    tower, the projections and all statistics stay as they are: nothing is ever in training mode. Under
    `accelerate launch` the batches are shared out among the processes.

    Args:
        encoder: The base model; it is changed, load it anew afterwards.
        data: Inputs, class prompts and labels.
        recipe: How.
        folder: Where the adapter goes; its parent is made if missing.
        seed: Of the initial weights and the order of the data.
        num_workers: Processes that decode while the model computes.
        progress: Whether to show a bar, on the main process; None: where stderr is a terminal.

    Raises:
        EncoderError: If the model has no temperature, or no layer that the recipe names.

    Reference:
        Park and Cho 2026, arXiv 2610.00929.
    """
    from accelerate import Accelerator
    from peft import LoraConfig, get_peft_model

    accelerator = Accelerator(cpu=process_state().device.type == "cpu")
    scale = _temperature(encoder)
    prompts = encode_columns(encoder, data.probes.columns).to(accelerator.device)
    layers = lora_layers(encoder, data.probes[0], recipe.target_modules)
    config = LoraConfig(r=recipe.r, lora_alpha=recipe.lora_alpha, lora_dropout=0.0, target_modules=layers)
    name = str(getattr(encoder.model, "name_or_path", ""))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        adapted: Any = get_peft_model(encoder.model, config)
    config.base_model_name_or_path = public_name(name)  # a path says nothing elsewhere
    tower = _Tower(adapted, encoder.family).eval()
    trained = [parameter for parameter in tower.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=recipe.learning_rate, weight_decay=recipe.weight_decay)
    batches: Any = DataLoader(
        range(len(data.labels)),  # type: ignore[arg-type]
        batch_size=recipe.batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),
        collate_fn=_Collate(encoder, data),
        num_workers=num_workers,
    )
    tower, optimizer, batches = accelerator.prepare(tower, optimizer, batches)
    tower.eval()
    hidden = not accelerator.is_main_process or (None if progress is None else not progress)
    for epoch in range(recipe.epochs):
        for inputs, labels in tqdm(batches, desc=f"fine-tune {epoch + 1}/{recipe.epochs}", disable=hidden):
            loss = functional.cross_entropy(scale * tower(inputs) @ prompts.T, labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
    if accelerator.is_main_process:
        _save(adapted, folder)
    accelerator.wait_for_everyone()


def _temperature(encoder: DualEncoder) -> float:
    """What the model multiplies similarities of probes to prompts with."""
    model = bare_model(encoder.model)
    for name in ("logit_scale_a", "logit_scale"):  # CLAP has one for each direction
        value = getattr(model, name, None)
        if torch.is_tensor(value):
            return float(value.detach().exp())
    raise EncoderError(
        f"Expected a model with a `logit_scale`, got {type(model).__name__}. Fine-tune it with your own script, and "
        'give the checkpoints to the suite with `fine_tunes: {kind: checkpoints, pattern: "..."}`.'
    )


def _save(adapted: Any, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        # No look-up of the base by its name, which PEFT would make to compare vocabularies.
        adapted.save_pretrained(temporary, save_embedding_layers=False)
        (temporary / "README.md").unlink(missing_ok=True)  # PEFT writes a card of blanks
        temporary.chmod(0o755)
        try:
            os.replace(temporary, folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was there first, with the same adapter
                raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
