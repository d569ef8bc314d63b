"""The third-party families of benchmarks/local_families.py, with tiny random weights."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers as tf
from tiny import bert_tokenizer, text, tiny_images

from hf_platonic import DualEncoder, ProbeSet, extract, supported_families, transfer
from hf_platonic.benchmark.setting import Setting
from hf_platonic.benchmark.suites import load_suite
from hf_platonic.encoders import Audio

PATH = Path(__file__).parent.parent / "benchmarks" / "local_families.py"


@pytest.fixture(scope="module")
def families():
    spec = importlib.util.spec_from_file_location("local_families", PATH)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def shared(tokenizer):
    return {
        "text_config": tf.BertConfig(**text(tokenizer)).to_dict(),
        "concepts": 12,
        "projection_dim": 10,
        "feature_channels": 16,
        "adapter_channels": 4,
        "temperature": 2.0,
    }


def lite(families):
    tokenizer = bert_tokenizer()
    sizes = {"stage_channels": [8, 8, 12], "stage_blocks": [1, 2, 1], "stage_kernels": [3, 5, 3]}
    config = families.LiteConfig(
        **shared(tokenizer),
        **sizes,
        image_size=20,
        stem_channels=8,
        stage_strides=[1, 2, 2],
        stage_expansions=[1, 2, 2],
    )
    images = tf.SiglipImageProcessorPil(size={"height": 20, "width": 20})
    return families.LiteConse(config), tf.VisionTextDualEncoderProcessor(images, tokenizer)


def tagger(families, tower):
    tokenizer = bert_tokenizer()
    sizes = {"channels": 4, "filters": [3, 2], "mels": 64, "frames": 120}
    # What five poolings leave of time and bands is part of the second tower's features.
    options = {**shared(tokenizer), **sizes, "feature_channels": 4 if tower == "vgg" else 16}
    extractor = tf.ClapFeatureExtractor(
        feature_size=64,
        sampling_rate=8000,
        hop_length=64,
        fft_window_size=512,
        max_length_s=1,
        frequency_max=4000,
        truncation="rand_trunc",
        padding="repeatpad",
    )
    model = families.TagsConse(families.TagsConfig(**options, tower=tower))
    return model, tf.ClapProcessor(extractor, tokenizer)


def clips(n):
    rng = np.random.default_rng(0)
    return [Audio(rng.normal(size=3000 + 2000 * i).astype(np.float32) / 5, 8000) for i in range(n)]


MAKERS = {
    "lite": lambda families: (*lite(families), tiny_images(12)),
    "musicnn": lambda families: (*tagger(families, "musicnn"), clips(6)),
    "vgg": lambda families: (*tagger(families, "vgg"), clips(6)),
}


@pytest.fixture(scope="module", params=MAKERS)
def made(request, families, tmp_path_factory):
    torch.manual_seed(0)
    model, processor, probes = MAKERS[request.param](families)
    for module in model.modules():
        if isinstance(module, (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Linear)):
            torch.nn.init.kaiming_normal_(module.weight)
        if isinstance(module, (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d)):
            module.momentum = 1.0
    encoder = DualEncoder(model, processor)
    with torch.no_grad():  # statistics as after training, so that features differ
        model.train().pooled_features(encoder.preprocess(probes)[model.main_input_name])
    model.eval()
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder, encoder, probes


def test_a_saved_folder_gives_the_same_embeddings(made):
    folder, encoder, probes = made
    loaded = DualEncoder.from_pretrained(folder)
    assert torch.equal(loaded.encode_probes(probes).unit, encoder.encode_probes(probes).unit)
    assert torch.equal(loaded.encode_prompts(["a cat", "a dog"]), encoder.encode_prompts(["a cat", "a dog"]))
    assert loaded.identity.config_digest == encoder.identity.config_digest
    assert loaded.identity.preprocessing_digest == encoder.identity.preprocessing_digest


def test_probes_dont_depend_on_their_batch(made):
    _, encoder, probes = made
    together = encoder.encode_probes(probes).unit
    alone = torch.cat([encoder.encode_probes([probe]).unit for probe in probes])
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=0)
    assert float((together - together[0]).norm(dim=1)[1:].min()) > 1e-3


@pytest.mark.parametrize("place", [{}, {"site": "input"}, {"tower": "text"}])
def test_a_descriptor_moves_into_it(made, place):
    folder, encoder, probes = made
    tuned = DualEncoder.from_pretrained(folder)
    with torch.no_grad():
        tuned.model.classifier.weight.add_(0.3 * torch.randn_like(tuned.model.classifier.weight))
    descriptor = extract(encoder, tuned, ProbeSet(probes, class_names=["cat", "dog", "car"]))
    # It compares the edited model, live and merged, with the operator, and raises if they differ.
    edited = transfer(descriptor, DualEncoder.from_pretrained(folder), strength=1.0, **place)
    assert type(edited).__name__ == "PeftModel"


def test_a_base_model_says_what_its_classifier_says(families, made):
    _, encoder, probes = made
    model = encoder.model
    inputs = encoder.preprocess(probes)[model.main_input_name]
    with torch.no_grad():
        model.adapter.fc2.weight.zero_()
        model.adapter.fc2.bias.zero_()
        features = model.pooled_features(inputs)
        wanted = torch.softmax(model.classifier(features) / 2.0, dim=-1) @ model.probe_projection.weight.T
        torch.testing.assert_close(encoder.encode_probes(probes).unit, torch.nn.functional.normalize(wanted, dim=1))


def test_pooled_features_can_be_listened_to(families):
    model, processor = lite(families)
    seen = {}
    for name, module in model.named_modules():
        if isinstance(module, families.MeanPool):
            module.register_forward_hook(lambda _, args, out, name=name: seen.update({name: out.shape}))
    DualEncoder(model, processor).encode_probes(tiny_images(2))
    stages = {f"probe_model.stage_pools.{i}": (2, size) for i, size in enumerate((8, 8, 12))}
    assert seen == {**stages, "probe_model.pooler": (2, 16)}


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "before", "after"), [(6, 3, 2, 0, 1), (5, 3, 2, 1, 1), (8, 4, 1, 1, 2)]
)
def test_padding_is_as_in_tensorflow(families, size, kernel, stride, before, after):
    torch.manual_seed(0)
    layer, x = families.SameConv(1, 1, kernel, stride), torch.randn(1, 1, size, size)
    padded = torch.nn.functional.pad(x, (before, after, before, after))
    wanted = torch.nn.functional.conv2d(padded, layer.weight, layer.bias, stride)
    assert torch.equal(layer(x), wanted)
    assert wanted.shape[-1] == -(-size // stride)


def test_a_benchmark_takes_it_as_a_plugin(families, tmp_path):
    setting = Setting(load_suite("local"), tmp_path, plugin=PATH)
    for _ in range(2):
        setting.load_plugin()
    model, processor = lite(families)
    assert DualEncoder(model, processor).family is supported_families()["efficientnet-lite-conse"]
