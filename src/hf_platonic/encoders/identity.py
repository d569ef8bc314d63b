"""Who made a matrix: a model's source and two digests, stable across processes and machines."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..errors import DescriptorFormatError

__all__ = ["EncoderIdentity", "config_digest", "digest_of"]

_VOLATILE = frozenset(
    {
        "_attn_implementation",
        "_commit_hash",
        "_name_or_path",
        "_processor_class",
        "architectures",
        "auto_map",
        "dtype",
        "name_or_path",
        "processor_class",
        "torch_dtype",
        "transformers_version",
    }
)
"""Keys that depend on where, how or by which version a model was stored, not on what it computes."""


@dataclass(frozen=True)
class EncoderIdentity:
    """Where an encoder came from and what it computes, apart from its weights.

    Attributes:
        repo: Hub id, or the last part of the path of a local folder, or None for a model made in memory.
        revision: Commit hash on the Hub; None for local folders.
        adapter: The same for a PEFT adapter, or for weights, loaded on top.
        adapter_revision: Its commit hash.
        model_type: `config.model_type`.
        config_digest: Of the configuration without paths, versions and dtypes.
        preprocessing_digest: Of the image processor or feature extractor, the tokenizer and this package's own rules.
    """

    repo: str | None
    revision: str | None
    adapter: str | None
    adapter_revision: str | None
    model_type: str
    config_digest: str
    preprocessing_digest: str

    def to_dict(self) -> dict[str, str | None]:
        """Plain JSON values; the inverse of `from_dict`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EncoderIdentity:
        """The identity from what `to_dict` gave.

        Raises:
            DescriptorFormatError: If a field is missing or unknown.
        """
        expected = {field.name for field in fields(cls)}
        if set(values) != expected:
            raise DescriptorFormatError(
                f"Expected an encoder identity with the fields {sorted(expected)}, got {sorted(values)}. "
                "The file was edited, or written by another version."
            )
        return cls(**values)


def digest_of(value: object) -> str:
    """The first 32 hex digits of the SHA-256 of canonical JSON: sorted keys, no spaces, volatile keys left out."""
    text = json.dumps(_plain(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def config_digest(config: Any) -> str:
    """The digest of a transformers configuration (or of any object with `to_dict`)."""
    return digest_of(config.to_dict())


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items() if str(key) not in _VOLATILE}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)
