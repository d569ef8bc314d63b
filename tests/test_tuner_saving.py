"""Adapters on disk: what is written, that a fresh process reads the same, and what is refused on loading."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import AutoPeftModel, PeftConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from test_tuner_layer import SITES, adapted, edited_layer, features, inputs
from tiny import tiny_parts
from torch import nn

from hf_platonic.errors import BaseMismatchError, PlatonicError
from hf_platonic.tuner import PlatonicConfig

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


def saved(folder: Path, family: str = "clip") -> tuple[PeftModel, Path]:
    """A model with "default", "cars" and "dogs" (strengths .3, 1.5, -.7), saved together with its base."""
    base, _ = tiny_parts(family)
    base.save_pretrained(folder / "base")
    model = adapted(family, "default", "cars", "dogs")
    for config in model.peft_config.values():
        config.base_model_name_or_path = str(folder / "base")
    model.set_strengths({"cars": 1.5, "dogs": -0.7})
    model.save_pretrained(folder / "adapter")
    return model, folder / "adapter"


@pytest.mark.parametrize("family", SITES)
def test_file_holds_only_its_adapters_tensors(tmp_path: Path, family: str) -> None:
    model, folder = saved(tmp_path, family)
    for name, place in (("default", folder), ("cars", folder / "cars"), ("dogs", folder / "dogs")):
        tensors = load_file(place / WEIGHTS)
        prefix = f"base_model.model.{SITES[family][0]}."
        assert set(tensors) == {prefix + "platonic_left", prefix + "platonic_right"}
        operator = model.get_operator(name)
        assert torch.equal(tensors[prefix + "platonic_left"], operator.left)
        assert torch.equal(tensors[prefix + "platonic_right"], operator.right)
        assert all(tensor.dtype == torch.float32 for tensor in tensors.values())


def test_configuration_file(tmp_path: Path) -> None:
    _, folder = saved(tmp_path)
    fields = json.loads((folder / "cars" / CONFIG).read_text())
    expected = {
        "peft_type": "PLATONIC",
        "r": 4,
        "strength": 1.5,
        "site": "output",
        "target_modules": ["visual_projection"],
        "base_shape": {"visual_projection": [16, 20]},
        "inference_mode": True,
        "auto_mapping": {"base_model_class": "CLIPModel", "parent_library": "transformers.models.clip.modeling_clip"},
    }
    assert {key: fields[key] for key in expected} == expected
    loaded = PeftConfig.from_pretrained(folder / "cars")
    assert isinstance(loaded, PlatonicConfig)
    assert (loaded.strength, loaded.target_modules) == (1.5, {"visual_projection"})


def test_saving_twice_writes_the_same_bytes(tmp_path: Path) -> None:
    model, folder = saved(tmp_path)
    first = {path.name: path.read_bytes() for path in (folder / "dogs").iterdir()}
    model.save_pretrained(folder)
    assert {path.name: path.read_bytes() for path in (folder / "dogs").iterdir()} == first


FRESH = """
import json, sys, warnings
import torch
from peft import PeftModel
import hf_platonic.tuner
from test_tuner_layer import features
import transformers
warnings.simplefilter("error")
warnings.filterwarnings("ignore", message=".is_gradient_checkpointing")
base, adapter, family, low, out = sys.argv[1:]
low = low == "True"
model = transformers.AutoModel.from_pretrained(base).eval()
model = PeftModel.from_pretrained(model, adapter, low_cpu_mem_usage=low)
result = {"default": features(model, family)}
model.load_adapter(adapter, "cars", subfolder="cars", low_cpu_mem_usage=low)
model.load_adapter(adapter + "/dogs", "dogs", low_cpu_mem_usage=low)
assert not any(parameter.is_meta for parameter in model.parameters())
assert not any(parameter.requires_grad for parameter in model.parameters())
model.base_model.set_adapter(["cars", "dogs"], inference_mode=True)
result["both"] = features(model, family)
result["strengths"] = {name: config.strength for name, config in model.peft_config.items()}
torch.save(result, out)
"""


@pytest.mark.parametrize(("family", "low"), [("clip", True), ("siglip", False)])
def test_fresh_process_computes_the_same(tmp_path: Path, family: str, low: bool) -> None:
    model, folder = saved(tmp_path, family)
    out = tmp_path / "out.pt"
    arguments = [str(tmp_path / "base"), str(folder), family, str(low), str(out)]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    subprocess.run([sys.executable, "-c", FRESH, *arguments], check=True, env={**os.environ, "PYTHONPATH": path})
    result = torch.load(out)
    assert result["strengths"] == {"default": 0.3, "cars": 1.5, "dogs": -0.7}
    torch.testing.assert_close(result["both"], features(model, family), rtol=0, atol=1e-6)
    model.set_adapter("default")
    torch.testing.assert_close(result["default"], features(model, family), rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("low", [False, True])
def test_half_precision_base_loads_all_digits_of_the_factors(tmp_path: Path, low: bool, dtype: torch.dtype) -> None:
    model, folder = saved(tmp_path)
    base = tiny_parts("clip")[0].to(dtype)
    loaded = PeftModel.from_pretrained(base, folder, low_cpu_mem_usage=low)
    loaded.load_adapter(folder / "cars", "cars", low_cpu_mem_usage=low)
    for name in ("default", "cars"):
        assert torch.equal(loaded.get_operator(name).left, model.get_operator(name).left)
        assert torch.equal(loaded.get_operator(name).right, model.get_operator(name).right)
    model.set_adapter("default")
    torch.testing.assert_close(features(loaded, "clip"), features(model, "clip"), rtol=0, atol=0.03)


@pytest.mark.parametrize("low", [False, True])
def test_a_file_in_half_precision_is_raised_to_float32_and_stays_frozen(tmp_path: Path, low: bool) -> None:
    _, folder = saved(tmp_path)
    tensors = load_file(folder / WEIGHTS)
    save_file({key: tensor.bfloat16() for key, tensor in tensors.items()}, folder / WEIGHTS)
    loaded = PeftModel.from_pretrained(tiny_parts("clip")[0], folder, low_cpu_mem_usage=low)
    left = edited_layer(loaded).platonic_left["default"]
    assert left.dtype == torch.float32
    assert not left.requires_grad


def test_loading_for_training_leaves_it_trainable(tmp_path: Path) -> None:
    _, folder = saved(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_parts("clip")[0], folder, is_trainable=True)
    assert sum(parameter.requires_grad for parameter in loaded.parameters()) == 2


def test_loading_one_adapter_under_another_name(tmp_path: Path) -> None:
    model, folder = saved(tmp_path)
    loaded = PeftModel.from_pretrained(tiny_parts("clip")[0], folder, adapter_name="vehicles", subfolder="cars")
    model.set_adapter("cars")
    assert loaded.get_strengths() == {"vehicles": 1.5}
    assert torch.equal(features(loaded, "clip"), features(model, "clip"))


def test_auto_classes_load_it(tmp_path: Path) -> None:
    model, folder = saved(tmp_path)
    model.set_adapter("default")
    live = features(model, "clip")
    auto = AutoPeftModel.from_pretrained(folder)
    assert type(auto.get_base_model()).__name__ == "CLIPModel"
    torch.testing.assert_close(features(auto.eval(), "clip"), live, rtol=0, atol=1e-6)
    mixin = transformers.AutoModel.from_pretrained(folder)
    torch.testing.assert_close(features(mixin.eval(), "clip"), live, rtol=0, atol=1e-6)


def test_vision_tower_alone_takes_the_same_adapter(tmp_path: Path) -> None:
    model, folder = saved(tmp_path)
    model.set_adapter("default")
    tower = transformers.CLIPVisionModelWithProjection.from_pretrained(tmp_path / "base", projection_dim=16).eval()
    loaded = PeftModel.from_pretrained(tower, folder)
    with torch.no_grad():
        embeddings = loaded(**inputs("clip")).image_embeds
    torch.testing.assert_close(nn.functional.normalize(embeddings, dim=-1), features(model, "clip"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("family", SITES)
def test_merged_model_is_an_ordinary_checkpoint(tmp_path: Path, family: str) -> None:
    model, _ = saved(tmp_path, family)
    live = features(model, family)
    merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    plain = type(tiny_parts(family)[0]).from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(features(plain, family), live, rtol=0, atol=1e-5)


def test_saving_while_merged_saves_the_adapter(tmp_path: Path) -> None:
    model, folder = saved(tmp_path)
    before = (folder / "cars" / WEIGHTS).read_bytes()
    model.merge_adapter()
    model.save_pretrained(folder)
    assert (folder / "cars" / WEIGHTS).read_bytes() == before


def test_sum_and_changed_rank_survive_a_round_trip(tmp_path: Path) -> None:
    model, folder = saved(tmp_path)
    model.add_weighted_adapter(["cars", "dogs"], [1.0, -1.0], "difference")
    model.load_factors("cars", torch.randn(16, 9), torch.randn(9, 16))
    model.save_pretrained(folder)
    loaded = PeftModel.from_pretrained(tiny_parts("clip")[0], folder / "difference", adapter_name="difference")
    loaded.load_adapter(folder / "cars", "cars")
    assert [loaded.peft_config[name].r for name in ("difference", "cars")] == [9, 9]
    for name in ("difference", "cars"):
        model.set_adapter(name)
        loaded.set_adapter(name)
        assert torch.equal(features(loaded, "clip"), features(model, "clip"))
    assert loaded.peft_config["difference"].provenance["sum"][1]["strength"] == -0.7


def test_base_with_other_weights_is_refused(tmp_path: Path) -> None:
    _, folder = saved(tmp_path)
    message = r"others of the same shape .*Load .*base, or carry .* `hf_platonic\.transfer`"
    with pytest.raises(BaseMismatchError, match=message):
        PeftModel.from_pretrained(tiny_parts("clip", seed=7)[0], folder)
    with pytest.raises(BaseMismatchError, match=message):  # transformers' own way in
        tiny_parts("clip", seed=7)[0].load_adapter(str(folder))
    config = PlatonicConfig.from_pretrained(folder)
    config.base_sketch = None
    PeftModel.from_pretrained(tiny_parts("clip", seed=7)[0], folder, config=config)


def test_base_of_another_size_is_refused_before_torch_does(tmp_path: Path) -> None:
    _, folder = saved(tmp_path)
    other = transformers.CLIPModel(transformers.CLIPConfig.from_pretrained(tmp_path / "base", projection_dim=24))
    with pytest.raises(BaseMismatchError, match=r"`visual_projection` of shape \(16, 20\).* got \(24, 20\)"):
        PeftModel.from_pretrained(other, folder)


def test_merged_base_is_refused_for_the_adapter_it_already_has(tmp_path: Path) -> None:
    model, folder = saved(tmp_path)
    with pytest.raises(BaseMismatchError, match="others of the same shape"):
        PeftModel.from_pretrained(model.merge_and_unload(), folder)


def spoiled(folder: Path, change: Any) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("base_model.model.visual_projection.platonic_left"), "platonic_left.default` missing"),
        (lambda t: t.update({"base_model.model.text_projection.platonic_left": torch.ones(1)}), "unexpected"),
        (lambda t: t.update({"base_model.model.elsewhere.weight": torch.ones(1)}), "unexpected"),
        (lambda t: t["base_model.model.visual_projection.platonic_left"].fill_(float("nan")), "NaN or infinity"),
        (
            lambda t: t.update({"base_model.model.visual_projection.platonic_left": torch.ones(16, 5)}),
            r"Expected \(16, 3\) .* got \(16, 5\) .*r = 3",
        ),
    ],
)
def test_incomplete_foreign_or_broken_files_are_refused(tmp_path: Path, change: Any, message: str, low: bool) -> None:
    _, folder = saved(tmp_path)
    spoiled(folder, change)
    with pytest.raises(PlatonicError, match=message):
        PeftModel.from_pretrained(tiny_parts("clip")[0], folder, low_cpu_mem_usage=low)


def test_unknown_setting_of_a_newer_version_only_warns(tmp_path: Path) -> None:
    _, folder = saved(tmp_path)
    fields = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**fields, "hue": 3}))
    with pytest.warns(UserWarning, match="Unexpected keyword arguments"):
        PeftModel.from_pretrained(tiny_parts("clip")[0], folder)


def test_configuration_edited_by_hand_is_checked(tmp_path: Path) -> None:
    _, folder = saved(tmp_path)
    fields = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**fields, "strength": float("nan")}))
    with pytest.raises(PlatonicError, match="`strength` to be finite"):
        PeftModel.from_pretrained(tiny_parts("clip")[0], folder)


def test_adapter_without_records_of_its_base_loads_and_records(tmp_path: Path) -> None:
    model, folder = saved(tmp_path)
    fields = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps({**fields, "base_sketch": None, "base_shape": None}))
    loaded = PeftModel.from_pretrained(tiny_parts("clip")[0], folder)
    assert loaded.peft_config["default"].base_sketch == model.peft_config["default"].base_sketch


def test_low_memory_start_takes_solved_factors() -> None:
    model = get_peft_model(tiny_parts("clip")[0], PlatonicConfig(), low_cpu_mem_usage=True).eval()
    assert edited_layer(model).platonic_left["default"].is_meta
    model.load_factors("default", torch.randn(16, 2), torch.randn(2, 16))
    assert not any(parameter.is_meta for parameter in model.parameters())
    assert features(model, "clip").isfinite().all()
