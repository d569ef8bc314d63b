"""The workbench: data by name, probes by seed, fine-tunes given or trained."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from peft import PeftModel
from tiny import tiny_clips, tiny_encoder, tiny_images, tiny_probes

from hf_platonic import playground
from hf_platonic.benchmark import Suite, Workbench, load_suite
from hf_platonic.benchmark.finetuning import fine_tune, lora_layers
from hf_platonic.benchmark.loading import aligned_labels
from hf_platonic.benchmark.suites import Data, FineTunes, MethodSpec, ModelSpec, Recipe, TaskSpec
from hf_platonic.errors import EncoderError, PlatonicError
from hf_platonic.evaluation import zero_shot_accuracy

FRUIT = TaskSpec(
    "fruit",
    "image",
    Data("parquet", "fruit"),
    class_names=("an apple", "a pear", "a plum"),
    labels=("apple", "Williams_pear", "plum"),
    templates=("a photo of {}",),
    probes_per_class=2,
)
RECIPE = Recipe(learning_rate=3e-3, batch_size=20, weight_decay=0.0, epochs=2)


def suite_of(*tasks: TaskSpec, controls: tuple[TaskSpec, ...] = (), **changes: Any) -> Suite:
    whole = {"name": "test", "tasks": tasks, "controls": controls, "methods": (MethodSpec("paper"),), **changes}
    return replace(load_suite("playground"), **whole)


def image_folder(folder: Path, names: list[str], labels: list[int], **columns: Any) -> None:
    folder.mkdir(parents=True)
    features = Features({"image": Image(), "label": ClassLabel(names=names), **{c: Value("int32") for c in columns}})
    rows = {"image": tiny_images(len(labels)), "label": labels, **columns}
    for split in ("train", "test"):
        Dataset.from_dict(rows, features=features).to_parquet(folder / f"{split}.parquet")


def hashes(probes: Any) -> tuple[str, ...]:
    return tuple(probes.content_hashes)


# The playground ------------------------------------------------------------------------------------------------------


def test_probes_are_drawn_by_the_seed_alone() -> None:
    suite = load_suite("beyond")
    zero, one, again = (Workbench(suite, seed=seed).task("shapes") for seed in (0, 1, 1))
    own = playground.load_task("shapes")
    assert [np.asarray(p).tobytes() for p in zero.probes] == [p.tobytes() for p in own.split("probes").inputs]
    assert hashes(one.probes) == hashes(again.probes)
    assert len(one.probes) == 1200
    # Of 400 unlabelled and 1,200 labelled items, about three quarters of each.
    assert 250 < len(set(hashes(one.probes)) & set(hashes(zero.probes))) < 350
    assert one.train is not None
    assert 850 < len(set(hashes(one.probes)) & set(hashes(one.train.probes))) < 950
    assert hashes(one.test.probes) == hashes(zero.test.probes)
    assert not set(hashes(one.probes)) & set(hashes(one.test.probes))
    assert one.test.labels == own.split("test").labels
    assert one.probes.prompts == own.prompts()


def test_a_smaller_training_split_gives_as_many_probes() -> None:
    digits = Workbench(load_suite("beyond"), seed=1).task("handwritten_digits")
    assert digits.train is not None
    assert set(hashes(digits.train.probes)) <= set(hashes(digits.probes))
    assert len(digits.probes) == 1200


@pytest.mark.parametrize("name", ["letters", "captions", "tones"])
def test_controls_come_in_two_disjoint_halves(name: str) -> None:
    suite = load_suite("playground")
    control, other = (Workbench(suite, seed=seed).control(name) for seed in (0, 3))
    assert hashes(control.probes) == hashes(other.probes)
    assert not set(hashes(control.probes)) & set(hashes(control.test.probes))
    assert control.train is None
    if control.kind == "retrieval":
        assert len(control.probes) == len(control.test.labels) == 200
        assert control.test.probes.prompts == playground.load_captioned(name).split().captions[::2]
        assert control.test.labels == tuple(range(200))
    else:
        seen = [set(map(int, labels)) for labels in (control.test.labels, range(len(control.probes.class_names)))]
        assert seen[0] == seen[1]


def test_given_fine_tunes_and_their_weight_deltas() -> None:
    bench = Workbench(load_suite("playground"))
    delta = bench.weight_delta("clip-narrow", "shapes")
    assert delta is not None
    assert all(".self_attn.q_proj." in name or ".self_attn.v_proj." in name for name in delta)
    base, tuned = bench.encoder("clip-narrow"), bench.tuned("clip-narrow", "shapes")
    state = base.model.state_dict()
    for name, change in delta.items():
        state[name] += change
    images = playground.load_task("shapes").split("probes", 4).inputs
    torch.testing.assert_close(base.encode_probes(images).unit, tuned.encode_probes(images).unit, atol=1e-5, rtol=0)
    assert bench.encoder("clip-narrow").model is not bench.encoder("clip-narrow").model
    bench.forget()


# Labels and columns --------------------------------------------------------------------------------------------------


def test_labels_are_matched_by_name_whatever_their_order() -> None:
    names = ["plum", "williams pear", "Apple"]
    assert aligned_labels(FRUIT, [0, 1, 2, 0], names, "here") == (2, 1, 0, 2)
    assert aligned_labels(FRUIT, ["plum", "apple"], None, "here") == (2, 0)
    with pytest.raises(
        PlatonicError, match=r"Without a counterpart there: \['plum'\]; without one in the suite: \['fig'\]"
    ):
        aligned_labels(FRUIT, [0], ["apple", "williams pear", "fig"], "here")
    with pytest.raises(PlatonicError, match=r"without one in the suite: \['fig'\].*correct the suite's `classes`"):
        aligned_labels(FRUIT, ["fig"], None, "here")
    with pytest.raises(
        PlatonicError, match="Expected label names in column 'label' of here, got numbers without names"
    ):
        aligned_labels(FRUIT, [0, 1], None, "here")


def test_parquet_folders(tmp_path: Path) -> None:
    labels = [2, 0, 1, 1, 0, 2, 0, 1, 2, 0]
    image_folder(tmp_path / "fruit", ["plum", "apple", "Williams pear"], labels, fold=[1, 2] * 5)
    expected = tuple((2, 0, 1)[label] for label in labels)
    bench = Workbench(suite_of(FRUIT), seed=5, data=tmp_path, cache=tmp_path)
    data = bench.task("fruit")
    assert data.test.labels == expected
    assert data.probes.prompts == ("a photo of an apple", "a photo of a pear", "a photo of a plum")
    chosen = sorted(np.random.default_rng(5).choice(10, 6, replace=False).tolist())
    assert data.train is not None
    assert hashes(data.probes) == tuple(hashes(data.train.probes)[i] for i in chosen)

    folds = replace(FRUIT, data=replace(FRUIT.data, test="train", fold_column="fold", test_folds=(2,)))
    by_fold = Workbench(suite_of(folds), data=tmp_path, cache=tmp_path).task("fruit")
    assert by_fold.test.labels == expected[1::2]
    assert by_fold.train is not None
    assert by_fold.train.labels == expected[::2]
    held = replace(FRUIT, data=replace(FRUIT.data, test="train", holdout=0.2))
    by_share = Workbench(suite_of(held), data=tmp_path, cache=tmp_path).task("fruit")
    order = np.random.default_rng(42).permutation(10)
    assert by_share.test.labels == tuple(expected[i] for i in sorted(order[8:]))
    few = replace(FRUIT, per_class=2)
    assert sorted(Workbench(suite_of(few), data=tmp_path, cache=tmp_path).task("fruit").test.labels) == [
        0,
        0,
        1,
        1,
        2,
        2,
    ]

    for spec, message in (
        (
            replace(FRUIT, data=replace(FRUIT.data, label_column="class")),
            r"Expected columns \['class'\] in data set 'fruit'",
        ),
        (replace(FRUIT, modality="audio"), "Expected audio probes in data set 'fruit' of task 'fruit', got image"),
        (
            replace(FRUIT, data=replace(FRUIT.data, path="nuts")),
            "Expected the test split of 'fruit' in .*no such file",
        ),
        (replace(FRUIT, data=replace(FRUIT.data, train=None)), "Expected a training split for task 'fruit', got none"),
    ):
        with pytest.raises(PlatonicError, match=message):
            Workbench(suite_of(spec), data=tmp_path, cache=tmp_path).task("fruit")
    with pytest.raises(PlatonicError, match="Expected a folder with 'fruit' for task 'fruit', got none"):
        Workbench(suite_of(FRUIT)).task("fruit")


def test_sounds_in_parquet_are_decoded_by_this_package(tmp_path: Path) -> None:
    soundfile = pytest.importorskip("soundfile")
    clips = tiny_clips(4)
    rows = []
    for clip in clips:
        buffer = io.BytesIO()
        soundfile.write(buffer, clip.array, clip.sampling_rate, format="WAV", subtype="FLOAT")
        rows.append({"bytes": buffer.getvalue(), "path": None})
    (tmp_path / "noise").mkdir()
    table = Dataset.from_dict({"audio": rows, "label": ["hum", "hiss", "hum", "hiss"]})
    for split in ("train", "test"):
        table.to_parquet(tmp_path / "noise" / f"{split}.parquet")
    data = Data("parquet", "noise", input_column="audio")
    noise = TaskSpec("noise", "audio", data, class_names=("a hiss", "a hum"), labels=("hiss", "hum"), probes=3)
    found = Workbench(suite_of(noise), data=tmp_path, cache=tmp_path).task("noise")
    assert found.test.labels == (1, 0, 1, 0)
    assert all(np.array_equal(a.array, b.array) for a, b in zip(found.test.probes, clips, strict=True))


# Fine-tuning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["clip", "siglip", "metaclip_2", "blip", "vision-text-dual-encoder", "clap"])
def test_lora_goes_into_the_attention_of_the_probe_tower_alone(family: str) -> None:
    encoder = tiny_encoder(family)
    endings = ("q_proj", "v_proj", "query", "value", "qkv")
    layers = lora_layers(encoder, tiny_probes(encoder, 1)[0], endings)
    assert layers
    assert all(name.rpartition(".")[2] in endings for name in layers)
    assert not any(name.startswith("text_") for name in layers)
    with pytest.raises(EncoderError, match=r"Expected linear layers named \['nothing'\] in the probe tower .* got \["):
        lora_layers(encoder, tiny_probes(encoder, 1)[0], ("nothing",))


def trained_suite(name: str, task: str, items: int) -> Suite:
    whole = load_suite("playground")
    few = replace(whole.task(task), train_size=items, test_size=100)
    model = ModelSpec(name, few.modality, name, loader="playground")
    return suite_of(few, models=(model,), fine_tunes=FineTunes("lora", recipes=(RECIPE,)))


def test_training_gains_is_kept_and_can_be_repeated(tmp_path: Path) -> None:
    suite = trained_suite("clip-narrow", "shapes", 300)
    bench = Workbench(suite, cache=tmp_path)
    tuned = bench.tuned("clip-narrow", "shapes")
    test = bench.task("shapes").test
    before, after = (zero_shot_accuracy(e, test, progress=False) for e in (bench.encoder("clip-narrow"), tuned))
    assert after > before + 0.1
    (folder,) = (tmp_path / "fine-tunes").iterdir()
    assert folder.name.startswith("clip-narrow--shapes--")
    written = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert set(written) == {"adapter_config.json", "adapter_model.safetensors"}
    assert str(tmp_path) not in (folder / "adapter_config.json").read_text()
    bench.tuned("clip-narrow", "shapes")
    assert written == {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    other = Workbench(suite, cache=tmp_path / "again")
    images = test.probes[:3]
    assert torch.equal(
        other.tuned("clip-narrow", "shapes").encode_probes(images).unit, tuned.encode_probes(images).unit
    )
    with pytest.raises(
        PlatonicError, match="Expected a folder for the fine-tune of 'clip-narrow' on 'shapes', got none"
    ):
        Workbench(suite).tuned("clip-narrow", "shapes")


def test_batch_statistics_and_the_text_tower_stay(tmp_path: Path) -> None:
    bench = Workbench(trained_suite("clap-narrow", "timbres", 40), cache=tmp_path)
    tuned, base = bench.tuned("clap-narrow", "timbres"), bench.encoder("clap-narrow")
    assert isinstance(tuned.model, PeftModel)
    assert torch.equal(tuned.encode_prompts(["a bell"]), base.encode_prompts(["a bell"]))
    delta = bench.weight_delta("clap-narrow", "timbres")
    assert delta
    assert all(name.startswith("audio_model.") for name in delta)
    assert not any("running" in name for name in delta)


def test_an_interruption_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Workbench(trained_suite("clip-narrow", "shapes", 20), cache=tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(PeftModel, "save_pretrained", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            bench.tuned("clip-narrow", "shapes")
    assert not list((tmp_path / "fine-tunes").iterdir())


def test_a_model_without_a_temperature_is_refused(tmp_path: Path) -> None:
    bench = Workbench(trained_suite("clip-narrow", "shapes", 20), cache=tmp_path)
    encoder, data = bench.encoder("clip-narrow"), bench.task("shapes").train
    del encoder.model.logit_scale
    assert data is not None
    with pytest.raises(EncoderError, match="Expected a model with a `logit_scale`, got CLIPModel"):
        fine_tune(encoder, data, RECIPE, tmp_path / "adapter")


def test_given_checkpoints_by_pattern(tmp_path: Path) -> None:
    whole = load_suite("playground")
    for folder in ("base", "base--shapes"):
        encoder = tiny_encoder("clip", seed=len(folder))
        encoder.model.save_pretrained(tmp_path / folder)
        encoder.processor.save_pretrained(tmp_path / folder)
    source = playground.adapter_path("clip-narrow", "colours")
    suite = suite_of(
        whole.task("shapes"),
        whole.task("colours"),
        models=(ModelSpec("tiny", "image", "base"),),
        fine_tunes=FineTunes("checkpoints", pattern="{models}/{model}--{task}"),
    )
    bench = Workbench(suite, models=tmp_path)
    images = tiny_images(2)
    whole_checkpoint = tiny_encoder("clip", seed=len("base--shapes"))
    found = bench.tuned("tiny", "shapes").encode_probes(images).unit
    torch.testing.assert_close(found, whole_checkpoint.encode_probes(images).unit)
    delta = bench.weight_delta("tiny", "shapes")
    assert delta is not None
    assert len(delta) > 20
    with pytest.raises(PlatonicError, match="Expected the fine-tune of 'tiny' on 'colours' in .*base--colours"):
        bench.tuned("tiny", "colours")
    (tmp_path / "base--colours").symlink_to(source)
    with pytest.raises(EncoderError, match="adapter"):  # read as an adapter, which isn't this model's
        bench.tuned("tiny", "colours")
