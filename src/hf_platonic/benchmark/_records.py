"""Frozen dataclasses from plain values, each key and type checked."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import PlatonicError

__all__ = ["record"]

T = TypeVar("T")


def record(cls: type[T], value: Any, where: str) -> T:
    """The dataclass that a mapping describes; lists become tuples, mappings the dataclasses that fields ask for.

    Args:
        cls: A dataclass whose fields are of plain types, literals, tuples, mappings, unions and dataclasses.
        value: What was read.
        where: File and key, for messages.

    Raises:
        PlatonicError: If a key is unknown or missing, or a value of another type.
    """
    if not isinstance(value, Mapping):
        raise _wrong(where, f"a mapping ({cls.__name__})", value)
    known = {entry.name: entry for entry in fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(str(key) for key in value if key not in known)
    if unknown:
        raise PlatonicError(
            f"Expected keys out of {sorted(known)} in {where}, got {unknown}. Check the spelling, or remove them."
        )
    lacking = [
        name
        for name, entry in known.items()
        if name not in value and entry.default is MISSING and entry.default_factory is MISSING
    ]
    if lacking:
        raise PlatonicError(f"Expected {lacking} in {where}, got only {sorted(map(str, value))}. Add them.")
    hints = get_type_hints(cls)
    return cls(**{str(key): _converted(hints[str(key)], item, f"{where}: {key}") for key, item in value.items()})


def _converted(hint: Any, value: Any, where: str) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        return _converted(next(kind for kind in arguments if kind is not type(None)), value, where)
    if origin is Literal:
        if value not in arguments:
            raise _wrong(where, f"one of {list(arguments)}", value)
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise _wrong(where, "a list", value)
        return tuple(_converted(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if is_dataclass(hint):
        return record(hint, value, where)  # type: ignore[arg-type]
    if origin is not None or hint is Mapping:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise _wrong(where, "a mapping from names", value)
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise _wrong(where, f"{hint.__name__}", value)
    return value


def _wrong(where: str, expected: str, value: Any) -> PlatonicError:
    remedy = " Put it in quotes." if expected == "str" else ""
    return PlatonicError(f"Expected {expected} for {where}, got {type(value).__name__} {value!r:.80}.{remedy}")
