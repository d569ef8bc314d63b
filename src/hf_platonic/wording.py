"""Wording: the receiver's own texts for the columns of a grid, aligned by class name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .errors import PromptError

__all__ = ["Texts", "Wording", "worded_columns"]

Texts = str | Sequence[str]
Wording = Mapping[str, Texts] | Sequence[Texts]
"""Class name to text or texts; or, for one grid, texts in the order of its columns."""


def worded_columns(grids: Sequence[Sequence[str]], wording: Wording) -> list[tuple[tuple[str, ...], ...]]:
    """The receiver's texts for every column of every grid.

    Args:
        grids: The class names of each grid, in the order of its columns.
        wording: By class name, one text or several (their embeddings are averaged, as templates are); it has to name
            every class of every grid and no other. A plain sequence stands for the columns of a single grid.

    Returns:
        Per grid and column the texts.

    Raises:
        PromptError: If a class has no text, a name belongs to no class, a text is empty, or two classes of one grid
            get the same texts; all that don't match are listed.

    Example:
        >>> worded_columns([["cat", "dog"]], {"dog": "ein Hund", "cat": ["eine Katze", "ein Kater"]})
        [(('eine Katze', 'ein Kater'), ('ein Hund',))]
    """
    if isinstance(wording, str):
        raise PromptError(f"Expected `prompts` by class name, got the text {wording!r}. Pass {{class name: text}}.")
    if not isinstance(wording, Mapping):
        if len({tuple(names) for names in grids}) > 1:
            raise PromptError(
                "Expected `prompts` as a mapping from class names for terms with different classes, got a sequence. "
                "Pass {class name: text}."
            )
        if len(wording) != len(grids[0]):
            raise PromptError(
                f"Expected one entry in `prompts` for each of the {len(grids[0])} classes {list(grids[0])}, got "
                f"{len(wording)}. Pass {{class name: text}} to align them by name."
            )
        wording = dict(zip(grids[0], wording, strict=True))
    known = list(dict.fromkeys(name for names in grids for name in names))
    missing = [name for name in known if name not in wording]
    unknown = [name for name in wording if name not in known]
    if missing or unknown:
        raise PromptError(
            f"Expected `prompts` for exactly the classes {known}, got no text for {missing} and texts for the unknown "
            f"{unknown}. Names must match letter for letter."
        )
    texts = {name: _texts(name, wording[name]) for name in known}
    for names in grids:
        first: dict[tuple[str, ...], str] = {}
        for name in names:
            if first.setdefault(texts[name], name) != name:
                raise PromptError(
                    f"Expected different texts for different classes, got {list(texts[name])} for "
                    f"{first[texts[name]]!r} and {name!r}. Equal columns can't be told apart."
                )
    return [tuple(texts[name] for name in names) for names in grids]


def _texts(name: str, value: Texts) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise PromptError(f"Expected one or more non-empty texts for class {name!r}, got {value!r}.")
    return texts
