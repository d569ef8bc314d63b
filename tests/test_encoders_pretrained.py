"""`DualEncoder.from_pretrained` on local folders: whole models, adapters, and everything that can be missing."""

import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import FAMILIES, SOURCES, tiny_clips, tiny_encoder, tiny_images, tiny_parts, tiny_probes

from hf_platonic.encoders import DualEncoder, EncoderIdentity
from hf_platonic.encoders.identity import digest_of
from hf_platonic.errors import DescriptorFormatError, EncoderError

LORA = LoraConfig(r=2, target_modules=r"vision_model.*(q_proj|v_proj)", init_lora_weights=False)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def saved(tmp_path):
    def save(family="clip"):
        model, processor = tiny_parts(family)
        folder = tmp_path / family
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        return folder

    return save


@pytest.fixture
def adapter(tmp_path):
    torch.manual_seed(3)
    tuned = get_peft_model(tiny_parts()[0], LORA)
    tuned.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    return DualEncoder(tuned, tiny_parts()[1]), tmp_path / "adapter"


@pytest.mark.parametrize("family", [*FAMILIES, *SOURCES])
def test_a_saved_model_comes_back(saved, family):
    here, loaded = tiny_encoder(family), DualEncoder.from_pretrained(saved(family))
    probes, prompts = tiny_probes(here), ["A cat", "rain, again"]
    # Convolutions may round by where the weights lie in memory.
    torch.testing.assert_close(
        here.encode_probes(probes).unit, loaded.encode_probes(probes).unit, rtol=0, atol=1e-6 * (family == "align")
    )
    assert torch.equal(here.encode_prompts(prompts), loaded.encode_prompts(prompts))
    assert not loaded.model.training
    assert loaded.dtype == torch.float32
    assert loaded.identity.repo == family
    assert loaded.identity.revision is None


@pytest.mark.parametrize("family", FAMILIES)
def test_identity_survives_saving(saved, family):
    here, loaded = tiny_encoder(family).identity, DualEncoder.from_pretrained(saved(family)).identity
    assert (here.config_digest, here.preprocessing_digest) == (loaded.config_digest, loaded.preprocessing_digest)


def test_digest_takes_any_plain_value():
    assert digest_of({"a": {2, 1}, "b": torch.float32, "c": (1, None)}) == digest_of(
        {"c": [1, None], "b": "torch.float32", "a": ["1", "2"], "transformers_version": "9"}
    )


def test_identity_refuses_other_fields():
    values = tiny_encoder().identity.to_dict()
    assert EncoderIdentity.from_dict(values).to_dict() == values
    with pytest.raises(DescriptorFormatError, match="fields .*'repo'.*another version"):
        EncoderIdentity.from_dict({**values, "new": 1})


def test_dtype_and_device(saved):
    encoder = DualEncoder.from_pretrained(saved(), dtype="bfloat16", device="cpu")
    assert encoder.dtype == torch.bfloat16
    assert encoder.device == torch.device("cpu")
    assert encoder.encode_probes(tiny_images(2)).unit.dtype == torch.float32


def test_images_always_go_through_pillow(saved):
    assert type(DualEncoder.from_pretrained(saved()).processor.image_processor).__name__.endswith("Pil")


def test_an_adapter_is_applied(saved, adapter):
    tuned, folder = adapter
    loaded = DualEncoder.from_pretrained(saved(), adapter=folder)
    images = tiny_images(3)
    assert torch.equal(loaded.encode_probes(images).unit, tuned.encode_probes(images).unit)
    assert (loaded.encode_probes(images).unit - tiny_encoder().encode_probes(images).unit).abs().max() > 0.01
    assert loaded.identity.adapter == "adapter"
    assert loaded.identity.config_digest == tiny_encoder().identity.config_digest


def test_an_adapter_in_a_subfolder(saved, adapter):
    tuned, folder = adapter
    loaded = DualEncoder.from_pretrained(saved(), adapter=folder.parent, subfolder=folder.name)
    images = tiny_images(2)
    assert torch.equal(loaded.encode_probes(images).unit, tuned.encode_probes(images).unit)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop(next(iter(tensors))), "1 weights without a value"),
        (lambda tensors: tensors.update({"base_model.model.other.lora_A.weight": torch.ones(2, 2)}), "1 unused ones"),
    ],
)
def test_adapter_weights_that_find_no_place_are_an_error(saved, adapter, change, message):
    _, folder = adapter
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(EncoderError, match=f"{message}.*task descriptor"):
        DualEncoder.from_pretrained(saved(), adapter=folder)


def test_an_adapter_of_another_base_is_an_error(saved, adapter):
    _, folder = adapter
    with pytest.raises(EncoderError, match="Can't load the adapter"):
        DualEncoder.from_pretrained(saved("clap"), adapter=folder)


@pytest.mark.parametrize("name", ["no/such-repo", "missing_folder", "/missing/folder", "a/b/c"])
def test_a_missing_model_says_what_to_do(name):
    with pytest.raises(EncoderError, match=f"(?s)Can't load the model '{name}'.*local folder or a Hub repo") as caught:
        DualEncoder.from_pretrained(name)
    assert caught.value.__cause__ is not None


def test_a_missing_adapter_says_what_to_do(saved, tmp_path):
    with pytest.raises(EncoderError, match=r"Can't load the adapter 'no/adapter' at revision 'v1'"):
        DualEncoder.from_pretrained(saved(), adapter="no/adapter", adapter_revision="v1")
    (tmp_path / "empty").mkdir()
    with pytest.raises(EncoderError, match="Can't load the adapter"):
        DualEncoder.from_pretrained(saved(), adapter=tmp_path / "empty")


def test_missing_weights_are_an_error(saved):
    folder = saved()
    tensors = load_file(folder / "model.safetensors")
    del tensors["visual_projection.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EncoderError, match=r"all weights of CLIPModel.*\['visual_projection.weight'\]"):
        DualEncoder.from_pretrained(folder)


def test_a_folder_without_a_processor_is_an_error(tmp_path):
    tiny_parts()[0].save_pretrained(tmp_path / "bare")
    with pytest.raises(EncoderError, match="Can't load the model"):
        DualEncoder.from_pretrained(tmp_path / "bare")


def test_other_architectures_are_refused(tmp_path):
    import transformers as tf
    from tiny import TEXT, bert_tokenizer

    tokenizer = bert_tokenizer()
    tf.BertModel(tf.BertConfig(**TEXT, vocab_size=len(tokenizer))).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(EncoderError, match="model type 'bert'"):
        DualEncoder.from_pretrained(tmp_path)


def test_audio_survives_a_round_trip_with_long_clips(saved):
    clips = tiny_clips(2, seconds=2.0)
    here, loaded = tiny_encoder("clap_fused"), DualEncoder.from_pretrained(saved("clap_fused"))
    assert torch.equal(here.encode_probes(clips).unit, loaded.encode_probes(clips).unit)
    assert Path(loaded.identity.repo or "").parts == ("clap_fused",)


@pytest.mark.parametrize("name", ["hf-hub:owner/name", "local-dir:folder"])
def test_open_clip_models_need_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "open_clip", None)
    with pytest.raises(
        ImportError, match=r"the package open_clip for this model.*pip install hf-platonic\[open-clip\]"
    ):
        DualEncoder.from_pretrained(name)


def test_a_torchvision_of_another_build_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "open_clip.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "open_clip", raising=False)
    with pytest.raises(ImportError, match=r"got RuntimeError: operator.*torchvision of the same build as torch"):
        DualEncoder.from_pretrained("hf-hub:owner/name")
