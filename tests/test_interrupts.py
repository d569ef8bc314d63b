"""Ctrl-C in the middle of what takes long, as a terminal sends it: to the whole process group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_matching import Recorder, fit
from test_transfers import descriptor
from tiny import tiny_encoder

from hf_platonic import ProbeSet, TaskDescriptor, extract, playground
from hf_platonic._files import whole_folder
from hf_platonic.cli import _heard
from hf_platonic.encoders.encoder import DualEncoder

pytestmark = pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs POSIX process groups")

SOURCE, TARGET = (str(playground.model_path(name)) for name in ("siglip", "clip-wide"))
ADAPTER = str(playground.adapter_path("siglip", "colours"))
TASK = playground.load_task("colours")
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",  # other libraries' own
}


class Run:
    """A process in a group of its own, and what it has printed so far."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        # A shell's background jobs ignore Ctrl-C and hand that down, which would make these tests wait for ever.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with log.open("w") as file:
                self.process = subprocess.Popen(
                    command, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=file, start_new_session=True
                )
        finally:
            signal.signal(signal.SIGINT, before)

    def said(self) -> str:
        return self.log.read_text()

    def interrupt(self, begun: Callable[[Run], bool]) -> int:
        """Ctrl-C once the work has begun; the exit status, after every process of the group has ended."""
        try:
            wait_until(lambda: begun(self) or self.process.poll() is not None, seconds=240)
            assert self.process.poll() is None, f"ended by itself: {self.said()}"
            os.killpg(self.process.pid, signal.SIGINT)
            status = self.process.wait(timeout=60)
            wait_until(lambda: not alive(self.process.pid), seconds=30)
            return status
        finally:
            self.end()

    def end(self) -> None:
        """Nothing of the group runs on after this."""
        if alive(self.process.pid):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(timeout=60)


def wait_until(true: Callable[[], bool], *, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.02)


def alive(group: int) -> bool:
    """Whether a process group has members that still run."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, own = path.read_text().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(own) == group and state != "Z":
            return True
    return False


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def children(run: Run) -> int:
    return len(Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split())


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Run, Path]]]:
    """The four commands, begun together: most of their time is imports."""
    folder = tmp_path_factory.mktemp("interrupted")
    words: dict[str, Any] = {"class_names": TASK.class_names, "templates": TASK.templates[:1]}
    probes = ProbeSet(TASK.split("probes").inputs[:200], **words)
    probes.save_pretrained(folder / "probes")
    tuned = DualEncoder.from_pretrained(SOURCE, adapter=ADAPTER)
    extract(None, tuned, probes, progress=False).save_pretrained(folder / "descriptor", include_probes=True)
    lines = {
        "extract": [
            *("--base", SOURCE, "--adapter", ADAPTER, "--data", str(folder / "probes")),
            *("--batch-size", "1", "--resume-dir", str(folder / "rows")),
        ],
        "transfer": [str(folder / "descriptor"), "--target", TARGET, "--method", "lora"],
        "demo": [],
        "benchmark": ["--suite", "playground", "--processes", "2"],
    }
    runs = {}
    for name, line in lines.items():
        command = [sys.executable, "-m", "hf_platonic", name, *line, "--out", str(folder / name), "--quiet"]
        runs[name] = Run(command, folder / f"{name}.log"), folder / name
    yield runs
    for run, _ in runs.values():
        run.end()


def settled(seconds: float) -> Callable[[bool], bool]:
    """Whether something has been true for so long."""
    since: list[float] = []

    def check(now: bool) -> bool:
        if now and not since:
            since.append(time.monotonic())
        return bool(since) and time.monotonic() - since[0] > seconds

    return check


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("name", ["extract", "transfer", "demo", "benchmark"])
def test_a_command_ends_with_one_line_and_130(name: str, started: dict[str, tuple[Run, Path]]) -> None:
    run, out = started[name]
    a_while = settled(0.5)
    begun: dict[str, Callable[[Run], bool]] = {
        "extract": lambda run: any((out.parent / "rows").glob("*.safetensors")),
        "transfer": lambda run: a_while("Loading weights: 100%" in run.said()),
        "demo": lambda run: a_while(children(run) >= 2),  # the worker and multiprocessing's own helper
        "benchmark": lambda run: a_while(children(run) >= 3),
    }
    assert run.interrupt(begun[name]) == 130
    # What transformers draws while it loads comes before, on lines that it overwrites.
    lines = [line for line in run.said().replace("\r", "\n").splitlines() if line and "Loading weights" not in line]
    lines = [line for line in lines if not line.startswith("[transformers]")]
    assert lines == ["hf-platonic: interrupted; nothing was left half-written."]
    if name in ("extract", "transfer"):
        assert not out.exists()
    assert not [path for path in files(out.parent) if ".tmp" in path]


def test_an_interruption_that_python_drops_comes_again(capsys: pytest.CaptureFixture[str]) -> None:
    class Unlucky:
        def __del__(self) -> None:
            raise KeyboardInterrupt

    def wait() -> None:
        with _heard():
            Unlucky()
            for _ in range(500):
                time.sleep(0.01)

    hook = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        wait()
    assert sys.unraisablehook is hook
    assert capsys.readouterr().err == ""


def test_an_interrupted_extraction_goes_on(started: dict[str, tuple[Run, Path]]) -> None:
    rows = started["extract"][1].parent / "rows"
    begun = list(rows.glob("*.safetensors"))
    assert begun
    probes = ProbeSet.from_pretrained(rows.parent / "probes")
    tuned = DualEncoder.from_pretrained(SOURCE, adapter=ADAPTER)
    found = extract(None, tuned, probes, batch_size=1, checkpoint=rows, progress=False)
    expected = TaskDescriptor.from_pretrained(rows.parent / "descriptor")
    torch.testing.assert_close(found.delta, expected.delta, rtol=0, atol=1e-5)


TRAINED = """
import sys
from test_matching import Recorder, fit
from test_transfers import descriptor
from tiny import tiny_encoder
class Loud(Recorder):
    def log(self, values, step=None, **_):
        print("step", step, file=sys.stderr)
target = tiny_encoder(seed=2)
inner, modules = target.model, [type(module) for module in target.model.modules()]
before = {k: v.clone() for k, v in inner.state_dict().items()}
try:
    fit(descriptor(), target, report_to=(Loud(),), output_dir=sys.argv[1], **eval(sys.argv[2]))
except KeyboardInterrupt:
    after = inner.state_dict()
    same = after.keys() == before.keys() and all(after[k].equal(v) for k, v in before.items())
    same = same and [type(module) for module in target.model.modules()] == modules
    same = same and all(p.requires_grad and p.grad is None for p in inner.parameters())
    print("as it was:", target.model is inner and same, file=sys.stderr)
    raise
"""


def test_a_training_leaves_its_target_as_it_was_and_goes_on(tmp_path: Path) -> None:
    options = {"max_steps": 60, "num_train_epochs": 60, "save_steps": 2, "logging_steps": 1}
    run = Run([sys.executable, "-W", "ignore", "-c", TRAINED, str(tmp_path / "out"), repr(options)], tmp_path / "log")
    assert run.interrupt(lambda run: "step 5" in run.said()) == -signal.SIGINT  # Python's own end after Ctrl-C
    assert "as it was: True" in run.said()
    assert run.said().rstrip().endswith("KeyboardInterrupt")
    (checkpoint,) = (tmp_path / "out").iterdir()
    done = int(checkpoint.name.removeprefix("checkpoint-"))
    assert 4 <= done < 60

    recorder = Recorder()
    options |= {"output_dir": tmp_path / "out", "resume_from_checkpoint": True}
    found = fit(descriptor(), tiny_encoder(seed=2), report_to=(recorder,), **options)
    assert found.steps == 60
    assert [step for step, _ in recorder.values] == list(range(done + 1, 61))


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    goal = tmp_path / "goal"

    def interrupted() -> None:
        with whole_folder(goal) as folder:
            (folder / "inner").mkdir()
            (folder / "inner" / "a").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not goal.exists()
    with whole_folder(goal) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_text("first")
        (folder / "README.md").write_text("generated")
    (goal / "README.md").write_text("written by hand")
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert files(goal) == ["README.md", "inner/a"]
    with whole_folder(goal) as folder:
        (folder / "README.md").write_text("generated")
    assert (goal / "README.md").read_text() == "written by hand"
    assert (goal / "inner" / "a").read_text() == "first"
