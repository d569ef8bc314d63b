"""What can go wrong, as one small tree: catch `PlatonicError` for all of it."""

from __future__ import annotations

__all__ = [
    "BaseMismatchError",
    "DescriptorFormatError",
    "EncoderError",
    "GridMismatchError",
    "HubError",
    "PlatonicError",
    "ProbeError",
    "PromptError",
]


class PlatonicError(ValueError):
    """The root of this package's own errors; each message says what was expected, what came and what to do."""


class ProbeError(PlatonicError):
    """A probe can't be used: unreadable, of the wrong modality, or with an embedding that says nothing.

    Attributes:
        index: Position of the probe in its set, or None where the whole set is at fault.
    """

    def __init__(self, message: str, *, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


class PromptError(PlatonicError):
    """The prompts can't form the columns of a grid: none, repeated, or equal after truncation."""


class GridMismatchError(PlatonicError):
    """Two matrices, or a matrix and a probe set, belong to different grids."""


class EncoderError(PlatonicError):
    """A model isn't a dual encoder this package knows how to read or edit."""


class DescriptorFormatError(PlatonicError):
    """A file or folder isn't a saved object of this package, or isn't whole."""


class BaseMismatchError(PlatonicError):
    """An adapter was put on another base model than the one it was solved for."""


class HubError(PlatonicError):
    """The Hub refused, failed or couldn't be reached; the client's own exception is the cause.

    Attributes:
        kind: Which: "unauthorized", "gated", "forbidden", "repo_not_found", "revision_not_found", "file_not_found",
            "offline", "not_cached", "timeout", "unreachable", "server", "rate_limited", "conflict",
            "unsafe_path", "invalid_id" or "rejected".
        status: The HTTP status, where there was an answer.
    """

    def __init__(self, message: str, *, kind: str, status: int | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.status = status
