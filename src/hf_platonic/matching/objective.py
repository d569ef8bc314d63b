"""The objective, and the module whose output it reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..encoders.encoder import DualEncoder
from ..encoders.families import bare_model, edit_site
from ..encoders.features import run_probes
from ..errors import PlatonicError

__all__ = ["ProbeTower", "matching_losses", "recomputed_layers"]

_TOLERANCE = 1e-4  # on unit embeddings; recomputing changes nothing but, perhaps, the order of sums


def matching_losses(unit: Tensor, columns: Sequence[Tensor], goals: Sequence[Tensor], grids: Sequence[int]) -> Tensor:
    """One loss per probe: the mean over its own grid's prompts of `(<f(x), g(p)> - goal(x, p))^2`.

    Args:
        unit: `f`, unit embeddings of b probes, shape (b, d), float32.
        columns: `g` of each grid, unit rows, shape (m_l, d).
        goals: For each probe the affinities it should have, shape (m_l,) with l its grid.
        grids: For each probe the index of its grid in `columns`.

    Returns:
        Shape (b,), float32, in [0, 4] where the goals are cosines.

    Example:
        >>> columns, unit = [torch.eye(2)], torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> matching_losses(unit, columns, [torch.tensor([1.0, 0.0]), torch.tensor([1.0, 1.0])], [0, 0])
        tensor([0.0000, 0.5000])
    """
    losses = unit.new_zeros(len(unit))
    for grid in sorted(set(grids)):
        rows = [row for row, its in enumerate(grids) if its == grid]
        goal = torch.stack([goals[row] for row in rows]).to(unit.device, non_blocking=True)
        found = unit[rows] @ columns[grid].T
        losses = losses.index_add(0, torch.tensor(rows, device=unit.device), (found - goal).square().mean(dim=1))
    return losses


class ProbeTower(nn.Module):
    """Preprocessed probes in, unit embeddings out, with gradients: what is handed to accelerate to wrap.

    The forward mode is that of evaluation, so that an adapter that changes nothing gives the base's embeddings. Only
    adapter layers train, for their own dropout's sake.
    """

    def __init__(self, encoder: DualEncoder) -> None:
        super().__init__()
        self.encoder = encoder
        self.model = bare_model(encoder.model)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Unit embeddings (b, d), float32, of a batch that `DualEncoder.preprocess` made."""
        encoder = self.encoder
        dtype, device = encoder.dtype, encoder.device
        inputs = {
            key: value.to(device, dtype if value.is_floating_point() else None, non_blocking=True)
            for key, value in batch.items()
            if key != "parts"
        }
        whole = "parts" not in batch
        seen = run_probes(
            self.model, encoder.family, inputs, None if whole else edit_site(self.model, family=encoder.family)
        )
        if not whole:
            inner = encoder.family.site is not None and encoder.family.site.kind == "output"
            seen = seen.joined(batch["parts"].tolist(), inner=inner)
        return nn.functional.normalize(seen.raw, dim=1)

    def train(self, mode: bool = True) -> ProbeTower:
        """Training mode for adapter layers alone, and for checkpointed layers, which only then recompute."""
        from peft.tuners.tuners_utils import BaseTunerLayer
        from transformers.modeling_layers import GradientCheckpointingLayer

        super().train(False)
        for module in self.model.modules():
            if isinstance(module, BaseTunerLayer):
                layer: Any = module
                layer.training = mode
                for name, child in layer.named_children():
                    if name != "base_layer":
                        child.train(mode)
            elif isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing:
                module.training = mode  # itself, not the dropout inside it
        return self


@contextmanager
def recomputed_layers(tower: ProbeTower, sample: Mapping[str, Tensor], wanted: bool) -> Iterator[None]:
    """With layers that are recomputed in the backward pass, once that is seen to leave the embeddings as they are."""
    if not wanted:
        yield
        return
    model: Any = tower.model
    try:
        model.activation_checkpointing_enable({"use_reentrant": False})
    except ValueError as error:
        raise PlatonicError(
            f"Expected a model with gradient checkpointing, got {type(model).__name__}: {error}. Leave "
            "`gradient_checkpointing` out."
        ) from error
    try:
        with torch.no_grad():
            without = tower.train(False)(sample)
            deviation = float((tower.train(True)(sample) - without).abs().max())
        if deviation > _TOLERANCE:
            raise PlatonicError(
                f"Expected {type(model).__name__} to embed alike with and without gradient checkpointing, got a "
                f"deviation of {deviation:.2e}: its checkpointed layers drop out. Leave `gradient_checkpointing` out."
            )
        yield
    finally:
        model.activation_checkpointing_disable()
