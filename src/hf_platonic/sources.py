"""Sources: the fine-tunes and teachers that went into a descriptor."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ._checks import finite
from .encoders.identity import EncoderIdentity
from .errors import PlatonicError

__all__ = ["Source", "joined_sources"]


@dataclass(frozen=True)
class Source:
    """One fine-tune, or one teacher's scores, that went into a descriptor, and with which coefficient.

    Attributes:
        base: The model before the fine-tune; None of a teacher.
        tuned: The model after it; None of a teacher.
        coefficient: Signed; 1 for a descriptor as extracted.
        teacher: A digest of the scores, 12 hex digits; None of a fine-tune.
        changes: What was done to its matrix apart from the coefficient, in order, in words; none as extracted.

    Raises:
        PlatonicError: If it's neither a fine-tune with its base nor a teacher.
    """

    base: EncoderIdentity | None
    tuned: EncoderIdentity | None
    coefficient: float = 1.0
    teacher: str | None = None
    changes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if {self.base is None, self.tuned is None} != {self.teacher is not None}:
            raise PlatonicError(
                "Expected a source to be a fine-tune with its base or a teacher's scores, got parts of both or "
                "neither. Pass `base` and `tuned`, or None for both and `teacher`."
            )

    def changed(self, how: str) -> Source:
        """The same source after another change to its matrix."""
        return replace(self, changes=(*self.changes, how))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; the inverse of `from_dict`."""
        values: dict[str, Any] = {
            "base": None if self.base is None else self.base.to_dict(),
            "tuned": None if self.tuned is None else self.tuned.to_dict(),
            "coefficient": self.coefficient,
        }
        values |= {"teacher": self.teacher} if self.teacher is not None else {}
        return values | ({"changes": list(self.changes)} if self.changes else {})

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Source:
        """The inverse of `to_dict`."""
        base, tuned = (
            None if values[key] is None else EncoderIdentity.from_dict(values[key]) for key in ("base", "tuned")
        )
        teacher = values.get("teacher")
        return cls(
            base,
            tuned,
            coefficient=finite(values["coefficient"], "coefficient"),
            teacher=None if teacher is None else str(teacher),
            changes=tuple(str(change) for change in values.get("changes", ())),
        )


def joined_sources(left: tuple[Source, ...], right: tuple[Source, ...]) -> tuple[Source, ...]:
    """The sources of a sum: coefficients of the same one added, those that cancel left out."""
    totals: dict[Source, float] = {}
    for source in (*left, *right):
        key = replace(source, coefficient=1.0)
        totals[key] = totals.get(key, 0.0) + source.coefficient
    return tuple(replace(source, coefficient=c) for source, c in totals.items() if c != 0.0)
