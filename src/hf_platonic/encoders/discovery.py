"""Models without a row in the table: read by the roles of their parts, as far as real forward passes bear it out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.nn import functional

from ..errors import EncoderError
from .families import EditSite, Family, bare_model, family_of, unwrap

if TYPE_CHECKING:
    from torch import Tensor, nn

    from .encoder import DualEncoder

__all__ = ["guess", "verified"]

_GETTERS = ("get_image_features", "get_text_features")
_PROMPTS = ("a cat", "a photo of two dogs in the snow", "rain")
_TOLERANCE = 1e-3  # on unit vectors; a wrong layer or padding rule is far above, rounding far below


def guess(model: nn.Module) -> Family:
    """A row for an image model with the usual getters, not yet verified, that can be read only.

    Raises:
        EncoderError: If it hasn't got them; the error is that of `family_of`.
    """
    bare = bare_model(model)
    config = getattr(bare, "config", None)
    if config is None or not all(callable(getattr(bare, getter, None)) for getter in _GETTERS):
        return family_of(model)  # raises, with the list
    return Family(f"{type(bare).__name__} (no row)", (str(getattr(config, "model_type", None)),), "image", None)


def verified(encoder: DualEncoder) -> Family:
    """The encoder's guessed row, with what was found out by running the model.

    The text tower must give a prompt the same embedding whatever it's batched with. In each tower, the last linear
    layer of the embedding's size becomes the edit site if changing its weights on some probes moves the embedding as
    an operator behind the layer, or at its input, would.

    Args:
        encoder: With a row from `guess`.

    Raises:
        EncoderError: If prompts depend on their padding.
    """
    family = encoder.family
    rows = encoder._tokenise(_PROMPTS)
    together, alone = encoder._encode_ids(rows), torch.cat([encoder._encode_ids([row]) for row in rows])
    if _distance(together, alone) > _tolerance(encoder):
        raise EncoderError(
            f"Expected prompt embeddings of {family.name} that don't depend on the batch, got a difference of "
            f"{_distance(together, alone):.2g} with other padding. Add a row with `register_family` that says how the "
            "text tower was trained to see prompts."
        )
    pictures = np.random.RandomState(0).randint(0, 256, (3, 48, 48, 3)).astype(np.uint8)
    pixels = {
        key: value.to(encoder.device, encoder.dtype if value.is_floating_point() else None)
        for key, value in encoder.preprocess(list(pictures)).items()
    }
    site = _site(encoder, lambda bare: unwrap(bare.get_image_features(**pixels)))
    prompts = encoder._prompt_inputs(rows)
    text_site = _site(encoder, lambda bare: unwrap(bare.get_text_features(**prompts)))
    found = replace(
        family,
        site=site,
        text_site=None if text_site is None or text_site.kind == "input" else text_site.module,
    )
    edits = f"edited at {site.kind} of {site.module}" if site else "read only: no layer of it can be edited exactly"
    warnings.warn(
        f"{family.name} isn't in the table of families. By running it: {edits}. `register_family` says it for good.",
        UserWarning,
        stacklevel=4,
    )
    return found


def _site(encoder: DualEncoder, embed: Callable[[Any], Tensor]) -> EditSite | None:
    """The last linear layer of the embedding's size, where an edit of its weights does what an operator does."""
    from torch import nn

    calls: list[tuple[str, nn.Linear, Tensor]] = []
    with encoder._reading() as bare:
        hooks = [
            module.register_forward_hook(lambda m, args, _, name=name: calls.append((name, m, args[0])))
            for name, module in bare.named_modules()
            if type(module) is nn.Linear and module.weight.is_floating_point() and not module.weight.is_meta
        ]
        try:
            before = embed(bare).float()
        finally:
            for hook in hooks:
                hook.remove()
        fitting = [call for call in calls if call[1].out_features == before.shape[-1]]
        if before.ndim != 2 or not fitting:
            return None
        name, layer, u = fitting[-1]
        generator = torch.Generator().manual_seed(0)
        size = layer.out_features
        push = (0.3 * torch.randn(size, size, generator=generator)).to(layer.weight)
        with _changed(layer, push @ layer.weight, None if layer.bias is None else push @ layer.bias):
            after = embed(bare).float()
        wanted = before + before @ push.float().T
        if _distance(functional.normalize(after, dim=1), functional.normalize(wanted, dim=1)) < _tolerance(encoder):
            return EditSite(name, "output")
        u = u[:, 0] if u.ndim == 3 else u
        spread = float(layer.weight.float().std())
        step = (spread * torch.randn(layer.weight.shape, generator=generator)).to(layer.weight)
        if len(u) == len(before):
            with _changed(layer, step, None):
                after = embed(bare).float()
            wanted = before + u.float() @ step.float().T
            if float((after - wanted).abs().max()) < _tolerance(encoder) * float((wanted - before).abs().max()):
                return EditSite(name, "input")
    return None


@contextmanager
def _changed(layer: nn.Linear, weight: Tensor, bias: Tensor | None) -> Iterator[None]:
    """The layer with something added, and then with its own bits again."""
    kept = layer.weight.data, None if layer.bias is None else layer.bias.data
    layer.weight.data = kept[0] + weight
    if bias is not None:
        layer.bias.data = layer.bias.data + bias
    try:
        yield
    finally:
        layer.weight.data = kept[0]
        if kept[1] is not None:
            layer.bias.data = kept[1]


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def _tolerance(encoder: DualEncoder) -> float:
    return _TOLERANCE if encoder.dtype is torch.float32 else 30 * _TOLERANCE
