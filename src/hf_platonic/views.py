"""Views: many edits measured on one model without running it again for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .encoders.encoder import DualEncoder, ProbeFeatures
from .encoders.media import content_hash
from .encoding import encode_columns, encode_probes
from .evaluation import EvaluationSet, accuracy
from .operator import Operator

__all__ = ["Memory", "RememberingEncoder", "View"]

Memory = dict[str, dict[str, Tensor]]
"""Preprocessed inputs by content hash."""


class RememberingEncoder(DualEncoder):
    """An encoder that keeps preprocessed inputs: a base model and its fine-tunes see the same ones several times.

    Attributes:
        memory: What it keeps; set the same one on encoders that preprocess alike.
    """

    memory: Memory

    def preprocess(self, inputs: Sequence[Any], *, offset: int = 0) -> dict[str, Tensor]:
        """As `DualEncoder.preprocess`; inputs seen before aren't decoded again."""
        keys = [content_hash(item) for item in inputs]
        new = {key: item for key, item in zip(keys, inputs, strict=True) if key not in self.memory}
        if new:
            ready = super().preprocess(list(new.values()), offset=offset)
            for row, key in enumerate(new):
                self.memory[key] = {name: values[row : row + 1] for name, values in ready.items()}
        return {name: torch.cat([self.memory[key][name] for key in keys]) for name in self.memory[keys[0]]}


@dataclass(frozen=True, eq=False)
class View:
    """A base model's view of one evaluation set; operators are applied to it without running the model again.

    Attributes:
        features: Of the inputs, at the site where operators act.
        columns: The class prompts' unit embeddings, shape (m, d).
        labels: One class index per input.
    """

    features: ProbeFeatures
    columns: Tensor
    labels: Sequence[int]

    @classmethod
    def of(cls, encoder: DualEncoder, data: EvaluationSet, *, batch_size: int = 32) -> View:
        """The encoder's view of the set, from one pass."""
        features = encode_probes(encoder, data.probes, batch_size=batch_size, progress=False)
        return cls(features, encode_columns(encoder, data.probes.columns), data.labels)

    def accuracy(self, operator: Operator | None = None, *, strength: float = 1.0) -> float:
        """Zero-shot accuracy in [0, 1], unedited or under an operator at a strength."""
        unit = self.features.unit
        if operator is not None:
            unit = operator.apply(unit, self.features.design, strength=strength)
        return accuracy(unit, self.columns, self.labels)
