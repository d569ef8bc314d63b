"""Which adapter is trained: the paper's recipe for any family, the closed form as its start, and what is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from .._checks import instance
from ..encoders.encoder import DualEncoder
from ..encoders.families import bare_model, edited_linear
from ..errors import EncoderError, PlatonicError
from ..operator import Operator
from .objective import ProbeTower
from .sharded import name_plain_class, require_fitting_config, require_whole, reshard, whole

if TYPE_CHECKING:
    from peft import LoraConfig, PeftConfig, PeftModel

__all__ = [
    "add_adapter",
    "default_lora_config",
    "require_gradients",
    "taken_back_on_errors",
    "with_closed_form",
    "write_closed_form",
]

_RANK, _ALPHA = 16, 32
_QUERY_VALUE = re.compile(r"(q|v|query|value)(_?proj|_?lin)?|to_[qv]")
_FUSED = re.compile(r"(in_proj_)?qkv(_?proj)?|query_key_value|c_attn|in_proj")


def default_lora_config(target: DualEncoder, batch: Mapping[str, Tensor]) -> LoraConfig:
    """The paper's adapter for this target: rank 16, alpha 32, no dropout, on the probe tower's q and v projections.

    The layers are found by running the tower: only linear layers whose `forward` is called count, so that the
    inside of an `nn.MultiheadAttention`, whose weights are read around any adapter, is left out. A tower without q
    and v projections gets its fused qkv layers; one without attention its pointwise layers (linear, or 1 x 1
    convolutions), but for the one that writes the embedding.

    Args:
        target: Any family, with or without an edit site.
        batch: Some probes, from `target.preprocess`.

    Returns:
        A config whose `target_modules` are full names within the model.

    Raises:
        EncoderError: If the tower has no such layer.
    """
    from peft import LoraConfig

    bare = bare_model(target.model)
    called: dict[str, nn.Module] = {}
    hooks = [
        module.register_forward_hook(lambda module, *_, name=name: called.update({name: module}))
        for name, module in bare.named_modules()
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and _is_pointwise(module))
    ]
    try:
        target.probe_features(batch, design=False)
    finally:
        for hook in hooks:
            hook.remove()
    last = target.site.module if target.family.site is not None else None
    linear = [name for name, module in called.items() if isinstance(module, nn.Linear)]
    candidates = (
        [name for name in linear if _QUERY_VALUE.fullmatch(_end(name))],
        [name for name in linear if _FUSED.fullmatch(_end(name))],
        [name for name in called if name != last],
    )
    chosen = next((names for names in candidates if names), None)
    if chosen is None:
        raise EncoderError(
            f"Expected attention, linear or 1 x 1 convolution layers in the probe tower of {target.family.name}, got "
            "none. Pass a `lora_config` whose `target_modules` name the layers to train."
        )
    return LoraConfig(r=_RANK, lora_alpha=_ALPHA, lora_dropout=0.0, target_modules=sorted(chosen))


def add_adapter(target: DualEncoder, config: PeftConfig, adapter_name: str, seed: int) -> PeftModel:
    """The target's model, put inside a `PeftModel` with a new adapter whose initial values the seed alone decides.

    Raises:
        PlatonicError: If the config is of a kind that this loop can't train as its authors meant it, or not on shards.
        EncoderError: If the target already is a PEFT model.
    """
    from peft import PeftConfig, PeftType, get_peft_model

    instance(config, "lora_config", PeftConfig, "Make one with `peft.LoraConfig(...)`, or leave it out.")
    if hasattr(target.model, "peft_config"):
        raise EncoderError(
            'Expected a target without adapters for method="lora", got a PeftModel. Merge what it has with '
            "`target.model = target.model.merge_and_unload()`, or load the base anew."
        )
    if config.task_type is not None:
        raise PlatonicError(
            f"Expected `task_type` None in the adapter's config, got {config.task_type!r}: PEFT would call the model "
            "with arguments that dual encoders don't take. Leave it out."
        )
    if config.is_prompt_learning or config.peft_type == PeftType.ADALORA:
        raise PlatonicError(
            f"Expected an adapter that lives in the probe tower's layers and trains without a schedule of its own, "
            f"got {config.peft_type.value}. Use LoRA, DoRA, LoHa, IA3 or another such method."
        )
    require_fitting_config(config, target.model)
    reshard(target.model)  # or PEFT would freeze gathered weights, which don't last
    with torch.random.fork_rng(_devices(target)):
        torch.manual_seed(seed)
        model = get_peft_model(target.model, config, adapter_name=adapter_name)
    name_plain_class(model)
    target.model = model
    require_whole(model)
    return model


@contextmanager
def taken_back_on_errors(target: DualEncoder) -> Iterator[None]:
    """The target's model gets its own layers back, trainable as they were, where an error ends what's inside."""
    model, bare = target.model, bare_model(target.model)
    reshard(bare)
    layers = [(module, dict(module.named_children())) for module in bare.modules()]
    required = {parameter: parameter.requires_grad for parameter in bare.parameters()}
    try:
        yield
    except BaseException:  # Ctrl-C, too
        if target.model is not model:
            cast("PeftModel", target.model).unload()
            target.model = model
        for module, children in layers:  # unloading leaves copies that were trained, and layers of half an adapter
            for name, child in children.items():
                setattr(module, name, child)
        for parameter, was in required.items():
            parameter.requires_grad_(was)
        raise
    finally:
        reshard(bare)


def require_gradients(tower: ProbeTower, batch: Mapping[str, Tensor]) -> None:
    """Nothing, once every trainable tensor is seen to act on the probes' embeddings.

    Args:
        tower: With the adapter in its model.
        batch: Some probes, from `DualEncoder.preprocess`.

    Raises:
        PlatonicError: If there's nothing to train, or tensors get no gradient; some are named.
    """
    trainable = {name: p for name, p in tower.model.named_parameters() if p.requires_grad}
    if not trainable:
        raise PlatonicError("Expected an adapter with trainable tensors, got none. Set `inference_mode=False`.")
    with torch.enable_grad():
        unit = tower(batch)
        gradients: Sequence[Tensor | None] = [None] * len(trainable)
        if unit.requires_grad:
            gradients = torch.autograd.grad(unit.sum(), list(trainable.values()), allow_unused=True)
    without = [name for name, gradient in zip(trainable, gradients, strict=True) if gradient is None]
    if without:
        raise PlatonicError(
            f"Expected a gradient in each of {len(trainable)} trainable tensors, got none in {len(without)}: "
            f"{', '.join(without[:4])}{', ...' if len(without) > 4 else ''}. They aren't part of the probe tower, or "
            "their layer's weight is read around the adapter, as inside an nn.MultiheadAttention. Name other "
            "`target_modules`, in the probe tower, or leave `lora_config` out."
        )


def with_closed_form(config: PeftConfig, target: DualEncoder, operator: Operator) -> LoraConfig:
    """The config with the target's last layer added, at the operator's rank and a scaling of 1.

    Args:
        config: A `LoraConfig` that leaves the last layer alone.
        target: With an edit site.
        operator: For that site.

    Returns:
        A new config. Where the last layer has a bias it has `lora_bias=True`, which PEFT knows only for all layers
        at once.

    Raises:
        PlatonicError: If a closed-form edit and this config aren't one plain LoRA together.
    """
    from peft import LoraConfig

    module = target.site.module
    layer = edited_linear(target.model, target.site)
    names = config.target_modules if isinstance(config, LoraConfig) else None
    if not isinstance(config, LoraConfig) or isinstance(names, str) or not names:
        raise PlatonicError(
            f'Expected a LoraConfig with a list of `target_modules` for warm_start="closed_form", got '
            f"{type(config).__name__} with {names!r}. The closed form is saved as a part of the same plain LoRA."
        )
    kept = (config.use_dora, config.use_rslora, config.bias, config.init_lora_weights)
    if kept != (False, False, "none", True):
        raise PlatonicError(
            'Expected a plain LoRA for warm_start="closed_form" (no DoRA or rsLoRA, bias="none", the default '
            f"initial values), got use_dora={kept[0]}, use_rslora={kept[1]}, bias={kept[2]!r}, "
            f"init_lora_weights={kept[3]!r}. The sum of the two wouldn't be exact."
        )
    others = _targeted(target.model, names)
    if module in others:
        raise PlatonicError(
            f"Expected `target_modules` without {module}, which the closed form writes into, got {sorted(names)}."
        )
    plain = [name for name in others if getattr(bare_model(target.model).get_submodule(name), "bias", None) is None]
    biased = getattr(layer, "bias", None) is not None
    if biased and plain:
        raise PlatonicError(
            f"Expected layers with a bias beside {module}, which has one that the closed form edits, got "
            f"{', '.join(plain[:4])} without: PEFT's `lora_bias` holds for all layers or none. "
            'Leave `warm_start` out, or use method="closed_form".'
        )
    joined = copy.deepcopy(config)
    joined.target_modules = {*others, module}
    joined.lora_bias = biased
    joined.rank_pattern = {**config.rank_pattern, module: operator.rank}
    joined.alpha_pattern = {**config.alpha_pattern, module: operator.rank}
    return joined


def write_closed_form(model: PeftModel, target: DualEncoder, operator: Operator, adapter_name: str) -> None:
    """Writes the operator, at s = 1, into the last layer's part of a `with_closed_form` LoRA, and freezes it.

    The other layers' `lora_bias` stays at its initial zero, frozen: without a warm start there would be none.
    """
    layer: Any = bare_model(model).get_submodule(target.site.module)
    base = edited_linear(model, target.site)
    down, up, offset = operator.update(
        whole(base.weight.detach()).cpu(), None if base.bias is None else whole(base.bias.detach()).cpu()
    )
    parts = layer.lora_A[adapter_name], layer.lora_B[adapter_name]
    with torch.no_grad():
        parts[0].weight.copy_(down)
        parts[1].weight.copy_(up)
        if offset is not None:
            parts[1].bias.copy_(offset)
    for part in parts:
        part.requires_grad_(False)
    for name, parameter in bare_model(model).named_parameters():
        if name.endswith(f"lora_B.{adapter_name}.bias"):
            parameter.requires_grad_(False)


def _is_pointwise(layer: nn.Conv2d) -> bool:
    return layer.kernel_size == (1, 1) and layer.groups == 1


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def _targeted(model: nn.Module, names: Any) -> list[str]:
    ends = tuple(names)
    found = [name for name, _ in bare_model(model).named_modules()]
    return [name for name in found if name in ends or name.endswith(tuple("." + end for end in ends))]


def _devices(target: DualEncoder) -> list[torch.device]:
    return [target.device] if target.device.type == "cuda" else []
