"""`hf-platonic extract`, `transfer` and `evaluate`; on two processes they run in test_processes."""

from __future__ import annotations

import json
from pathlib import Path

import datasets
import pytest
import torch

from hf_platonic import DualEncoder, ProbeSet, TaskDescriptor, extract, playground
from hf_platonic.cli import main
from hf_platonic.cli_verbs import _term
from hf_platonic.encoding import encode_probes

SOURCE, TARGET = (str(playground.model_path(name)) for name in ("siglip", "clip-wide"))
ADAPTER = str(playground.adapter_path("siglip", "colours"))
TASK = playground.load_task("colours")
WORDS = {"class_names": TASK.class_names, "templates": TASK.templates[:1]}
EXTRACT = ["extract", "--base", SOURCE, "--adapter", ADAPTER, "--out", "x", "--data"]
OPTIONS = ["--quiet", "--batch-size", "8"]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same inputs in the forms that --data takes: a file with class labels, one with names, a saved set."""
    folder = tmp_path_factory.mktemp("data")
    split = TASK.split("test")
    labels = [int(label) for label in (split.labels or ())[:24]]
    rows = {"image": list(split.inputs[:24]), "label": labels, "kind": [TASK.class_names[i] for i in labels]}
    features = {"image": datasets.Image(), "label": datasets.Value("int64"), "kind": datasets.Value("string")}
    plain = datasets.Dataset.from_dict(rows, features=datasets.Features(features))
    typed = plain.cast_column("label", datasets.ClassLabel(names=list(TASK.class_names)))
    typed.to_parquet(folder / "typed.parquet")
    plain.to_parquet(folder / "plain.parquet")
    ProbeSet(rows["image"], **WORDS).save_pretrained(folder / "saved")
    (folder / "classes.txt").write_text("\n".join(TASK.class_names) + "\n\n")
    (folder / "prompts.txt").write_text("\n".join(TASK.templates[0].replace("{}", n) for n in TASK.class_names))
    (folder / "notes.md").write_text("nothing")
    (folder / "broken.json").write_text("{")
    found = {name: str(folder / name) for name in ("saved", "classes.txt", "prompts.txt", "notes.md", "broken.json")}
    return {**found, **{name: str(folder / f"{name}.parquet") for name in ("typed", "plain")}}


def run(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert main([*line, *OPTIONS]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    assert main([*line, *OPTIONS]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err


@pytest.fixture(scope="module")
def descriptor(data: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("descriptor")
    line = ["extract", "--base", SOURCE, "--adapter", ADAPTER, "--data", data["saved"], "--include-probes"]
    assert main([*line, "--out", str(folder), "--name", "colours", *OPTIONS]) == 0
    return folder


def test_extract_writes_what_the_call_gives(descriptor: Path, data: dict[str, str]) -> None:
    found = TaskDescriptor.from_pretrained(descriptor)
    expected = extract(
        None, DualEncoder.from_pretrained(SOURCE, adapter=ADAPTER), ProbeSet.from_pretrained(data["saved"])
    )
    assert found.name == "colours"
    assert found.grid == expected.grid
    torch.testing.assert_close(found.delta, expected.delta, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        ["typed", "--template", TASK.templates[0]],
        ["plain", "--class-names", *TASK.class_names, "--template", TASK.templates[0]],
        ["plain", "--classes", "classes.txt", "--template", TASK.templates[0], "--streaming"],
        ["saved", "--class-names", *TASK.class_names, "--template", TASK.templates[0]],
    ],
)
def test_data_and_prompts_in_any_form_are_one_grid(
    options: list[str], data: dict[str, str], descriptor: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    named = [data.get(option, option) for option in options]
    line = ["extract", "--base", SOURCE, "--adapter", ADAPTER, "--out", str(tmp_path), "--data", *named]
    assert "norm=" in run(capsys, *line)
    found, expected = (TaskDescriptor.from_pretrained(folder) for folder in (tmp_path, descriptor))
    assert found.grid == expected.grid


def test_a_stream_can_be_bounded_rows_drawn_and_a_stop_made_up_for(
    data: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["extract", "--base", SOURCE, "--adapter", ADAPTER, "--prompts", data["prompts.txt"], "--store-base"]
    stream = ["--streaming", "--limit", "5", "--resume-dir", str(tmp_path / "rows")]
    run(capsys, *line, "--data", data["plain"], "--out", str(tmp_path / "a"), *stream)
    run(capsys, *line, "--data", data["plain"], "--out", str(tmp_path / "b"), "--n", "7")
    first, second = (TaskDescriptor.from_pretrained(tmp_path / name) for name in "ab")
    assert first.base_affinity is not None
    assert (first.grid.n, second.grid.n) == (5, 7)
    assert (tmp_path / "rows" / "extraction.json").is_file()


def test_transfer_writes_an_adapter_or_a_checkpoint_and_evaluate_measures_either(
    data: dict[str, str], descriptor: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ways = {"adapter": [], "merged": ["--merge"]}
    for name, more in ways.items():
        line = [
            "transfer",
            f"{descriptor}:0.5",
            f"{descriptor}:0.5",
            "--target",
            TARGET,
            "--out",
            str(tmp_path / name),
        ]
        said = json.loads(run(capsys, *line, "--strength", "1", "--site", "input", "--probe-ridge", "0.05", *more))
        assert said["merged"] is (name == "merged")
        assert said["verified"]["live"] < 1e-3
    edited = [
        DualEncoder.from_pretrained(TARGET, adapter=tmp_path / "adapter"),
        DualEncoder.from_pretrained(tmp_path / "merged"),
    ]
    probes = ProbeSet.from_pretrained(data["saved"])
    units = [encode_probes(encoder, probes).unit for encoder in edited]
    torch.testing.assert_close(*units, rtol=0, atol=1e-5)

    on = ["--data", data["typed"], "--template", TASK.templates[0]]
    live = json.loads(run(capsys, "evaluate", "--model", TARGET, "--adapter", str(tmp_path / "adapter"), *on))
    merged = json.loads(run(capsys, "evaluate", "--model", str(tmp_path / "merged"), "--base", TARGET, *on))
    assert live == merged
    assert live["n"] == 24
    named = ["--data", data["plain"], "--label-column", "kind", "--classes", data["classes.txt"]]
    alone = json.loads(
        run(capsys, "evaluate", "--model", TARGET, *named, "--template", TASK.templates[0], "--n", "24")
    )
    assert alone == {"accuracy": live["before"], "n": 24}


def test_a_coefficient_is_read_from_the_end_of_a_term() -> None:
    assert _term("team/cars:-0.5") == ("team/cars", -0.5)
    assert _term("team/cars") == ("team/cars", 1.0)
    assert _term("C:/cars") == ("C:/cars", 1.0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            ["extract", "--adapter", ADAPTER, "--data", "typed", "--out", "x"],
            "Expected --base for --adapter, got none",
        ),
        (
            [*EXTRACT, "plain"],
            "Expected class names, and the data set states none",
        ),
        (
            [*EXTRACT, "typed", "--limit", "3"],
            "Expected --limit beside --streaming only",
        ),
        (
            [*EXTRACT, "notes.md"],
            "Expected a file of type .parquet, .json",
        ),
        (
            [*EXTRACT, "broken.json", "--class-names", "a", "b"],
            "Expected a readable json file, got",
        ),
        (
            [*EXTRACT, "typed", "--prompts", "prompts.txt", "--template", "a {}"],
            "Expected --prompts or --template, got both",
        ),
        (
            ["evaluate", "--model", TARGET, "--adapter", "a", "--base", "b", "--data", "typed"],
            "Expected --adapter or --base, got both",
        ),
        (
            ["evaluate", "--model", TARGET, "--data", "typed", "--label-column", "number"],
            "Expected a column of labels, found none among ['image', 'kind', 'label']",
        ),
        (
            ["evaluate", "--model", TARGET, "--data", "plain", "--label-column", "kind", "--class-names", "a", "b"],
            "Expected labels to be class numbers or one of ['a', 'b']",
        ),
    ],
)
def test_says_what_was_expected(
    line: list[str], message: str, data: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *(data.get(word, word) for word in line))
