"""`Grid`: what a matrix remembers of its rows and columns, so that two matrices can be told to match."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from .errors import DescriptorFormatError, GridMismatchError, PromptError

__all__ = ["PLAIN", "Grid", "checked_columns", "digest", "fill", "probe_fingerprint", "require_same_grid"]

PLAIN = ("{}",)
"""The template that leaves a whole prompt as it is."""


@dataclass(frozen=True)
class Grid:
    """The fingerprint of a probe set with its prompts, and enough to name or find them again.

    Attributes:
        fingerprint: 32 hex digits over `probe_fingerprint`, class names and templates. Two matrices may be added where
            it's equal.
        probe_fingerprint: 32 hex digits over modality and the probes' content hashes, in order.
        n: Number of probes.
        class_names: m names, one a column.
        templates: Prompt patterns, each with "{}" for the name.
        modality: "image" or "audio".
        reference: Where the probes can be loaded from (see `ProbeSet.from_reference`), or None; not compared.
    """

    fingerprint: str
    probe_fingerprint: str
    n: int
    class_names: tuple[str, ...]
    templates: tuple[str, ...]
    modality: str
    reference: dict[str, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def m(self) -> int:
        """Number of prompts, that is columns."""
        return len(self.class_names)

    @property
    def prompts(self) -> tuple[str, ...]:
        """The m names in the first template."""
        return tuple(fill(self.templates[0], name) for name in self.class_names)

    @property
    def columns(self) -> tuple[tuple[str, ...], ...]:
        """For each of the m columns, its name in every template."""
        return tuple(tuple(fill(template, name) for template in self.templates) for name in self.class_names)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the inverse of `from_dict`. Content hashes are packed, 21 bytes a probe."""
        values = {**asdict(self), "class_names": list(self.class_names), "templates": list(self.templates)}
        if self.reference is not None:
            packed = base64.b64encode(bytes.fromhex("".join(self.reference["content_hashes"]))).decode()
            values["reference"] = {**self.reference, "content_hashes": packed}
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Grid:
        """The grid from what `to_dict` gave.

        Raises:
            DescriptorFormatError: If a field is missing, unknown or of another type, or the fingerprint doesn't follow
                from the others.
        """
        expected = {item.name for item in fields(cls)}
        if not isinstance(values, Mapping) or set(values) != expected:
            got = sorted(map(str, values)) if isinstance(values, Mapping) else type(values).__name__
            raise DescriptorFormatError(
                f"Expected a grid with the fields {sorted(expected)}, got {got}. "
                "The file was edited, or written by another version."
            )
        n, names, templates = values["n"], values["class_names"], values["templates"]
        texts = [values["fingerprint"], values["probe_fingerprint"], values["modality"]]
        if (
            not (isinstance(n, int) and not isinstance(n, bool) and n > 0)
            or not all(isinstance(text, str) for text in texts)
            or not all(_is_texts(part) for part in (names, templates))
        ):
            raise DescriptorFormatError(
                "Expected a grid with n above 0, texts for fingerprints and modality, and non-empty lists of texts "
                "for class names and templates, got something else. The file was edited; restore it."
            )
        grid = cls(
            **{
                **values,
                "class_names": tuple(names),
                "templates": tuple(templates),
                "reference": _unpacked(values["reference"], n),
            }
        )
        computed = digest([grid.probe_fingerprint, list(names), list(templates)])
        if grid.fingerprint != computed:
            raise DescriptorFormatError(
                f"Expected grid fingerprint {computed} for these class names and templates, got {grid.fingerprint}. "
                "The file was edited; restore it, or extract the descriptor again."
            )
        return grid


def checked_columns(
    class_names: Sequence[str] | None, templates: Sequence[str], prompts: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Class names and templates as tuples; `prompts` is short for class names in the plain template.

    Raises:
        PromptError: If neither or both kinds are given, one is empty or repeated, or a template has no "{}".
    """
    if (class_names is None) == (prompts is None):
        got = "neither" if prompts is None else "both"
        raise PromptError(
            f"Expected `class_names` or `prompts`, got {got}. Pass the class names with templates, or whole prompts."
        )
    if prompts is not None:
        if tuple(templates) != PLAIN:
            raise PromptError("Expected no `templates` beside `prompts`, got both. Use `class_names` with templates.")
        return _texts(prompts, "prompts"), PLAIN
    names, patterns = _texts(class_names, "class_names"), _texts(templates, "templates")
    for pattern in patterns:
        if "{}" not in pattern:
            raise PromptError(f'Expected "{{}}" for the class name in every template, got {pattern!r}.')
    return names, patterns


def _texts(values: Any, what: str) -> tuple[str, ...]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise PromptError(f"Expected `{what}` to be a list of strings, got {values!r}.")
    texts = tuple(values)
    if not texts:
        raise PromptError(f"Expected at least one entry in `{what}`, got none.")
    first: dict[str, int] = {}
    for position, text in enumerate(texts):
        if not isinstance(text, str) or not text.strip():
            raise PromptError(f"Expected a non-empty string in `{what}`, got {text!r} at position {position}.")
        if first.setdefault(text, position) != position:
            raise PromptError(
                f"Expected different entries in `{what}`, got {text!r} at positions {first[text]} and {position}. "
                "Equal columns can't be told apart; remove one or make it more specific."
            )
    return texts


def _is_texts(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and len(values) > 0 and all(isinstance(value, str) for value in values)


def _unpacked(reference: Any, n: int) -> dict[str, Any] | None:
    """The reference with one content hash a probe, 32 hex digits each."""
    if reference is None:
        return None
    try:
        raw = base64.b64decode(reference["content_hashes"], validate=True)
        if len(raw) != 16 * n:
            raise ValueError(f"{len(raw)} bytes")
        hashes = [raw[i : i + 16].hex() for i in range(0, len(raw), 16)]
        return {**reference, "content_hashes": hashes}
    except (KeyError, TypeError, ValueError) as error:
        raise DescriptorFormatError(
            f"Expected a grid's reference with {n} packed content hashes, got {type(error).__name__}: {error}. "
            "The file was edited; restore it."
        ) from error


def fill(template: str, name: str) -> str:
    """The template with the name in place of "{}"."""
    # Not str.format: a class may be called "{x}".
    return template.replace("{}", name)


def digest(value: object) -> str:
    """The first 32 hex digits of the SHA-256 of compact JSON."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def probe_fingerprint(modality: str, hashes: Iterable[str]) -> str:
    """`digest([modality, [*hashes]])`, without a list of all hashes in memory.

    Example:
        >>> probe_fingerprint("image", ["00", "ff"]) == digest(["image", ["00", "ff"]])
        True
    """
    total = hashlib.sha256(f'["{modality}",['.encode())
    for index, known in enumerate(hashes):
        total.update(f',"{known}"'.encode() if index else f'"{known}"'.encode())
    total.update(b"]]")
    return total.hexdigest()[:32]


def require_same_grid(expected: Grid, got: Grid) -> None:
    """Nothing, where two grids are the same one.

    Raises:
        GridMismatchError: Naming both fingerprints and the part that differs.
    """
    if expected.fingerprint == got.fingerprint:
        return
    if expected.probe_fingerprint == got.probe_fingerprint:
        part = f"the probes agree, the prompts don't ({expected.m} against {got.m}, or other words or order)"
    else:
        part = f"the probes differ ({expected.n} against {got.n}, or other content or order)"
    raise GridMismatchError(
        f"Expected grid {expected.fingerprint[:16]}, got grid {got.fingerprint[:16]}: {part}. "
        "Extract on the same ProbeSet, or add the descriptors with `+`, which keeps one term a grid."
    )
