"""Audio without chance, digests, and token limits."""

import numpy as np
import pytest
import torch
from PIL import Image
from tiny import IMAGE_FAMILIES, RATE, SOURCES, tiny_clips, tiny_encoder, tiny_images, tiny_parts

from hf_platonic.encoders import Audio, DualEncoder
from hf_platonic.encoders.preprocessing import prompt_limit
from hf_platonic.errors import EncoderError, ProbeError
from hf_platonic.extraction import extract
from hf_platonic.probes import ProbeSet
from hf_platonic.transfers import transfer

CLAPS = ["clap", "clap_fused"]


def with_long_clips():
    return [*tiny_clips(2), *tiny_clips(2, seed=1, seconds=2.5), *tiny_clips(1, seed=2, seconds=1.0)]


@pytest.mark.parametrize("family", CLAPS)
def test_audio_is_the_same_on_every_call_and_leaves_the_generator_alone(family):
    encoder = tiny_encoder(family)
    np.random.seed(5)
    before = np.random.get_state()
    first = encoder.preprocess(with_long_clips())
    after = np.random.get_state()
    assert before[2] == after[2]
    np.testing.assert_array_equal(before[1], after[1])
    np.random.seed(6)
    second = encoder.preprocess(with_long_clips())
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("family", CLAPS)
def test_a_clip_does_not_depend_on_its_neighbours(family):
    encoder = tiny_encoder(family)
    clips = with_long_clips()
    together = encoder.preprocess(clips)
    for row, clip in enumerate(clips):
        alone = encoder.preprocess([clip])
        assert all(torch.equal(together[key][row], alone[key][0]) for key in together)


def test_short_clips_are_the_extractors_own():
    for family in CLAPS:
        encoder = tiny_encoder(family)
        clips = tiny_clips(3)
        own = encoder.processor.feature_extractor(
            [clip.array for clip in clips], sampling_rate=RATE, return_tensors="pt"
        )
        torch.testing.assert_close(encoder.preprocess(clips)["input_features"], own["input_features"].float())


def test_only_clips_beyond_the_limit_are_longer_for_a_fused_model():
    fused = tiny_encoder("clap_fused").preprocess(with_long_clips())
    assert fused["is_longer"].flatten().tolist() == [False, False, True, True, False]
    assert fused["input_features"].shape == (5, 4, 81, 64)
    # Up to one hop beyond the limit there's nothing to crop, which the extractor calls "not longer".
    barely = Audio(np.ones(RATE + 50, dtype=np.float32), RATE)
    assert not tiny_encoder("clap_fused").preprocess([barely])["is_longer"].any()
    plain = tiny_encoder("clap").preprocess(with_long_clips())
    assert not plain["is_longer"].any()
    assert plain["input_features"].shape == (5, 1, 81, 64)


def test_a_long_clip_is_cut_to_its_centre():
    encoder = tiny_encoder("clap")
    (clip,) = tiny_clips(1, seconds=2.0)
    centre = Audio(clip.array[RATE // 2 : RATE // 2 + RATE], RATE)
    long, short = encoder.preprocess([clip, centre])["input_features"]
    assert torch.equal(long, short)


def test_the_model_decides_on_fusion_not_the_extractor():
    model, _ = tiny_parts("clap_fused")
    _, processor = tiny_parts("clap")
    crossed = DualEncoder(model, processor).encode_probes(tiny_clips(2)).unit
    torch.testing.assert_close(crossed, tiny_encoder("clap_fused").encode_probes(tiny_clips(2)).unit)


def test_a_pencil_of_a_picture_is_named_before_it_fills_the_memory():
    pencil = Image.new("RGB", (1, 4000))
    with pytest.raises(ProbeError, match="200 times as long as wide for probe 21, got 1 x 4000.*Crop") as caught:
        tiny_encoder("clip").preprocess([*tiny_images(1), pencil], offset=20)
    assert caught.value.index == 21
    assert tiny_encoder("siglip").encode_probes([pencil]).unit.isfinite().all()  # scales both edges


@pytest.mark.parametrize("family", [*IMAGE_FAMILIES, *SOURCES])
def test_one_pixel_and_large_pictures(family):
    encoder = tiny_encoder(family)
    wide = np.random.default_rng(0).integers(0, 256, (600, 2400, 3), dtype=np.uint8)
    unit = encoder.encode_probes([Image.new("RGB", (1, 1), "red"), wide, *tiny_images(1)]).unit
    assert unit.isfinite().all()
    assert (unit[0] - unit[1]).abs().max() > 1e-4


def test_preprocessing_digest_follows_what_changes_a_tensor():
    def digest(family="clip", change=lambda processor: None):
        model, processor = tiny_parts(family)
        change(processor)
        return DualEncoder(model, processor).identity.preprocessing_digest

    def resize(processor):
        processor.image_processor.size = {"shortest_edge": 18}

    def cut(processor):
        processor.feature_extractor.truncation = "rand_trunc"

    same = digest()
    assert digest() == same
    assert digest(change=resize) != same
    assert digest(change=lambda p: p.tokenizer.add_tokens(["Cat"])) != same
    assert len({digest(family) for family in ("clip", "siglip", "siglip2", "clap", "clap_fused")}) == 5


def test_using_an_encoder_does_not_change_its_digests():
    encoder = tiny_encoder("siglip2")
    before = encoder.identity
    encoder.encode_prompts(["a cat", "x" * 40])
    encoder.encode_probes(tiny_images(2))
    assert DualEncoder(encoder.model, encoder.processor).identity == before


def test_weights_and_precision_are_not_part_of_the_identity():
    first, second = tiny_encoder(seed=0), tiny_encoder(seed=1)
    second.model.to(torch.bfloat16)
    assert first.identity == second.identity
    assert first.identity.model_type == "clip"
    assert first.identity.repo is None


@pytest.mark.parametrize(("family", "limit"), [("clip", 77), ("clap", 62), ("vision-text-dual-encoder", 64)])
def test_prompt_limit_is_within_the_positions(family, limit):
    encoder = tiny_encoder(family)
    text = encoder.model.config.text_config
    assert prompt_limit(encoder.processor.tokenizer, text) == limit
    encoder.processor.tokenizer.model_max_length = 10**30  # what a tokenizer without a limit says
    assert prompt_limit(encoder.processor.tokenizer, text) == limit
    encoder.processor.tokenizer.model_max_length = 10
    assert prompt_limit(encoder.processor.tokenizer, text) == 10


def test_a_long_clip_may_be_the_mean_of_its_parts():
    model, processor = tiny_parts("clap")
    mean = DualEncoder(model, processor, long_clips="mean")
    crop = DualEncoder(model, processor)
    short, (long,) = tiny_clips(2), tiny_clips(1, seed=4, seconds=2.5)
    found = mean.encode_probes([short[0], long, short[1]]).unit
    torch.testing.assert_close(found[[0, 2]], crop.encode_probes(short).unit, rtol=0, atol=2e-6)
    thirds = np.array_split(long.array, 3)
    heard = []
    model.audio_projection.linear2.register_forward_hook(lambda _, __, output: heard.append(output))
    crop.encode_probes([Audio(third, RATE) for third in thirds])
    expected = torch.nn.functional.normalize(heard[0].mean(dim=0), dim=0)
    torch.testing.assert_close(found[1], expected, rtol=0, atol=2e-6)
    assert (found[1] - crop.encode_probes([long]).unit[0]).abs().max() > 1e-3
    assert mean.identity.preprocessing_digest != crop.identity.preprocessing_digest
    twice = Audio(np.repeat(long.array, 2), 2 * RATE)  # as many parts at another rate
    assert mean.preprocess([twice, long])["parts"].tolist() == [3, 3]
    with pytest.raises(EncoderError, match='"crop" or "mean", got \'middle\''):
        DualEncoder(model, processor, long_clips="middle")


@pytest.mark.parametrize("place", [{}, {"site": "input"}, {"tower": "text"}])
def test_edits_are_exact_on_means_of_parts_too(place):
    clips = tiny_clips(8, seconds=2.2)
    base, tuned = (DualEncoder(*tiny_parts("clap", seed=seed), long_clips="mean") for seed in (0, 1))
    task = extract(base, tuned, ProbeSet(clips, prompts=["a cat", "rain", "a bell"]))
    target = DualEncoder(*tiny_parts("clap", seed=2), long_clips="mean")
    model = transfer(task, target, strength=0.7, **place)
    verified = model.peft_config["default"].provenance["verified"]
    assert max(verified["live"], verified["merged"]) < 1e-5
