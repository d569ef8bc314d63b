"""The playground's build script, on a corpus of a few hundred items and for a step or two."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hf_platonic.playground import build, load_task, training
from hf_platonic.playground.architectures import BLUEPRINTS, TEXT_LENGTH, build_tokenizer


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(build, "CORPUS_SIZE", {"image": 48, "audio": 24})
    monkeypatch.setattr(training, "BATCH", {"image": 16, "audio": 8})
    monkeypatch.setattr(training, "RECIPES", dict.fromkeys(("image", "audio"), training.Recipe(1e-2, 1, batch=16)))


def read_corpus(folder):
    with np.load(folder / "arrays.npz") as arrays:
        captions = json.loads((folder / "captions.json").read_text(encoding="utf-8"))
        return training.Corpus(arrays["inputs"], arrays["factors"], captions, arrays["named"])


def test_corpus_is_seeded_and_kept(small, tmp_path):
    first = read_corpus(build.build_corpus("image", tmp_path / "a"))
    second = read_corpus(build.build_corpus("image", tmp_path / "b"))
    np.testing.assert_array_equal(first.inputs, second.inputs)
    assert first.captions == second.captions
    folder = tmp_path / "a" / "corpus-image-48"
    before = folder.stat().st_mtime_ns
    assert build.build_corpus("image", tmp_path / "a") == folder
    assert folder.stat().st_mtime_ns == before


def test_captions_fit_their_own_input(small, tmp_path):
    corpus = read_corpus(build.build_corpus("image", tmp_path))
    for variant in range(build.CAPTIONS):
        named = torch.from_numpy(corpus.named[:, variant])
        positives = training._positives(torch.from_numpy(corpus.factors), named)
        assert positives.diagonal().all()
        row, column = 3, 7
        agree = corpus.factors[row] == corpus.factors[column]
        assert positives[row, column] == bool(agree[corpus.named[column, variant]].all())


@pytest.mark.parametrize("name", ["clip-narrow", "siglip2", "convnext-bert", "clap-narrow"])
def test_a_model_is_trained_saved_and_adapted(name, small, tmp_path):
    modality = BLUEPRINTS[name].modality
    corpus = read_corpus(build.build_corpus(modality, tmp_path / "work"))
    with build._atomic_folder(tmp_path / name) as temporary:
        facts = training.pretrain(name, corpus, temporary, steps=2)
    assert np.isfinite(facts["final_loss"])
    assert {path.name for path in tmp_path.iterdir()} == {"work", name}

    model, processor = training.load(tmp_path / name)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    task = load_task("colours" if modality == "image" else "timbres")
    train = task.split("train", 32)
    inputs = training.process(processor, train.inputs)
    adapter = tmp_path / "adapter"
    training.finetune(name, tmp_path / name, adapter, inputs, train.labels, (task.class_names, task.templates[:1]))
    weights = load_file(adapter / "adapter_model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float16}
    assert all("text" not in key and "out_proj" not in key and "projection" not in key for key in weights)
    assert all(value.abs().max() > 0 for value in weights.values())
    tuned, _ = training.load(tmp_path / name, adapter)
    assert not torch.equal(training.embed(tuned, inputs), training.embed(model, inputs))
    for key, value in model.named_buffers():
        torch.testing.assert_close(dict(tuned.named_buffers())[key], value, rtol=0, atol=0)


def test_finished_models_are_skipped(small, tmp_path):
    (tmp_path / "models" / "siglip").mkdir(parents=True)
    assert build.pretrain_model("siglip", tmp_path, tmp_path / "work") == {}


def test_an_interrupted_folder_leaves_nothing(tmp_path):
    def interrupted():
        with build._atomic_folder(tmp_path / "model") as temporary:
            (temporary / "part").write_text("x")
            raise RuntimeError("halfway")

    with pytest.raises(RuntimeError, match="halfway"):
        interrupted()
    assert list(tmp_path.iterdir()) == []


def test_report_entries_merge(tmp_path):
    report = tmp_path / "report.json"
    build._update_report(report, "siglip", {"seconds": 1.0, "tasks": {"shapes": {"seconds": 2.0}}})
    build._update_report(report, "siglip", {"tasks": {"shapes": {"zero_shot": 0.25}, "sizes": {"zero_shot": 0.5}}})
    build._update_report(report, "clip-narrow", {"seconds": 3.0})
    models = json.loads(report.read_text(encoding="utf-8"))["models"]
    assert list(models) == ["clip-narrow", "siglip"]
    expected = {"seconds": 1.0, "tasks": {"shapes": {"seconds": 2.0, "zero_shot": 0.25}, "sizes": {"zero_shot": 0.5}}}
    assert models["siglip"] == expected


@pytest.mark.parametrize("family", ["clip", "siglip", "siglip2", "metaclip2", "convnext-bert", "clap"])
def test_tokenizers_know_every_word_and_every_character(family):
    captions = ["a red star at the top left", "the digit seven", "two things"]
    tokenizer = build_tokenizer(family, captions)
    rows = tokenizer(captions, padding="max_length", truncation=True)["input_ids"]
    assert {len(row) for row in rows} == {TEXT_LENGTH}
    special = {tokenizer.pad_token_id, *tokenizer.all_special_ids}
    assert len([token for token in rows[0] if token not in special]) == 7
    unknown = tokenizer(["a zebra!", "a gnu?"])["input_ids"]
    assert unknown[0] != unknown[1]
    assert tokenizer.unk_token_id not in unknown[0][1:-1] or tokenizer.unk_token_id == tokenizer.eos_token_id


def test_unknown_family():
    with pytest.raises(ValueError, match="Expected a family of BLUEPRINTS, got 'blip'"):
        build_tokenizer("blip", ["a"])
