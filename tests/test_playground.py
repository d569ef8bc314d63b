"""The playground: its weights, its splits and its rendered worlds."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_platonic import playground
from hf_platonic.playground import (
    AUDIO_TASKS,
    IMAGE_TASKS,
    MODELS,
    adapter_path,
    controls,
    load_control,
    load_task,
    model_names,
    model_path,
    scenes,
    sounds,
)
from hf_platonic.playground.architectures import BLUEPRINTS, SAMPLING_RATE
from hf_platonic.playground.training import accuracy, class_embeddings, embed, load, process, tokenize

ALL_TASKS = IMAGE_TASKS + AUDIO_TASKS
WEIGHTS = Path(playground.__file__).parent / "weights"
REPORT = json.loads((WEIGHTS / "build_report.json").read_text(encoding="utf-8"))


def tasks_of(model: str) -> tuple[str, ...]:
    return IMAGE_TASKS if BLUEPRINTS[model].modality == "image" else AUDIO_TASKS


def pixels_or_samples(item: object) -> np.ndarray:
    return item["array"] if isinstance(item, dict) else np.asarray(item)


def zero_shot(model: str, task_name: str, adapter: Path | None = None, n: int | None = None) -> float:
    task = load_task(task_name)
    base, processor = load(model_path(model))
    classes = class_embeddings(model, base, processor, task.class_names, task.templates[:1])
    test = task.split("test", n)
    edited = load(model_path(model), adapter)[0] if adapter else base
    return accuracy(embed(edited, process(processor, test.inputs)), classes, test.labels)


def fresh_interpreter(code: str, hash_seed: str = "0") -> str:
    """Run code where the playground is importable but torch, transformers and scikit-learn are not."""
    preamble = (
        "import sys, types\n"
        "sys.modules.update(dict.fromkeys(('torch', 'transformers', 'peft', 'sklearn')))\n"
        "package = sys.modules['hf_platonic'] = types.ModuleType('hf_platonic')\n"
        f"package.__path__ = [{str(Path(playground.__file__).parent.parent)!r}]\n"
    )
    command = [sys.executable, "-c", preamble + code]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()


def test_import_is_cheap():
    assert fresh_interpreter("import hf_platonic.playground as p; print(len(p.MODELS))") == "8"


def test_names():
    assert model_names("image") + model_names("audio") == MODELS == model_names()
    assert len(model_names("image")) == 6
    assert len(IMAGE_TASKS) == 8
    assert len(AUDIO_TASKS) == 4
    assert not {c for m in ("image", "audio") for c in controls(m)} & set(ALL_TASKS)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: model_path("clip"), "Expected a model out of"),
        (lambda: adapter_path("clip", "shapes"), "Expected a model out of"),
        (lambda: adapter_path("clip-wide", "timbres"), "Take a task of the model's modality"),
        (lambda: load_task("letters"), "Expected a task out of"),
        (lambda: load_control("shapes"), "Expected a control out of"),
        (lambda: controls("video"), "Expected modality"),
        (lambda: model_names("video"), "Expected modality"),
        (lambda: load_task("shapes").split("dev"), "Expected a split of 'shapes'"),
        (lambda: load_control("letters").split("train"), "Expected a split of 'letters'"),
        (lambda: load_task("shapes").split("test", 0), "Expected `n` from 1 for split"),
        (lambda: load_task("handwritten_digits").split("test", 598), "Expected `n` from 1 to 597"),
    ],
)
def test_errors_name_the_remedy(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("name", ALL_TASKS)
def test_splits_are_repeatable_prefixes_without_overlap(name):
    task = load_task(name)
    splits = {split: task.split(split, 60) for split in ("test", "probes", "train")}
    again = task.split("test", 25)
    for first, second in zip(splits["test"].inputs, again.inputs, strict=False):
        np.testing.assert_array_equal(pixels_or_samples(first), pixels_or_samples(second))
    assert splits["test"].labels[:25] == again.labels
    assert splits["probes"].labels is None
    digests = [{pixels_or_samples(item).tobytes() for item in split.inputs} for split in splits.values()]
    assert len(set.union(*digests)) == sum(map(len, digests))
    assert set(splits["train"].labels) <= set(range(len(task.class_names)))


def test_handwriting_splits_cover_the_scans_once():
    task = load_task("handwritten_digits")
    sizes = [len(task.split(split)) for split in ("train", "probes", "test")]
    assert sum(sizes) == 1797


def test_splits_do_not_depend_on_the_interpreter():
    code = (
        "from hf_platonic.playground import load_task; import hashlib\n"
        "load_task('colours').split('train', 5)\n"
        "print(hashlib.sha256(load_task('shapes').split('test', 3).inputs[2].tobytes()).hexdigest())"
    )
    here = hashlib.sha256(load_task("shapes").split("test", 3).inputs[2].tobytes()).hexdigest()
    assert fresh_interpreter(code, hash_seed="7") == here


def test_inputs_are_ordinary():
    image = load_task("colours").split("test", 1).inputs[0]
    assert (image.mode, image.size) == ("RGB", (scenes.SIDE, scenes.SIDE))
    sound = load_task("motions").split("test", 1).inputs[0]
    assert sound["sampling_rate"] == SAMPLING_RATE
    assert sound["array"].dtype == np.float32
    assert sound["array"].shape == (sounds.SAMPLES,)
    assert np.abs(sound["array"]).max() <= 1


@pytest.mark.parametrize("module", [scenes, sounds])
def test_captions_fit_what_they_name(module):
    rng = np.random.default_rng(0)
    sample = module.sample_scene if module is scenes else module.sample_sound
    for _ in range(200):
        item = sample(rng)
        caption, named = module.describe(item, rng)
        assert named <= set(item)
        for factor in named - {"kind"} - ({"count"} if item.get("count") == "one" else set()):
            assert item[factor] in caption


@pytest.mark.parametrize("model", MODELS)
def test_models_and_processors_load_from_their_folders(model):
    base, processor = load(model_path(model))
    task = load_task(tasks_of(model)[0])
    inputs = process(processor, task.split("test", 4).inputs)
    vectors = embed(base, inputs)
    assert vectors.shape == (4, BLUEPRINTS[model].embedding)
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(4))
    assert sum(p.numel() for p in base.parameters()) == REPORT["models"][model]["parameters"]
    torch.testing.assert_close(process(processor, task.split("test", 4).inputs), inputs, rtol=0, atol=0)


@pytest.mark.parametrize("model", MODELS)
def test_prompts_of_one_task_differ_as_tokens(model):
    _, processor = load(model_path(model))
    names = tasks_of(model) + controls(BLUEPRINTS[model].modality)
    for name in names:
        task = load_control(name) if name in controls(BLUEPRINTS[model].modality) else load_task(name)
        for template in task.templates:
            rows = tokenize(model, processor, task.prompts(template))["input_ids"].tolist()
            assert len({tuple(row) for row in rows}) == len(task.class_names)
    unknown = tokenize(model, processor, ["a zebra", "a gnu", "a yak"])["input_ids"].tolist()
    assert len({tuple(row) for row in unknown}) == 3


def test_text_embeddings_do_not_depend_on_the_batch():
    for model in MODELS:
        base, processor = load(model_path(model))
        together = class_embeddings(model, base, processor, ["a red star", "some blue hearts at the top left"], ["{}"])
        alone = class_embeddings(model, base, processor, ["a red star"], ["{}"])
        torch.testing.assert_close(together[:1], alone, rtol=0, atol=1e-5)


def test_weights_are_small_and_name_no_place():
    files = [path for path in WEIGHTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 10e6
    assert max(path.stat().st_size for path in files) < 1.4e6
    for path in files:
        if path.suffix == ".json":
            assert not re.search(r'"/\w+/', path.read_text(encoding="utf-8")), f"{path} names a folder"


def test_adapters_are_ordinary_and_leave_the_pooling_heads_alone():
    for model in MODELS:
        for task in tasks_of(model):
            config = json.loads((adapter_path(model, task) / "adapter_config.json").read_text(encoding="utf-8"))
            assert config["base_model_name_or_path"] == f"hf_platonic/playground/{model}"
            assert config["task_type"] is None
            assert (adapter_path(model, task) / "adapter_model.safetensors").stat().st_size < 60_000


@pytest.mark.parametrize(
    ("model", "task"), [("clip-narrow", "colours"), ("siglip", "textures"), ("clap-narrow", "pitches")]
)
def test_reported_accuracies_hold(model, task):
    entry = REPORT["models"][model]["tasks"][task]
    assert zero_shot(model, task) == pytest.approx(entry["zero_shot"], abs=0.015)
    tuned = zero_shot(model, task, adapter_path(model, task))
    assert tuned == pytest.approx(entry["fine_tuned"], abs=0.015)
    assert tuned > entry["zero_shot"] + 0.1


@pytest.mark.parametrize("model", MODELS)
def test_report_keeps_the_design_bounds(model):
    entries = REPORT["models"][model]["tasks"]
    assert tuple(entries) == tasks_of(model)
    before = np.mean([entry["zero_shot"] for entry in entries.values()])
    after = np.mean([entry["fine_tuned"] for entry in entries.values()])
    assert 0.2 < before < 0.6
    assert after > before + 0.2


def test_sound_features_ignore_the_batch():
    _, processor = load(model_path("clap-narrow"))
    clips = load_task("rhythms").split("test", 3).inputs
    torch.testing.assert_close(process(processor, clips)[1:2], process(processor, clips[1:2]), rtol=0, atol=0)


def test_captions_fit_their_own_picture_alone() -> None:
    split = playground.load_captioned("captions").split()
    assert len(split) == len(set(split.captions)) == 400
    head = playground.load_captioned("captions").split(20)
    assert head.captions == split.captions[:20]
    assert [i.tobytes() for i in head.inputs] == [i.tobytes() for i in split.inputs[:20]]
    digest = hashlib.sha256("\n".join(split.captions).encode()).hexdigest()
    assert digest[:16] == "5b56ebdff7803d63"
    with pytest.raises(ValueError, match="Expected a retrieval task out of .*'captions'.*, got 'songs'"):
        playground.load_captioned("songs")
    for n in (0, 1001):
        with pytest.raises(ValueError, match=f"Expected `n` from 1 to 1000 for 'captions', got {n}"):
            playground.load_captioned("captions").split(n)


@pytest.mark.parametrize("model", ["clip-narrow", "siglip2"])
def test_models_find_captions(model: str) -> None:
    base, processor = load(model_path(model))
    split = playground.load_captioned("captions").split(100)
    prompts = class_embeddings(model, base, processor, split.captions, ("{}",))
    assert accuracy(embed(base, process(processor, split.inputs)), prompts, range(100)) > 0.8
