"""Every example runs as its docstring says, and prints finite accuracies; so does the README's quickstart."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import ALICE, HubServer, client_environment

ROOT = Path(__file__).parent.parent
WITH_HUB = ("publish.py", "use.py")
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py"))


def run(arguments: list[str], environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=environment, cwd=folder
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def accuracies(text: str) -> list[float]:
    found = [float(n) for n in re.findall(r"\b[01]\.\d{3}\b", text)]
    assert len(found) >= 2
    assert all(0.0 <= n <= 1.0 for n in found)
    return found


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_is_short_and_says_how_to_run_it(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 120
    assert f"python examples/{path.name}" in path.read_text().split('"""')[1]


@pytest.mark.parametrize("path", [p for p in EXAMPLES if p.name not in WITH_HUB], ids=lambda p: p.name)
def test_runs(path: Path, tmp_path: Path) -> None:
    accuracies(run([str(path)], {**os.environ, "HF_HUB_OFFLINE": "1"}, tmp_path))


def test_what_one_publishes_another_uses(tmp_path: Path) -> None:
    with HubServer(tmp_path / "hub") as server:
        publisher = client_environment(server, tmp_path / "publisher", ALICE)
        said = run([str(ROOT / "examples" / "publish.py"), "alice/digits"], publisher, tmp_path)
        assert "pushed alice/digits" in said
        reader = client_environment(server, tmp_path / "reader")
        before, after = accuracies(run([str(ROOT / "examples" / "use.py"), "alice/digits"], reader, tmp_path))
    assert after > before
    assert (tmp_path / "better" / "model.safetensors").is_file()


def test_the_readmes_quickstart_prints_what_it_says(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.S)
    assert code is not None
    printed = run(["-c", code[1]], {**os.environ, "HF_HUB_OFFLINE": "1"}, tmp_path)
    shown = re.search(r"It prints `([^`]*)`", text)
    assert shown is not None
    got, wanted = (re.findall(r"0\.\d+", part) for part in (printed, shown[1]))
    assert [float(n) for n in got] == pytest.approx([float(n) for n in wanted], abs=0.011)
