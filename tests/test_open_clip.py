"""open_clip's models as source and target, on tiny random ones and without a network; needs the extra `open-clip`."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from family_checks import PROMPTS, check, support_row, task_of
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny import bert_tokenizer, text, tiny_encoder, tiny_images
from transformers import BertConfig

from hf_platonic.encoders import DualEncoder, open_clip_parts, save_open_clip
from hf_platonic.errors import EncoderError
from hf_platonic.extraction import extract
from hf_platonic.probes import ProbeSet
from hf_platonic.transfers import transfer

open_clip = pytest.importorskip("open_clip", reason="pip install -e '.[open-clip]'")
made = pytest.importorskip("tiny_open_clip")

TABLE = (Path(__file__).parent.parent / "docs" / "families.md").read_text(encoding="utf-8")
PLACES = {
    "open_clip": {"output", "input", "features", "text"},
    "open_clip_eva": {"output", "input", "features", "text"},
    "open_clip_siglip": {"input", "text"},
    "open_clip_resnet": {"text"},
}
PROBES = ProbeSet(tiny_images(6), prompts=PROMPTS)

# The Hub's client reads its endpoint when imported.
FROM_HUB = """
import os, sys, threading
from http.server import ThreadingHTTPServer
from pathlib import Path
from test_encoders_hub import COMMIT, Hub

Hub.root = Path(sys.argv[1])
server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
threading.Thread(target=server.serve_forever, daemon=True).start()
os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_HUB_DISABLE_XET": "1"}
import conftest, pytest, torch
from tiny import tiny_images
from hf_platonic.encoders import DualEncoder
from hf_platonic.errors import EncoderError

local = DualEncoder.from_pretrained(f"local-dir:{sys.argv[1]}/me/model").encode_probes(tiny_images(3)).unit
for options in ({}, {"revision": COMMIT["me/model"], "local_files_only": True}):
    encoder = DualEncoder.from_pretrained("hf-hub:me/model", **options)
    assert (encoder.identity.repo, encoder.identity.revision) == ("me/model", COMMIT["me/model"])
    assert torch.equal(encoder.encode_probes(tiny_images(3)).unit, local)
with pytest.raises(EncoderError, match="open_clip model 'hf-hub:me/none'"):
    DualEncoder.from_pretrained("hf-hub:me/none")
"""


@pytest.mark.parametrize("family", made.CONFIGS)
def test_a_model_is_read_and_edited_exactly(family: str) -> None:
    found = check(family)
    assert found.same_order
    assert found.order is not None
    assert found.order < 1e-4
    assert found.batch < 2e-6
    assert found.permuted < 2e-6
    assert set(found.edits) == PLACES[family]
    for edit in found.edits.values():
        assert edit.moved > 1e-3
        assert edit.live < 1e-5
        assert edit.merged < 1e-5
        assert edit.reloaded < 1e-6
        assert edit.restored
        assert edit.other_tower < 1e-6
    assert support_row(family, found) in TABLE, "out of date: python docs/families.py"


@pytest.mark.parametrize("family", made.CONFIGS)
def test_embeddings_and_state_dict_are_those_of_the_untouched_model(family: str, tmp_path: Path) -> None:
    encoder, plain = tiny_encoder(family), made.bare(family)
    keys = [(key, value.shape) for key, value in plain.state_dict().items()]
    assert sorted(keys) == sorted((key, value.shape) for key, value in encoder.model.state_dict().items())
    assert plain.load_state_dict(encoder.model.state_dict())
    with torch.no_grad():
        images = plain.encode_image(encoder.preprocess(tiny_images(3))["pixel_values"], normalize=True)
        texts = plain.encode_text(made.WORDS(PROMPTS), normalize=True)
    torch.testing.assert_close(encoder.encode_probes(tiny_images(3)).unit, images, rtol=0, atol=1e-6)
    torch.testing.assert_close(encoder.encode_prompts(PROMPTS), texts, rtol=0, atol=1e-6)

    save_open_clip(encoder.model, tmp_path)
    again = open_clip.create_model(f"local-dir:{tmp_path}", require_pretrained=True)
    assert all(torch.equal(value, plain.state_dict()[key]) for key, value in again.state_dict().items())
    loaded = DualEncoder.from_pretrained(f"local-dir:{tmp_path}")
    copied = copy.deepcopy(loaded.model)
    assert copied.load_state_dict(made.parts(family)[0].state_dict())
    assert loaded.identity.repo == tmp_path.name
    assert torch.equal(loaded.encode_probes(tiny_images(3)).unit, encoder.encode_probes(tiny_images(3)).unit)


def test_one_edit_by_the_merged_model_of_open_clip_itself(tmp_path: Path) -> None:
    encoder = tiny_encoder("open_clip_eva", seed=2)
    model = transfer(task_of("siglip"), encoder)
    live = encoder.encode_probes(tiny_images(3)).unit
    with pytest.raises(EncoderError, match=r"without adapters, got PeftModel.*merge_and_unload"):
        save_open_clip(model, tmp_path)
    with pytest.raises(EncoderError, match=r"without adapters, got CustomTextCLIP.*merge_and_unload"):
        save_open_clip(model.get_base_model(), tmp_path)
    save_open_clip(model.merge_and_unload(), tmp_path)
    plain = open_clip.create_model(f"local-dir:{tmp_path}", require_pretrained=True).eval()
    with torch.no_grad():
        got = plain.encode_image(encoder.preprocess(tiny_images(3))["pixel_values"], normalize=True)
    torch.testing.assert_close(got, live, rtol=0, atol=1e-5)
    assert plain.visual.trunk.head.bias is not None


@pytest.mark.parametrize("family", ["open_clip", "open_clip_siglip"])
def test_fine_tunes_in_their_forms(family: str, tmp_path: Path) -> None:
    base = tiny_encoder(family)
    save_open_clip(base.model, tmp_path / "base")
    before = {key: value.clone() for key, value in base.model.state_dict().items()}
    name = f"local-dir:{tmp_path / 'base'}"
    torch.manual_seed(3)
    config = LoraConfig(r=2, target_modules=r"visual.*(c_fc|fc1)|visual\.projection", init_lora_weights=False)
    tuned = get_peft_model(DualEncoder.from_pretrained(name).model, config)
    tuned.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    whole = tuned.merge_and_unload()
    save_open_clip(whole, tmp_path / "whole")
    state = load_file(tmp_path / "whole" / "open_clip_model.safetensors")
    # As open_clip's CLIP class, which has the text tower's parts at the top, would save it.
    save_file({key.removeprefix("text."): value for key, value in state.items()}, tmp_path / "old.safetensors")
    save_file({k: (v - before[k]).contiguous() for k, v in state.items()}, tmp_path / "vector.safetensors")
    tower = {key.removeprefix("visual."): value for key, value in state.items() if key.startswith("visual.")}
    save_file(tower, tmp_path / "tower.safetensors")

    reference = extract(base, DualEncoder.from_pretrained(f"local-dir:{tmp_path / 'whole'}"), PROBES)
    assert float(reference.delta.abs().max()) > 0.01
    options = [
        {"adapter": tmp_path / "adapter"},
        {"weights": tmp_path / "old.safetensors"},
        {"weights": tmp_path / "whole" / "open_clip_model.safetensors"},
        {"weights": tmp_path / "tower.safetensors"},
        {"task_vector": tmp_path / "vector.safetensors"},
    ]
    if family == "open_clip_siglip":  # open_clip knows that class by another key
        options = [option for option in options if option.get("weights") != tmp_path / "old.safetensors"]
    for option in options:
        found = extract(base, DualEncoder.from_pretrained(name, **option), PROBES)
        torch.testing.assert_close(found.delta, reference.delta, rtol=0, atol=1e-5, msg=str(option))
    alone = DualEncoder.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(extract(None, alone, PROBES).delta, reference.delta, rtol=0, atol=1e-5)


def test_an_edit_is_saved_and_loaded_on_its_recorded_base(tmp_path: Path) -> None:
    save_open_clip(tiny_encoder("open_clip", seed=2).model, tmp_path / "base")
    encoder = DualEncoder.from_pretrained(f"local-dir:{tmp_path / 'base'}")
    model = transfer(task_of("clip"), encoder)
    live = encoder.encode_probes(tiny_images(3)).unit
    model.save_pretrained(tmp_path / "edit", save_embedding_layers=False)
    again = DualEncoder.from_pretrained(tmp_path / "edit")
    torch.testing.assert_close(again.encode_probes(tiny_images(3)).unit, live, rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["shortest", "longest", "squash"])
def test_pixels_are_those_of_open_clips_transform(mode: str) -> None:
    config = {
        "size": (16, 16),
        "resize_mode": mode,
        "interpolation": "bicubic",
        "mean": (0.5,) * 3,
        "std": (0.25,) * 3,
    }
    model = made.bare("open_clip")
    open_clip.model.set_model_preprocess_cfg(model, open_clip.transform.merge_preprocess_dict({}, config))
    encoder = DualEncoder(*open_clip_parts(model, made.WORDS, made.CONFIGS["open_clip"]))
    transform = open_clip.image_transform((16, 16), is_train=False, **{k: v for k, v in config.items() if k != "size"})
    images = [*tiny_images(2, size=(41, 20)), *tiny_images(1, size=(1, 1))]
    wanted = torch.stack([transform(image) for image in images])
    assert torch.equal(encoder.preprocess(images)["pixel_values"], wanted)
    assert torch.equal(encoder.preprocess([np.asarray(image) for image in images])["pixel_values"], wanted)
    other = DualEncoder(*made.parts("open_clip"))
    assert other.identity.preprocessing_digest != encoder.identity.preprocessing_digest
    assert other.identity.config_digest == encoder.identity.config_digest


def test_quick_gelu_is_part_of_the_identity() -> None:
    config = {**made.CONFIGS["open_clip"], "quick_gelu": False}
    plain = DualEncoder(*open_clip_parts(made.bare("open_clip"), made.WORDS, config))
    assert plain.identity.config_digest != tiny_encoder("open_clip").identity.config_digest
    unsaid = {key: value for key, value in config.items() if key != "quick_gelu"}
    assert DualEncoder(*open_clip_parts(made.bare("open_clip"), made.WORDS, unsaid)).identity == plain.identity


def test_long_prompts_are_reported_and_dropping_words_is_switched_off() -> None:
    words = open_clip.tokenizer.SimpleTokenizer(str(made.MERGES), context_length=24, reduction_mask="random")
    encoder = DualEncoder(*open_clip_parts(made.bare("open_clip"), words, made.CONFIGS["open_clip"]))
    long = "one two three " * 12
    with pytest.warns(UserWarning, match=r"1 of 2 prompts are longer than the 24 tokens"):
        first = encoder.encode_prompts([long, "a cat"])
    with pytest.warns(UserWarning, match="longer than the 24"):
        assert torch.equal(encoder.encode_prompts([long, "a cat"]), first)
    assert encoder.encode_prompts(["one two three one two"]).shape == (1, 16)


def test_a_tokenizer_of_transformers_goes_along(tmp_path: Path) -> None:
    bert_tokenizer().save_pretrained(tmp_path / "words")
    words = open_clip.tokenizer.HFTokenizer(str(tmp_path / "words"), context_length=24)
    config = copy.deepcopy(made.CONFIGS["open_clip"])
    config["text_cfg"]["hf_tokenizer_name"] = str(tmp_path / "words")
    encoder = DualEncoder(*open_clip_parts(made.bare("open_clip"), words, config))
    save_open_clip(encoder.model, tmp_path / "with", encoder.processor)
    save_open_clip(encoder.model, tmp_path / "named")
    for name in ("with", "named"):
        loaded = DualEncoder.from_pretrained(f"local-dir:{tmp_path / name}")
        assert torch.equal(loaded.encode_prompts(PROMPTS), encoder.encode_prompts(PROMPTS))
        assert loaded.identity.preprocessing_digest == encoder.identity.preprocessing_digest


def test_what_is_no_two_tower_model_of_open_clip_is_refused(tmp_path: Path) -> None:
    clip = open_clip.model.CLIP(**made.CONFIGS["open_clip"])
    with pytest.raises(EncoderError, match=r"class CustomTextCLIP.*got CLIP\. Make a CLIP with.*force_custom_text"):
        open_clip_parts(clip, made.WORDS, made.CONFIGS["open_clip"])
    save_open_clip(tiny_encoder("open_clip").model, tmp_path)
    (tmp_path / "open_clip_model.safetensors").unlink()
    with pytest.raises(EncoderError, match="Can't load the open_clip model.*could not be loaded"):
        DualEncoder.from_pretrained(f"local-dir:{tmp_path}")


def test_half_precision(tmp_path: Path) -> None:
    save_open_clip(tiny_encoder("open_clip_eva").model, tmp_path)
    half = DualEncoder.from_pretrained(f"local-dir:{tmp_path}", dtype="bfloat16")
    assert half.dtype is torch.bfloat16
    whole = DualEncoder.from_pretrained(f"local-dir:{tmp_path}", dtype="auto")
    near = (half.encode_probes(tiny_images(3)).unit * whole.encode_probes(tiny_images(3)).unit).sum(1)
    assert float(near.min()) > 0.99


@pytest.mark.parametrize("pickled", [False, True])
def test_loading_from_the_hub_pins_a_commit(pickled: bool, tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "me" / "model"
    save_open_clip(tiny_encoder("open_clip").model, folder)
    if pickled:  # as older repos have it
        file = folder / "open_clip_model.safetensors"
        torch.save(load_file(file), folder / "open_clip_pytorch_model.bin")
        file.unlink()
    env = {key: value for key, value in os.environ.items() if "proxy" not in key.lower() and key != "HF_HUB_OFFLINE"}
    env |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", FROM_HUB, str(tmp_path / "hub")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_heads_of_timm_and_text_towers_of_transformers(kind: str, tmp_path: Path) -> None:
    words = bert_tokenizer()
    words.save_pretrained(tmp_path)
    BertConfig(**text(words)).save_pretrained(tmp_path)
    config = copy.deepcopy(made.CONFIGS["open_clip_eva"])
    config["vision_cfg"]["timm_proj"] = kind
    config["text_cfg"] = {
        "hf_model_name": str(tmp_path),
        "hf_tokenizer_name": str(tmp_path),
        "hf_model_pretrained": False,
        "hf_proj_type": kind,
        "context_length": 24,
    }
    torch.manual_seed(5)
    model = open_clip.model.CustomTextCLIP(**copy.deepcopy(config)).eval()
    open_clip.model.set_model_preprocess_cfg(model, made.bare("open_clip").visual.preprocess_cfg)
    plain = copy.deepcopy(model)
    tokens = open_clip.tokenizer.HFTokenizer(str(tmp_path), context_length=24)
    encoder = DualEncoder(*open_clip_parts(model, tokens, config))
    assert plain.load_state_dict(encoder.model.state_dict())
    before = encoder.encode_probes(tiny_images(3)).unit
    with torch.no_grad():
        images = plain.encode_image(encoder.preprocess(tiny_images(3))["pixel_values"], normalize=True)
        texts = plain.encode_text(tokens(PROMPTS), normalize=True)
    torch.testing.assert_close(before, images, rtol=0, atol=1e-6)
    torch.testing.assert_close(encoder.encode_prompts(PROMPTS), texts, rtol=0, atol=1e-6)
    for place in ({}, {"tower": "text"}):
        verified = transfer(task_of("clip"), encoder, adapter_name=f"edit{len(place)}", **place).peft_config
        assert verified[f"edit{len(place)}"].provenance["verified"]["merged"] < 1e-5
