"""The package's own shape: what it exports, and that imports only point up one list of modules."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_platonic

PACKAGE = Path(hf_platonic.__file__).parent
# Data flows down this list; a module may import from those above it, and from its own line.
ORDER = [
    {"errors"},
    {"_checks", "_files", "_hashes", "_tensors", "_processes", "_hub_errors", "_pooling"},
    {"_hub"},
    {"_publish"},
    {"encoders"},
    {"grid", "cards", "sources"},
    {"probe_sources", "probes"},
    {"encoding", "affinities"},
    {"descriptor", "objectives", "consensus", "teachers"},
    {"shards"},
    {"extraction", "solve", "wording", "scaling", "coresets"},
    {"selection", "joint", "prompting"},
    {"recipes"},
    {"operator"},
    {"tuner"},
    {"fits"},
    {"readings", "terms"},
    {"solutions"},
    {"export"},
    {"bank"},
    {"matching"},
    {"transfers"},
    {"evaluation", "retrieval"},
    {"few_shot", "metrics"},
    {"views"},
    {"hub"},
    {"playground"},
    {"demo"},
    {"benchmark"},
    {"cli_data", "cli_verbs"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(ORDER) for name in names}


def modules() -> list[Path]:
    return sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


def top(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0]
    return first.removesuffix(".py")


def imported(path: Path) -> set[str]:
    """First components, within the package, of everything the module imports anywhere."""
    depth = len(path.relative_to(PACKAGE).parts) - 1
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth + 1:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith("hf_platonic"):
            # evaluate runs a copy of a metric's file, from where a relative import leads nowhere.
            copied = top(path) == "metrics" and depth == 2
            found.add((node.module or "").split(".")[1] if copied else "absolute import of hf_platonic")
    return found - {"__version__"}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_point_up(path: Path) -> None:
    below = {name for name in imported(path) if LEVEL[name] > LEVEL[top(path)]}
    assert not below, f"{top(path)} imports from further down: {below}"


def test_every_module_has_its_place() -> None:
    assert {top(path) for path in modules()} == set(LEVEL)


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_stay_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500


@pytest.mark.parametrize("name", hf_platonic.__all__)
def test_exports_exist_whatever_was_imported_before(name: str) -> None:
    value = getattr(hf_platonic, name)
    assert value is getattr(importlib.import_module("hf_platonic"), name)
    assert not isinstance(value, type(sys)), f"{name} is a module; a submodule of that name shadows the export"


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hf_platonic.nothing  # noqa: B018


def test_importing_is_lazy() -> None:
    code = "import hf_platonic, sys; print([m for m in ('datasets', 'sklearn', 'PIL.Image') if m in sys.modules])"
    peft = code.replace("import hf_platonic", "import peft")
    here, alone = (
        subprocess.run([sys.executable, "-c", c], capture_output=True, text=True, check=True) for c in (code, peft)
    )
    assert here.stdout == alone.stdout


def test_links_between_pages_lead_somewhere() -> None:
    root = PACKAGE.parents[1]
    pages = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("examples/*.md"), *root.glob("model_cards/*.md")]
    links = [
        (page.relative_to(root), target)
        for page in pages
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    ]
    assert len(links) > 20
    assert [(str(page), target) for page, target in links if not (root / page.parent / target).exists()] == []
