"""Targets whose frozen weights FSDP 2 spreads over the processes; the adapter is whole on each of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from .._processes import process_state, sharded_modules, sum_over_processes
from ..encoders.encoder import DualEncoder
from ..encoders.families import bare_model
from ..errors import EncoderError, PlatonicError

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

__all__ = [
    "average_gradients",
    "name_plain_class",
    "require_fitting_config",
    "require_fitting_target",
    "require_whole",
    "reshard",
    "whole",
]

_METHODS = frozenset(
    {"LORA", "LOHA", "LOKR", "IA3", "OFT", "BOFT", "VERA", "FOURIERFT", "HRA", "VBLORA", "RANDLORA", "C3A"}
)
"""PEFT methods whose initial values don't come from the layers' weights."""


def reshard(model: nn.Module) -> None:
    """Frees what FSDP keeps whole after a pass: the parameters are the lasting ones again, all of them shards."""
    for module in sharded_modules(model):
        module.reshard()


def require_fitting_target(target: DualEncoder, device: torch.device) -> None:
    """Nothing, once a target is seen to be whole, or sharded in the way that a training can use.

    Args:
        target: The target.
        device: Where this process computes.

    Raises:
        EncoderError: If layers are split otherwise (tensor parallel), or the shards are on another device.
    """
    bare = bare_model(target.model)
    reshard(bare)
    sharded = bool(sharded_modules(bare))
    for name, parameter in bare.named_parameters():
        split = [place for place in _placements(parameter) if not place.is_replicate()]
        if len(split) > sharded:
            raise EncoderError(
                f"Expected weights that are whole or sharded by `fully_shard` alone, got {name} with placements "
                f"{tuple(split)}: with tensor parallelism several processes would have to see the same probes. Load "
                "the model without `tp_plan`."
            )
    if sharded and target.device.type != device.type:
        raise EncoderError(
            f"Expected the target's shards on {device.type}, where this process computes, got {target.device.type}. "
            "Give `fully_shard` a mesh of such devices and no CPUOffloadPolicy, and load the weights."
        )


def require_fitting_config(config: PeftConfig, model: nn.Module) -> None:
    """Nothing, once an adapter's initial values are seen not to come from weights that are sharded.

    Raises:
        PlatonicError: If they do; PEFT would read one process's shard, or none.
    """
    from peft import LoraConfig

    if not sharded_modules(model):
        return
    start = str(config.peft_type.value)
    fits = start in _METHODS
    if isinstance(config, LoraConfig):
        start = f"LORA with use_dora={config.use_dora}, init_lora_weights={config.init_lora_weights!r}"
        fits = not config.use_dora and config.init_lora_weights in (True, False, "gaussian")
    if not fits:
        raise PlatonicError(
            f"Expected an adapter that starts without looking at the weights, for a target sharded by FSDP, got "
            f"{start}. Use LoRA without DoRA and with its default initial values, or one of {sorted(_METHODS)}."
        )


def require_whole(model: nn.Module) -> None:
    """Nothing, once every trainable tensor is seen to be whole.

    Raises:
        PlatonicError: If the adapter trains weights of the target that are sharded; some are named.
    """
    split = [name for name, p in model.named_parameters() if p.requires_grad and _placements(p)]
    if split:
        raise PlatonicError(
            f"Expected an adapter of new tensors alone, for a target sharded by FSDP, got {len(split)} that are the "
            f"target's own, or copies: {', '.join(split[:4])}{', ...' if len(split) > 4 else ''}. Leave `bias` and "
            "`modules_to_save` out."
        )


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Puts the mean over all processes in the place of these gradients, in one exchange."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    mean = sum_over_processes(torch.cat([g.flatten() for g in gradients])) / process_state().num_processes
    for gradient, found in zip(gradients, mean.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(found.view_as(gradient))


def whole(weight: Tensor) -> Tensor:
    """A weight, gathered from all processes where it's sharded; all of them have to ask."""
    gather = getattr(weight, "full_tensor", None)
    return weight if gather is None else cast("Tensor", gather())


def name_plain_class(model: PeftModel) -> None:
    """Lets PEFT save the name of the model's own class as the adapter's base: FSDP's can't be imported."""
    inner: Any = model.get_base_model()
    if inner in sharded_modules(inner):
        plain = type(inner).__mro__[2]  # after FSDP's own class for it and FSDPModule
        model._get_base_model_class = lambda is_prompt_tuning=False: plain


def _placements(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(getattr(tensor, "placements", ()))
