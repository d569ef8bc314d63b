"""The tuner: which layers are edited, on which base, with which adapters at which strengths."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

import torch
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn

from .._checks import finite, instance
from .._pooling import features_of
from ..errors import BaseMismatchError, PlatonicError
from ..operator import Operator
from .base import check_base, record_base, remedy
from .capture import module_at
from .config import PlatonicConfig
from .layer import Linear, PlatonicLayer

__all__ = ["PlatonicModel"]

# Parts of a state dict's keys besides the edited layer's path. PEFT drops keys with another adapter's name in them.
_KEY_PARTS = frozenset({"base_model", "model", "base_layer", "platonic_left", "platonic_right"})


class _Configs(dict[str, PlatonicConfig]):
    """Configurations by adapter name, and what to do where PEFT looks up one that was deleted.

    PEFT 0.21 goes on naming a deleted adapter as `PeftModel.active_adapter` while several others act, and the tuner
    can't reach that attribute.
    """

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(
            f"Expected an adapter among {sorted(self)}, got {name!r}. If that was deleted while several others act, "
            "PEFT still takes it for the active one: call `set_adapter` with the name of one that is there, then "
            "`set_strengths` again."
        )


class PlatonicModel(BaseTuner):  # type: ignore[misc, unused-ignore]
    """A model whose embedding layer carries operators, each with a signed strength.

    Made by `peft.get_peft_model(model, PlatonicConfig(...))` or `peft.PeftModel.from_pretrained(model, folder)`; the
    methods below are reached through the `PeftModel` as well, except `set_adapter`, whose list form lives here:
    `peft_model.base_model.set_adapter([...])`.
    """

    prefix: str = "platonic_"
    tuner_layer_cls = PlatonicLayer
    target_module_mapping: ClassVar[dict[str, list[str]]] = {}

    def __init__(
        self, model: nn.Module, peft_config: PlatonicConfig | dict[str, PlatonicConfig], adapter_name: str, **more: Any
    ) -> None:
        configs = peft_config if isinstance(peft_config, dict) else {adapter_name: peft_config}
        super().__init__(model, _Configs(configs), adapter_name, **more)

    def _prepare_adapter_config(self, peft_config: PlatonicConfig, model_config: dict[str, Any]) -> PlatonicConfig:
        """The adapter's own copy of its configuration, with target and site filled in.

        A copy, because what is recorded below belongs to this model: one configuration may be put on several.
        """
        name = self._name_of(peft_config)
        config = copy.deepcopy(peft_config)
        if config.target_modules is None:
            if not hasattr(getattr(self.model, "config", None), "model_type"):
                raise PlatonicError(
                    f"Expected `target_modules` and `site` for a {type(self.model).__name__}, which isn't a "
                    "transformers model, got None. Name the linear layer that writes the embedding."
                )
            # Looked up here since most uses of this module need no model family.
            from ..encoders.families import edit_site

            site = edit_site(self.model)
            config.target_modules = {site.module}
            config.site = config.site or site.kind
        config.site = config.site or "output"
        self.peft_config[name] = config
        return config

    def _prepare_model(self, peft_config: PlatonicConfig, model: nn.Module) -> None:
        """Check names and base before anything is changed, and record the base where it isn't yet."""
        name = self._name_of(peft_config)
        targets = self._targets(peft_config, model)
        self._check_names(name, targets)
        if peft_config.base_shape and not targets:
            raise BaseMismatchError(
                f"Expected a base model with {_listed(peft_config.base_shape)}, the layers adapter {name!r} was made "
                f"for, got a {type(model).__name__} without. {remedy(peft_config)}"
            )
        for key, layer in targets.items():
            if isinstance(model.get_submodule(key.rpartition(".")[0]), nn.MultiheadAttention):
                raise PlatonicError(
                    f"Expected a linear layer that is called, got `{key}` inside torch.nn.MultiheadAttention, which "
                    "reads the weight itself: an edit would do nothing. Choose another layer."
                )
            check_base(name, peft_config, key, layer)
        for feature in features_of(peft_config.features or ()):
            module_at(model, feature)
        for key, layer in targets.items():
            record_base(peft_config, key, layer)

    def _create_and_replace(
        self,
        peft_config: PlatonicConfig,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        *,
        parameter_name: str | None = None,
    ) -> None:
        if isinstance(target, PlatonicLayer):
            target.update_layer(adapter_name, peft_config)
            target.read_features(self.model)
            return
        layer = Linear(target, adapter_name, peft_config)
        layer.read_features(self.model)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def _name_of(self, config: PlatonicConfig) -> str:
        names: list[str] = [name for name, other in self.peft_config.items() if other is config]
        return names[0]

    def _targets(self, config: PlatonicConfig, model: nn.Module) -> dict[str, nn.Module]:
        """The modules that PEFT is about to edit, by name."""
        tuned = tuple(f"{key}." for key, module in model.named_modules() if isinstance(module, BaseTunerLayer))
        return {
            key: module
            for key, module in model.named_modules()
            if key and not key.startswith(tuned) and self._check_target_module_exists(config, key)
        }

    def _check_names(self, new: str, targets: dict[str, nn.Module]) -> None:
        """Refuse adapter names under which PEFT loses weights, or torch refuses the parameter."""
        if not new or "." in new or new.startswith("/") or hasattr(nn.ParameterDict(), new):
            raise PlatonicError(
                f"Expected an adapter name that can be part of a parameter's name, got {new!r}. Avoid dots, a leading "
                "slash and the names of torch.nn.ParameterDict's methods."
            )
        paths = [*targets, *(key for key, _ in self._layers())]
        taken = _KEY_PARTS.union(*(path.split(".") for path in paths))
        for name in self.peft_config:
            if name in taken:
                raise PlatonicError(
                    f"Expected an adapter name that isn't part of an edited layer's name, got {name!r}: PEFT would "
                    f"leave other adapters' weights out of their files. Choose another than {_listed(taken)}."
                )

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: PlatonicConfig, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """The file's tensors under the model's names; PEFT would only warn of missing ones and drop foreign ones."""
        mapped: dict[str, Tensor] = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        own = {
            f"{key}.{part}.{adapter_name}": getattr(layer, part)[adapter_name]
            for key, layer in model.named_modules()
            if isinstance(layer, PlatonicLayer) and adapter_name in layer.platonic_left
            for part in layer.adapter_layer_names
        }
        missing = sorted(own.keys() - mapped.keys())
        known = model.state_dict().keys()
        # A model injected without a PeftModel has no such prefix; PEFT takes it off after this.
        unexpected = sorted(k for k in mapped if k not in known and k.removeprefix("base_model.model.") not in known)
        if missing or unexpected:
            raise PlatonicError(
                f"Expected exactly the tensors of adapter {adapter_name!r} in its file, got {_listed(missing)} "
                f"missing and {_listed(unexpected)} unexpected. Save it again, or load it on the model it belongs to."
            )
        for key, parameter in own.items():
            if mapped[key].shape != parameter.shape:
                raise BaseMismatchError(
                    f"Expected {tuple(parameter.shape)} for `{key}`, got {tuple(mapped[key].shape)} in the adapter's "
                    f"file, with r = {config.r} in its configuration. {remedy(config)}"
                )
            if not bool(mapped[key].isfinite().all()):
                raise PlatonicError(f"Expected finite values in `{key}`, got NaN or infinity. Solve it again.")
        return mapped

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        """Raise half-precision factors to float32 in place, so that a frozen adapter stays frozen."""
        for _, layer in self._layers() if autocast_adapter_dtype else ():
            for container in (layer.platonic_left, layer.platonic_right):
                if adapter_name in container and container[adapter_name].dtype in (torch.float16, torch.bfloat16):
                    container[adapter_name].data = container[adapter_name].data.float()

    def train(self, mode: bool = True) -> PlatonicModel:
        """Training mode for all but the batch normalisations of the frozen base.

        Their running statistics would move (CLAP's audio tower has one), and they aren't part of an adapter: neither
        the disabled model nor the saved adapter on a fresh base would be what was trained.
        """
        super().train(mode)
        for module in self.model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self

    def set_adapter(self, adapter_name: str | list[str], inference_mode: bool = False) -> None:
        """Make exactly these adapters active; several add up.

        Args:
            adapter_name: One name, or a list.
            inference_mode: Freeze them.

        Raises:
            PlatonicError: If one isn't on the model.
        """
        names = [adapter_name] if isinstance(adapter_name, str) else list(adapter_name)
        self._check_exist(names)
        super().set_adapter(adapter_name, inference_mode=inference_mode)

    def set_strengths(self, strengths: dict[str, float]) -> None:
        """Make exactly these adapters active, each at its strength, e.g. `{"cars": 1.5, "dogs": -0.7}`.

        The strengths are saved with the adapters. Adapters loaded for inference stay frozen. The PeftModel's
        `active_adapters` follows; its `active_adapter`, which can't name several, doesn't. So before that one is
        deleted while several others act, make another one it by `peft_model.set_adapter(name)`.

        Raises:
            PlatonicError: If there is none, one isn't finite, or an adapter isn't on the model.
        """
        instance(strengths, "strengths", dict, 'Pass {"adapter": strength}.')
        checked = {name: finite(value, f"strength of {name!r}") for name, value in strengths.items()}
        if not checked:
            raise PlatonicError("Expected at least one strength, got none. `disable_adapter()` gives the base model.")
        self._check_exist(checked)
        # First unmerges, if need be: what is merged carries the former strengths.
        self.set_adapter(list(checked), inference_mode=True)
        trainable = [name for name in checked if not self.peft_config[name].inference_mode]
        self.set_requires_grad(trainable, True)
        for name, value in checked.items():
            self.set_strength(name, value)

    def set_strength(self, adapter_name: str, strength: float) -> None:
        """Set one adapter's strength, saved with it; which adapters are active stays.

        Raises:
            PlatonicError: If it isn't finite, or the adapter isn't on the model or is merged.
        """
        value = finite(strength, f"strength of {adapter_name!r}")
        layers = self._edited(adapter_name).values()
        if any(adapter_name in layer.merged_adapters for layer in layers):
            raise PlatonicError(f"Expected adapter {adapter_name!r} to be live, got a merged one. Unmerge it first.")
        self.peft_config[adapter_name].strength = value
        for layer in layers:
            layer.platonic_strength[adapter_name] = value

    def get_strengths(self) -> dict[str, float]:
        """The active adapters' strengths."""
        return {name: self.peft_config[name].strength for name in self.active_adapters}

    def load_factors(self, adapter_name: str, left: Tensor, right: Tensor, *, module: str | None = None) -> None:
        """Replace an adapter's factors by a solved operator's.

        Args:
            adapter_name: An adapter on the model.
            left: Shape (p, r); copied as float32.
            right: Shape (r, d); copied as float32. The rank may be another than before, except where the adapter
                edits several layers.
            module: Name of the edited layer; needed only where there are several.

        Raises:
            PlatonicError: If a shape doesn't fit, a value isn't finite, the adapter is merged, or no layer is meant.
        """
        layers = self._edited(adapter_name)
        layer = self._one(layers, adapter_name, module)
        config = self.peft_config[adapter_name]
        if len(layers) > 1 and left.shape[-1] != config.r:
            raise PlatonicError(
                f"Expected rank {config.r} for each of the {len(layers)} layers adapter {adapter_name!r} edits, got "
                f"{left.shape[-1]}. Pad with zeros, or use one adapter a layer."
            )
        layer.load_factors(adapter_name, left, right)
        config.r = int(left.shape[1])

    def get_operator(self, adapter_name: str, *, module: str | None = None) -> Operator:
        """An adapter's operator, without its strength.

        Args:
            adapter_name: An adapter on the model.
            module: Name of the edited layer; needed only where there are several.

        Returns:
            Copies of the factors, float32, on the CPU.
        """
        operator = self._one(self._edited(adapter_name), adapter_name, module).operator(adapter_name)
        return replace(operator, left=operator.left.cpu().clone(), right=operator.right.cpu().clone())

    def add_weighted_adapter(self, adapters: Sequence[str], weights: Sequence[float], adapter_name: str) -> None:
        """Add the adapter that does exactly what `adapters` do together, each at `weight * strength`.

        The factors are put side by side (or added, where adapters share their right factor), and brought back to the
        smallest exact rank in float64 where they grow wider than the operator. Strength of the result: 1. Not made
        active.

        Args:
            adapters: Names of adapters on the model; repeats count twice.
            weights: One signed finite factor each.
            adapter_name: Name of the new adapter.

        Raises:
            PlatonicError: If a name is unknown or taken, the numbers differ, a weight isn't finite, or two adapters
                edit one layer at different sites or read different features.
        """
        if adapter_name in self.peft_config:
            raise PlatonicError(f"Expected a new adapter name, got {adapter_name!r}, which is taken. Delete it first.")
        if not adapters or len(adapters) != len(weights):
            raise PlatonicError(f"Expected a weight for each adapter, got {len(weights)} for {len(adapters)}.")
        self._check_exist(adapters)
        factors = [finite(weight, f"weight of {name!r}") for name, weight in zip(adapters, weights, strict=True)]
        parts = [self.peft_config[name] for name in adapters]
        if len({str(part.features) for part in parts if part.features}) > 1:
            raise PlatonicError(
                "Expected adapters that read the same inner features, got different ones. Solve them on one view of "
                "the target."
            )
        sums: dict[str, Operator] = {}
        for name, factor, part in zip(adapters, factors, parts, strict=True):
            for key in self._edited(name):
                term = factor * part.strength * self.get_operator(name, module=key)
                sums[key] = sums[key] + term if key in sums else term
        sums = {key: operator.compressed() for key, operator in sums.items()}
        sites = {operator.site for operator in sums.values()}
        if len(sites) > 1:
            raise PlatonicError(f"Expected adapters of one site, got {sorted(sites)}. Add them up one site at a time.")
        config = replace(
            parts[0],
            r=max(operator.rank for operator in sums.values()),
            strength=1.0,
            site=sites.pop(),
            target_modules=set(sums),
            exclude_modules=None,
            base_shape=_united([part.base_shape for part in parts]),
            base_sketch=_united([part.base_sketch for part in parts]),
            provenance={
                "sum": [
                    {"adapter": name, "weight": factor, "strength": part.strength, "provenance": part.provenance}
                    for name, factor, part in zip(adapters, factors, parts, strict=True)
                ]
            },
        )
        self.peft_config[adapter_name] = config
        try:
            self.inject_adapter(self.model, adapter_name)
        except BaseException:  # Ctrl-C leaves no configuration without its adapter, too
            del self.peft_config[adapter_name]
            raise
        for key, operator in sums.items():
            self.load_factors(adapter_name, *_padded(operator, config.r), module=key)

    def unload(self) -> nn.Module:
        """The base model as it was, with nothing merged and no adapter left."""
        for _, layer in self._layers():
            if layer.merged:
                layer.unmerge()
        model: nn.Module = super().unload()
        return model

    def merge_adapter(self, adapter_names: list[str] | None = None, safe_merge: bool = False) -> None:
        """Write adapters into the weights; all of them or, where one can't be, none.

        Args:
            adapter_names: Which; None: the active ones.
            safe_merge: Refuse a result that isn't finite.

        Raises:
            PlatonicError: If one reads inner features.
        """
        self._require_mergeable(adapter_names)
        super().merge_adapter(adapter_names=adapter_names, safe_merge=safe_merge)

    def _unload_and_optionally_merge(
        self, merge: bool = True, *args: Any, adapter_names: list[str] | None = None, **kwargs: Any
    ) -> nn.Module:
        if merge:
            self._require_mergeable(adapter_names)
        layers = [layer for _, layer in self._layers()]
        model: nn.Module = super()._unload_and_optionally_merge(merge, *args, adapter_names=adapter_names, **kwargs)
        for layer in layers:
            layer.stop_reading()
        return model

    def _require_mergeable(self, adapter_names: list[str] | None) -> None:
        names = self.active_adapters if adapter_names is None else adapter_names
        for _, layer in self._layers():
            layer.require_mergeable(names)

    def _check_merge_allowed(self) -> None:
        """Refuse to merge into a weight that another layer shares and this method would change for both."""
        super()._check_merge_allowed()
        names: dict[int, list[str]] = {}
        for key, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(key)
        for _, layer in self._layers():
            shared = names.get(id(getattr(layer.get_base_layer(), "weight", None)), [])
            if len(shared) > 1:
                raise PlatonicError(
                    f"Expected an edited weight of its own, got one shared by {_listed(shared)}. Keep the adapter "
                    "live, or untie the weights first."
                )

    @contextlib.contextmanager
    def _enable_peft_forward_hooks(self, *args: Any, **kwargs: Any) -> Iterator[None]:
        """PEFT's entry for one adapter a sample, which it would otherwise pass over in silence."""
        if kwargs.get("adapter_names") is not None:
            raise PlatonicError(
                "Expected no `adapter_names`, got some: one adapter a sample isn't supported by this method. "
                "Run the samples of each adapter as a batch of their own."
            )
        yield

    def _layers(self, adapter_name: str | None = None) -> Iterator[tuple[str, PlatonicLayer]]:
        for key, module in self.model.named_modules():
            if isinstance(module, PlatonicLayer) and (adapter_name is None or adapter_name in module.platonic_left):
                yield key, module

    def _edited(self, adapter_name: str) -> dict[str, PlatonicLayer]:
        self._check_exist([adapter_name])
        return dict(self._layers(adapter_name))

    def _one(self, layers: dict[str, PlatonicLayer], adapter_name: str, module: str | None) -> PlatonicLayer:
        if module is None and len(layers) == 1:
            return next(iter(layers.values()))
        if module is None or module not in layers:
            raise PlatonicError(
                f"Expected `module` to be one of the layers adapter {adapter_name!r} edits, got {module!r}. "
                f"Choose among {_listed(layers)}."
            )
        return layers[module]

    def _check_exist(self, names: Sequence[str] | dict[str, float]) -> None:
        unknown = [name for name in names if name not in self.peft_config]
        if unknown:
            raise PlatonicError(
                f"Expected names of adapters on the model, got {_listed(unknown)}. "
                f"There are {_listed(self.peft_config)}."
            )


def _united(parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    return {key: value for part in parts for key, value in (part or {}).items()} or None


def _padded(operator: Operator, rank: int) -> tuple[Tensor, Tensor]:
    """The factors with columns and rows of zeros up to `rank`."""
    extra = rank - operator.rank
    return nn.functional.pad(operator.left, (0, extra)), nn.functional.pad(operator.right, (0, 0, 0, extra))


def _listed(names: Any) -> str:
    """A few names for a message."""
    shown = sorted(names)
    return ", ".join(f"`{name}`" for name in shown[:8]) + (", …" if len(shown) > 8 else "") if shown else "none"
