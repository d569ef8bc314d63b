"""Saving an object to a temporary folder with its card, and pushing that as one commit."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ._hub import Pushed, explain, push_folder
from .errors import HubError

__all__ = ["inherited_license", "push_saved"]

logger = logging.getLogger(__name__)


def push_saved(save: Callable[[Path], object], card: str, repo_id: str, **options: Any) -> Pushed:
    """Saves, adds the card, and pushes everything as one commit.

    Args:
        save: Writes the object into the folder it is given.
        card: The text of README.md, which replaces a generated card on the Hub but none that somebody wrote.
        repo_id: Where to.
        **options: Further options of `push_folder`.

    Returns:
        The commit.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder)
        (folder / "README.md").write_text(card, encoding="utf-8")
        return push_folder(folder, repo_id, **options)


def inherited_license(repos: Iterable[str], *, token: str | bool | None = None) -> str | None:
    """The licence that all the models state on the Hub; None where one states none, or they differ.

    Args:
        repos: Ids of model repos.
        token: For private ones.
    """
    from huggingface_hub import HfApi

    found = set()
    for repo in dict.fromkeys(repos):
        try:
            with explain(f"model {repo!r}", token=token):
                data = HfApi(token=token).model_info(repo).card_data
        except HubError as error:
            logger.warning("No licence was inherited from %s: %s", repo, error)
            return None
        found.add(None if data is None else data.license)
    return found.pop() if len(found) == 1 else None
