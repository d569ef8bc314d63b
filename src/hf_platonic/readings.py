"""Readings: what a target sees of one grid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor

from .affinities import affinity
from .encoders.encoder import DualEncoder, ProbeFeatures
from .encoding import encode_columns, encode_probes
from .fits import Equation
from .probes import ProbeSet
from .scaling import FeatureScaling, scaled
from .tuner import PlatonicModel
from .wording import Wording, worded_columns

__all__ = ["KeepsReadings", "Reading", "grid_texts", "unedited"]


@runtime_checkable
class KeepsReadings(Protocol):
    """An encoder that keeps its last reading, so that many descriptors of one grid share its factorisations."""

    @property
    def readings(self) -> dict[Any, Reading] | None:
        """By grid, texts and edit site; None: nothing is kept."""


@dataclass(frozen=True, eq=False)
class Reading:
    """A target's embeddings of one grid.

    Attributes:
        features: Of the n probes, at the place where the target is edited.
        columns: Unit embeddings of the prompts, shape (m, d).
        texts: The m columns' texts, as the target read them.
    """

    features: ProbeFeatures
    columns: Tensor
    texts: tuple[tuple[str, ...], ...]

    @classmethod
    def of(
        cls, target: DualEncoder, probes: ProbeSet, *, texts: Sequence[Sequence[str]] | None = None, **options: Any
    ) -> Reading:
        """The target's reading of a probe set, from one pass with its own `PLATONIC` adapters off.

        Args:
            target: The encoder.
            probes: The grid's probes and prompts.
            texts: Other texts for the columns, in their order; see `wording.worded_columns`.
            **options: `batch_size`, `num_workers` and `progress` of `encode_probes`.
        """
        read = probes.columns if texts is None else tuple(tuple(column) for column in texts)
        kept = target.readings if isinstance(target, KeepsReadings) else None
        if kept is None:
            return cls._read(target, probes, read, options)
        key = (probes.grid.fingerprint, read, repr(target.site))
        if key not in kept:
            kept.clear()  # factorisations are large, and the last grid is the likeliest next
            kept[key] = cls._read(target, probes, read, options)
        return kept[key]

    @classmethod
    def _read(
        cls, target: DualEncoder, probes: ProbeSet, texts: tuple[tuple[str, ...], ...], options: dict[str, Any]
    ) -> Reading:
        with unedited(target):
            columns = encode_columns(target, texts)  # first, as prompts that don't do are seen at once
            return cls(encode_probes(target, probes, description="solve", **options), columns, texts)

    @cached_property
    def equation(self) -> Equation:
        """The grid as part of a problem, with nothing asked yet."""
        return Equation(self.features.unit, self.features.design, self.columns)

    @cached_property
    def scaled(self) -> tuple[Equation, FeatureScaling]:
        """The same with features scaled by this grid alone, and the scaling."""
        (design,), scaling = scaled([self.features.design], "features")
        return Equation(self.features.unit, design, self.columns), cast("FeatureScaling", scaling)

    @cached_property
    def affinity(self) -> Tensor:
        """The target's cosines before any edit, shape (n, m)."""
        return affinity(self.features.unit, self.columns)


def grid_texts(probe_sets: Mapping[str, ProbeSet], prompts: Wording | None) -> dict[str, Sequence[Sequence[str]]]:
    """The texts of each grid's columns: the grids' own, or the receiver's by class name.

    Args:
        probe_sets: By grid fingerprint.
        prompts: As in `transfer`.

    Raises:
        PromptError: If the receiver's don't fit the grids' classes.
    """
    if prompts is None:
        return {fingerprint: probe_set.columns for fingerprint, probe_set in probe_sets.items()}
    worded = worded_columns([probe_set.class_names for probe_set in probe_sets.values()], prompts)
    return dict(zip(probe_sets, worded, strict=True))


@contextmanager
def unedited(target: DualEncoder) -> Iterator[None]:
    """The target with its `PLATONIC` adapters switched off for a while, if it has any."""
    from peft import PeftModel

    if isinstance(target.model, PeftModel) and isinstance(target.model.base_model, PlatonicModel):
        with target.model.disable_adapter():
            yield
    else:
        yield
