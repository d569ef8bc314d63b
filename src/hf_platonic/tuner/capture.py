"""Features of inner modules, kept from where they are computed to where an edited layer reads them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._pooling import Feature, pool
from ..errors import BaseMismatchError, PlatonicError

__all__ = ["FeatureReader", "module_at", "stacked"]


class _Store:
    """Rows by feature of the forward pass under way, apart for each thread: replicas of a model share their hooks."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[Feature, Tensor]] = {}

    def put(self, feature: Feature, rows: Tensor) -> None:
        self.rows.setdefault(threading.get_ident(), {})[feature] = rows

    def take(self) -> dict[Feature, Tensor]:
        return self.rows.pop(threading.get_ident(), {})

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": {}}  # a copy of a model starts without what another one's pass left behind


@dataclass(frozen=True, eq=False)
class _Hook:
    """A forward hook that keeps one feature; an object, so that a copied model's hooks write to its own store."""

    store: _Store
    feature: Feature

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.store.put(self.feature, pool(output, self.feature.pooling))


class FeatureReader:
    """What one edited layer reads from other modules of its model, in the same forward pass.

    Hooks on those modules keep pooled rows until the layer takes them. Copying or pickling the model copies hooks and
    reader together.
    """

    def __init__(self) -> None:
        self._store = _Store()
        self._handles: dict[Feature, RemovableHandle] = {}

    def watch(self, model: nn.Module, features: Iterable[Feature]) -> None:
        """Put hooks on the modules of these features, where there are none yet."""
        for feature in features:
            if feature not in self._handles:
                module = module_at(model, feature)
                self._handles[feature] = module.register_forward_hook(_Hook(self._store, feature))

    def keep_only(self, features: Iterable[Feature]) -> None:
        """Take away the hooks of all other features."""
        kept = set(features)
        for feature in [feature for feature in self._handles if feature not in kept]:
            self._handles.pop(feature).remove()
        self._store.rows.clear()

    def take(self) -> dict[Feature, Tensor]:
        """The rows of this thread's pass so far, which are forgotten here."""
        return self._store.take()


def module_at(model: nn.Module, feature: Feature) -> nn.Module:
    """The module that a feature is read from.

    Raises:
        BaseMismatchError: If the model has none of that name.
    """
    try:
        return model.get_submodule(feature.module)
    except AttributeError:
        raise BaseMismatchError(
            f"Expected a module `{feature.module}` to read features from, got a {type(model).__name__} without. "
            "Load the base that the adapter was made for."
        ) from None


def stacked(rows: dict[Feature, Tensor], features: Iterable[Feature], count: int, like: Tensor) -> Tensor:
    """The features side by side.

    Args:
        rows: Of the forward pass.
        features: Which, in order.
        count: Inputs of the edited layer.
        like: Gives dtype and device.

    Returns:
        Shape (count, sum of sizes).

    Raises:
        PlatonicError: If one is missing, or has other sizes.
    """
    parts = []
    for feature in features:
        found = rows.get(feature)
        if found is None or found.shape != (count, feature.size):
            raise PlatonicError(
                f"Expected {count} rows of {feature.size} features from `{feature.module}` in the same forward pass, "
                f"got {'none' if found is None else tuple(found.shape)}. Run the whole model or its feature getter, "
                "not the edited layer alone, or disable the adapter."
            )
        parts.append(found.to(like))
    return torch.cat(parts, dim=1)
