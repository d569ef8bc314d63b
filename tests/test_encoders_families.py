"""The table of families: look-ups, registration, edit sites, output forms."""

from dataclasses import replace

import pytest
import torch
import transformers as tf
from tiny import FAMILIES, TEXT, VISION, tiny_images, tiny_parts
from transformers.modeling_outputs import BaseModelOutputWithPooling

from hf_platonic.encoders import DualEncoder, EditSite, edit_site, family_of, register_family, supported_families
from hf_platonic.encoders import families as table
from hf_platonic.encoders.families import edited_linear, unwrap
from hf_platonic.errors import EncoderError


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_found_by_its_model_type(family):
    model, _ = tiny_parts(family)
    row = family_of(model)
    assert {model.config.model_type, type(model).__name__} & set(row.model_types)
    site = edit_site(model)
    assert site.kind == ("input" if family.startswith("siglip") else "output")
    assert isinstance(edited_linear(model, site), torch.nn.Linear)


def test_supported_families_is_a_copy():
    assert set(supported_families()) >= {
        *("clip", "metaclip_2", "altclip", "chinese_clip", "vision-text-dual-encoder"),
        *("siglip", "siglip2", "clap"),
    }
    supported_families().clear()
    assert supported_families()


def test_unknown_models_are_refused_with_the_list():
    bert = tf.BertModel(tf.BertConfig(**TEXT, vocab_size=10))
    with pytest.raises(EncoderError, match=r"clap, clip.*siglip.*got BertModel of model type 'bert'.*register_family"):
        family_of(bert)
    with pytest.raises(EncoderError, match="got Linear of model type None"):
        family_of(torch.nn.Linear(2, 2))


def test_scores_that_are_dot_products_are_refused():
    text = {**TEXT, "hidden_size": 16, "vocab_size": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sound = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    codec = {"encoder_hidden_size": 4, "hidden_size": 16, "downsampling_ratios": [2, 2], "n_codebooks": 1}
    config = tf.PeAudioConfig(
        text_config={**text, "cls_token_id": 1, "sep_token_id": 2, "hidden_size": 24},
        audio_config={**sound, "num_key_value_heads": 2, "head_dim": 8, "dac_config": codec},
    )
    with pytest.raises(
        EncoderError, match=r"scores by cosines, got PeAudioModel of .*'pe_audio', which .* dot products"
    ):
        DualEncoder(tf.PeAudioModel(config), None)


def test_half_a_model_is_refused():
    vision = tf.CLIPVisionModel(tf.CLIPVisionConfig(**VISION))
    with pytest.raises(EncoderError, match="CLIPVisionModel of model type 'clip_vision_model'"):
        edit_site(vision)


def test_classifier_head_is_refused():
    model, processor = tiny_parts()
    classifier = tf.CLIPForImageClassification(model.config)
    with pytest.raises(EncoderError, match="one module named 'visual_projection' in CLIPForImageClassification"):
        DualEncoder(classifier, processor)


def test_siglip_without_a_pooling_head_is_refused():
    config = tiny_parts("siglip")[0].config
    config.vision_config.vision_use_head = False
    with pytest.raises(EncoderError, match="one module named 'head.mlp.fc2'.*got none"):
        edit_site(tf.SiglipModel(config))


def test_a_site_that_is_not_linear_is_refused():
    model, _ = tiny_parts()
    model.visual_projection = torch.nn.Identity()
    with pytest.raises(EncoderError, match="`visual_projection` to be a linear layer, got Identity"):
        edit_site(model)


def test_incomplete_processors_are_refused():
    model, processor = tiny_parts()
    with pytest.raises(
        EncoderError, match=r"processor\.tokenizer, processor\.image_processor for family CLIP, got CLIPModel"
    ):
        DualEncoder(model, processor.image_processor)
    with pytest.raises(EncoderError, match=r"processor\.feature_extractor for family CLAP"):
        DualEncoder(tiny_parts("clap")[0], processor)


def test_unwrap_takes_both_generations():
    z = torch.ones(2, 3)
    assert unwrap(z) is z
    assert unwrap(BaseModelOutputWithPooling(pooler_output=z)) is z
    for bad in ((z,), BaseModelOutputWithPooling(last_hidden_state=z), None):
        with pytest.raises(EncoderError, match="tensor or an output with `pooler_output`"):
            unwrap(bad)


class OwnConfig(tf.PretrainedConfig):
    model_type = "own-two-tower"


class OwnModel(torch.nn.Module):
    """A third-party dual encoder that is no transformers model."""

    def __init__(self):
        super().__init__()
        self.config = OwnConfig()
        self.config.text_config = tf.PretrainedConfig(max_position_embeddings=32)
        self.tower = torch.nn.ModuleDict({"classifier": torch.nn.Linear(3, 8)})
        self.words = torch.nn.Embedding(600, 8)

    def embed(self, pixel_values):
        return self.tower["classifier"](pixel_values.mean((2, 3)))

    def get_text_features(self, input_ids, attention_mask):
        return (self.words(input_ids) * attention_mask[..., None]).sum(1)


def test_a_registered_family_works_like_the_others(monkeypatch):
    monkeypatch.setattr(table, "_FAMILIES", dict(table._FAMILIES))
    row = table.Family("Own", ("own-two-tower",), "image", EditSite("classifier", "output"), probe_getter="embed")
    register_family(row)
    register_family(row)
    with pytest.raises(EncoderError, match="new model type, got 'own-two-tower'"):
        register_family(replace(row, name="Other"))
    torch.manual_seed(0)
    encoder = DualEncoder(OwnModel(), tiny_parts()[1])
    assert encoder.site == EditSite("tower.classifier", "output")
    assert encoder.encode_probes(tiny_images(3)).unit.shape == (3, 8)
    assert encoder.encode_prompts(["a cat", "a dog"]).shape == (2, 8)
    assert encoder.identity.model_type == "own-two-tower"


@pytest.mark.parametrize("times", [1, 2])
def test_an_input_site_must_run_once(monkeypatch, times):
    monkeypatch.setattr(table, "_FAMILIES", dict(table._FAMILIES))
    register_family(table.Family("Own", ("own-two-tower",), "image", EditSite("classifier", "input"), "embed"))
    torch.manual_seed(0)
    model = OwnModel()
    layer = model.tower["classifier"]
    model.embed = lambda pixel_values: 5 + sum(layer(pixel_values.mean((2, 3))) for _ in range(times))
    encoder = DualEncoder(model, tiny_parts()[1])
    if times == 1:
        assert encoder.encode_probes(tiny_images(3)).design.shape == (3, 4)
    else:
        with pytest.raises(EncoderError, match="`tower.classifier` to run once with one row for each of 3 probes"):
            encoder.encode_probes(tiny_images(3))
