"""The verbs on two processes give what they give on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_extraction import PROMPTS, pair
from tiny import tiny_encoder, tiny_images

from hf_platonic._processes import gather_rows, own_slice, process_state
from hf_platonic.evaluation import EvaluationSet, zero_shot_accuracy
from hf_platonic.extraction import extract
from hf_platonic.probes import ProbeSet
from hf_platonic.solutions import solve_operators

PROGRAM = """
import sys, torch
from test_processes import work
from hf_platonic._processes import process_state
for n in (7, 1):
    found = work(n)
    if process_state().is_main_process:
        torch.save((*found, process_state().num_processes), f"{sys.argv[1]}/{n}.pt")
"""


def work(n: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    base, tuned = pair()
    probes = ProbeSet(tiny_images(n), prompts=PROMPTS)
    found = extract(base, tuned, probes, batch_size=2, progress=True)
    (operator,) = solve_operators([found], tiny_encoder("siglip", seed=2), batch_size=2)
    accuracy = zero_shot_accuracy(tuned, EvaluationSet(probes, [i % 3 for i in range(n)]), batch_size=2)
    return found.delta, operator.dense(), accuracy


def test_two_processes_equal_one(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    run = subprocess.run(
        [*command, str(tmp_path / "program.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    for n in (7, 1):  # an uneven tail, and fewer probes than processes
        delta, operator, accuracy, processes = torch.load(tmp_path / f"{n}.pt")
        expected = work(n)
        assert processes == 2
        torch.testing.assert_close(delta, expected[0], rtol=0, atol=1e-6)
        torch.testing.assert_close(operator, expected[1], rtol=1e-4, atol=1e-5)
        assert accuracy == expected[2]


def test_one_process_has_it_all() -> None:
    assert own_slice(5) == range(5)
    rows = torch.ones(2, 3)
    assert torch.equal(gather_rows(rows), rows)


def test_refuses_a_launch_that_accelerate_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    process_state()
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RuntimeError, match=r"Expected 3 processes .* has 1"):
        process_state()
