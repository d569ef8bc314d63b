"""Half precision, weights kept elsewhere, and last layers that aren't plain matrices."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from accelerate import cpu_offload, dispatch_model
from test_extraction import PROMPTS, pair
from tiny import tiny_encoder, tiny_parts, tiny_probes
from torch import Tensor, nn

from hf_platonic.encoders import DualEncoder
from hf_platonic.encoding import encode_probes
from hf_platonic.errors import PlatonicError
from hf_platonic.extraction import extract
from hf_platonic.probes import ProbeSet
from hf_platonic.transfers import transfer

PLACES: list[dict[str, Any]] = [{}, {"site": "input"}, {"tower": "text"}]


def task_of(family: str) -> Any:
    base, tuned = pair(family)
    return extract(base, tuned, ProbeSet(tiny_probes(base, 12), prompts=PROMPTS))


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["clip", "siglip", "clap", "blip_itc"])
def test_half_precision_targets_keep_their_dtype_and_the_edit(
    family: str, dtype: torch.dtype, place: dict[str, Any]
) -> None:
    task = task_of("clap" if family == "clap" else "clip")
    exact, target = tiny_encoder(family, seed=2), tiny_encoder(family, seed=2)
    target.model.to(dtype)
    before = {key: value.clone() for key, value in target.model.state_dict().items()}
    transfer(task, exact, strength=1.0, **place)
    model = transfer(task, target, strength=1.0, **place)
    verified = model.peft_config["default"].provenance["verified"]
    assert max(verified["live"], verified["merged"]) < 0.03
    same = (encode_probes(target, task.probes).unit * encode_probes(exact, task.probes).unit).sum(dim=1)
    assert float(same.min()) > 0.98
    assert {p.dtype for name, p in model.named_parameters() if "platonic" in name} == {torch.float32}
    model.merge_adapter()
    model.unmerge_adapter()
    restored = model.unload().state_dict()
    assert all(torch.equal(value, before[key]) for key, value in restored.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sources_give_float32_descriptors(dtype: torch.dtype) -> None:
    base, tuned = pair()
    probes = ProbeSet(tiny_probes(base, 6), prompts=PROMPTS)
    exact = extract(base, tuned, probes)
    base.model.to(dtype)
    tuned.model.to(dtype)
    rough = extract(base, tuned, probes)
    assert rough.delta.dtype == torch.float32
    assert float((rough.delta - exact.delta).norm()) < 0.15 * float(exact.delta.norm())


@pytest.mark.parametrize(
    ("family", "place"),
    [("siglip", {}), ("align", PLACES[2]), *((family, place) for family in ("clip", "clap") for place in PLACES)],
)
def test_weights_that_are_kept_elsewhere_between_calls(family: str, place: dict[str, Any]) -> None:
    """What `device_map="auto"` does with what doesn't fit: the weights are on the meta device until they're used."""
    task, here = task_of("clap" if family == "clap" else "clip"), tiny_encoder(family, seed=2)
    model, processor = tiny_parts(family, seed=2)
    # As transformers does it: torch's attention reads the weights of its inner layers itself.
    cpu_offload(model, execution_device=torch.device("cpu"), preload_module_classes=model._no_split_modules)
    assert all(parameter.is_meta for parameter in model.parameters())
    away = DualEncoder(model, processor)
    assert away.device == torch.device("cpu")
    probes = tiny_probes(here, 3)
    torch.testing.assert_close(away.encode_probes(probes).unit, here.encode_probes(probes).unit)
    if family == "siglip":  # PEFT can't wrap a layer whose weights come with a whole block
        return
    transfer(task, here, **place)
    edited = transfer(task, away, **place)
    assert edited.peft_config["default"].provenance["verified"]["merged"] is None
    for merge in (True, False):
        torch.testing.assert_close(away.encode_probes(probes).unit, here.encode_probes(probes).unit, atol=1e-5, rtol=0)
        torch.testing.assert_close(away.encode_prompts(PROMPTS), here.encode_prompts(PROMPTS), atol=1e-5, rtol=0)
        if merge:
            edited.merge_adapter()


def test_device_maps(tmp_path: Path) -> None:
    model, processor = tiny_parts(seed=2)
    model.save_pretrained(tmp_path)
    task = task_of("clip")
    placed = DualEncoder(tf.CLIPModel.from_pretrained(tmp_path, device_map="auto"), processor)
    hooked = dispatch_model(copy.deepcopy(model), {"": "cpu"}, force_hooks=True)
    dispatched = DualEncoder(hooked, processor)
    plain = DualEncoder(model, processor)
    for encoder in (placed, dispatched, plain):
        encoder.model = transfer(task, encoder).merge_and_unload()
    units = [encoder.encode_probes(tiny_probes(plain, 3)).unit for encoder in (placed, dispatched, plain)]
    torch.testing.assert_close(units[0], units[2])
    torch.testing.assert_close(units[1], units[2])


class Eight(nn.Module):
    """A linear layer in eight bits, as quantisation libraries put in the place of `nn.Linear`."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        scale = layer.weight.data.abs().amax(dim=1, keepdim=True) / 127
        self.register_buffer("weight", (layer.weight.data / scale).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = None if layer.bias is None else nn.Parameter(layer.bias.data)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale.to(x.dtype), self.bias)


class Packed(nn.Linear):
    """One whose weight isn't a matrix of its own shape, as in four bits."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.weight = nn.Parameter(layer.weight.data.reshape(-1, 1), requires_grad=False)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.reshape(self.out_features, -1), self.bias)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", [Eight, Packed])
@pytest.mark.parametrize("family", ["clip", "clap"])
def test_quantised_last_layers_are_read_and_edited_live_but_never_merged(
    family: str, kind: Any, place: dict[str, Any], tmp_path: Path
) -> None:
    def quantised(seed: int) -> DualEncoder:
        model, processor = tiny_parts(family, seed=seed)
        for tower in ("probe", "text"):
            name = DualEncoder(model, processor).at(tower=tower).site.module  # type: ignore[arg-type]
            parent, _, end = name.rpartition(".")
            setattr(model.get_submodule(parent), end, kind(model.get_submodule(name)))
        return DualEncoder(model, processor)

    base = quantised(0)
    probes = ProbeSet(tiny_probes(base, 12), prompts=PROMPTS)
    task = extract(base, quantised(1), probes)
    assert float(task.delta.abs().max()) > 1e-3
    target = quantised(2)
    model = transfer(task, target, strength=1.0, **place)
    verified = model.peft_config["default"].provenance["verified"]
    assert verified["live"] < 1e-5
    assert verified["merged"] is None
    with pytest.raises(PlatonicError, match=f"got {kind.__name__}, whose weight can't be edited in place.*live"):
        model.merge_and_unload()
    model.save_pretrained(tmp_path)  # the adapter is what travels
    assert (tmp_path / "adapter_model.safetensors").stat().st_size > 0
