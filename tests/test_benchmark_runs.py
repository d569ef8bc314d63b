"""The benchmark's runner on a corner of the playground: whole, interrupted, repeated; and the report it draws."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_platonic.benchmark import load_suite
from hf_platonic.benchmark.page import headline, page, read_results, write_report
from hf_platonic.benchmark.runs import narrowed, run_benchmark
from hf_platonic.benchmark.setting import Setting, unsupported
from hf_platonic.benchmark.store import Store
from hf_platonic.benchmark.suites import MethodSpec, Suite
from hf_platonic.benchmark.tables import tables
from hf_platonic.cli import main
from hf_platonic.errors import PlatonicError

METHODS = (
    MethodSpec("paper, s = 1", options={"strength": 1.0}),
    MethodSpec("paper"),
    MethodSpec("consensus", sources="others", own=False, options={"strength": 1.0}),
    MethodSpec("input site", options={"strength": 1.0, "site": "input"}),
    MethodSpec("text tower", options={"strength": 1.0, "tower": "text"}),
    MethodSpec("no such option", options={"wings": 2}),
)
PROBES = 120


def small() -> Suite:
    """Two models whose shapes differ, two tasks with few inputs, one control."""
    suite = load_suite("playground")
    tasks = (suite.task("handwritten_digits"), suite.task("backgrounds"))
    return replace(
        suite,
        models=(suite.model("clip-narrow"), suite.model("siglip")),
        tasks=tuple(replace(task, probes=PROBES, per_class=16) for task in tasks),
        controls=(replace(suite.control("letters"), per_class=4),),
        methods=METHODS,
        seeds=(1,),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("benchmark")
    run_benchmark(small(), folder, processes=1, progress=False)
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def results(run: Path) -> dict[str, Any]:
    return read_results(run)


def test_every_case_is_there_and_says_what_it_was(results: dict[str, Any]) -> None:
    assert list(results["summary"]) == ["image"]
    for method in ("paper, s = 1", "paper", "input site", "text tower"):
        found = {(c["source"], c["target"], c["task"]) for c in results["transfer"] if c["method"] == method}
        assert len(found) == 2 * 2 * 2, method
    strengths = {(c["method"], c["strength"]) for c in results["transfer"]}
    assert {("paper, s = 1", 1.0), ("paper", 0.5), ("consensus", 1.0)} <= strengths
    assert {c["source"] for c in results["transfer"] if c["method"] == "consensus"} == {"others"}
    (reason,) = results["not_run"]
    assert reason["method"] == "no such option"
    assert "got wings" in reason["reason"]
    assert {c["strength"] for c in results["negation"] if c["method"] == "paper"} == {1.0}
    assert {tuple(c["tasks"]) for c in results["addition"]} == {("handwritten_digits", "backgrounds")}


def test_figures_agree_with_the_cases_they_summarise(results: dict[str, Any]) -> None:
    zero, own, given = results["accuracy"]["zero_shot"], [], []
    for case in results["transfer"]:
        if case["method"] == "paper, s = 1":
            gain = case["accuracy"] - zero[case["target"]][case["task"]]
            (own if case["source"] == case["target"] else given).append(gain)
        if case["oracle"] is not None and case["strength"] in (0.5, 1.0):
            assert case["oracle"]["accuracy"] >= case["accuracy"]
    row = results["summary"]["image"]["methods"][0]
    assert row["cases"] == len(given) == 4
    assert row["gain"]["value"] == pytest.approx(sum(given) / 4, abs=1e-5)
    assert row["own_gain"]["value"] == pytest.approx(sum(own) / 4, abs=1e-5)
    assert row["retention"]["value"] == pytest.approx(sum(given) / sum(own), abs=1e-4)
    for estimate in (row["gain"], row["accuracy"]):
        assert estimate["low"] <= estimate["value"] <= estimate["high"]
    levels = results["summary"]["image"]["levels"]
    assert levels["zero_shot"]["value"] < row["accuracy"]["value"] < levels["fine_tuned"]["value"]
    assert levels["linear_probe"]["value"] > levels["zero_shot"]["value"]
    # One other model: the mean over the others is that one's descriptor.
    consensus = next(r for r in results["summary"]["image"]["methods"] if r["method"] == "consensus")
    assert consensus["gain"] == row["gain"]
    assert consensus["own_gain"] == row["own_gain"]
    random = next(r for r in results["summary"]["image"]["baselines"] if r["baseline"] == "random")
    assert random["gain"]["value"] < row["gain"]["value"] / 2


def test_addition_and_negation_do_what_they_are_for(results: dict[str, Any]) -> None:
    summary = results["summary"]["image"]
    for kind, sign in (("addition", 1), ("negation", -1)):
        row = next(r for r in summary[kind] if r["method"] == "paper, s = 1" and r["sources"] == "other")
        assert row["cases"] == (2 if kind == "negation" else 1) * 2
        assert sign * row["change"]["value"] > 0.05
        assert row["control_after"]["value"] < row["control_before"]["value"]
        assert row["controls"]["letters"]["before"] == row["control_before"]


def test_analysis_and_curves_are_consistent(results: dict[str, Any]) -> None:
    likeness = results["likeness"]["image"]
    for matrices in (likeness["across_models"], likeness["across_tasks"]):
        for matrix in matrices.values():
            assert [matrix[i][i] for i in range(2)] == pytest.approx([1, 1])
            assert matrix[0][1] == matrix[1][0]
    for task, shares in likeness["shared"].items():  # of two models, each is the other's others
        assert list(shares.values()) == pytest.approx([likeness["across_models"][task][0][1] ** 2] * 2, abs=1e-5)
    points = results["summary"]["image"]["alignment"]["points"]
    assert [(p["source"], p["target"]) for p in points] == [("clip-narrow", "siglip"), ("siglip", "clip-narrow")]
    assert points[0]["linear_cka"] == likeness["alignment"][0]["linear_cka"]
    curves = results["summary"]["image"]["curves"]
    at_the_end = {name: dict(map(tuple, curves[name]["own"])) for name in ("probes", "rank", "ridge")}
    assert at_the_end["probes"][PROBES] == at_the_end["ridge"][0.01]
    assert at_the_end["probes"][PROBES] > at_the_end["probes"][10]
    assert list(at_the_end["rank"])[:4] == [1, 2, 4, 8]


def test_the_same_seed_gives_the_same_json_on_two_processes_and_after_a_kill(run: Path, tmp_path: Path) -> None:
    """Kills a run on two processes for real, in the middle; what it had finished isn't done again."""
    code = (
        "import sys; from pathlib import Path; from test_benchmark_runs import small\n"
        "from hf_platonic.benchmark.runs import run_benchmark\n"
        "if __name__ == '__main__': run_benchmark(small(), Path(sys.argv[1]), processes=2, progress=False)\n"
    )
    script, out = tmp_path / "again.py", tmp_path / "run"
    script.write_text(code)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    child = subprocess.Popen([sys.executable, str(script), str(out)], env=environment)
    deadline = time.monotonic() + 120
    while len(list(out.glob("cells/*/*.json"))) < 4 and time.monotonic() < deadline:
        assert child.poll() is None
        time.sleep(0.02)
    child.send_signal(signal.SIGKILL)
    child.wait()
    time.sleep(0.5)  # the workers follow
    finished = {path: path.stat().st_mtime_ns for path in out.glob("cells/*/*.json")}
    every = len(list(run.glob("cells/*/*.json")))
    assert 4 <= len(finished) < every
    assert not (out / "results.json").exists()
    time.sleep(0.5)
    assert {path: path.stat().st_mtime_ns for path in out.glob("cells/*/*.json")} == finished, "a worker lives on"

    run_benchmark(small(), out, processes=1, progress=False)
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert len(list(out.glob("cells/*/*.json"))) == every
    assert (out / "results.json").read_bytes() == (run / "results.json").read_bytes()


@pytest.mark.slow
def test_an_error_in_one_process_ends_the_run_at_once(tmp_path: Path) -> None:
    suite = small()
    broken = replace(suite, models=(suite.models[0], replace(suite.models[1], path="no-such-model")))
    with pytest.raises(ValueError, match="no-such-model"):
        run_benchmark(broken, tmp_path, processes=2, progress=False)


def test_the_report_needs_the_json_alone(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(run / "results.json", tmp_path)
    assert main(["benchmark", "--report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    written = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.rglob("*.*")}
    assert len([path for path in written if path.suffix == ".png"]) == 8
    for path, content in written.items():
        assert (run / path).read_bytes() == content, path


def test_the_page_is_whole_and_asks_for_nothing(run: Path, results: dict[str, Any]) -> None:
    text = (run / "report.html").read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", text)
    assert "url(" not in text
    assert "@import" not in text
    assert "<script" not in text
    assert text.count("<img ") == len(list((run / "figures").glob("*.png"))) == 8
    for table in tables(results):
        assert f'id="table-{table.key}"' in text
    assert "paper, s = 1" in headline(results)
    assert "nothing &lt;b&gt;" in page({**results, "suite": {**results["suite"], "description": "nothing <b>"}}, [])


def opened(page_file: Path, folder: Path) -> tuple[str, set[str]]:
    """The page as Chromium made it, and what it asked the network for (in vain: no name resolves)."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    log = folder / "net.json"
    seen = subprocess.run(
        [
            chromium,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=5000"),
            *(f"--user-data-dir={folder / 'profile'}", f"--log-net-log={log}", "--dump-dom", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            "--host-resolver-rules=MAP * ~NOTFOUND",
            page_file.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert seen.returncode == 0, seen.stderr[-2000:]
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    # What has no origin is the browser's own, such as asking for the time.
    pages = [event for event in events if event.get("initiator", "not an origin") != "not an origin"]
    return seen.stdout, {event["url"] for event in pages if event.get("url", "").startswith("http")}


def test_chromium_opens_the_page_and_sees_every_figure(run: Path, tmp_path: Path) -> None:
    script = (
        "<script>onload = () => {document.title = [...document.images].map(i => i.naturalWidth).join(' ')}</script>"
    )
    copy = tmp_path / "report.html"
    copy.write_text((run / "report.html").read_text() + script)
    dom, requested = opened(copy, tmp_path)
    found = re.search("<title>(.*?)</title>", dom)
    assert found is not None
    widths = [int(width) for width in found.group(1).split()]
    assert len(widths) == 8
    assert min(widths) > 300
    assert "</footer>" in dom
    assert not requested


def test_that_check_would_see_a_request(tmp_path: Path) -> None:
    asking = tmp_path / "asking.html"
    asking.write_text("<!doctype html><title>x</title><img src='http://figures.invalid/a.png'>")
    assert opened(asking, tmp_path)[1] == {"http://figures.invalid/a.png"}


def test_a_folder_of_another_suite_is_refused(run: Path) -> None:
    other = replace(small(), seeds=(2,))
    with pytest.raises(PlatonicError, match="same suite in .*, got another"):
        run_benchmark(other, run, processes=1)


def test_results_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PlatonicError, match=r"Expected results.json in .*, found none"):
        read_results(tmp_path)
    path = tmp_path / "results.json"
    path.write_text("[]")
    with pytest.raises(PlatonicError, match="Expected a benchmark's results"):
        read_results(tmp_path)
    path.write_text(json.dumps({"schema_version": 99, "library_version": "9.0"}))
    with pytest.raises(PlatonicError, match=r"got 99. Install hf-platonic 9.0"):
        read_results(tmp_path)


def test_narrowing_keeps_what_belongs_together() -> None:
    suite = load_suite("playground")
    sounds = narrowed(suite, tasks=["timbres", "pitches"], seeds=1)
    assert {model.modality for model in sounds.models} == {"audio"}
    assert {control.modality for control in sounds.controls} == {"audio"}
    assert [task.name for task in sounds.tasks] == ["timbres", "pitches"]
    assert len(sounds.seeds) == 1
    more = narrowed(suite, seeds=len(suite.seeds) + 2).seeds
    assert len(set(more)) == len(more) == len(suite.seeds) + 2
    with pytest.raises(PlatonicError, match="Expected at least one seed, got 0"):
        narrowed(suite, seeds=0)
    with pytest.raises(PlatonicError, match="no-such-task"):
        narrowed(suite, tasks=["no-such-task"])


def test_methods_are_checked_before_they_are_run(tmp_path: Path) -> None:
    assert unsupported(MethodSpec("a", options={"site": "input"})) is None
    assert "solve_transfer" in str(unsupported(MethodSpec("a", options={"wings": 2})))
    assert unsupported(MethodSpec("a", realisation="lora")) is None
    setting = Setting(small(), tmp_path, plugin=tmp_path / "missing.py")
    with pytest.raises(PlatonicError, match=r"Expected a Python file for --plugin, got .*missing.py"):
        setting.load_plugin()


def test_cells_come_back_as_they_were_put(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.open({"suite": 1})
    store.put("transfer", 0, "paper, s = 1", "a/b", seconds=1.0, cases=[])
    store.put("transfer", 0, "paper  s = 1", "a-b", seconds=1.0, cases=[1])
    assert store.has("transfer", 0, "paper, s = 1", "a/b")
    assert store.get("transfer", 0, "paper, s = 1", "a/b")["cases"] == []
    assert len(list(store.cells("transfer"))) == 2
    assert not store.has("transfer", 1, "paper, s = 1", "a/b")


def test_the_command_line_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["benchmark"]) == 1
    assert "Expected --suite or --report" in capsys.readouterr().err
    assert main(["benchmark", "--suite", "playground"]) == 1
    assert "Expected --out" in capsys.readouterr().err
