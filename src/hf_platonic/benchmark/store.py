"""`Store`: the finished cells of a run, one JSON file each, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._files import write_json
from ..errors import PlatonicError

__all__ = ["Store", "pack", "unpack"]


class Store:
    """The folder of a run.

    Args:
        folder: Made if missing. `cells/` has one file a finished cell, `work/` what cells need of each other.

    Attributes:
        folder: The same.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cells = folder / "cells"

    def open(self, settings: Mapping[str, Any]) -> None:
        """Makes the folder a run's, or checks that it is this run's.

        Args:
            settings: Everything that decides the results, as plain JSON.

        Raises:
            PlatonicError: If the folder holds a run with other settings; the message names them.
        """
        self._cells.mkdir(parents=True, exist_ok=True)
        path = self.folder / "run.json"
        wanted = json.loads(json.dumps(settings))
        if not path.exists():
            write_json(path, wanted)
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        if found != wanted:
            differing = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
            raise PlatonicError(
                f"Expected a run with the same {', '.join(differing)} in {self.folder}, got another. "
                "Pass another --out, or remove the folder."
            )

    def sweep(self) -> None:
        """Removes what processes had begun to write when they were ended; none may be at work in the folder."""
        for path in list(self.folder.rglob(".*.tmp")):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    @property
    def work(self) -> Path:
        """Where descriptors and features are kept."""
        path = self.folder / "work"
        path.mkdir(parents=True, exist_ok=True)
        return path

    def has(self, *key: object) -> bool:
        """Whether the cell is finished."""
        return self._path(key).is_file()

    def put(self, *key: object, seconds: float, **values: Any) -> None:
        """Writes a finished cell, atomically.

        Args:
            key: Its kind, and what tells it from others of the kind.
            seconds: What it took.
            values: Plain JSON, of one form for all cells of a kind.
        """
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"key": [str(part) for part in key], "seconds": seconds, **values})

    def get(self, *key: object) -> dict[str, Any]:
        """A finished cell."""
        found: dict[str, Any] = json.loads(self._path(key).read_text(encoding="utf-8"))
        return found

    def cells(self, kind: str) -> Iterator[dict[str, Any]]:
        """All finished cells of a kind, in the order of their file names."""
        for path in sorted((self._cells / kind).glob("*.json")):
            yield json.loads(path.read_text(encoding="utf-8"))

    def _path(self, key: tuple[object, ...]) -> Path:
        kind, *parts = map(str, key)
        words = "--".join(re.sub(r"[^A-Za-z0-9.]+", "-", part).strip("-") for part in parts)
        # Two names may become the same words.
        digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:8]
        return self._cells / kind / f"{words}--{digest}.json"


def pack(flags: Tensor) -> str:
    """Booleans of shape (n,) as base64 of their bits, first one first."""
    return base64.b64encode(np.packbits(flags.numpy().astype(bool)).tobytes()).decode()


def unpack(text: str, n: int) -> Tensor:
    """The n booleans that `pack` wrote."""
    bits = np.unpackbits(np.frombuffer(base64.b64decode(text), dtype=np.uint8), count=n)
    return torch.from_numpy(bits.astype(bool))
