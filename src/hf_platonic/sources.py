"""Sources: the fine-tunes that went into a descriptor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ._checks import finite
from .encoders.identity import EncoderIdentity

__all__ = ["Source", "joined_sources"]


@dataclass(frozen=True)
class Source:
    """One fine-tune that went into a descriptor, and with which coefficient.

    Attributes:
        base: The model before the fine-tune.
        tuned: The model after it.
        coefficient: Signed; 1 for a descriptor as extracted.
    """

    base: EncoderIdentity
    tuned: EncoderIdentity
    coefficient: float = 1.0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"base": self.base.to_dict(), "tuned": self.tuned.to_dict(), "coefficient": self.coefficient}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Source:
        """The inverse of `to_dict`."""
        base, tuned = EncoderIdentity.from_dict(values["base"]), EncoderIdentity.from_dict(values["tuned"])
        return cls(base, tuned, finite(values["coefficient"], "coefficient"))


def joined_sources(left: tuple[Source, ...], right: tuple[Source, ...]) -> tuple[Source, ...]:
    """The sources of a sum: coefficients of the same fine-tune added, those that cancel left out."""
    totals: dict[tuple[EncoderIdentity, EncoderIdentity], float] = {}
    for source in (*left, *right):
        key = (source.base, source.tuned)
        totals[key] = totals.get(key, 0.0) + source.coefficient
    return tuple(Source(base, tuned, c) for (base, tuned), c in totals.items() if c != 0.0)
