"""The lowest versions are said in one place and tested as said."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is in the standard library from Python 3.11 on")
def test_the_lowest_versions_are_the_bounds_of_the_package() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stated = [*project["dependencies"], *project["optional-dependencies"]["audio"]]
    bounds = dict(re.fullmatch(r"([\w-]+)>=([\d.]+)", line).groups() for line in stated)  # type: ignore[union-attr]
    lines = (ROOT / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {name.lower(): padded(version) for name, version in bounds.items()} == {
        name.lower(): padded(version) for name, version in pinned.items()
    }
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("transformers", "peft"):
        assert f"{name} {bounds[name]}" in readme


def padded(version: str) -> str:
    """With three numbers."""
    return ".".join([*version.split("."), "0", "0"][:3])
