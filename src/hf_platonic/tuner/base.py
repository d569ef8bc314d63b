"""Whether an adapter meets the base model it was made for."""

from __future__ import annotations

from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

from ..errors import BaseMismatchError
from .config import PlatonicConfig
from .fingerprint import has_bias, layer_shape, mismatch, plain_weight, sketch
from .layer import PlatonicLayer

__all__ = ["check_base", "record_base", "remedy"]


def check_base(adapter_name: str, config: PlatonicConfig, key: str, layer: nn.Module) -> None:
    """Refuse a layer that isn't, up to a cast, the one the adapter was made for; what isn't recorded isn't checked.

    Args:
        adapter_name: For the message.
        config: With `base_shape` and `base_sketch` as recorded, or None.
        key: The layer's name in the model.
        layer: The layer, or a tuner layer around it.

    Raises:
        BaseMismatchError: If the shape differs, or the sketch by more than a cast does.
        PlatonicError: If it's no linear layer.
    """
    base = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer
    shape = (config.base_shape or {}).get(key)
    here = layer_shape(base)
    if shape is not None and tuple(shape) != here:
        raise BaseMismatchError(
            f"Expected `{key}` of shape {tuple(shape)}, the base that adapter {adapter_name!r} was solved for, got "
            f"{here}. {remedy(config)}"
        )
    recorded = (config.base_sketch or {}).get(key)
    if recorded is not None and plain_weight(base):
        distance = mismatch(recorded, *_original(layer))
        if distance is not None:
            raise BaseMismatchError(
                f"Expected the weights of `{key}` that adapter {adapter_name!r} was solved for, got others of the "
                f"same shape (relative distance about {distance:.2g}). {remedy(config)} To put it on these weights "
                "all the same, load its PlatonicConfig, set `base_sketch = None` and pass it as `config`."
            )


def record_base(config: PlatonicConfig, key: str, layer: nn.Module) -> None:
    """Write the layer's shape and sketch into the configuration, where they aren't yet."""
    base = layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer
    config.base_shape = {**(config.base_shape or {})}
    config.base_shape.setdefault(key, list(layer_shape(base)))
    if plain_weight(base):
        config.base_sketch = {**(config.base_sketch or {})}
        if key not in config.base_sketch:
            config.base_sketch[key] = sketch(*_original(layer))


def _original(layer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Weight and bias without what this method has merged into them."""
    inner: Any = layer
    while isinstance(inner, BaseTunerLayer):
        if isinstance(inner, PlatonicLayer):
            return inner.original()
        inner = inner.base_layer
    return inner.weight.data, inner.bias.data if has_bias(inner) else None


def remedy(config: PlatonicConfig) -> str:
    """What to do about another base, for a message."""
    base = config.base_model_name_or_path
    load = f"Load {base}" if base else "Load the base it was made for"
    return f"{load}, or carry the behaviour over to this model with `hf_platonic.transfer`."
