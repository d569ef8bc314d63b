"""The inner features of a probe tower: its blocks, found by the role they play in a forward pass."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._pooling import Feature, pool
from ..errors import EncoderError, PlatonicError
from .families import call
from .media import Audio

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .encoder import DualEncoder

__all__ = ["FEATURE_LAYERS", "find_features"]

FEATURE_LAYERS = 6
"""Blocks that are read by default: all of a shallow tower, every fourth of 24."""

_CLASS_TOKENS = ("class_embedding", "cls_token", "class_token")


def find_features(encoder: DualEncoder, layers: int) -> tuple[Feature, ...]:
    """The features of an encoder's probe tower, from one forward pass over two made-up probes.

    The blocks are the children of the longest list of modules (of the outermost ones) that all run once in the pass
    and hand on tokens or a map; or what the family's row names. Tokens are averaged; where the tower has a class
    token, that is read as well.

    Args:
        encoder: Whose probe tower is meant.
        layers: Blocks to read at most, at least 1: evenly spaced, the last one always among them.

    Returns:
        In the order of the blocks.

    Raises:
        EncoderError: If the number isn't at least 1, or no such blocks are found.
    """
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise EncoderError(f"Expected `features` to be a number of blocks of at least 1, got {layers!r}.")
    with encoder._reading() as bare:
        outputs = _outputs(encoder, bare)
        named = encoder.family.feature_modules
        if named is None:
            names = max(_stacks(bare, outputs), key=len, default=[])
            wanted = "a list of blocks that each run once a pass and hand on tokens or a map"
        else:
            names = [name for name in outputs if re.fullmatch(named, name)]
            wanted = f"modules named {named!r} that each run once a pass"
        if not names:
            raise EncoderError(
                f"Expected {wanted} in the probe tower of {encoder.family.name}, got none. Use another `site`, or say "
                "in the family's row which `feature_modules` to read."
            )
        chosen = [names[index] for index in _spaced(len(names), layers)]
        tower = bare.get_submodule(names[0].partition(".")[0])
        has_class = any(
            name.rpartition(".")[2] in _CLASS_TOKENS and "head" not in name.split(".")  # some pool by one of that name
            for name, _ in tower.named_parameters()
        )
    found = []
    for name in chosen:
        ndim, width = outputs[name]
        found.append(Feature(name, "mean", width))
        if ndim > 2:
            found.append(Feature(name, "std", width))
        if ndim == 3 and has_class:
            found.append(Feature(name, "first", width))
    return tuple(found)


def _outputs(encoder: DualEncoder, bare: nn.Module) -> dict[str, tuple[int, int]]:
    """Of each module that ran once with a row an input: its output's axes, and how wide it is; in running order."""
    import torch

    made = _probes(encoder)
    batch = {key: value for key, value in encoder.preprocess(made).items() if key != "parts"}
    inputs = {
        key: value.to(encoder.device, encoder.dtype if value.is_floating_point() else None)
        for key, value in batch.items()
    }
    seen: dict[str, list[tuple[int, int, int]]] = {}

    def look(name: str, output: Any) -> None:
        hidden = output[0] if isinstance(output, (tuple, list)) and len(output) else output
        if not torch.is_tensor(hidden):
            return
        try:
            rows: Tensor = pool(hidden, "mean")
        except PlatonicError:
            return
        seen.setdefault(name, []).append((hidden.ndim, *rows.shape))

    hooks = [
        module.register_forward_hook(lambda _, __, output, name=name: look(name, output))
        for name, module in bare.named_modules()
        if name
    ]
    try:
        call(bare, encoder.family.probe_getter, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    once = {name: calls[0] for name, calls in seen.items() if len(calls) == 1}
    return {name: (ndim, width) for name, (ndim, rows, width) in once.items() if rows == len(made)}


def _probes(encoder: DualEncoder) -> Sequence[Any]:
    """Two made-up probes that no part of a tower finds the same."""
    generator = np.random.RandomState(0)
    if encoder.modality == "image":
        from PIL import Image

        return [Image.fromarray(rows) for rows in generator.randint(0, 256, (2, 48, 48, 3)).astype(np.uint8)]
    rate = encoder.processor.feature_extractor.sampling_rate
    return [Audio(0.1 * generator.standard_normal(rate // 2).astype(np.float32), rate) for _ in range(2)]


def _stacks(bare: nn.Module, outputs: dict[str, tuple[int, int]]) -> Iterator[list[str]]:
    """The names of the children of each outermost list of modules that all gave an output."""
    from torch import nn

    outer: list[str] = []
    for name, module in bare.named_modules():
        if not isinstance(module, nn.ModuleList) or not len(module) or name.startswith(tuple(outer)):
            continue
        children = [f"{name}.{index}" for index in range(len(module))]
        if all(child in outputs for child in children):
            outer.append(f"{name}.")
            yield children


def _spaced(count: int, wanted: int) -> list[int]:
    """At most `wanted` of `count` indices, evenly spaced, the last one among them."""
    step = -(-count // wanted)
    return list(range(count - 1, -1, -step))[::-1]
