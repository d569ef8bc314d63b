"""Suites as data, and plans of what they'd use."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from hf_platonic import playground
from hf_platonic.benchmark import load_suite, suite_names
from hf_platonic.benchmark.plan import format_plan, plan
from hf_platonic.errors import PlatonicError
from hf_platonic.playground.tasks import split_size

SMALL: dict[str, Any] = {
    "name": "small",
    "description": "For a test.",
    "models": [{"name": "a", "modality": "image", "path": "me/a", "gflops": 2.0}],
    "tasks": [
        {
            "name": "shades",
            "modality": "image",
            "data": {"source": "hub", "path": "me/shades"},
            "classes": {"lo": "dark", "hi": "bright"},
            "templates": ["a {} picture"],
            "probes_per_class": 30,
            "train_size": 50,
            "test_size": 10,
        }
    ],
    "controls": [],
    "methods": [{"name": "paper", "options": {"strength": 0.5}}],
    "fine_tunes": {
        "kind": "lora",
        "recipes": [{"learning_rate": 1e-3, "batch_size": 8, "weight_decay": 0, "epochs": 4}],
    },
    "seeds": [1, 2],
}


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}, sort_keys=False))
    return path


@pytest.mark.parametrize("name", suite_names())
def test_shipped_suites_are_whole(name: str) -> None:
    suite = load_suite(name)
    assert suite.name == name
    for task in suite.tasks + suite.controls:
        prompts = [template.format(c) for template in task.templates for c in task.class_names]
        assert len(set(prompts)) == len(prompts)
        assert len(task.labels) == len(task.class_names) > 1 or task.kind == "retrieval"
        assert len({label.casefold().replace("_", " ") for label in task.labels}) == len(task.labels)
        assert task.modality in {model.modality for model in suite.models}
    for task in suite.tasks:
        unlabelled = split_size(task.name, "probes") if suite.fine_tunes.kind == "playground" else 0
        assert 0 < task.probe_count <= (task.train_size or 0) + unlabelled
    if suite.fine_tunes.kind == "lora":
        assert all(suite.fine_tunes.recipe(m.name, t.name).epochs for m in suite.models for t in suite.tasks)


def test_the_papers_protocol() -> None:
    suite = load_suite("vision8")
    assert [len(task.class_names) for task in suite.tasks] == [196, 47, 10, 43, 10, 45, 397, 10]
    assert [len(task.class_names) for task in suite.controls] == [100, 1000]
    assert [task.probe_count for task in suite.tasks] == [30 * len(task.class_names) for task in suite.tasks]
    assert suite.seeds == (42,)
    ordinary, special = suite.fine_tunes.recipe("clip-l", "cars"), suite.fine_tunes.recipe("siglip-l", "dtd")
    assert (ordinary.learning_rate, ordinary.batch_size, ordinary.weight_decay, ordinary.epochs) == (1e-4, 32, 0.01, 3)
    assert (special.learning_rate, special.batch_size, special.weight_decay, special.epochs) == (3e-4, 64, 1e-4, 3)
    assert (ordinary.r, ordinary.lora_alpha) == (4, 8)
    assert suite.fine_tunes.recipe("eva02-l", "eurosat") == ordinary
    assert suite.fine_tunes.recipe("clip-l", "sun397").epochs == 1
    assert load_suite("vision8_base").tasks == suite.tasks


def test_the_playground_suite_is_the_playground() -> None:
    suite = load_suite("playground")
    assert tuple(model.name for model in suite.models) == playground.MODELS
    assert tuple(task.name for task in suite.tasks) == playground.IMAGE_TASKS + playground.AUDIO_TASKS
    assert suite.task("counts").class_names == playground.load_task("counts").class_names
    assert suite.control("captions").kind == "retrieval"


def test_a_suite_of_ones_own(tmp_path: Path) -> None:
    suite = load_suite(written(tmp_path))
    assert suite.task("shades").labels == ("lo", "hi")
    assert suite.task("shades").class_names == ("dark", "bright")
    child = tmp_path / "child.yaml"
    child.write_text("extends: playground\nname: child\nseeds: [7]\n")
    assert load_suite(child).seeds == (7,)
    assert load_suite(child).tasks == load_suite("playground").tasks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": []}, r"Expected keys out of .*'models'.* in small.yaml, got \['model'\]"),
        ({"seeds": [1.5]}, r"Expected int for small.yaml: seeds\[0\], got float 1.5"),
        ({"seeds": [True]}, r"Expected int for small.yaml: seeds\[0\], got bool"),
        ({"seeds": 3}, r"Expected a list for small.yaml: seeds, got int 3"),
        (
            {"models": [{"name": "a"}]},
            r"Expected \['modality', 'path'\] in small.yaml: models\[0\], got only \['name'\]",
        ),
        ({"models": []}, "Expected different model names in suite 'small', got none at all"),
        ({"models": 2 * SMALL["models"]}, r"Expected different model names in suite 'small', got \['a'\]"),
        (
            {"models": [{**SMALL["models"][0], "loader": "x"}]},
            r"Expected one of \['transformers'.* for small.yaml: models",
        ),
        ({"models": [{**SMALL["models"][0], "path": 7}]}, "Expected str .*path, got int 7. Put it in quotes"),
        ({"models": ["a"]}, r"Expected a mapping \(ModelSpec\) for small.yaml: models\[0\], got str"),
        ({"methods": [{"name": "m", "options": [1]}]}, "Expected a mapping from names for .*options, got list"),
        ({"methods": [{"name": "m", "tasks": ["z"]}]}, r"Expected tasks of suite 'small' for method 'm', got \['z'\]"),
        ({"tasks": [{**SMALL["tasks"][0], "classes": "nowhere"}]}, "Expected nowhere.yaml beside the suite"),
        (
            {"tasks": [{**SMALL["tasks"][0], "data": {**SMALL["tasks"][0]["data"], "test": "train"}}]},
            "Expected for 'me/shades' either different splits, or one split with a `holdout`",
        ),
        (
            {"tasks": [{**SMALL["tasks"][0], "data": {**SMALL["tasks"][0]["data"], "holdout": 0.1}}]},
            "Expected for 'me/shades' either different splits, .* got train = 'train', test = 'test', holdout = 0.1",
        ),
        (
            {"tasks": [{**SMALL["tasks"][0], "kind": "retrieval"}]},
            "Expected classes for task 'shades' if it is a class",
        ),
        (
            {"tasks": [{**SMALL["tasks"][0], "probes_per_class": 0}]},
            r"Expected `probes` or `probes_per_class` above 0 for every task of .*, got neither for \['shades'\]",
        ),
        ({"extends": "nothing"}, "Expected a suite out of ablation, audio, .* or a YAML file, got 'nothing'"),
    ],
)
def test_mistakes_name_file_key_and_what_was_expected(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlatonicError, match=message):
        load_suite(written(tmp_path, **changes))


def test_files_that_are_no_suites(tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_text("a: [")
    with pytest.raises(PlatonicError, match="Expected YAML in broken.yaml"):
        load_suite(path)
    path.write_text("- a\n")
    with pytest.raises(PlatonicError, match=r"Expected a mapping \(Suite\) for broken.yaml, got list"):
        load_suite(path)
    suite = load_suite(written(tmp_path))
    for find in (suite.model, suite.task, suite.control):
        with pytest.raises(PlatonicError, match="of suite 'small' out of .*, got 'z'"):
            find("z")
    recipes = [{**SMALL["fine_tunes"]["recipes"][0], "tasks": ["other"]}]
    suite = load_suite(written(tmp_path, fine_tunes={"kind": "lora", "recipes": recipes}))
    with pytest.raises(PlatonicError, match="Expected a recipe for 'a' on 'shades', got none that fits"):
        suite.fine_tunes.recipe("a", "shades")


def test_plans_count_passes_cases_and_time(tmp_path: Path) -> None:
    found = plan(load_suite(written(tmp_path)), speeds={"slow": 0.001})
    passes = {row["stage"]: row["inputs"] for row in found.work}
    # Four epochs of 50, three passes a step; ten tests of two models; all 50 probes, two models, two seeds.
    assert passes == {"fine-tunes": 600, "accuracies": 20, "descriptors": 200}
    assert found.seconds("slow") == pytest.approx(820 * 2.0)  # 2 GFLOP each at 1 GFLOP/s
    assert found.prompts == {"shades": ("a dark picture", "a bright picture")}
    rows = {row["name"]: row for row in plan(load_suite("beyond")).data}
    # Of 1,200 labelled and 400 unlabelled pictures, of 800 and 400 scans, in every case all that are asked for.
    assert rows["shapes"]["probes"] == rows["handwritten_digits"]["probes"] == 1200
    cases = {row["name"]: row["cases"] for row in plan(load_suite("beyond")).methods}
    # Six image models on eight tasks and two audio models on four; others and oneself.
    assert cases["paper, s = 1"] == 6 * 8 * 6 + 2 * 4 * 2
    assert cases["auto, consensus of the others"] == 6 * 8 + 2 * 4
    cycle = load_suite(written(tmp_path, methods=[{"name": "lora", "realisation": "lora", "cases": "cycle"}]))
    assert plan(cycle).methods[0]["cases"] == 1  # one's own; there's no other model
    three = [{**SMALL["models"][0], "name": name} for name in "abc"]
    cycle = load_suite(written(tmp_path, models=three, methods=[{"name": "lora", "cases": "cycle"}]))
    assert plan(cycle).methods[0]["cases"] == 6  # for each of three models, the next one's and its own


@pytest.mark.parametrize("name", suite_names())
def test_plans_need_no_network_and_name_everything(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a plan opened a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    suite = load_suite(name)
    text = " ".join(format_plan(plan(suite)).split())
    for model in suite.models:
        assert model.path in text
    for task in suite.tasks + suite.controls:
        assert task.data.path in text
        assert all(task.templates[0].replace("{}", c) in text for c in task.class_names)
    if name == "vision8":
        assert "Not verified against a published source: siglip2-l, resisc45, imagenet." in text
        assert "Estimated time on a GPU that sustains 15 TFLOP/s: about" in text
