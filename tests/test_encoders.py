"""`DualEncoder` on tiny random models of every family: embeddings, design rows, prompts, modes, adapters."""

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from tiny import FAMILIES, IMAGE_FAMILIES, text_tower, tiny_clips, tiny_encoder, tiny_images, tiny_parts, tiny_probes
from torch.nn.functional import normalize

from hf_platonic.encoders import DualEncoder, edit_site
from hf_platonic.encoders.families import bare_model, edited_linear
from hf_platonic.errors import EncoderError, ProbeError, PromptError

PROMPTS = ["a cat", "a dog in the snow", "rain"]


@pytest.mark.parametrize("family", FAMILIES)
def test_shapes_norms_and_types(family):
    encoder = tiny_encoder(family)
    features = encoder.encode_probes(tiny_probes(encoder, 3))
    prompts = encoder.encode_prompts(PROMPTS)
    assert features.unit.shape == (3, encoder.embedding_dim)
    assert features.design.shape == (3, encoder.design_dim)
    assert prompts.shape == (3, encoder.embedding_dim)
    for rows in (features.unit, prompts):
        assert rows.dtype == torch.float32
        assert not rows.requires_grad
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(3))
    assert features.design.dtype == torch.float32


@pytest.mark.parametrize("family", [name for name in IMAGE_FAMILIES if name != "blip_itc"])  # it has no getter
def test_image_embeddings_are_the_models_own(family):
    model, processor = tiny_parts(family)
    images = tiny_images(3)
    with torch.no_grad():
        own = model.get_image_features(**processor.image_processor(images=images, return_tensors="pt")).pooler_output
    torch.testing.assert_close(DualEncoder(model, processor).encode_probes(images).unit, normalize(own, dim=1))


@pytest.mark.parametrize("family", FAMILIES)
def test_an_edit_on_the_design_is_an_edit_of_the_module(family):
    encoder = tiny_encoder(family)
    probes = tiny_probes(encoder)
    before = encoder.encode_probes(probes)
    torch.manual_seed(1)
    edit = 0.2 * torch.randn(encoder.design_dim, encoder.embedding_dim) / encoder.design_dim**0.5
    expected = normalize(before.unit + before.design @ edit, dim=1)
    layer = edited_linear(encoder.model, encoder.site)
    with torch.no_grad():
        if encoder.site.kind == "output":
            change = edit.T @ layer.weight
            if layer.bias is not None:
                layer.bias += edit.T @ layer.bias
        else:
            change = edit[:-1].T
            layer.bias += edit[-1]
        layer.weight += change
    after = encoder.encode_probes(probes).unit
    assert (after - before.unit).abs().max() > 0.01
    torch.testing.assert_close(after, expected, atol=2e-6, rtol=1e-5)


def test_input_site_without_bias_has_no_constant_column():
    model, processor = tiny_parts("siglip")
    model.vision_model.head.mlp.fc2.bias = None
    encoder = DualEncoder(model, processor)
    assert encoder.design_dim == 32
    assert encoder.encode_probes(tiny_images(2)).design.shape == (2, 32)


def test_design_can_be_skipped():
    encoder = tiny_encoder("siglip")
    features = encoder.probe_features(encoder.preprocess(tiny_images(2)), design=False)
    assert features.design is features.unit


@pytest.mark.parametrize("family", FAMILIES)
def test_one_pass_through_the_probe_tower_and_none_through_the_text_tower(family):
    encoder = tiny_encoder(family)
    calls = {"probe": 0, "text": 0}

    def count(key):
        def hook(*_):
            calls[key] += 1

        return hook

    tower = encoder.model.audio_model if encoder.modality == "audio" else encoder.model.vision_model
    tower.register_forward_hook(count("probe"))
    text_tower(encoder.model).register_forward_hook(count("text"))
    encoder.encode_probes(tiny_probes(encoder))
    assert calls == {"probe": 1, "text": 0}


@pytest.mark.parametrize("family", FAMILIES)
def test_batch_composition_changes_nothing(family):
    encoder = tiny_encoder(family)
    probes = tiny_probes(encoder)
    together = encoder.encode_probes(probes)
    alone = [encoder.encode_probes([probe]) for probe in probes]
    torch.testing.assert_close(together.unit, torch.cat([f.unit for f in alone]), atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(together.design, torch.cat([f.design for f in alone]), atol=2e-5, rtol=1e-5)
    prompts = encoder.encode_prompts(PROMPTS)
    one_by_one = encoder.encode_prompts(PROMPTS, batch_size=1)
    torch.testing.assert_close(prompts, one_by_one, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_mode_is_ignored_and_kept(family):
    encoder = tiny_encoder(family)
    probes = tiny_probes(encoder)
    quiet = encoder.encode_probes(probes), encoder.encode_prompts(PROMPTS)
    encoder.model.train()
    text_tower(encoder.model).eval()
    buffers = {name: value.clone() for name, value in encoder.model.named_buffers()}
    assert torch.equal(encoder.encode_probes(probes).unit, quiet[0].unit)
    assert torch.equal(encoder.encode_prompts(PROMPTS), quiet[1])
    assert encoder.model.training
    assert not text_tower(encoder.model).training
    assert all(torch.equal(buffers[name], value) for name, value in encoder.model.named_buffers())


def test_mode_is_kept_after_a_failure():
    encoder = tiny_encoder()
    encoder.model.train()
    with pytest.raises(TypeError, match="pixel_values"):
        encoder.probe_features({})
    assert encoder.model.training


@pytest.mark.parametrize("family", ["clip", "siglip", "clap"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_models_give_float32(family, dtype):
    encoder = tiny_encoder(family)
    probes = tiny_probes(encoder)
    exact = encoder.encode_probes(probes)
    encoder.model.to(dtype)
    rounded = encoder.encode_probes(probes)
    assert encoder.dtype == dtype
    assert rounded.unit.dtype == rounded.design.dtype == encoder.encode_prompts(PROMPTS).dtype == torch.float32
    torch.testing.assert_close(rounded.unit.norm(dim=1), torch.ones(4))
    assert (rounded.unit * exact.unit).sum(dim=1).min() > 0.98


def test_a_repeated_prompt_is_encoded_once():
    encoder = tiny_encoder()
    rows = []
    text_tower(encoder.model).register_forward_hook(lambda _, __, output: rows.append(len(output.pooler_output)))
    embedded = encoder.encode_prompts(["a cat", "rain", "a cat"])
    assert rows == [2]
    assert torch.equal(embedded[0], embedded[2])


@pytest.mark.parametrize("family", ["siglip", "siglip2", "siglip2_naflex"])
def test_siglip_prompts_fill_every_position_and_have_no_mask(family):
    encoder = tiny_encoder(family)
    text = [prompt.lower() if family.startswith("siglip2") else prompt for prompt in ("a Cat", "rain on a Roof")]
    batch = encoder.processor.tokenizer(
        text, padding="max_length", max_length=64, truncation=True, padding_side="right", return_tensors="pt"
    )
    with torch.no_grad():
        own = encoder.model.get_text_features(input_ids=batch["input_ids"]).pooler_output
    torch.testing.assert_close(encoder.encode_prompts(["a Cat", "rain on a Roof"]), normalize(own, dim=1))


@pytest.mark.parametrize(
    "family", ["clip", "metaclip_2", "altclip", "chinese_clip", "vision-text-dual-encoder", "clap"]
)
def test_prompts_of_other_families_are_padded_to_the_longest(family):
    encoder = tiny_encoder(family)
    batch = encoder.processor.tokenizer(PROMPTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        own = encoder.model.get_text_features(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
        ).pooler_output
    torch.testing.assert_close(encoder.encode_prompts(PROMPTS), normalize(own, dim=1), atol=2e-6, rtol=1e-5)


def test_only_siglip2_lowers_case():
    lowered = {name: tiny_encoder(name).canonical_prompts(["A Cat"])[0] for name in IMAGE_FAMILIES}
    assert {name for name, prompt in lowered.items() if prompt == "a cat"} == {"siglip2", "siglip2_naflex"}
    with pytest.raises(PromptError, match=r"'A cat' and 'a cat'.*same to this model"):
        tiny_encoder("siglip2").encode_prompts(["A cat", "a cat"])


@pytest.mark.parametrize(
    ("family", "limit"), [("clip", 77), ("siglip2", 64), ("clap", 62), ("altclip", 62), ("metaclip_2", 62)]
)
def test_long_prompts_keep_their_end_and_must_stay_different(family, limit):
    encoder = tiny_encoder(family)
    long = "x" * 200
    with pytest.warns(UserWarning, match=rf"1 of 2 prompts are longer than the {limit} tokens.*the first: 'xxx"):
        assert encoder.encode_prompts(["a cat", long]).isfinite().all()
    with pytest.raises(PromptError, match=rf"'{long}1' and '{long}2'.*{limit} tokens"):
        encoder.encode_prompts([long + "1", "a cat", long + "2"])


def test_a_tokenizer_without_the_models_end_token_is_refused():
    model, _ = tiny_parts("clip")
    _, other = tiny_parts("vision-text-dual-encoder")
    _, processor = tiny_parts("clip")
    processor.tokenizer = other.tokenizer
    with pytest.raises(EncoderError, match="end token.*every tokenised prompt"):
        DualEncoder(model, processor).encode_prompts(["a cat"])


@pytest.mark.parametrize("bad", [[], "a cat"])
def test_prompts_must_be_a_list(bad):
    with pytest.raises(PromptError, match="non-empty list of prompts"):
        tiny_encoder().encode_prompts(bad)


@pytest.mark.parametrize("bad", ["", "  ", None, 3])
def test_each_prompt_must_say_something(bad):
    with pytest.raises(PromptError, match="prompt 1 to be a non-empty string"):
        tiny_encoder().encode_prompts(["a cat", bad])


def test_bad_embeddings_are_named():
    encoder = tiny_encoder()
    batch = encoder.preprocess(tiny_images(3))
    batch["pixel_values"][1] = float("nan")
    with pytest.raises(ProbeError, match="probe 11") as caught:
        encoder.probe_features(batch, offset=10)
    assert caught.value.index == 11
    torch.nn.init.zeros_(encoder.model.visual_projection.weight)
    with pytest.raises(ProbeError, match="direction.*zero for probe 5") as caught:
        encoder.encode_probes(tiny_images(2), offset=5)
    assert caught.value.index == 5


@pytest.mark.parametrize("bad", [[], {}, b"", "picture.png", 3])
def test_inputs_must_be_a_list(bad):
    with pytest.raises(ProbeError, match="non-empty list of image probes"):
        tiny_encoder().preprocess(bad)


def test_wrong_modality_is_named():
    with pytest.raises(ProbeError, match="image probe, got an audio clip for probe 1") as caught:
        tiny_encoder().encode_probes([tiny_images(1)[0], tiny_clips(1)[0]])
    assert caught.value.index == 1
    with pytest.raises(ProbeError, match="audio probe, got an image for probe 0"):
        tiny_encoder("clap").encode_probes(tiny_images(1))


def test_flat_and_tiny_images_keep_their_axes():
    encoder = tiny_encoder("siglip")
    flat = np.random.default_rng(0).integers(0, 256, (3, 40, 3), dtype=np.uint8)
    pixels = encoder.preprocess([flat, flat[:1], flat[:, :1]])["pixel_values"]
    assert pixels.shape == (3, 3, 16, 16)
    assert pixels[0].std(dim=2).min() > 0.01  # forty columns: taken for channels, they would be averaged out


def test_lora_changes_probes_and_not_the_rest():
    model, processor = tiny_parts()
    images = tiny_images(3)
    base = DualEncoder(model, processor)
    before, prompts = base.encode_probes(images).unit, base.encode_prompts(PROMPTS)
    config = LoraConfig(
        r=2, target_modules=r"vision_model.*(q_proj|v_proj)|visual_projection", init_lora_weights=False
    )
    tuned = DualEncoder(get_peft_model(model, config), processor)
    assert tuned.site == base.site
    assert type(edited_linear(tuned.model, tuned.site)) is torch.nn.Linear
    assert tuned.embedding_dim == 16
    changed = tuned.encode_probes(images).unit
    assert (changed - before).abs().max() > 0.01
    assert torch.equal(tuned.encode_prompts(PROMPTS), prompts)
    with tuned.model.disable_adapter():
        assert torch.equal(tuned.encode_probes(images).unit, before)


def test_injected_layers_and_saved_copies_are_found():
    model, processor = tiny_parts("siglip")
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["fc2"]), model)
    assert edit_site(model).module == "vision_model.head.mlp.fc2"
    assert DualEncoder(model, processor).encode_probes(tiny_images(2)).design.shape == (2, 33)
    model, processor = tiny_parts("clip")
    saved = get_peft_model(model, LoraConfig(target_modules=["q_proj"], modules_to_save=["visual_projection"]))
    assert edit_site(saved).module == "visual_projection"
    assert DualEncoder(saved, processor).embedding_dim == 16


def test_prompt_learning_is_refused():
    from peft import PromptTuningConfig

    model, processor = tiny_parts("clip")
    config = PromptTuningConfig(
        task_type="FEATURE_EXTRACTION",
        num_virtual_tokens=2,
        token_dim=24,
        num_layers=2,
        num_attention_heads=2,
        num_transformer_submodules=1,
    )
    tuned = get_peft_model(model, config)
    with pytest.raises(EncoderError, match="layers, got prompt learning"):
        DualEncoder(tuned, processor)


def test_the_wrapped_model_is_the_very_one():
    model, processor = tiny_parts()
    encoder = DualEncoder(model, processor)
    assert encoder.model is model
    assert bare_model(model) is model
