"""Content hashes of many probes in little memory, as far as they are known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

__all__ = ["ContentHashes"]

_SIZE = 16  # bytes of a hash


class ContentHashes:
    """One hash a probe, 17 bytes each: a million probes take 17 MB, where as many strings would take 89.

    Args:
        n: The number of probes; no hash is known yet.

    Example:
        >>> hashes = ContentHashes(2)
        >>> hashes[1] = "00112233445566778899aabbccddeeff"
        >>> hashes[0], hashes[1][:4], hashes.missing()
        (None, '0011', [0])
    """

    def __init__(self, n: int) -> None:
        self._packed, self._known = bytearray(_SIZE * n), bytearray(n)

    def __len__(self) -> int:
        return len(self._known)

    def __getitem__(self, index: int) -> str | None:
        return self._packed[_SIZE * index : _SIZE * (index + 1)].hex() if self._known[index] else None

    def __setitem__(self, index: int, value: str) -> None:
        self._packed[_SIZE * index : _SIZE * (index + 1)] = bytes.fromhex(value)
        self._known[index] = 1

    def __iter__(self) -> Iterator[str | None]:
        return (self[index] for index in range(len(self)))

    def missing(self) -> list[int]:
        """The probes whose hash isn't known."""
        return [index for index, known in enumerate(self._known) if not known]

    def picked(self, rows: Iterable[int]) -> ContentHashes:
        """The hashes of these probes, in this order."""
        chosen = list(rows)
        other = ContentHashes(len(chosen))
        for to, index in enumerate(chosen):
            other._packed[_SIZE * to : _SIZE * (to + 1)] = self._packed[_SIZE * index : _SIZE * (index + 1)]
            other._known[to] = self._known[index]
        return other

    def pack(self, rows: range) -> tuple[bytes, bytes]:
        """The hashes of a run of probes, 16 bytes each, and a byte per probe: 1 where it's known."""
        return (
            bytes(self._packed[_SIZE * rows.start : _SIZE * rows.stop]),
            bytes(self._known[rows.start : rows.stop]),
        )

    def unpack(self, rows: range, packed: bytes, known: bytes) -> None:
        """Takes what `pack` gave for these probes, in another process perhaps; what's known here stays."""
        for offset, index in enumerate(rows):
            if known[offset] and not self._known[index]:
                self._packed[_SIZE * index : _SIZE * (index + 1)] = packed[_SIZE * offset : _SIZE * (offset + 1)]
                self._known[index] = 1
