"""The edited linear layer: live, merged and unmerged again."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer, check_adapters_to_merge
from torch import Tensor, nn

from .._checks import finite, matrix
from .._pooling import Feature, features_of
from ..errors import PlatonicError
from ..operator import NOT_MERGEABLE, Operator, SiteKind
from .capture import FeatureReader, stacked
from .config import PlatonicConfig
from .fingerprint import has_bias, layer_shape, plain_weight

__all__ = ["Linear", "PlatonicLayer"]


class PlatonicLayer(BaseTunerLayer):  # type: ignore[misc, unused-ignore]
    """The adapters of one linear layer: two thin factors, a strength and a site each.

    Args:
        base_layer: A linear layer, or another method's layer around one.

    Raises:
        PlatonicError: If `base_layer` has no `in_features` and `out_features`.

    Attributes:
        platonic_left: Per adapter a parameter of shape (p, r), float32.
        platonic_right: Per adapter a parameter of shape (r, d), float32.
        platonic_strength: Per adapter its signed strength.
        platonic_site: Per adapter "output" (p = d), "input" (p = in_features, and one more for a bias) or "features"
            (p = in_features, the sizes of the features, and one more).
        platonic_features: Per adapter what it reads from inner modules.
    """

    adapter_layer_names: tuple[str, ...] = ("platonic_left", "platonic_right")
    other_param_names: tuple[str, ...] = ("platonic_strength", "platonic_site", "platonic_features")

    def __init__(self, base_layer: nn.Module) -> None:
        self.base_layer = base_layer
        self.platonic_left = nn.ParameterDict({})
        self.platonic_right = nn.ParameterDict({})
        self.platonic_strength: dict[str, float] = {}
        self.platonic_site: dict[str, SiteKind] = {}
        self.platonic_features: dict[str, tuple[Feature, ...]] = {}
        self._reader = FeatureReader()
        self.merged_adapters: list[str] = []
        self._disable_adapters = False
        self._original: tuple[Tensor, Tensor | None] | None = None
        self.out_features, self.in_features = layer_shape(self.get_base_layer())

    def update_layer(self, adapter_name: str, config: PlatonicConfig) -> None:
        """Add an adapter, or start an existing one anew, as its configuration says."""
        site: SiteKind = config.site or "output"
        features = features_of(config.features or ())
        left = torch.empty(self.design_size(site, features), config.r)
        right = torch.zeros(config.r, self.out_features)
        nn.init.normal_(left, std=left.shape[0] ** -0.5)
        if not config.init_weights:
            nn.init.normal_(right, std=config.r**-0.5)
        self.platonic_left[adapter_name] = nn.Parameter(left)
        self.platonic_right[adapter_name] = nn.Parameter(right)
        self.platonic_strength[adapter_name] = finite(config.strength, "strength")
        self.platonic_site[adapter_name] = site
        self.platonic_features[adapter_name] = features
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)

    def design_size(self, site: SiteKind, features: Sequence[Feature] = ()) -> int:
        """Rows `p` of a left factor at this site of this layer."""
        if site == "features":
            return self.in_features + sum(feature.size for feature in features) + 1
        return self.out_features if site == "output" else self.in_features + has_bias(self.get_base_layer())

    def load_factors(self, adapter_name: str, left: Tensor, right: Tensor) -> None:
        """Replace an adapter's factors; the rank may change.

        Args:
            adapter_name: An adapter of this layer.
            left: Shape (p, r); copied as float32.
            right: Shape (r, d); copied as float32.

        Raises:
            PlatonicError: If a shape doesn't fit, a value isn't finite in float32, or the adapter is merged.
        """
        if adapter_name in self.merged_adapters:
            raise PlatonicError(f"Expected adapter {adapter_name!r} to be live, got a merged one. Unmerge it first.")
        size = self.design_size(self.platonic_site[adapter_name], self.platonic_features[adapter_name])
        matrix(left, "left", (size, None))
        matrix(right, "right", (left.shape[1], self.out_features))
        if left.shape[1] < 1:
            raise PlatonicError("Expected factors of rank 1 or more, got rank 0. Delete the adapter instead.")
        # Always copies: two adapters may be given the same factors, and safetensors refuses shared memory.
        new = {
            "left": left.detach().to(torch.float32, copy=True),
            "right": right.detach().to(torch.float32, copy=True),
        }
        for name, value in new.items():
            if not bool(value.isfinite().all()):
                raise PlatonicError(f"Expected finite values in `{name}`, got NaN or infinity. Solve in float64.")
        for name, value in new.items():
            container = getattr(self, f"platonic_{name}")
            old = container[adapter_name]
            placed = value.to(self._base_device() if old.is_meta else old.device).contiguous()
            container[adapter_name] = nn.Parameter(placed, requires_grad=old.requires_grad)

    def read_features(self, model: nn.Module) -> None:
        """Watch the modules of this model that the layer's adapters read features from, and no others.

        Raises:
            BaseMismatchError: If the model hasn't got one of them.
        """
        self._reader.watch(model, (feature for features in self.platonic_features.values() for feature in features))
        self._reader.keep_only(feature for features in self.platonic_features.values() for feature in features)

    def stop_reading(self) -> None:
        """Take the layer's hooks off other modules, before it is replaced by its base layer."""
        self._reader.keep_only(())

    def delete_adapter(self, adapter_name: str) -> None:
        """Remove an adapter, and the hooks that it alone needed."""
        super().delete_adapter(adapter_name)
        self._reader.keep_only(feature for features in self.platonic_features.values() for feature in features)

    def operator(self, adapter_name: str) -> Operator:
        """The adapter's operator, its strength not included; detached and shared with the parameters."""
        left, right = self.platonic_left[adapter_name], self.platonic_right[adapter_name]
        return Operator(left.detach(), right.detach(), self.platonic_site[adapter_name])

    def original(self) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the base layer as they are without any merged adapter, in its device and dtype.

        Raises:
            PlatonicError: If the base layer's weight isn't an ordinary floating-point matrix.
        """
        base = self.get_base_layer()
        if not plain_weight(base):
            raise PlatonicError(
                f"Expected a plain floating-point `torch.nn.Linear`, got {type(base).__name__}, whose weight can't be "
                "edited in place. Keep the adapter live, or load the base model unquantised."
            )
        if self._original is None:
            return base.weight.data, None if base.bias is None else base.bias.data
        # The model may have been moved or cast since the merge.
        weight, bias = self._original
        return weight.to(base.weight), None if bias is None else bias.to(base.bias)

    @property
    def can_merge(self) -> bool:
        """Whether the base layer's weight can be edited in place: an ordinary matrix, with no live adapter between."""
        between = isinstance(self.base_layer, BaseTunerLayer) and not self.base_layer.merged
        return plain_weight(self.get_base_layer()) and not between

    def require_mergeable(self, adapter_names: Sequence[str]) -> None:
        """Nothing, where none of the adapters reads inner features.

        Raises:
            PlatonicError: If one does.
        """
        if any(self.platonic_site.get(name) == "features" for name in adapter_names):
            raise PlatonicError(NOT_MERGEABLE)

    def get_delta_weight(self, adapter_name: str) -> Tensor:
        """What the adapter adds to the original weight, strength included: shape (out, in), float32 (or wider)."""
        return self._delta(adapter_name)[0]

    def get_delta_bias(self, adapter_name: str) -> Tensor | None:
        """What the adapter adds to the original bias, strength included: shape (out,); None without a bias."""
        return self._delta(adapter_name)[1]

    def supports_lora_conversion(self, adapter_name: str = "default") -> bool:
        """Whether a LoRA says exactly the same, so that PEFT's `save_as_lora` may be used: without a bias only."""
        base = self.get_base_layer()
        known = self.platonic_site.get(adapter_name) in ("output", "input")
        return known and plain_weight(base) and not has_bias(base)

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Write adapters into the base layer; always from its original weight, so the order doesn't matter.

        Args:
            safe_merge: Refuse a result that isn't finite.
            adapter_names: Which adapters; None: the active ones.

        Raises:
            PlatonicError: If the weight can't be edited, an adapter reads inner features, another method's layer lies
                between, or `safe_merge` finds NaN or infinity.
        """
        names = [name for name in check_adapters_to_merge(self, adapter_names) if name in self.platonic_left]
        if not names:
            return
        self.require_mergeable(names)
        if isinstance(self.base_layer, BaseTunerLayer) and not self.base_layer.merged:
            raise PlatonicError(
                f"Expected the {type(self.base_layer).__name__} of another PEFT method inside this layer to be merged "
                "first, got a live one. Merge that method's adapters by name, then this one."
            )
        weight, bias = self.original()
        dtype = torch.promote_types(weight.dtype, torch.float32)
        new_weight, new_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        merged = list(dict.fromkeys([*self.merged_adapters, *names]))
        for name in merged:
            delta_weight, delta_bias = self._delta(name)
            new_weight = new_weight + delta_weight
            new_bias = None if new_bias is None or delta_bias is None else new_bias + delta_bias
        new_weight = new_weight.to(weight.dtype)
        new_bias = None if bias is None or new_bias is None else new_bias.to(bias.dtype)
        if safe_merge and not all(bool(t.isfinite().all()) for t in (new_weight, new_bias) if t is not None):
            raise PlatonicError(
                f"Expected a finite merged weight, got NaN or infinity from {names}. Lower the strength, or load the "
                "base model in float32."
            )
        base = self.get_base_layer()
        self._original = (weight, bias)
        base.weight.data = new_weight
        if new_bias is not None:
            base.bias.data = new_bias
        self.merged_adapters = merged

    def unmerge(self) -> None:
        """Put the original weight and bias back, bit for bit."""
        if self._original is None:
            warnings.warn("Already unmerged. Nothing to do.", stacklevel=2)
            return
        base, (weight, bias) = self.get_base_layer(), self.original()
        base.weight.data = weight
        if bias is not None:
            base.bias.data = bias
        self._original = None
        self.merged_adapters = []

    @torch.no_grad()
    def _delta(self, adapter_name: str) -> tuple[Tensor, Tensor | None]:
        """Change of weight and bias, strength included, at least float32, on the device of the weight."""
        self.require_mergeable([adapter_name])
        weight, bias = self.original()
        dtype = torch.promote_types(weight.dtype, torch.float32)
        left = self.platonic_left[adapter_name].to(weight.device, dtype)
        right = self.platonic_right[adapter_name].to(weight.device, dtype) * self.platonic_strength[adapter_name]
        if self.platonic_site[adapter_name] == "output":
            delta_bias = None if bias is None else (bias.to(dtype) @ left) @ right
            return right.T @ (left.T @ weight.to(dtype)), delta_bias
        return (left[: self.in_features] @ right).T, None if bias is None else left[-1] @ right

    def _acting(self) -> list[str]:
        """The active adapters that this layer has."""
        return [name for name in self.active_adapters if name in self.platonic_left]

    def _base_device(self) -> torch.device | None:
        weight = getattr(self.get_base_layer(), "weight", None)
        return weight.device if isinstance(weight, Tensor) and not weight.is_meta else None

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move one adapter; PEFT's own version would also cast it to the base's dtype, and lose digits in bfloat16."""
        target = device if device is not None else self._base_device()
        for container in (self.platonic_left, self.platonic_right):
            if target is not None and adapter_name in container and not container[adapter_name].is_meta:
                container[adapter_name].data = container[adapter_name].data.to(target)


class Linear(nn.Module, PlatonicLayer):
    """A linear layer with adapters: `y + sum_i s_i D_i left_i right_i`, `D_i` one of `y`, `[u, 1]` and `[u, f, 1]`.

    Args:
        base_layer: The layer to edit.
        adapter_name: Name of the first adapter.
        config: Its configuration.
    """

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: PlatonicConfig) -> None:
        super().__init__()
        PlatonicLayer.__init__(self, base_layer)
        self._active_adapter: str | list[str] = adapter_name
        self.update_layer(adapter_name, config)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The edited output.

        Args:
            x: Shape (..., in_features).
            *args: Passed on to the base layer.
            **kwargs: Passed on to the base layer.

        Returns:
            Shape (..., out_features), the base layer's output dtype; the edit itself is computed in the factors'
            dtype, or the base's where that is wider.

        Raises:
            PlatonicError: If an adapter reads inner features and they weren't computed in the same forward pass.
        """
        rows = self._reader.take()
        if self.disable_adapters and self.merged:
            self.unmerge()
        y: Tensor = self.base_layer(x, *args, **kwargs)
        names = self._acting()
        if self.disable_adapters or self.merged or not names:
            return y
        dtype = torch.promote_types(y.dtype, self.platonic_left[names[0]].dtype)
        edited = y.to(dtype)
        for name in names:
            left: Tensor = self.platonic_left[name].to(dtype)
            right: Tensor = self.platonic_right[name].to(dtype)
            if self.platonic_site[name] == "output":
                coordinates = y.to(dtype) @ left
            else:
                coordinates = x.to(dtype) @ left[: self.in_features]
                if self.platonic_site[name] == "features":
                    inputs = x.shape[:-1].numel()
                    f = stacked(rows, self.platonic_features[name], inputs, edited)
                    # A pooling head hands on (b, 1, in_features).
                    coordinates = coordinates + (f @ left[self.in_features : -1]).reshape(*x.shape[:-1], -1)
                if len(left) > self.in_features:  # the ones column that stands for the bias
                    coordinates = coordinates + left[-1]
            edited = edited + self.platonic_strength[name] * (coordinates @ right)
        return edited.to(y.dtype)

    def __repr__(self) -> str:
        return "platonic." + super().__repr__()
