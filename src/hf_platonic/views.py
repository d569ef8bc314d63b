"""Views: many edits measured on one model without running it again for each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._files import write_atomic
from .affinities import affinity
from .encoders.encoder import DualEncoder, ProbeFeatures
from .encoders.families import Tower
from .encoders.media import content_hash
from .encoding import encode_columns, encode_probes
from .evaluation import EvaluationSet
from .operator import Operator
from .readings import Reading

__all__ = ["FeatureMemory", "Memory", "RememberingEncoder", "View"]

Memory = dict[str, dict[str, Tensor]]
"""Preprocessed inputs by content hash."""


@dataclass(eq=False)
class FeatureMemory:
    """What one model says about inputs, by content hash, so that it is run on each of them once.

    Attributes:
        limit: Bytes of features to keep; what comes later is computed anew each time.
        units: Unit embeddings by content hash, shape (d,).
        designs: Design rows by edit site and content hash, shape (p,).
        prompts: Prompt embeddings by the list of prompts.
    """

    limit: int = 8 * 2**30
    units: dict[str, Tensor] = field(default_factory=dict)
    designs: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    prompts: dict[tuple[str, ...], Tensor] = field(default_factory=dict)
    _bytes: int = 0

    def recall(self, hashes: Sequence[str | None], site: str | None) -> ProbeFeatures | None:
        """Features of these inputs, with the design of a site (None: the embeddings), or None if one is unknown."""
        units = [None if key is None else self.units.get(key) for key in hashes]
        unit = _stacked(units)
        if unit is None or site is None:
            return None if unit is None else ProbeFeatures(unit, unit)
        kept = self.designs.get(site, {})
        design = _stacked([None if key is None else kept.get(key) for key in hashes])
        return None if design is None else ProbeFeatures(unit, design)

    def remember(self, hashes: Sequence[str | None], features: ProbeFeatures, site: str | None) -> None:
        """Keeps features of these inputs, as long as there is room."""
        self._keep(self.units, hashes, features.unit)
        if site is not None:
            self._keep(self.designs.setdefault(site, {}), hashes, features.design)

    def _keep(self, table: dict[str, Tensor], hashes: Sequence[str | None], rows: Tensor) -> None:
        for key, row in zip(hashes, rows.cpu(), strict=True):
            if key is not None and key not in table and self._bytes + 4 * len(row) <= self.limit:
                table[key] = row.clone()
                self._bytes += 4 * len(row)

    def save(self, path: Path) -> None:
        """Writes the features of inputs to a safetensors file, atomically."""
        from safetensors.torch import save_file

        tables = {"": self.units, **self.designs}
        tensors: dict[str, Tensor] = {}
        for index, table in enumerate(tables.values()):
            if table:
                hashes = torch.tensor([list(bytes.fromhex(key)) for key in table], dtype=torch.uint8)
                tensors |= {f"{index}.hashes": hashes, f"{index}.rows": torch.stack(list(table.values()))}
        names = {str(index): name for index, name in enumerate(tables)}
        write_atomic(path, lambda temporary: save_file(tensors, temporary, metadata=names))

    @classmethod
    def load(cls, path: Path, *, limit: int = 8 * 2**30) -> FeatureMemory:
        """What `save` wrote."""
        from safetensors import safe_open

        memory = cls(limit)
        with safe_open(path, framework="pt") as file:
            for index, name in (file.metadata() or {}).items():
                if f"{index}.rows" not in file.keys():  # noqa: SIM118 - no mapping
                    continue
                hashes = [bytes(row).hex() for row in file.get_tensor(f"{index}.hashes").numpy()]
                table = memory.designs.setdefault(name, {}) if name else memory.units
                memory._keep(table, hashes, file.get_tensor(f"{index}.rows"))
        return memory


class RememberingEncoder(DualEncoder):
    """An encoder that keeps what several passes need: preprocessed inputs, and what the model says about them.

    Attributes:
        memory: Preprocessed inputs; set the same one on encoders that preprocess alike. None keeps none.
        features: What the model said about inputs; set by `keep_features`.
    """

    memory: Memory | None = None
    features: FeatureMemory | None = None
    _remembered: object = None
    _readings: dict[Any, Reading] | None = None

    def keep_features(self, features: FeatureMemory | None) -> None:
        """Recalls features from this memory from now on, and adds to it; not once the model is edited or replaced."""
        self.features, self._remembered = features, self.model
        self._readings = {}

    @property
    def readings(self) -> dict[Any, Reading] | None:
        """Its last reading of a grid, with the factorisations made of it."""
        return None if self._usable is None else self._readings

    def recall(self, hashes: Sequence[str | None], *, design: bool) -> ProbeFeatures | None:
        """Features of inputs seen before, on the CPU; None if one wasn't."""
        memory = self._usable
        return None if memory is None else memory.recall(hashes, self._site_key if design else None)

    def remember(self, hashes: Sequence[str | None], features: ProbeFeatures, *, design: bool) -> None:
        """Takes note of features that were computed."""
        memory = self._usable
        if memory is not None:
            memory.remember(hashes, features, self._site_key if design else None)

    def preprocess(self, inputs: Sequence[Any], *, offset: int = 0) -> dict[str, Tensor]:
        """As `DualEncoder.preprocess`; inputs seen before aren't decoded again."""
        memory = self.memory
        if memory is None:
            return super().preprocess(inputs, offset=offset)
        keys = [content_hash(item) for item in inputs]
        new = {key: item for key, item in zip(keys, inputs, strict=True) if key not in memory}
        if new:
            ready = super().preprocess(list(new.values()), offset=offset)
            for row, key in enumerate(new):
                memory[key] = {name: values[row : row + 1] for name, values in ready.items()}
        return {name: torch.cat([memory[key][name] for key in keys]) for name in memory[keys[0]]}

    def encode_prompts(self, prompts: Sequence[str], *, batch_size: int = 256) -> Tensor:
        """As `DualEncoder.encode_prompts`; a list seen before isn't encoded again."""
        memory, key = self._usable, tuple(prompts)
        if memory is None:
            return super().encode_prompts(prompts, batch_size=batch_size)
        if key not in memory.prompts:
            memory.prompts[key] = super().encode_prompts(prompts, batch_size=batch_size)
        return memory.prompts[key]

    @property
    def _usable(self) -> FeatureMemory | None:
        """The memory, while the model is the one it is about."""
        return None if self.model is not self._remembered or self._bare_of_adapters else self.features

    @property
    def _site_key(self) -> str | None:
        return repr(self.site) if self.reads_input else None


@dataclass(frozen=True, eq=False)
class View:
    """A base model's view of one evaluation set; operators are applied to it without running the model again.

    Attributes:
        features: Of the inputs, at the site where operators act.
        columns: The class prompts' unit embeddings, shape (m, d).
        labels: One class index per input.
        tower: Which side operators move.
    """

    features: ProbeFeatures
    columns: Tensor
    labels: Sequence[int]
    tower: Tower = "probe"

    @classmethod
    def of(
        cls,
        encoder: DualEncoder,
        data: EvaluationSet,
        *,
        tower: Tower = "probe",
        batch_size: int = 32,
        num_workers: int = 0,
        progress: bool | None = False,
    ) -> View:
        """The encoder's view of the set, from one pass; the last three as in `encode_probes`."""
        columns = encode_columns(encoder, data.probes.columns)
        features = encode_probes(
            encoder, data.probes, batch_size=batch_size, num_workers=num_workers, progress=progress
        )
        return cls(features, columns, data.labels, tower)

    def affinities(self, operator: Operator | None = None, *, strength: float = 1.0) -> Tensor:
        """Cosines of inputs and prompts, shape (n, m), unedited or under an operator at a strength."""
        unit, columns = self.features.unit, self.columns
        if operator is not None and self.tower == "text":
            columns = operator.apply(columns, columns, strength=strength)
        elif operator is not None:
            unit = operator.apply(unit, self.features.design, strength=strength)
        return affinity(unit, columns)

    def correct(self, operator: Operator | None = None, *, strength: float = 1.0) -> Tensor:
        """Whether each input's nearest prompt is its class, shape (n,), bool."""
        best = self.affinities(operator, strength=strength).argmax(dim=1)
        return best == torch.as_tensor(self.labels)

    def accuracy(self, operator: Operator | None = None, *, strength: float = 1.0) -> float:
        """Zero-shot accuracy in [0, 1], unedited or under an operator at a strength."""
        return float(self.correct(operator, strength=strength).double().mean())


def _stacked(rows: Sequence[Tensor | None]) -> Tensor | None:
    found = [row for row in rows if row is not None]
    return torch.stack(found) if len(found) == len(rows) and found else None
