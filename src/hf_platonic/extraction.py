"""Extraction: from a base model and its fine-tune to a task descriptor."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ._checks import instance
from ._processes import gather_objects, gather_rows, own_slice
from .affinities import affinity, row_centred
from .descriptor import TaskDescriptor
from .encoders.encoder import DualEncoder
from .encoding import Varied, encode_batches, encode_columns, in_batches
from .errors import EncoderError, PlatonicError
from .probes import ProbeSet
from .shards import Shards
from .sources import Source

__all__ = ["extract"]

_Rows = dict[str, Tensor]
_SAME = 1e-4  # on cosines; rounding stays far below, another fine-tune is far above


def extract(
    base: DualEncoder | None,
    tuned: DualEncoder,
    probes: ProbeSet,
    *,
    name: str | None = None,
    store_base: bool = False,
    batch_size: int = 32,
    num_workers: int = 0,
    progress: bool | None = None,
    checkpoint: str | Path | None = None,
) -> TaskDescriptor:
    """The descriptor of a fine-tune, `U = A(fine-tuned) - A(base)`, on unlabelled probes.

    One pass over the probes: each is decoded once and seen by both models in evaluation mode. Under `torchrun` or
    `accelerate launch` each process takes a contiguous share, and encodes the prompts for itself, once.

    Args:
        base: The model before the fine-tune. None: `tuned` is a PEFT model, and the base is the same model with its
            adapters switched off, so that one model in memory serves for both.
        tuned: The model after it; the same architecture, either tower changed.
        probes: n unlabelled inputs and m prompts.
        name: The task's name, for messages and tables.
        store_base: Keeps the base affinity too, which doubles the saved file.
        batch_size: Probes a forward pass.
        num_workers: Processes that decode while the models compute.
        progress: Whether to show a bar, on the main process; None: where stderr is a terminal.
        checkpoint: A folder for finished rows, made if missing; several processes need one that all of them see.
            The same call goes on where an earlier one was stopped, `kill -9` included, on any number of processes,
            and gives the same bits on one machine. Rows stay on disk and are mapped, so that memory doesn't grow
            with n: keep the folder while the descriptor is in use. A call on the finished folder reads it again.

    Returns:
        A descriptor with `delta (n, m)`, float32 on the CPU, the probe set at hand.

    Raises:
        EncoderError: If the two models read different modalities or are one and the same object; if `base` is None
            and the base can't be had from `tuned` (no PEFT model, or one that trained biases too).
        ProbeError: If a probe can't be read or embedded; names its index.
        PromptError: If two prompts are the same to a model.
        PlatonicError: If something is of another class, or `checkpoint` holds an extraction with other models, probes,
            prompts or batches.

    Reference:
        Park and Cho 2026, arXiv 2610.00929.
    """
    for which, encoder in (("base", base), ("tuned", tuned)):
        if which == "tuned" or encoder is not None:
            instance(encoder, which, DualEncoder, "Load one with `DualEncoder.from_pretrained`.")
    instance(probes, "probes", ProbeSet, "Make one with `ProbeSet(inputs, class_names=...)`.")
    if base is None:
        base = tuned.without_adapters()
    elif base.model is tuned.model:
        raise EncoderError(
            "Expected two models, got one object twice: an edited or adapted model shares its weights with its base. "
            "Load the base a second time with DualEncoder.from_pretrained, or pass None for the base of an adapter."
        )
    if base.modality != tuned.modality:
        raise EncoderError(
            f"Expected a base and a fine-tune of one modality, got {base.modality} ({base.family.name}) and "
            f"{tuned.modality} ({tuned.family.name})."
        )
    prompts = [encode_columns(encoder, probes.columns) for encoder in (base, tuned)]
    n, m = len(probes), len(probes.columns)
    work = _Work(base, tuned, probes, (prompts[0], prompts[1]), store_base)
    options: dict[str, Any] = {"num_workers": num_workers, "progress": progress, "description": "extract"}
    if checkpoint is None:
        rows = work.gathered(in_batches(own_slice(n), batch_size), options)
    else:
        rows = work.checkpointed(Path(checkpoint), batch_size, options)
    return TaskDescriptor(
        rows["delta"],
        probes.grid,  # after the pass, which has hashed what it decoded
        sources=(Source(base.identity, tuned.identity),),
        spread=math.sqrt(math.fsum(rows["squares"].tolist()) / (n * m)),
        base_affinity=rows.get("base_affinity"),
        name=name,
        probes=probes,
        predictions=rows["predictions"],
    )


@dataclass(frozen=True, eq=False)
class _Work:
    """One extraction: which rows it makes, and how they are collected."""

    base: DualEncoder
    tuned: DualEncoder
    probes: ProbeSet
    prompts: tuple[Tensor, Tensor]
    store_base: bool

    def rows(self, batches: list[range], options: dict[str, Any]) -> Iterator[tuple[range, _Rows]]:
        """The batches' rows: `delta`, `predictions`, `base_affinity` where it's kept, and `squares`, one a batch.

        Raises:
            ProbeError: If all embeddings are the same.
        """
        varied = Varied()
        for batch, features in encode_batches([self.base, self.tuned], self.probes, batches, **options):
            before, after = (affinity(f.unit.cpu(), g) for f, g in zip(features, self.prompts, strict=True))
            rows = {
                "delta": after - before,
                "predictions": after.argmax(dim=1).int(),
                "squares": row_centred(before.double()).square().sum().reshape(1),
            }
            if self.store_base:
                rows["base_affinity"] = before
            varied.update(features[0].unit)
            yield batch, rows
        varied.require()

    def gathered(self, batches: list[range], options: dict[str, Any]) -> _Rows:
        """All rows in memory, on every process."""
        share = own_slice(len(self.probes))
        own = {name: torch.empty(len(share), width) for name, width in self._widths().items()}
        squares = [torch.zeros(0, 1, dtype=torch.float64)]
        predictions = [torch.zeros(0, 1, dtype=torch.int32)]
        for batch, rows in self.rows(batches, options):
            squares.append(rows["squares"][:, None])
            predictions.append(rows["predictions"][:, None])
            for name, kept in own.items():
                kept[batch.start - share.start : batch.stop - share.start] = rows[name]
        known = self.probes.known_hashes
        for theirs, hashes in gather_objects((share, known.pack(share))):
            known.unpack(theirs, *hashes)
        found = {name: gather_rows(kept) for name, kept in own.items()}
        lists = {"squares": squares, "predictions": predictions}
        return {**found, **{name: gather_rows(torch.cat(parts))[:, 0] for name, parts in lists.items()}}

    def checkpointed(self, folder: Path, batch_size: int, options: dict[str, Any]) -> _Rows:
        """All rows in one mapped file, from shards that survive an interruption.

        Raises:
            PlatonicError: If the folder belongs to another extraction, or its rows aren't those of these models and
                probes.
        """
        n, known = len(self.probes), self.probes.known_hashes
        in_batches(range(n), batch_size)  # refuses a size that is none before anything is written
        shards = Shards.open(folder, self._setup(batch_size), n=n, batch_size=batch_size)
        finished = shards.finished()
        self._verify(shards, finished, batch_size, options)
        missing = shards.missing(finished)
        mine = [missing[i] for i in own_slice(len(missing))]
        ends = {rows.stop: rows for rows in mine}
        parts: list[_Rows] = []
        for batch, part in self.rows([batch for rows in mine for batch in in_batches(rows, batch_size)], options):
            packed = torch.frombuffer(bytearray(known.pack(batch)[0]), dtype=torch.uint8).reshape(-1, 16)
            parts.append({**part, "content_hashes": packed})
            if batch.stop in ends:
                shards.write(ends[batch.stop], {name: torch.cat([p[name] for p in parts]) for name in parts[0]})
                parts = []
        found = shards.whole()
        known.unpack(range(n), found.pop("content_hashes").numpy().tobytes(), b"\1" * n)
        return found

    def _verify(self, shards: Shards, finished: list[range], batch_size: int, options: dict[str, Any]) -> None:
        """Looks whether finished rows are these models' on these probes: setups are told apart by their names alone.

        The first and the last probe of every shard are decoded, and one batch is computed again.
        """
        self._refuse(self._other_probe(shards, [finished[i] for i in own_slice(len(finished))]), shards)
        if finished:
            stored = shards.read(finished[0])["delta"]
            batch = in_batches(finished[0], batch_size)[0]
            quiet = {**options, "num_workers": 0, "progress": False}
            ((_, features),) = encode_batches([self.base, self.tuned], self.probes, [batch], **quiet)
            before, after = (affinity(f.unit.cpu(), g) for f, g in zip(features, self.prompts, strict=True))
            off = float((after - before - stored[: len(batch)]).abs().max())
            half = any(encoder.dtype is not torch.float32 for encoder in (self.base, self.tuned))
            problem = f"the first rows differ by {off:.1e} from what these models give"
            self._refuse(problem if off > (30 if half else 1) * _SAME else None, shards)

    def _refuse(self, problem: str | None, shards: Shards) -> None:
        problems = [found for found in gather_objects(problem) if found]  # so that no process goes on alone
        if problems:
            raise PlatonicError(
                f"Expected the models and probes that the extraction in {shards.folder} was begun with, got others: "
                f"{problems[0]}. Pass the former ones to go on with it, or another folder to begin anew."
            )

    def _other_probe(self, shards: Shards, finished: list[range]) -> str | None:
        known = self.probes.known_hashes
        for rows in finished:
            stored = shards.read(rows)["content_hashes"]
            for at in (0, len(rows) - 1):
                self.probes[rows[at]]
                if known[rows[at]] != stored[at].numpy().tobytes().hex():
                    return f"probe {rows[at]} has other content"
        return None

    def _widths(self) -> dict[str, int]:
        m = len(self.probes.columns)
        return {"delta": m, "base_affinity": m} if self.store_base else {"delta": m}

    def _setup(self, batch_size: int) -> dict[str, Any]:
        return {
            "base": self.base.identity.to_dict(),
            "tuned": self.tuned.identity.to_dict(),
            "dtypes": [str(encoder.dtype) for encoder in (self.base, self.tuned)],
            "n": len(self.probes),
            "modality": self.probes.modality,
            "class_names": list(self.probes.class_names),
            "templates": list(self.probes.templates),
            "batch_size": batch_size,
            "store_base": self.store_base,
        }
