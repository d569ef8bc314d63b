"""The verbs on two processes give what they give on one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from peft import PeftModel
from test_extraction import PROMPTS, pair
from tiny import tiny_encoder, tiny_images

from hf_platonic import playground
from hf_platonic._processes import gather_rows, own_slice, process_state, sum_over_processes
from hf_platonic.bank import OperatorBank
from hf_platonic.cli import main
from hf_platonic.descriptor import TaskDescriptor
from hf_platonic.evaluation import EvaluationSet, zero_shot_accuracy
from hf_platonic.extraction import extract
from hf_platonic.probes import ProbeSet
from hf_platonic.shards import SETUP_NAME, Shards
from hf_platonic.solutions import solve_operators

SIZES = (40, 7, 1)  # the primal form; the dual one on one process, and an uneven tail; fewer probes than processes
PROGRAM = """
import sys
from pathlib import Path
from test_processes import everything
everything(Path(sys.argv[1]))
"""


def everything(folder: Path) -> None:
    """What the test compares, written by the main process."""
    found = {n: work(n) for n in SIZES}
    found["resumed"] = resumed(folder)
    found["streamed"] = streamed()
    found["sharded"] = sharded(found[7]["delta"], folder)
    commands(folder)
    if process_state().is_main_process:
        torch.save((found, process_state().num_processes), folder / "found.pt")


def work(n: int) -> dict[str, Any]:
    base, tuned = pair()
    probes = ProbeSet(tiny_images(n), prompts=PROMPTS)
    found = extract(base, tuned, probes, batch_size=2, progress=True)
    (operator,) = solve_operators([found], tiny_encoder("siglip", seed=2), batch_size=2)
    accuracy = zero_shot_accuracy(tuned, EvaluationSet(probes, [i % 3 for i in range(n)]), batch_size=2)
    grid = found.grid.fingerprint
    return {"delta": found.delta, "operator": operator.dense(), "accuracy": accuracy, "grid": grid, "n": n}


def resumed(folder: Path) -> dict[str, Any]:
    """An extraction into a folder, of which a part may be there already."""
    probes = ProbeSet(tiny_images(70), prompts=PROMPTS)
    found = extract(*pair(), probes, batch_size=2, checkpoint=folder / "rows")
    return {"delta": found.delta.clone(), "spread": found.spread, "grid": found.grid.fingerprint}


def streamed() -> dict[str, Any]:
    """An extraction on the first rows of a stream."""
    features = datasets.Features({"image": datasets.Image()})
    rows = ({"image": image} for image in tiny_images(9))
    data = datasets.IterableDataset.from_generator(rows_of, gen_kwargs={"rows": list(rows)}, features=features)
    found = extract(*pair(), ProbeSet.from_dataset(data.take(5), prompts=PROMPTS), batch_size=2)
    return {"delta": found.delta, "grid": found.grid.fingerprint}


def sharded(delta: torch.Tensor, folder: Path) -> dict[str, Any]:
    """A solve for a target whose weights are sharded over the processes, which have unequal shares of seven probes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    probes = ProbeSet(tiny_images(7), prompts=PROMPTS)
    target, size = tiny_encoder("siglip", seed=2), process_state().num_processes
    if size > 1:
        mesh = init_device_mesh("cpu", (size,))
        for layer in target.model.vision_model.encoder.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(target.model, mesh=mesh)
        for name in ("get_image_features", "get_text_features"):
            register_fsdp_forward_method(target.model, name)
    term = TaskDescriptor(delta, probes.grid, probes=probes)
    bank = OperatorBank.solve({("clip", "cars"): term}, target, batch_size=2)
    if process_state().is_main_process:
        bank.save_pretrained(folder / "bank")
    return {"operator": bank.compose({("clip", "cars"): 1.0}).dense()}


def rows_of(rows: list[Any]) -> Any:
    yield from rows


def commands(folder: Path) -> None:
    """The three commands, as a launcher runs them."""
    models = {name: str(playground.model_path(name)) for name in ("siglip", "clip-wide")}
    adapter = str(playground.adapter_path("siglip", "colours"))
    data, options = str(folder / "colours.parquet"), ["--quiet", "--batch-size", "16"]
    term, edit, out = str(folder / "descriptor"), str(folder / "edit"), str(folder / "accuracy.json")
    target = ["--target", models["clip-wide"], "--strength", "1"]
    lines = [
        ["extract", "--base", models["siglip"], "--adapter", adapter, "--out", term, "--name", "colours"],
        ["transfer", f"{term}:1", *target, "--out", edit],
        ["evaluate", "--model", models["clip-wide"], "--adapter", edit, "--json", out],
    ]
    for line in lines:
        process_state().wait_for_everyone()
        assert main([*line, "--data", data, *options]) == 0


def colours(folder: Path) -> None:
    """A file with some of a shipped task's inputs, and labels under class names."""
    task = playground.load_task("colours")
    split = task.split("test")
    rows = {"image": list(split.inputs[:45]), "label": [int(label) for label in (split.labels or ())[:45]]}
    names = [task.templates[0].replace("{}", name) for name in task.class_names]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=names)})
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "colours.parquet")


def test_two_processes_equal_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = one, two = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
        colours(folder)
    everything(one)
    # One process was stopped after the second of three shards; two go on.
    (two / "rows").mkdir()
    (two / "rows" / SETUP_NAME).write_bytes((one / "rows" / SETUP_NAME).read_bytes())
    done = Shards(one / "rows", 70, 32).read(range(70))
    batches = {"squares": slice(16, 32)}
    part = {name: tensor[batches.get(name, slice(32, 64))].clone() for name, tensor in done.items()}
    Shards(two / "rows", 70, 32).write(range(32, 64), part)
    (two / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    run = subprocess.run(
        [*command, str(two / "program.py"), str(two)], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    expected, processes = torch.load(one / "found.pt")
    assert processes == 1
    found, processes = torch.load(two / "found.pt")
    assert processes == 2
    for n in SIZES:
        for name, tolerance in (("delta", 1e-6), ("operator", 1e-5)):
            torch.testing.assert_close(found[n].pop(name), expected[n].pop(name), rtol=tolerance, atol=tolerance)
        assert found[n] == expected[n]
    torch.testing.assert_close(*(f["sharded"]["operator"] for f in (found, expected)), rtol=1e-5, atol=1e-5)
    edited = [
        PeftModel.from_pretrained(tiny_encoder("siglip", seed=2).model, folder / "bank", subfolder="clip/cars")
        for folder in folders
    ]
    pixels = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    outputs = [model.get_image_features(pixel_values=pixels).pooler_output for model in edited]
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    for name in ("resumed", "streamed"):  # whole shards, so the same batches, so the same bits; 5 rows, other batches
        tolerance = 0 if name == "resumed" else 1e-6
        torch.testing.assert_close(found[name].pop("delta"), expected[name].pop("delta"), rtol=0, atol=tolerance)
        assert found[name] == expected[name]
    descriptors = [TaskDescriptor.from_pretrained(folder / "descriptor") for folder in folders]
    torch.testing.assert_close(descriptors[0].delta, descriptors[1].delta, rtol=0, atol=1e-6)
    accuracies = [json.loads((folder / "accuracy.json").read_text()) for folder in folders]
    assert accuracies[0] == accuracies[1]
    assert accuracies[0]["after"] > accuracies[0]["before"]
    # Only the main process prints, each command one line.
    printed, here = run.stdout.strip().splitlines(), capsys.readouterr().out.strip().splitlines()
    assert len(printed) == len(here) == 3
    assert printed[2] == here[2]


def test_one_process_has_it_all() -> None:
    assert own_slice(5) == range(5)
    rows = torch.ones(2, 3)
    assert torch.equal(gather_rows(rows), rows)
    assert sum_over_processes(rows) is rows


def test_refuses_a_launch_that_accelerate_does_not_see(monkeypatch: pytest.MonkeyPatch) -> None:
    process_state()
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(RuntimeError, match=r"Expected 3 processes .* has 1"):
        process_state()
