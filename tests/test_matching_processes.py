"""LoRA matching on two processes gives what it gives on one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from test_matching import fit
from test_transfers import descriptor
from tiny import tiny_encoder

from hf_platonic import MatchingArguments, match_affinities

PROGRAM = """
import sys, torch
from test_matching_processes import work
from hf_platonic._processes import process_state
found = work(sys.argv[1] + "/out")
if process_state().is_main_process:
    torch.save((*found, process_state().num_processes), sys.argv[1] + "/found.pt")
"""


def work(folder: str, *, parts: int = 1) -> tuple[dict[str, torch.Tensor], Any, Any]:
    terms = [descriptor(n=11), descriptor("siglip", n=6, seed=3, prompts=["red", "green", "blue", "a dark one"])]
    arguments = MatchingArguments(
        batch_size=9,  # an uneven share for two processes
        max_steps=6,
        learning_rate=1e-3,
        logging_steps=2,
        held_out=0.2,
        gradient_accumulation_steps=parts,
        max_grad_norm=1.0,
        save_steps=3,
        output_dir=folder,
    )
    found = match_affinities(terms, tiny_encoder("siglip", seed=2), training_args=arguments, batch_size=4)
    tensors = {name: p.detach().clone() for name, p in found.model.named_parameters() if "lora_" in name}
    return tensors, found.losses, found.held_out


def test_two_processes_equal_one(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    run = subprocess.run(
        [*command, str(tmp_path / "program.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    tensors, losses, held_out, processes = torch.load(tmp_path / "found.pt")
    assert processes == 2
    expected, single, single_held_out = work(str(tmp_path / "one"))
    assert [step for step, _ in losses] == [2, 4, 6]
    for found, wanted in ((losses, single), (held_out, single_held_out)):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-5, atol=1e-7)
    for name, values in expected.items():
        torch.testing.assert_close(tensors[name], values, rtol=1e-3, atol=1e-5)
    assert [path.name for path in (tmp_path / "out").glob("checkpoint-*")] == ["checkpoint-6"]
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


KILLED = """
import os, signal, sys
from test_matching import Recorder, fit
from test_matching import fit
from test_transfers import descriptor
from tiny import tiny_encoder
class Deadly(Recorder):
    def log(self, values, step=None, **_):
        if step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
fit(descriptor(), tiny_encoder(seed=2), report_to=(Deadly(),), output_dir=sys.argv[1], **eval(sys.argv[2]))
"""


def test_goes_on_after_being_killed(tmp_path: Path) -> None:
    options = {"max_steps": 6, "save_steps": 2, "logging_steps": 1, "resume_from_checkpoint": True}
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path / "killed"), repr(options)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == -signal.SIGKILL, run.stderr[-3000:]
    assert [path.name for path in (tmp_path / "killed").iterdir()] == ["checkpoint-4"]
    for name in ("killed", "whole"):
        fit(descriptor(), tiny_encoder(seed=2), output_dir=tmp_path / name, **options)
    for name in ("adapter_model.safetensors", "matching.json"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
