"""Passes over a probe set: the one place where data is looped over, on one process or many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from ._processes import gather_objects, gather_rows, own_slice, process_state
from .encoders.encoder import DualEncoder, ProbeFeatures
from .errors import PlatonicError, ProbeError

if TYPE_CHECKING:
    from .probes import ProbeSet

__all__ = ["Varied", "encode_columns", "encode_probes", "passes"]


_Inputs = tuple[list[str | None], dict[str, dict[str, Tensor]]]


class _Batches(Dataset[_Inputs]):
    """Content hashes, and preprocessed inputs by preprocessing digest, batch by batch."""

    def __init__(self, probes: ProbeSet, encoders: dict[str, DualEncoder], batches: Sequence[range]) -> None:
        self.probes, self.encoders, self.batches = probes, encoders, batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> _Inputs:
        batch = self.batches[index]
        inputs = [self.probes[i] for i in batch]
        ready = {digest: encoder.preprocess(inputs, offset=batch.start) for digest, encoder in self.encoders.items()}
        return self.probes.known_hashes(batch), ready


def passes(
    encoders: Sequence[DualEncoder],
    probes: ProbeSet,
    *,
    batch_size: int = 32,
    num_workers: int = 0,
    design: bool = False,
    progress: bool | None = None,
    description: str = "probes",
) -> Iterator[tuple[int, list[ProbeFeatures]]]:
    """Features of this process's share of the probes, batch by batch, from every encoder.

    Inputs are decoded once, and preprocessed once for all encoders that preprocess alike.

    Args:
        encoders: One or more, of the probes' modality.
        probes: The set to run over.
        batch_size: Probes a forward pass, at least 1.
        num_workers: Processes that decode while the model computes; 0 decodes in between.
        design: Whether the features carry what a solve needs at an input site.
        progress: Whether to show a bar, on the main process; None: where stderr is a terminal.
        description: The bar's label.

    Yields:
        The index of the batch's first probe within this process's share, and one `ProbeFeatures` per encoder.

    Raises:
        ProbeError: If the modality is wrong, or an input or an embedding can't be used (with its index).
        PlatonicError: If `batch_size` isn't at least 1.
    """
    if batch_size < 1:
        raise PlatonicError(f"Expected `batch_size` of at least 1, got {batch_size}.")
    for encoder in encoders:
        if encoder.modality != probes.modality:
            raise ProbeError(
                f"Expected {encoder.modality} probes for {encoder.family.name}, got {probes.modality} probes. "
                "Use probes of the encoder's modality, or an encoder of theirs."
            )
    share = own_slice(len(probes))
    batches = [share[i : i + batch_size] for i in range(0, len(share), batch_size)]
    digests = [encoder.identity.preprocessing_digest for encoder in encoders]
    loader = DataLoader(
        _Batches(probes, dict(zip(digests, encoders, strict=True)), batches),
        batch_size=None,
        num_workers=num_workers,
        pin_memory=any(encoder.device.type == "cuda" for encoder in encoders),
        generator=torch.Generator(),  # or the loader would draw its seed from the global one
    )
    for batch, (hashes, inputs) in zip(batches, _bar(loader, progress, description), strict=True):
        probes.note_hashes(batch, hashes)  # decoded in a worker, perhaps
        features = [
            encoder.probe_features(inputs[digest], design=design, offset=batch.start)
            for encoder, digest in zip(encoders, digests, strict=True)
        ]
        yield batch.start - share.start, features
    for theirs, known in gather_objects((share, probes.known_hashes(share))):
        probes.note_hashes(theirs, known)


def encode_probes(
    encoder: DualEncoder,
    probes: ProbeSet,
    *,
    batch_size: int = 32,
    num_workers: int = 0,
    progress: bool | None = None,
    description: str = "probes",
) -> ProbeFeatures:
    """Features of the whole probe set, in its order, on the CPU; on every process.

    Args:
        encoder: The encoder.
        probes: The set to run over; n of them.
        batch_size: Probes a forward pass.
        num_workers: Processes that decode while the model computes.
        progress: Whether to show a bar, on the main process; None: where stderr is a terminal.
        description: The bar's label.

    Returns:
        `unit (n, d)` and `design (n, p)`, float32.

    Raises:
        ProbeError: If an input or an embedding can't be used, or all embeddings are the same.
    """
    units: list[Tensor] = []
    designs: list[Tensor] = []
    varied = Varied()
    for _, (features,) in passes(
        [encoder],
        probes,
        batch_size=batch_size,
        num_workers=num_workers,
        design=True,
        progress=progress,
        description=description,
    ):
        varied.update(features.unit)
        units.append(features.unit.cpu())
        if encoder.reads_input:  # at an output site the design is the embedding itself
            designs.append(features.design.cpu())
    unit = gather_rows(_stacked(units, encoder.embedding_dim))
    design = gather_rows(_stacked(designs, encoder.design_dim)) if encoder.reads_input else unit
    varied.require()
    return ProbeFeatures(unit, design)


def encode_columns(encoder: DualEncoder, columns: Sequence[Sequence[str]]) -> Tensor:
    """Unit embeddings of a grid's columns: of each class, the normalised mean over its templates.

    Args:
        encoder: The encoder.
        columns: The m classes, each as its prompts in t templates; `columns` of a grid or a probe set.

    Returns:
        Shape (m, d), float32, unit rows, on the CPU.

    Raises:
        PromptError: If two prompts are the same to the encoder.
    """
    embedded = encoder.encode_prompts([prompt for column in columns for prompt in column]).cpu()
    means = embedded.reshape(len(columns), -1, embedded.shape[1]).mean(dim=1)
    return torch.nn.functional.normalize(means, dim=-1)


class Varied:
    """Watches a pass for embeddings that are all the same: an encoder that says nothing about its input."""

    def __init__(self) -> None:
        self.first: Tensor | None = None
        self.seen = 0
        self.deviation = 0.0

    def update(self, unit: Tensor) -> None:
        """Takes note of a batch of unit embeddings, shape (b, d)."""
        if len(unit):
            self.first = unit[0] if self.first is None else self.first
            self.seen += len(unit)
            self.deviation = max(self.deviation, float((unit - self.first).abs().amax()))

    def require(self) -> None:
        """Nothing, where embeddings differ or there was one probe at most.

        Raises:
            ProbeError: If several probes were seen and all have the same embedding.
        """
        if self.seen > 1 and self.deviation <= 1e-6:
            raise ProbeError(
                f"Expected embeddings that differ between probes, got the same one for probe 0 and the "
                f"{self.seen - 1} others. Look at the inputs (all blank?) and at the weights (did they load?).",
                index=0,
            )


def _stacked(parts: list[Tensor], width: int) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, width)


def _bar(batches: Iterable[_Inputs], progress: bool | None, description: str) -> Iterable[_Inputs]:
    hidden = None if progress is None else not progress  # None: tqdm looks whether there is a terminal
    if not process_state().is_local_main_process:
        hidden = True
    return cast("Iterable[_Inputs]", tqdm(batches, desc=description, unit="batch", leave=False, disable=hidden))
