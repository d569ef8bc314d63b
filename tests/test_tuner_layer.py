"""The edited layer: its formula, merging and unmerging, precisions, other layers around and beneath it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from tiny import tiny_parts
from torch import Tensor, nn

from hf_platonic.errors import PlatonicError
from hf_platonic.operator import Operator
from hf_platonic.tuner import Linear, PlatonicConfig, PlatonicLayer

SITES = {
    "clip": ("visual_projection", "output"),
    "siglip": ("vision_model.head.mlp.fc2", "input"),
    "clap": ("audio_projection.linear2", "output"),
}


def inputs(family: str, *, seed: int = 0) -> dict[str, Tensor]:
    """Probes of a family, in the form its model takes."""
    generator = torch.Generator().manual_seed(seed)
    if family == "clap":
        return {"input_features": torch.randn(3, 1, 81, 64, generator=generator)}
    return {"pixel_values": torch.randn(3, 3, 16, 16, generator=generator)}


@torch.no_grad()
def features(model: Any, family: str) -> Tensor:
    """Unit probe embeddings (3, d) of a family's fixed probes."""
    dtype = next(model.parameters()).dtype
    batch = {key: value.to(dtype) for key, value in inputs(family).items()}
    getter = model.get_audio_features if family == "clap" else model.get_image_features
    return nn.functional.normalize(getter(**batch).pooler_output.float(), dim=-1)


def adapted(family: str = "clip", *names: str, r: int = 3, seed: int = 0, **options: Any) -> PeftModel:
    """A tiny model with random adapters on its own edit site; the first name is active."""
    model, _ = tiny_parts(family, seed=seed)
    names = names or ("cars",)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        options = {"r": r, "init_weights": False, "strength": 0.3, **options}
        peft_model = get_peft_model(model, PlatonicConfig(**options), adapter_name=names[0])
        for i, name in enumerate(names[1:], start=1):
            peft_model.add_adapter(name, PlatonicConfig(**{**options, "r": r + i}))
    return peft_model.eval()


def edited_layer(model: Any) -> Linear:
    return next(module for module in model.modules() if isinstance(module, Linear))


def plain(*, bias: bool = True, dtype: torch.dtype = torch.float32) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Linear(7, 5, bias=bias).to(dtype)


def layer(site: str = "output", *, bias: bool = True, dtype: torch.dtype = torch.float32, r: int = 2) -> Linear:
    """A layer from 7 to 5 with the adapters "cars" (active) and "dogs"."""
    with torch.random.fork_rng():
        torch.manual_seed(4)
        config = {"site": site, "init_weights": False, "target_modules": ["x"]}
        made = Linear(plain(bias=bias, dtype=dtype), "cars", PlatonicConfig(r=r, strength=0.7, **config))
        made.update_layer("dogs", PlatonicConfig(r=r + 1, strength=-1.3, **config))
    return made


def probes(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(5)).to(dtype)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("site", ["output", "input"])
def test_live_layer_equals_the_dense_formula(site: str, bias: bool) -> None:
    edited, u = layer(site, bias=bias), probes()
    edited.set_adapter(["cars", "dogs"])
    y = plain(bias=bias)(u)
    design = y if site == "output" else torch.cat([u, torch.ones(4, 1)], dim=1) if bias else u
    assert design.shape[1] == edited.design_size(site)
    dense = sum(s * edited.platonic_left[n] @ edited.platonic_right[n] for n, s in (("cars", 0.7), ("dogs", -1.3)))
    torch.testing.assert_close(edited(u), y + design @ dense, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", SITES)
def test_default_target_is_the_edit_site_of_the_family(family: str) -> None:
    model = adapted(family)
    config = model.peft_config["cars"]
    assert (config.target_modules, config.site) == ({SITES[family][0]}, SITES[family][1])
    assert not torch.allclose(features(model, family), features(tiny_parts(family)[0], family), atol=1e-3)


@pytest.mark.parametrize("family", SITES)
def test_edited_embedding_equals_the_operator_on_embeddings(family: str) -> None:
    model = adapted(family)
    edited = edited_layer(model)
    seen: list[tuple[Tensor, Tensor]] = []
    hook = edited.base_layer.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
    with model.disable_adapter(), torch.no_grad():
        getter = model.get_audio_features if family == "clap" else model.get_image_features
        raw = getter(**inputs(family)).pooler_output.float()
    hook.remove()
    u, y = (t.reshape(-1, t.shape[-1])[: len(raw)] for t in seen[-1])
    if SITES[family][1] == "output":
        unit = design = nn.functional.normalize(y, dim=-1)
    else:
        unit = nn.functional.normalize(raw, dim=-1)
        design = torch.cat([u, torch.ones(len(u), 1)], dim=1) / raw.norm(dim=-1, keepdim=True)
    expected = model.get_operator("cars").apply(unit, design, strength=0.3)
    torch.testing.assert_close(features(model, family), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", SITES)
def test_forward_of_the_whole_model_is_edited_too(family: str) -> None:
    model, (base, _) = adapted(family), tiny_parts(family)
    ids = torch.tensor([[5, 6, 7, 8], [9, 8, 4, 3]])
    kwargs = {**inputs(family), "input_ids": ids}
    name = "logits_per_audio" if family == "clap" else "logits_per_image"
    with torch.no_grad():
        live, before = model(**kwargs)[name], base(**kwargs)[name]
        assert not torch.allclose(live, before, atol=1e-3)
        torch.testing.assert_close(model.merge_and_unload()(**kwargs)[name], live, rtol=1e-5, atol=1e-4)


def test_true_initialisation_changes_nothing_and_false_does() -> None:
    base = features(tiny_parts("clip")[0], "clip")
    assert torch.equal(features(adapted(init_weights=True), "clip"), base)
    assert not torch.allclose(features(adapted(init_weights=False), "clip"), base, atol=1e-3)


def test_disabled_layer_is_the_base_exactly() -> None:
    for family in SITES:
        model = adapted(family)
        with model.disable_adapter():
            # Frozen like the base inside PEFT: torch's MultiheadAttention, which SigLIP's head has, takes another
            # kernel for weights that require gradients, even without any gradient being taken.
            base = tiny_parts(family)[0].requires_grad_(False)
            assert torch.equal(features(model, family), features(base, family))


@pytest.mark.parametrize("family", SITES)
def test_merged_equals_live(family: str) -> None:
    model = adapted(family, "cars", "dogs")
    model.set_strengths({"cars": 0.8, "dogs": -0.4})
    live = features(model, family)
    model.merge_adapter()
    torch.testing.assert_close(features(model, family), live, rtol=0, atol=1e-5)
    model.unmerge_adapter()
    unloaded = model.merge_and_unload(safe_merge=True)
    assert not any(isinstance(module, PlatonicLayer) for module in unloaded.modules())
    torch.testing.assert_close(features(unloaded, family), live, rtol=0, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("site", ["output", "input"])
def test_merge_equals_the_operators_own_fold(site: str, bias: bool) -> None:
    edited = layer(site, bias=bias)
    edited.set_adapter(["cars", "dogs"])
    base = plain(bias=bias)
    total: Operator = 0.7 * edited.operator("cars") + -1.3 * edited.operator("dogs")
    weight, offset = total.fold(base.weight.data, base.bias.data if bias else None)
    edited.merge()
    torch.testing.assert_close(edited.weight.data, weight, rtol=1e-5, atol=1e-6)
    if offset is not None:
        torch.testing.assert_close(edited.bias.data, offset, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("site", ["output", "input"])
def test_unmerge_restores_bits_after_many_cycles(site: str, dtype: torch.dtype) -> None:
    edited, base = layer(site, dtype=dtype), plain(dtype=dtype)
    for names in (["cars"], ["dogs"], ["cars", "dogs"], ["dogs", "cars"], ["cars"]):
        edited.merge(adapter_names=names)
        assert edited.merged_adapters == names
        assert not torch.equal(edited.weight, base.weight)
        edited.unmerge()
        assert torch.equal(edited.weight, base.weight)
        assert torch.equal(edited.bias, base.bias)
        assert edited.weight.dtype == dtype


@pytest.mark.filterwarnings("ignore:Already following adapters were merged:UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("site", ["output", "input"])
def test_one_after_the_other_merges_like_both_at_once(site: str, dtype: torch.dtype) -> None:
    step, both = layer(site, dtype=dtype), layer(site, dtype=dtype)
    step.merge(adapter_names=["cars"])
    step.merge(adapter_names=["dogs"])
    both.merge(adapter_names=["cars", "dogs"])
    assert step.merged_adapters == both.merged_adapters == ["cars", "dogs"]
    assert torch.equal(step.weight, both.weight)
    assert torch.equal(step.bias, both.bias)
    step.unmerge()
    assert torch.equal(step.weight, plain(dtype=dtype).weight)


def test_merging_twice_or_unmerging_unmerged_only_warns() -> None:
    edited = layer()
    edited.merge()
    once = edited.weight.clone()
    with pytest.warns(UserWarning, match="already merged"):
        edited.merge()
    assert torch.equal(edited.weight, once)
    edited.unmerge()
    with pytest.warns(UserWarning, match="Already unmerged"):
        edited.unmerge()


def test_merging_a_name_twice_counts_once_and_unknown_names_do_nothing() -> None:
    edited, other = layer(), layer()
    edited.merge(adapter_names=["cars", "cars"])
    other.merge(adapter_names=["cars"])
    assert torch.equal(edited.weight, other.weight)
    other.unmerge()
    other.merge(adapter_names=["birds"])
    assert not other.merged


def test_disabling_unmerges() -> None:
    edited = layer()
    edited.merge()
    edited.enable_adapters(False)
    assert torch.equal(edited(probes()), plain()(probes()))
    assert not edited.merged


def test_safe_merge_refuses_infinities_and_changes_nothing() -> None:
    edited = layer(dtype=torch.float16)
    edited.platonic_strength["cars"] = 1e9
    with pytest.raises(PlatonicError, match="finite merged weight"):
        edited.merge(safe_merge=True)
    assert not edited.merged
    assert torch.equal(edited.weight, plain(dtype=torch.float16).weight)


def test_unmerge_follows_the_model_to_another_dtype() -> None:
    edited = layer()
    edited.merge()
    edited.base_layer.to(torch.bfloat16)
    with pytest.warns(UserWarning, match="additionally merging dogs"):
        edited.merge(adapter_names=["dogs"])
    assert edited.weight.dtype == edited.bias.dtype == torch.bfloat16
    edited.unmerge()
    assert torch.equal(edited.weight, plain(dtype=torch.bfloat16).weight)


def test_deep_copy_while_merged_unmerges_on_its_own() -> None:
    edited = layer()
    edited.merge()
    copied = copy.deepcopy(edited)
    copied.unmerge()
    assert edited.merged
    assert torch.equal(copied.weight, plain().weight)
    assert not torch.equal(edited.weight, plain().weight)


def test_adding_and_taking_away_leaves_the_other_adapter() -> None:
    model = adapted("clip", "cars", "dogs")
    alone = features(model, "clip")
    model.add_weighted_adapter(["cars", "dogs"], [1.0, 1.0], "both")
    model.add_weighted_adapter(["both", "dogs"], [1.0, -1.0], "rest")
    # cars carries its strength of .3 inside "rest", whose own strength is 1
    model.set_strengths({"rest": 1.0})
    torch.testing.assert_close(features(model, "clip"), alone, rtol=0, atol=1e-6)


@pytest.mark.parametrize("site", ["output", "input"])
def test_deltas_are_what_a_merge_adds(site: str) -> None:
    edited = layer(site)
    delta, delta_bias = edited.get_delta_weight("dogs"), edited.get_delta_bias("dogs")
    assert (delta.shape, delta_bias.shape) == ((5, 7), (5,))
    edited.merge(adapter_names=["dogs"])
    torch.testing.assert_close(edited.weight - plain().weight, delta, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(edited.bias - plain().bias, delta_bias, rtol=1e-4, atol=1e-6)
    assert torch.equal(edited.get_delta_weight("dogs"), delta)  # of the original weight, merged or not


def test_lora_export_is_offered_where_it_is_exact() -> None:
    assert layer(bias=False).supports_lora_conversion("cars")
    assert not layer(bias=True).supports_lora_conversion("cars")
    assert not layer(bias=False).supports_lora_conversion("birds")
    assert layer(bias=False).get_delta_bias("cars") is None


def test_peft_saves_as_plain_lora(tmp_path: Any) -> None:
    from peft import save_as_lora

    model = adapted("clip")
    live = features(model, "clip")
    save_as_lora(tmp_path, model, rank=3, adapter_name="cars")
    loaded = PeftModel.from_pretrained(tiny_parts("clip")[0], tmp_path)
    assert loaded.peft_config["default"].peft_type == "LORA"
    torch.testing.assert_close(features(loaded, "clip"), live, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_base_keeps_float32_factors_and_its_output_dtype(dtype: torch.dtype) -> None:
    edited, u = layer("output", dtype=dtype), probes(dtype)
    assert edited.platonic_left["cars"].dtype == torch.float32
    y = plain(dtype=dtype)(u)
    exact = y.float() + 0.7 * (y.float() @ edited.platonic_left["cars"]) @ edited.platonic_right["cars"]
    assert edited(u).dtype == dtype
    torch.testing.assert_close(edited(u), exact.to(dtype), rtol=0, atol=0)


def test_double_precision_base_is_edited_in_double_precision() -> None:
    edited, u = layer("input", dtype=torch.float64), probes(torch.float64)
    x = edited.operator("cars").to(torch.float64).dense()
    exact = plain(dtype=torch.float64)(u) + 0.7 * torch.cat([u, torch.ones(4, 1)], dim=1) @ x
    torch.testing.assert_close(edited(u), exact, rtol=0, atol=1e-13)


def test_autocast_runs() -> None:
    edited = layer("input")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = edited(probes())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), edited(probes()), rtol=0.1, atol=0.1)


def test_gradients_reach_both_factors_and_nothing_else() -> None:
    for site in ("output", "input"):
        edited = layer(site)
        edited.base_layer.requires_grad_(False)
        edited(probes()).square().sum().backward()
        assert edited.platonic_left["cars"].grad.abs().max() > 0
        assert edited.platonic_right["cars"].grad.abs().max() > 0
        assert edited.platonic_left["dogs"].grad is None
        assert edited.base_layer.weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_factors_are_replaced_by_copies_and_the_rank_may_change(dtype: torch.dtype) -> None:
    edited = layer()
    left, right = torch.randn(5, 4, dtype=dtype), torch.randn(4, 5, dtype=dtype)
    edited.load_factors("cars", left, right)
    assert edited.platonic_left["cars"].dtype == torch.float32
    assert edited.platonic_left["cars"].requires_grad
    y = plain()(probes())
    left_before = left.clone()
    left.zero_()
    expected = y + 0.7 * y @ left_before.float() @ right.float()
    torch.testing.assert_close(edited(probes()), expected, rtol=1e-5, atol=1e-5)


def test_wrong_factors_are_refused() -> None:
    edited = layer("input")
    with pytest.raises(PlatonicError, match=r"Expected `left` of shape \(8, 'any'\), got \(7, 2\)"):
        edited.load_factors("cars", torch.zeros(7, 2), torch.zeros(2, 5))
    with pytest.raises(PlatonicError, match=r"Expected `right` of shape \(2, 5\), got \(3, 5\)"):
        edited.load_factors("cars", torch.zeros(8, 2), torch.zeros(3, 5))
    with pytest.raises(PlatonicError, match="finite values in `right`"):
        edited.load_factors("cars", torch.zeros(8, 2), torch.full((2, 5), float("nan")))
    with pytest.raises(PlatonicError, match="finite values in `left`"):
        edited.load_factors("cars", torch.full((8, 2), 1e300, dtype=torch.float64), torch.zeros(2, 5))
    with pytest.raises(PlatonicError, match="rank 1 or more"):
        edited.load_factors("cars", torch.zeros(8, 0), torch.zeros(0, 5))
    edited.merge()
    with pytest.raises(PlatonicError, match="Unmerge it first"):
        edited.load_factors("cars", torch.zeros(8, 2), torch.zeros(2, 5))


def test_refused_factors_leave_the_old_ones() -> None:
    edited = layer()
    before = edited(probes())
    with pytest.raises(PlatonicError, match="finite"):
        edited.load_factors("cars", torch.zeros(5, 2), torch.full((2, 5), float("inf")))
    assert torch.equal(edited(probes()), before)


class Quantised(nn.Module):
    """A linear layer whose weight is stored as int8, as quantised layers do."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = base.in_features, base.out_features
        self.scale = float(base.weight.data.abs().max()) / 127
        self.weight = nn.Parameter((base.weight.data / self.scale).round().to(torch.int8), requires_grad=False)
        self.bias = base.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


class Head(nn.Module):
    """A model with one layer, as plain torch code has them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.project = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x)


@pytest.mark.parametrize("site", ["output", "input"])
def test_quantised_layer_is_edited_live_but_not_merged(site: str) -> None:
    config = PlatonicConfig(r=2, target_modules=["project"], site=site, init_weights=False)
    model = get_peft_model(Head(Quantised(plain())), config)
    y, x = Quantised(plain())(probes()), model.get_operator("default").dense()
    design = y if site == "output" else torch.cat([probes(), torch.ones(4, 1)], dim=1)
    torch.testing.assert_close(model(probes()), y + design @ x, rtol=1e-5, atol=1e-5)
    assert model.peft_config["default"].base_sketch is None
    assert not edited_layer(model).supports_lora_conversion()
    with pytest.raises(PlatonicError, match="plain floating-point"):
        model.merge_adapter()


def test_parametrised_and_shared_weights_are_not_merged() -> None:
    from torch.nn.utils.parametrizations import weight_norm

    edited = Linear(weight_norm(plain()), "cars", PlatonicConfig(r=2, target_modules=["x"]))
    assert torch.equal(edited(probes()), weight_norm(plain())(probes()))
    with pytest.raises(PlatonicError, match="plain floating-point"):
        edited.merge()

    tied = Head(plain())
    tied.twin = plain()
    tied.twin.weight = tied.project.weight
    model = get_peft_model(tied, PlatonicConfig(r=2, target_modules=["project"]))
    with pytest.raises(PlatonicError, match=r"one shared by `project\.base_layer\.weight`, `twin\.weight`"):
        model.merge_and_unload()


def test_something_that_is_no_linear_layer_is_refused() -> None:
    with pytest.raises(PlatonicError, match="linear layer with `in_features` and `out_features`, got LayerNorm"):
        get_peft_model(Head(nn.LayerNorm(5)), PlatonicConfig(target_modules=["project"]))


def test_layer_inside_multihead_attention_is_refused() -> None:
    model = Head(nn.MultiheadAttention(8, 2))
    with pytest.raises(PlatonicError, match=r"inside torch\.nn\.MultiheadAttention"):
        get_peft_model(model, PlatonicConfig(target_modules=["out_proj"]))
    assert not any(isinstance(module, PlatonicLayer) for module in model.modules())


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`:UserWarning")
@pytest.mark.parametrize("site", ["output", "input"])
def test_nesting_around_a_lora_layer(site: str) -> None:
    lora = get_peft_model(Head(plain()), LoraConfig(r=2, target_modules=["project"], init_lora_weights=False))
    before = lora(probes())
    config = PlatonicConfig(r=2, target_modules=["project"], site=site, init_weights=False)
    inject_adapter_in_model(config, lora.base_model.model, adapter_name="moved")
    edited = edited_layer(lora)
    design = before if site == "output" else torch.cat([probes(), torch.ones(4, 1)], dim=1)
    expected = before + design @ edited.operator("moved").dense()
    torch.testing.assert_close(lora(probes()), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(PlatonicError, match="another PEFT method inside this layer to be merged first"):
        edited.merge(adapter_names=["moved"])
    edited.base_layer.merge()
    edited.merge(adapter_names=["moved"])
    torch.testing.assert_close(lora(probes()), expected, rtol=1e-4, atol=1e-5)
    edited.unmerge()
    edited.base_layer.unmerge()
    torch.testing.assert_close(lora(probes()), expected, rtol=1e-4, atol=1e-5)


def test_layer_shows_what_it_is() -> None:
    assert repr(layer()).startswith("platonic.Linear(")
