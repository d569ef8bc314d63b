"""Writing that an interruption can't leave half done, and reading configs that may be anything."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import DescriptorFormatError

__all__ = ["read_json", "whole_folder", "write_atomic", "write_json"]

_MAX_CONFIG_BYTES = 256 * 2**20


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Writes a file beside its place under a temporary name, then renames it there.

    Args:
        path: The final place; its folder must exist.
        write: Gets the temporary path and writes it whole.

    Raises:
        OSError: Whatever `write` or the file system raises; the old file, or none, is then still at `path`.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        # mkstemp makes files only the owner may read; give them what an ordinary new file gets.
        mask = os.umask(0)
        os.umask(mask)
        temporary.chmod(0o666 & ~mask)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def whole_folder(goal: Path) -> Iterator[Path]:
    """A folder to write into, whose files are moved to `goal` once all are written.

    For what other libraries write in place. An error or an interruption inside leaves `goal` as it was. Its other
    files stay, and so does a README.md, which somebody may have written.

    Args:
        goal: Made if it isn't there.
    """
    made = not goal.exists()
    goal.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=goal, prefix=".writing.", suffix=".tmp"))
    try:
        yield temporary
        for path in sorted(path for path in temporary.rglob("*") if path.is_file()):
            place = goal / path.relative_to(temporary)
            if place.name != "README.md" or not place.exists():
                place.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, place)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if made and not any(goal.iterdir()):
            goal.rmdir()


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes JSON with sorted keys, atomically."""
    text = json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def read_json(path: Path, *, schema: int, remedy: str) -> dict[str, Any]:
    """The object in a JSON config of this package.

    Args:
        path: The file.
        schema: The newest `schema_version` this library reads.
        remedy: What to do where there is no such file.

    Raises:
        DescriptorFormatError: If the file is missing, too large or no JSON object, or has no `schema_version` or one
            that is newer.
    """
    if not path.is_file():
        raise DescriptorFormatError(f"Expected {path.name} in {path.parent}, found none. {remedy}")
    if path.stat().st_size > _MAX_CONFIG_BYTES:
        raise DescriptorFormatError(
            f"Expected {path} of at most {_MAX_CONFIG_BYTES} bytes, got {path.stat().st_size}. It isn't a config."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DescriptorFormatError(
            f"Expected JSON in {path}, got something else ({error}). Save or download it again."
        ) from error
    version = config.get("schema_version") if isinstance(config, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise DescriptorFormatError(f"Expected a config with a `schema_version` in {path}, got {version!r}.")
    if version > schema:
        raise DescriptorFormatError(
            f"Expected schema {schema} or older in {path}, got {version}. Install hf-platonic "
            f"{config.get('library_version', '(unknown)')} or newer to read it."
        )
    return dict(config)
