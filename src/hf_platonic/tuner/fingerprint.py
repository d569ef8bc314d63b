"""Reading linear layers, and sketches of a few numbers that tell one from another."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import PlatonicError

__all__ = ["factors_digest", "has_bias", "layer_shape", "mismatch", "plain_weight", "sketch"]

_PROJECTIONS = 8
_SEED = 20261001
# Casting to bfloat16 moves a projection by .001 of the weight's norm, a different weight by about 1.4.
_TOLERANCE = 0.01


def layer_shape(layer: nn.Module) -> tuple[int, int]:
    """`(out_features, in_features)` of a linear layer, quantised ones included.

    Raises:
        PlatonicError: If the module doesn't say.
    """
    sizes = getattr(layer, "out_features", None), getattr(layer, "in_features", None)
    if not all(isinstance(size, int) for size in sizes):
        raise PlatonicError(
            f"Expected a linear layer with `in_features` and `out_features`, got {type(layer).__name__}. "
            "Name the linear layer itself in `target_modules`."
        )
    return int(sizes[0] or 0), int(sizes[1] or 0)


def has_bias(layer: nn.Module) -> bool:
    """Whether the linear layer adds a bias."""
    return getattr(layer, "bias", None) is not None


def plain_weight(layer: nn.Module) -> bool:
    """Whether the layer's weight is an ordinary floating-point matrix that can be read and replaced.

    False for quantised and parametrised layers, for tensor subclasses, and for weights on the meta device.
    """
    weight = getattr(layer, "weight", None)
    return (
        isinstance(layer, nn.Linear)
        and type(weight) is nn.Parameter
        and type(weight.data) is Tensor
        and weight.is_floating_point()
        and not weight.is_meta
        and tuple(weight.shape) == layer_shape(layer)
    )


def sketch(weight: Tensor, bias: Tensor | None) -> list[float]:
    """Eight seeded projections `a' W b + a' bias` with standard normal `a` and `b`.

    Their root mean square estimates the Frobenius norm of `[W, bias]`, and that of the difference of two sketches
    the distance of the two layers, so a handful of numbers tells a cast weight from another one.

    Args:
        weight: Shape (out, in), any floating-point dtype.
        bias: Shape (out,) or None.

    Returns:
        Eight floats, rounded to 8 significant digits.
    """
    # This generator's stream is frozen by NumPy's compatibility policy; torch's may change between releases.
    generator = np.random.RandomState(_SEED)
    rows = torch.from_numpy(generator.standard_normal((_PROJECTIONS, weight.shape[0]))).float().to(weight.device)
    columns = torch.from_numpy(generator.standard_normal((_PROJECTIONS, weight.shape[1]))).float().to(weight.device)
    with torch.no_grad():
        projected = ((rows @ weight.float()) * columns).sum(dim=1)
        if bias is not None:
            projected = projected + rows @ bias.float()
    return [float(f"{value:.8g}") for value in projected.tolist()]


def factors_digest(left: Tensor, right: Tensor) -> str:
    """32 hex digits over an adapter's two factors in float32, bit for bit."""
    found = hashlib.sha256()
    for factor in (left, right):
        found.update(factor.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:32]


def mismatch(recorded: list[float], weight: Tensor, bias: Tensor | None) -> float | None:
    """How far a layer is from the one a sketch was recorded of: None up to a cast, else relative to its own norm.

    Args:
        recorded: A result of `sketch`.
        weight: Shape (out, in), any floating-point dtype.
        bias: Shape (out,) or None.

    Returns:
        None, or a distance above 0.01, infinite for a sketch of another length.
    """
    here = sketch(weight, bias)
    if len(recorded) != len(here):
        return math.inf
    distance = math.sqrt(sum((a - b) ** 2 for a, b in zip(recorded, here, strict=True)) / len(here))
    norm = math.hypot(*(float(part.detach().float().norm()) for part in (weight, bias) if part is not None))
    if distance <= _TOLERANCE * norm:
        return None
    return distance / norm if norm else math.inf
