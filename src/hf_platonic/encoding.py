"""Passes over a probe set: the one place where data is looped over, on one process or many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, cast, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from ._processes import gather_objects, gather_rows, own_slice, passes_to_keep_step, process_state
from .encoders.encoder import DualEncoder, ProbeFeatures
from .encoders.features import group_means
from .errors import PlatonicError, ProbeError

if TYPE_CHECKING:
    from .probes import ProbeSet

__all__ = ["Recalling", "Varied", "encode_batches", "encode_columns", "encode_probes", "in_batches", "passes"]


_Inputs = tuple[tuple[bytes, bytes], dict[str, dict[str, Tensor]]]


@runtime_checkable
class Recalling(Protocol):
    """An encoder that keeps features, so that a pass neither decodes nor runs what it has seen before."""

    def recall(self, hashes: Sequence[str | None], *, design: bool) -> ProbeFeatures | None:
        """Features of the inputs with these content hashes, or None if one is unknown."""

    def remember(self, hashes: Sequence[str | None], features: ProbeFeatures, *, design: bool) -> None:
        """Takes note of features that were computed."""


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
        return self.probes.known_hashes.pack(batch), ready


def in_batches(rows: range, batch_size: int) -> list[range]:
    """The rows in runs of `batch_size`; the last may be shorter.

    Raises:
        PlatonicError: If `batch_size` isn't at least 1.
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise PlatonicError(f"Expected `batch_size` to be a whole number of at least 1, got {batch_size!r}.")
    return [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]


def encode_batches(
    encoders: Sequence[DualEncoder],
    probes: ProbeSet,
    batches: Sequence[range],
    *,
    num_workers: int = 0,
    design: bool = False,
    progress: bool | None = None,
    description: str = "probes",
) -> Iterator[tuple[range, list[ProbeFeatures]]]:
    """Features of these batches from every encoder, on this process alone.

    Inputs are decoded once, and preprocessed once for all encoders that preprocess alike. An encoder that recalls a
    batch's features isn't run on it, and a batch that all encoders recall isn't decoded.

    Args:
        encoders: One or more, of the probes' modality.
        probes: The set that the batches count in.
        batches: Runs of probes, one forward pass each.
        num_workers: Processes that decode while the model computes; 0 decodes in between.
        design: Whether the features carry what a solve needs at an input site.
        progress: Whether to show a bar, on the main process; None: where stderr is a terminal.
        description: The bar's label.

    Yields:
        The batch, and one `ProbeFeatures` per encoder.

    Raises:
        ProbeError: If the modality is wrong, or an input or an embedding can't be used (with its index).
    """
    for encoder in encoders:
        if encoder.modality != probes.modality:
            raise ProbeError(
                f"Expected {encoder.modality} probes for {encoder.family.name}, got {probes.modality} probes. "
                "Use probes of the encoder's modality, or an encoder of theirs."
            )
    digests = [encoder.identity.preprocessing_digest for encoder in encoders]
    keepers = [encoder if isinstance(encoder, Recalling) else None for encoder in encoders]

    def recalled(batch: range) -> list[ProbeFeatures | None]:
        hashes = [probes.known_hashes[i] for i in batch] if any(keepers) else []
        return [None if keeper is None else keeper.recall(hashes, design=design) for keeper in keepers]

    unseen = {batch: None for batch in batches if None in recalled(batch)}
    loader = DataLoader(
        _Batches(probes, dict(zip(digests, encoders, strict=True)), list(unseen)),
        batch_size=None,
        num_workers=num_workers,
        pin_memory=any(encoder.device.type == "cuda" for encoder in encoders),
        generator=torch.Generator(),  # or the loader would draw its seed from the global one
    )
    further = passes_to_keep_step([encoder.model for encoder in encoders], len(unseen))
    loaded = iter(_bar(loader, progress, description))
    for batch in batches:
        features = recalled(batch)
        if batch in unseen:
            hashes, inputs = next(loaded)
            probes.known_hashes.unpack(batch, *hashes)  # decoded in a worker, perhaps
            for index, (encoder, keeper, digest) in enumerate(zip(encoders, keepers, digests, strict=True)):
                if features[index] is None:
                    found = encoder.probe_features(inputs[digest], design=design, offset=batch.start)
                    features[index] = found
                    if keeper is not None:
                        keeper.remember([probes.known_hashes[i] for i in batch], found, design=design)
        yield batch, [found for found in features if found is not None]
    next(loaded, None)  # lets the bar close
    for _ in range(further):
        for encoder in encoders:
            encoder.encode_probes([probes[0]])


def passes(
    encoders: Sequence[DualEncoder],
    probes: ProbeSet,
    *,
    batch_size: int = 32,
    num_workers: int = 0,
    design: bool = False,
    progress: bool | None = None,
    description: str = "probes",
) -> Iterator[tuple[range, list[ProbeFeatures]]]:
    """Features of this process's share of the probes, batch by batch, from every encoder; see `encode_batches`.

    The share is contiguous, in rank order. After the last batch every process knows all content hashes.

    Yields:
        The batch as a run of the whole set's indices, and one `ProbeFeatures` per encoder.

    Raises:
        ProbeError: As `encode_batches`.
        PlatonicError: If `batch_size` isn't at least 1.
    """
    share = own_slice(len(probes))
    yield from encode_batches(
        encoders,
        probes,
        in_batches(share, batch_size),
        num_workers=num_workers,
        design=design,
        progress=progress,
        description=description,
    )
    for theirs, hashes in gather_objects((share, probes.known_hashes.pack(share))):
        probes.known_hashes.unpack(theirs, *hashes)


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
    """Unit embeddings of a grid's columns: of each class, the normalised mean over its texts.

    Args:
        encoder: The encoder.
        columns: The m classes, each as its texts, such as a name in several templates; `columns` of a grid or a probe
            set.

    Returns:
        Shape (m, d), float32, unit rows, on the CPU.

    Raises:
        PromptError: If two prompts are the same to the encoder.
    """
    embedded = encoder.encode_prompts([prompt for column in columns for prompt in column]).cpu()
    means = group_means(embedded, [len(column) for column in columns])
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
