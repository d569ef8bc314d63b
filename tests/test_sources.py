"""One fine-tune in every form it can come in: each gives the same descriptor."""

from __future__ import annotations

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import tiny_images, tiny_parts

from hf_platonic.descriptor import TaskDescriptor
from hf_platonic.encoders import DualEncoder
from hf_platonic.encoders.weights import lay_over, read_tensors
from hf_platonic.errors import EncoderError
from hf_platonic.extraction import extract
from hf_platonic.probes import ProbeSet
from hf_platonic.transfers import transfer

PROMPTS = ["a cat", "a dog", "one bird"]
PROBES = ProbeSet(tiny_images(6), prompts=PROMPTS)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def save(model: Any, folder: Path, processor: Any = None) -> Path:
    model.save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, Any]], TaskDescriptor]:
    """Base folder, loading options of each form of one LoRA fine-tune of the vision tower, and its descriptor."""
    root = tmp_path_factory.mktemp("forms")
    model, processor = tiny_parts()
    base = save(model, root / "base", processor)
    torch.manual_seed(3)
    config = LoraConfig(r=2, target_modules=r"vision_model.*(q_proj|v_proj)", init_lora_weights=False)
    tuned = get_peft_model(tf.CLIPModel.from_pretrained(base), config)
    tuned.save_pretrained(root / "adapter", save_embedding_layers=False)
    whole = tuned.merge_and_unload()
    state = {key: value.clone() for key, value in whole.state_dict().items()}
    before = model.state_dict()
    moved = {k: v - before[k] for k, v in state.items() if not torch.equal(v, before[k])}
    assert len(moved) == 4
    save(whole, root / "whole", processor)
    tower = tf.CLIPVisionModel(whole.config.vision_config)
    tower.load_state_dict(whole.vision_model.state_dict())
    save(tower, root / "tower")
    save_file(state, root / "state.safetensors")
    torch.save({"state_dict": {f"module.{k}": v for k, v in state.items()}}, root / "trainer.pt")
    save_file({f"vision_model.{k}": v for k, v in tower.state_dict().items()}, root / "prefixed.safetensors")
    save_file(moved, root / "vector.safetensors")
    torch.save(moved, root / "vector.bin")
    whole.save_pretrained(root / "shards", max_shard_size="20KB")
    assert len(list((root / "shards").glob("*.safetensors"))) > 1
    options = {
        "adapter": {"adapter": root / "adapter"},
        "vision tower": {"weights": root / "tower"},
        "whole checkpoint over the base": {"weights": root / "whole"},
        "shards": {"weights": root / "shards"},
        "state dict": {"weights": root / "state.safetensors"},
        "trainer's pickle": {"weights": root / "trainer.pt"},
        "tower's state dict": {"weights": root / "prefixed.safetensors"},
        "task vector": {"task_vector": root / "vector.safetensors"},
        "pickled task vector": {"task_vector": root / "vector.bin"},
    }
    reference = extract(DualEncoder.from_pretrained(base), DualEncoder.from_pretrained(root / "whole"), PROBES)
    assert float(reference.delta.abs().max()) > 0.01
    return base, options, reference


NAMES = [
    "adapter",
    "vision tower",
    "whole checkpoint over the base",
    "shards",
    "state dict",
    "trainer's pickle",
    "tower's state dict",
    "task vector",
    "pickled task vector",
]


@pytest.mark.parametrize("form", NAMES)
def test_every_form_gives_the_same_descriptor(form: str, forms: Any) -> None:
    base, options, reference = forms
    tuned = DualEncoder.from_pretrained(base, **options[form])
    found = extract(DualEncoder.from_pretrained(base), tuned, PROBES)
    torch.testing.assert_close(found.delta, reference.delta, rtol=0, atol=1e-5)
    assert tuned.identity.adapter == Path(next(iter(options[form].values()))).name


def test_an_adapter_serves_as_its_own_base_in_one_pass(forms: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    base, options, reference = forms
    tuned = DualEncoder.from_pretrained(base, **options["adapter"])
    decoded = []
    original = ProbeSet.__getitem__
    monkeypatch.setattr(ProbeSet, "__getitem__", lambda self, i: decoded.append(i) or original(self, i))
    flags = {name: p.requires_grad for name, p in tuned.model.named_parameters()}
    found = extract(None, tuned, PROBES, batch_size=4)
    torch.testing.assert_close(found.delta, reference.delta, rtol=0, atol=1e-5)
    assert sorted(decoded) == list(range(6))
    assert {name: p.requires_grad for name, p in tuned.model.named_parameters()} == flags
    assert found.sources[0].base == DualEncoder.from_pretrained(base).identity
    assert found.sources[0].tuned == tuned.identity
    assert not torch.equal(
        tuned.encode_probes(tiny_images(2)).unit, DualEncoder(*tiny_parts()).encode_probes(tiny_images(2)).unit
    )  # switched on again


def test_an_adapter_alone_is_loaded_on_its_recorded_base(forms: Any, tmp_path: Path) -> None:
    _, options, reference = forms
    tuned = DualEncoder.from_pretrained(options["adapter"]["adapter"])
    assert tuned.identity.repo == "base"
    assert tuned.identity.adapter == "adapter"
    torch.testing.assert_close(extract(None, tuned, PROBES).delta, reference.delta, rtol=0, atol=1e-5)
    nameless = tmp_path / "nameless"
    nameless.mkdir()
    (nameless / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": None}))
    with pytest.raises(EncoderError, match="Can't load the model"):
        DualEncoder.from_pretrained(nameless)


def test_a_tuned_text_tower_in_its_forms(forms: Any, tmp_path: Path) -> None:
    base = forms[0]
    model, processor = tiny_parts()
    torch.manual_seed(4)
    config = LoraConfig(r=2, target_modules=r"text_model.*(q_proj|v_proj)", init_lora_weights=False)
    tuned = get_peft_model(copy.deepcopy(model), config)
    live = DualEncoder(tuned, processor)
    reference = extract(None, live, PROBES)
    assert float(reference.delta.abs().max()) > 0.01
    whole = tuned.merge_and_unload()
    tower = tf.CLIPTextModel(whole.config.text_config)
    tower.load_state_dict(whole.text_model.state_dict())
    for form, source in {"whole": whole, "tower": tower}.items():
        encoder = DualEncoder.from_pretrained(base, weights=save(source, tmp_path / form))
        found = extract(DualEncoder.from_pretrained(base), encoder, PROBES)
        torch.testing.assert_close(found.delta, reference.delta, rtol=0, atol=1e-5)


def test_an_edited_model_is_a_source_live_loaded_and_merged(forms: Any, tmp_path: Path) -> None:
    base, _, reference = forms
    edited = DualEncoder.from_pretrained(base)
    model = transfer(reference, edited, strength=1.0)
    live = extract(None, edited, PROBES)
    assert float(live.delta.abs().max()) > 0.01
    model.save_pretrained(tmp_path / "edit")
    loaded = DualEncoder.from_pretrained(tmp_path / "edit")
    torch.testing.assert_close(extract(None, loaded, PROBES).delta, live.delta, rtol=0, atol=1e-5)
    save(model.merge_and_unload(), tmp_path / "merged")
    merged = DualEncoder.from_pretrained(base, weights=tmp_path / "merged")
    found = extract(DualEncoder.from_pretrained(base), merged, PROBES)
    torch.testing.assert_close(found.delta, live.delta, rtol=0, atol=1e-5)


def test_only_one_fine_tune_at_a_time(forms: Any) -> None:
    base, options, _ = forms
    with pytest.raises(EncoderError, match="one fine-tune on top of the base, got adapter and weights"):
        DualEncoder.from_pretrained(base, **options["adapter"], **options["state dict"])


def test_a_base_must_be_at_hand_behind_the_adapter() -> None:
    model, processor = tiny_parts()
    with pytest.raises(EncoderError, match="Expected a PeftModel.*got CLIPModel"):
        extract(None, DualEncoder(model, processor), PROBES)
    biased = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], bias="all"))
    assert isinstance(biased, PeftModel)
    with pytest.raises(EncoderError, match='bias="none", got .*default.*encoder of its own'):
        extract(None, DualEncoder(biased, processor), PROBES)


class Code:
    def __reduce__(self) -> Any:
        return (print, ("run",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (Code(), "would run code"),
        ([torch.ones(2)], "Expected named tensors in x.pt, got list"),
        ({"a": 3}, "Expected named tensors in x.pt, got dict"),
        ({}, "at least one tensor, got none"),
        ({"vision_model.nothing": torch.ones(2)}, r"\['vision_model.nothing'\] \(1 of 1\) without one"),
        ({"visual_projection.weight": torch.ones(2, 2)}, r"\(1 of 1\) without one"),
        ({"visual_projection.weight": torch.full((16, 20), torch.nan)}, "NaN or infinity in .*visual_projection"),
    ],
)
def test_files_that_are_no_weights_of_the_model_are_refused(
    forms: Any, tmp_path: Path, content: Any, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(EncoderError, match=message):
        DualEncoder.from_pretrained(forms[0], weights=tmp_path / "x.pt")
    assert "run" not in capsys.readouterr().out


def test_an_old_pickle_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(pickle.dumps(Code(), protocol=2))
    with pytest.raises(EncoderError, match="would run code"):
        read_tensors(str(tmp_path / "x.bin"), None, {})


def test_keys_that_fit_two_towers_are_refused_and_nothing_is_written() -> None:
    model = torch.nn.ModuleDict({"one": torch.nn.Linear(2, 2), "two": torch.nn.Linear(2, 2)})
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(EncoderError, match="got 2 places"):
        lay_over(model, {"weight": torch.ones(2, 2)}, add=False)
    with pytest.raises(EncoderError, match="without one"):
        lay_over(model, {"one.weight": torch.ones(2, 2), "three.weight": torch.ones(2, 2)}, add=False)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    lay_over(model, {"one.weight": torch.ones(2, 2)}, add=True)
    assert torch.equal(model["one"].weight, before["one.weight"] + 1)


def test_missing_shards_and_files_say_what_to_do(forms: Any, tmp_path: Path) -> None:
    for missing in (tmp_path, tmp_path / "nothing.safetensors", Path("no/repo")):
        with pytest.raises(EncoderError, match="Can't load the weights"):
            DualEncoder.from_pretrained(forms[0], weights=missing)
    assert load_file(forms[1]["state dict"]["weights"])
