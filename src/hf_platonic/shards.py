"""Shards: finished rows of an extraction on disk, from which it goes on after an interruption."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ._files import read_json, write_json
from ._processes import gather_objects, process_state
from ._tensors import Stream, stream_tensors
from .errors import PlatonicError

__all__ = ["Shards"]

SCHEMA_VERSION = 1
SETUP_NAME = "extraction.json"
_BATCHES = 16  # forward passes a shard: what a kill can cost
_MOST = 65_536  # shards in a folder


@dataclass(frozen=True)
class Shards:
    """A folder with the finished rows of one extraction, one file a run of rows.

    The runs are the same whatever the number of processes, and consist of whole batches: an extraction goes on with
    the very forward passes that an uninterrupted one would make, on as many processes as there are then. Files appear
    whole (written beside their place, then renamed). Several processes need a folder that all of them see.

    Attributes:
        folder: Where they are.
        n: Rows in all.
        rows: Rows a shard; the last one may have fewer.
    """

    folder: Path
    n: int
    rows: int

    @classmethod
    def open(cls, folder: Path, setup: Mapping[str, Any], *, n: int, batch_size: int) -> Shards:
        """The shards of an extraction, new or begun.

        Args:
            folder: Made if missing.
            setup: What the rows depend on, as plain JSON; compared to the one the folder was begun with.
            n: Rows in all.
            batch_size: Rows a forward pass.

        Raises:
            PlatonicError: If the folder was begun with another setup; names what differs.
            DescriptorFormatError: If the folder's record of its setup is damaged.
        """
        from . import __version__

        shards = cls(folder, n, cls.layout(n, batch_size))
        path = folder / SETUP_NAME
        state = process_state()
        if state.is_main_process:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(".*.tmp"):  # of writes that were cut off
                leftover.unlink(missing_ok=True)
            if not path.exists():
                write_json(path, {"schema_version": SCHEMA_VERSION, "library_version": __version__, **setup})
        state.wait_for_everyone()
        begun = read_json(path, schema=SCHEMA_VERSION, remedy="Several processes need a folder that all of them see.")
        different = sorted(key for key in setup if begun.get(key) != setup[key])
        if different:
            shown = "; ".join(f"{key} was {_short(begun.get(key))}, now {_short(setup[key])}" for key in different)
            raise PlatonicError(
                f"Expected the setup that the extraction in {folder} was begun with, got another: {shown}. "
                "Pass the former arguments to go on with it, or another folder to begin anew."
            )
        return shards

    @staticmethod
    def layout(n: int, batch_size: int) -> int:
        """Rows a shard: whole batches, enough of them to keep the number of files bounded."""
        return batch_size * max(_BATCHES, -(-n // (_MOST * batch_size)))

    def finished(self) -> list[range]:
        """The runs of rows on disk, in order; the same list on every process."""
        whole = [range(self.n)] if self._path(range(self.n)).exists() else None
        found = whole or [rows for rows in self._runs() if self._path(rows).exists()]
        return gather_objects(found)[0]

    def missing(self, finished: list[range]) -> list[range]:
        """The runs of rows that are still to do."""
        done = {row for rows in finished for row in range(rows.start, rows.stop, self.rows)}
        return [rows for rows in self._runs() if rows.start not in done]

    def write(self, rows: range, tensors: Mapping[str, Tensor]) -> None:
        """Writes a run of rows atomically."""
        stream_tensors(self._path(rows), {name: Stream(t.dtype, tuple(t.shape), [t]) for name, t in tensors.items()})

    def read(self, rows: range) -> dict[str, Tensor]:
        """A run of rows, as views of the mapped file.

        Raises:
            PlatonicError: If the file is damaged.
        """
        from safetensors import SafetensorError, safe_open

        path = self._path(rows)
        try:
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, OSError) as error:
            raise PlatonicError(
                f"Expected a whole shard in {path}, got something else ({error}). Delete it to have its rows "
                "extracted again."
            ) from error

    def whole(self) -> dict[str, Tensor]:
        """All rows, as views of one mapped file, on every process; the main process joins the shards into it.

        Takes the shards' place on disk; memory doesn't grow with n.
        """
        state = process_state()
        everything = range(self.n)
        state.wait_for_everyone()
        if state.is_main_process:
            runs = list(self._runs())
            if not self._path(everything).exists():
                self._join(runs, everything)
            for rows in runs:
                if rows != everything:
                    self._path(rows).unlink(missing_ok=True)
        state.wait_for_everyone()
        return self.read(everything)

    def _join(self, runs: list[range], everything: range) -> None:
        lengths: dict[str, int] = {}
        for rows in runs:
            for name, tensor in self.read(rows).items():
                lengths[name] = lengths.get(name, 0) + len(tensor)
        streams = {
            name: Stream(tensor.dtype, (lengths[name], *tensor.shape[1:]), self._pieces(name, runs))
            for name, tensor in self.read(runs[0]).items()
        }
        stream_tensors(self._path(everything), streams)

    def _pieces(self, name: str, runs: list[range]) -> Iterator[Tensor]:
        return (self.read(rows)[name] for rows in runs)

    def _runs(self) -> Iterator[range]:
        return (range(start, min(start + self.rows, self.n)) for start in range(0, self.n, self.rows))

    def _path(self, rows: range) -> Path:
        return self.folder / f"rows-{rows.start:012d}-{rows.stop:012d}.safetensors"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
