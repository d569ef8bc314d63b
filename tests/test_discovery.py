"""Models that no row describes: read and edited where a forward pass bears out the roles of their parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from family_checks import PROMPTS, task_of
from tiny import tiny_encoder, tiny_images, tiny_parts

from hf_platonic.encoders import DualEncoder
from hf_platonic.encoders import families as table
from hf_platonic.encoding import encode_probes
from hf_platonic.errors import EncoderError
from hf_platonic.transfers import transfer


@pytest.fixture
def without_row(monkeypatch: pytest.MonkeyPatch) -> Any:
    def build(family: str) -> DualEncoder:
        model, processor = tiny_parts(family, seed=2)
        kept = {key: row for key, row in table._FAMILIES.items() if key != model.config.model_type}
        monkeypatch.setattr(table, "_FAMILIES", kept)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.warns(UserWarning, match="isn't in the table of families"):
            encoder = DualEncoder(model, processor)
        assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
        return encoder

    return build


@pytest.mark.parametrize("family", ["clip", "altclip", "chinese_clip", "groupvit", "vision-text-dual-encoder", "blip"])
def test_roles_are_found_and_edits_are_exact(family: str, without_row: Any) -> None:
    known, task = tiny_encoder(family, seed=2), task_of("siglip")
    encoder = without_row(family)
    assert encoder.site == known.site
    assert encoder.family.text_site == known.at(tower="text").site.module
    images = tiny_images(3)
    torch.testing.assert_close(encoder.encode_probes(images).unit, known.encode_probes(images).unit, rtol=0, atol=1e-6)
    torch.testing.assert_close(encoder.encode_prompts(PROMPTS), known.encode_prompts(PROMPTS), rtol=0, atol=1e-6)
    transfer(task, known)
    model = transfer(task, encoder)
    assert task.probes is not None
    torch.testing.assert_close(
        encode_probes(encoder, task.probes).unit, encode_probes(known, task.probes).unit, rtol=0, atol=1e-5
    )
    assert model.peft_config["default"].provenance["verified"]["merged"] < 1e-5


def test_a_tower_without_an_affine_end_is_read_only(without_row: Any) -> None:
    encoder = without_row("align")
    assert encoder.family.site is None
    assert encoder.family.text_site == "text_projection"
    with pytest.raises(EncoderError, match="can be a source.*pass tower"):
        transfer(task_of("siglip"), encoder)


def test_a_residual_head_is_edited_at_its_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """SigLIP's image tower under a text tower that doesn't mind padding."""
    model, processor = tiny_parts("siglip", seed=2)
    words = torch.nn.Embedding(len(processor.tokenizer), 20)
    model.get_text_features = lambda input_ids, attention_mask: (words(input_ids) * attention_mask[..., None]).sum(1)
    kept = {key: row for key, row in table._FAMILIES.items() if key != "siglip"}
    monkeypatch.setattr(table, "_FAMILIES", kept)
    with pytest.warns(UserWarning, match=r"input of .*head\.mlp\.fc2"):
        encoder = DualEncoder(model, processor)
    assert (encoder.site.kind, encoder.site.module) == ("input", "vision_model.head.mlp.fc2")
    assert encoder.family.text_site is None
    model_ = transfer(task_of("clip"), encoder)
    assert model_.peft_config["default"].provenance["verified"]["live"] < 1e-5


@pytest.mark.parametrize("family", ["siglip", "aimv2"])
def test_prompts_that_depend_on_padding_are_refused(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = tiny_parts(family)
    kept = {key: row for key, row in table._FAMILIES.items() if key != family}
    monkeypatch.setattr(table, "_FAMILIES", kept)
    with pytest.raises(EncoderError, match="don't depend on the batch, got a difference.*register_family"):
        DualEncoder(model, processor)


def test_an_unknown_audio_model_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_FAMILIES", {key: row for key, row in table._FAMILIES.items() if key != "clap"})
    with pytest.raises(EncoderError, match=r"dual encoder of model type .*got ClapModel of model type 'clap'"):
        DualEncoder(*tiny_parts("clap"))
