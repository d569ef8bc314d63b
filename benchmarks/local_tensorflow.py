"""Reads TensorFlow checkpoints (the V2 "bundle" format) with NumPy alone.

An `.index` file is a sorted table of LevelDB's form: blocks of prefix-compressed entries, found through an index block
that a footer points to. Each entry's value is a protocol buffer that says where the tensor lies in the `.data` file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

__all__ = ["read_checkpoint"]

_TYPES = {1: "<f4", 3: "<i4", 9: "<i8"}
_FOOTER = 48
_MAGIC = 0xDB4775248B80FB57


def read_checkpoint(index: Path) -> dict[str, np.ndarray]:
    """All variables of a checkpoint in one shard, by name.

    Args:
        index: Its `.index` file; the `.data-00000-of-00001` file lies beside it.

    Raises:
        ValueError: If it's no such checkpoint.
    """
    table = index.read_bytes()
    if int.from_bytes(table[-8:], "little") != _MAGIC:
        raise ValueError(f"Expected a TensorFlow V2 checkpoint in {index}, got another file.")
    data = Path(str(index).removesuffix("index") + "data-00000-of-00001").read_bytes()
    _, at = _varint(table, len(table) - _FOOTER)  # the first handle is of a block without use here
    _, at = _varint(table, at)
    found = {}
    for _, handle in _entries(table, table[at:-8]):
        for key, value in _entries(table, handle):
            if key:  # the empty key is the header
                found[key.decode()] = _tensor(value, data)
    return found


def _entries(table: bytes, handle: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of the block that a handle, offset and size, points to."""
    offset, at = _varint(handle, 0)
    size, _ = _varint(handle, at)
    if table[offset + size] != 0:
        raise ValueError("Expected an uncompressed table, got a compressed one.")
    block = table[offset : offset + size]
    end = size - 4 * (1 + int.from_bytes(block[-4:], "little"))
    key, at = b"", 0
    while at < end:
        shared, at = _varint(block, at)
        own, at = _varint(block, at)
        length, at = _varint(block, at)
        key = key[:shared] + block[at : at + own]
        yield key, block[at + own : at + own + length]
        at += own + length


def _varint(source: bytes, at: int) -> tuple[int, int]:
    """A variable-length integer and the place behind it."""
    value = shift = 0
    while True:
        byte = source[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field numbers and values of a protocol buffer."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        if tag & 7 == 0:
            value, at = _varint(message, at)
            yield tag >> 3, value
        elif tag & 7 == 2:
            size, at = _varint(message, at)
            yield tag >> 3, message[at : at + size]
            at += size
        else:
            at += 4 if tag & 7 == 5 else 8  # a checksum


def _tensor(message: bytes, data: bytes) -> np.ndarray:
    """The tensor that an entry describes: fields 1 type, 2 shape, 4 offset, 5 size."""
    entry = dict(_fields(message))
    shape = [dict(_fields(size)).get(1, 0) for number, size in _fields(entry.get(2, b"")) if number == 2]
    offset, size = entry.get(4, 0), entry.get(5, 0)
    return np.frombuffer(data[offset : offset + size], _TYPES[entry[1]]).reshape(shape)
