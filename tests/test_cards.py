"""The cards in `model_cards/` are what the package renders, and the Hub's own parser reads them."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from hf_platonic._hub import CARD_MARKER

FOLDER = Path(__file__).parent.parent / "model_cards"
NAMES = ("task-descriptor.md", "operator-head.md", "lora.md", "operator-bank.md", "probe-set.md")


@pytest.fixture(scope="module")
def rendered() -> dict[str, str]:
    spec = importlib.util.spec_from_file_location("render", FOLDER / "render.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, str] = module.cards()
    return found


def without_figures(text: str) -> str:
    """Accuracies, norms and spreads differ in the last digits between machines."""
    return re.sub(r"\d+\.\d+", "N", text)


@pytest.mark.parametrize("name", NAMES)
def test_is_what_the_package_renders(name: str, rendered: dict[str, str]) -> None:
    kept = (FOLDER / name).read_text(encoding="utf-8")
    assert without_figures(kept) == without_figures(rendered[name]), "run model_cards/render.py"


@pytest.mark.parametrize("name", NAMES)
def test_the_hub_reads_it(name: str, rendered: dict[str, str]) -> None:
    card = ModelCard(rendered[name])
    assert card.data.license == "apache-2.0"
    assert CARD_MARKER in card.content
    assert "platonic" in card.data.tags
    assert "None" not in card.text
