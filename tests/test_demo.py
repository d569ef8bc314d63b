"""The demo's figures: that they are all there, true to each other, and within what the playground promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hf_platonic import playground
from hf_platonic.cli import main
from hf_platonic.demo import format_report

KEYS = {"zero_shot", "fine_tuned", "own_gain", "transfer_gain", "retention"}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("demo")
    command = [sys.executable, "-m", "hf_platonic", "demo", "--quiet"]
    run = subprocess.run(
        [*command, "--json", str(folder / "out.json"), "--out", str(folder / "kept")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert (folder / "kept" / "merged" / "model.safetensors").is_file()
    assert (folder / "kept" / "descriptor" / "descriptor.safetensors").is_file()
    found: dict[str, Any] = json.loads((folder / "out.json").read_text())
    assert run.stdout.strip() == format_report(found).strip()
    return found


def test_has_every_figure(report: dict[str, Any]) -> None:
    assert set(report) == {*KEYS, "addition", "negation", "audio", "round_trip", "seconds"}
    assert set(report["audio"]) == KEYS
    for part, tasks in ((report, playground.IMAGE_TASKS), (report["audio"], playground.AUDIO_TASKS)):
        for key in KEYS - {"retention"}:
            assert set(part[key]["per_task"]) == set(tasks)
            assert part[key]["mean"] == pytest.approx(sum(part[key]["per_task"].values()) / len(tasks))
    for key in ("addition", "negation"):
        assert set(report[key]["per_task"]) == set(playground.IMAGE_TASKS)
        assert set(report[key]["mean"]) == {"before", "after", "control_before", "control_after"}
    assert all(len(line) <= 100 for line in format_report(report).splitlines())


def test_every_familys_zero_shot_leaves_room_and_its_fine_tunes_fill_it(report: dict[str, Any]) -> None:
    for model in playground.model_names("image"):
        zero_shot = report["zero_shot"]["per_model"][model]
        assert 0.20 <= zero_shot <= 0.60, model
        assert report["fine_tuned"]["per_model"][model] >= zero_shot + 0.20, model


def test_transfers_at_the_papers_ridges_keep_what_the_paper_says(report: dict[str, Any]) -> None:
    assert report["own_gain"]["share_of_fine_tuning"] >= 0.60
    assert report["retention"]["mean"] >= 0.50
    assert report["transfer_gain"]["mean"] == pytest.approx(report["retention"]["mean"] * report["own_gain"]["mean"])


def test_adding_helps_both_tasks_and_negating_hurts_one(report: dict[str, Any]) -> None:
    assert report["addition"]["mean"]["after"] > report["addition"]["mean"]["before"]
    assert report["negation"]["mean"]["after"] < report["negation"]["mean"]["before"]


def test_what_was_saved_comes_back(report: dict[str, Any]) -> None:
    trip = report["round_trip"]
    assert trip["descriptor_equal"]
    assert trip["same_parameter_names"]
    assert trip["accuracy_merged_and_reloaded"] == pytest.approx(trip["accuracy_live_adapter"], abs=0.005)
    assert trip["merged_class"] == "VisionTextDualEncoderModel"


def test_the_command_line_says_what_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["demo", "--json", str(tmp_path / "no" / "out.json")]) == 1
    assert "Expected an existing folder for --json" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["dance"])
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
