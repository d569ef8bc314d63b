from __future__ import annotations

from typing import Any

import pytest

from hf_platonic.errors import PromptError
from hf_platonic.wording import worded_columns

PETS, CARS = ("cat", "dog"), ("car", "dog")


def test_aligns_by_name_over_several_grids() -> None:
    wording = {"dog": ["ein Hund", "der Hund"], "car": "ein Auto", "cat": "eine Katze"}
    assert worded_columns([PETS, CARS], wording) == [
        (("eine Katze",), ("ein Hund", "der Hund")),
        (("ein Auto",), ("ein Hund", "der Hund")),
    ]
    assert worded_columns([PETS], ["eine Katze", ["ein Hund"]]) == [(("eine Katze",), ("ein Hund",))]
    assert worded_columns([PETS, PETS], ["eine Katze", "ein Hund"])[1] == (("eine Katze",), ("ein Hund",))


@pytest.mark.parametrize(
    ("grids", "wording", "message"),
    [
        ([PETS, CARS], {"cat": "x", "cow": "y"}, r"no text for \['dog', 'car'\] and texts for the unknown \['cow'\]"),
        ([PETS, CARS], ["x", "y"], "as a mapping from class names for terms with different classes"),
        ([PETS], ["x"], r"each of the 2 classes \['cat', 'dog'\], got 1"),
        ([PETS], "eine Katze", "Expected `prompts` by class name, got the text"),
        ([PETS], {"cat": "x", "dog": " "}, "non-empty texts for class 'dog'"),
        ([PETS], {"cat": "x", "dog": []}, "non-empty texts for class 'dog'"),
        ([PETS], {"cat": "x", "dog": "x"}, "different texts for different classes"),
    ],
)
def test_refuses(grids: Any, wording: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        worded_columns(grids, wording)
