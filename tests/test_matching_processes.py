"""LoRA matching on two processes gives what it gives on one, with the target whole on each or sharded over both."""

from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState
from peft import (
    BOFTConfig,
    C3AConfig,
    FourierFTConfig,
    HRAConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PeftModel,
    RandLoraConfig,
    VBLoRAConfig,
    VeraConfig,
)
from test_matching import fit, trained
from test_transfers import descriptor
from tiny import tiny_encoder, tiny_images

from hf_platonic import DualEncoder, MatchingArguments, match_affinities
from hf_platonic._processes import process_state
from hf_platonic.errors import EncoderError, PlatonicError

PROGRAM = """
import sys
from pathlib import Path
from test_matching_processes import everything
everything(Path(sys.argv[1]))
"""
TOWER = [f"vision_model.encoder.layers.{i}.self_attn.{part}_proj" for i in (0, 1) for part in "qv"]
METHODS = {
    "LoHa": LoHaConfig(target_modules=TOWER),
    "LoKr": LoKrConfig(target_modules=TOWER),
    "IA3": IA3Config(target_modules=TOWER, feedforward_modules=[]),
    "OFT": OFTConfig(target_modules=TOWER),
    "BOFT": BOFTConfig(target_modules=TOWER),
    "VeRA": VeraConfig(target_modules=TOWER),
    "FourierFT": FourierFTConfig(target_modules=TOWER, n_frequency=8),
    "HRA": HRAConfig(target_modules=TOWER),
    "VB-LoRA": VBLoRAConfig(target_modules=TOWER, vector_length=4, topk=2, num_vectors=8),
    "RandLora": RandLoraConfig(target_modules=TOWER),
    "C3A": C3AConfig(target_modules=TOWER, block_size=4),
}


def everything(folder: Path) -> None:
    """What the tests compare, written by the main process."""
    found: dict[str, Any] = {"whole": work(folder / "whole"), "processes": process_state().num_processes}
    target = shard(tiny_encoder("siglip", seed=2))
    found["refused"] = refusals(target)
    found["sharded"] = work(folder / "sharded", target=target)  # the one that those left as it was
    found["options"] = work(folder / "options", target=shard(tiny_encoder("siglip", seed=2)), **OPTIONS)
    found["resumed"] = resumed(folder / "resumed")
    found["methods"] = {
        name: [one_step(config, shards) for shards in (False, True)] for name, config in METHODS.items()
    }
    AcceleratorState._reset_state()  # accelerate knows one precision a process
    found["bf16"] = [one_step(None, shards, mixed_precision="bf16") for shards in (False, True)]
    if process_state().is_main_process:
        torch.save(found, folder / "found.pt")


def shard(target: DualEncoder) -> DualEncoder:
    """The target with its weights spread over the processes, as docs/cluster.md does it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh("cpu", (process_state().num_processes,))
    for tower in (target.model.vision_model, target.model.text_model):
        for layer in tower.encoder.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(tower, mesh=mesh)
    fully_shard(target.model, mesh=mesh)
    for name in ("get_image_features", "get_text_features"):
        register_fsdp_forward_method(target.model, name)
    return target


def work(folder: Path, *, target: DualEncoder | None = None, **options: Any) -> tuple[Any, ...]:
    """The adapter's tensors, the losses, the held-out losses and some embeddings of a training on two grids."""
    terms = [descriptor(n=11), descriptor("siglip", n=6, seed=3, prompts=["red", "green", "blue", "a dark one"])]
    arguments: dict[str, Any] = {
        "batch_size": 9,  # an uneven share for two processes
        "max_steps": 6,
        "learning_rate": 1e-3,
        "logging_steps": 2,
        "held_out": 0.2,
        "max_grad_norm": 1.0,
        "save_steps": 3,
        "output_dir": folder,
        **options,
    }
    sharded = target is not None
    target = tiny_encoder("siglip", seed=2) if target is None else target
    found = match_affinities(terms, target, training_args=MatchingArguments(**arguments), batch_size=4)
    frozen = [p for name, p in found.model.named_parameters() if "lora_" not in name]
    assert all(p.grad is None and not p.requires_grad for p in frozen)
    assert {hasattr(p, "placements") for p in frozen} == {sharded}  # and nothing is left gathered
    tensors = {name: p.detach().clone() for name, p in found.model.named_parameters() if "lora_" in name}
    embeddings = target.probe_features(target.preprocess(tiny_images(3))).unit
    return tensors, found.losses, found.held_out, embeddings


OPTIONS: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "gradient_checkpointing": True,
    "warm_start": "closed_form",
    "held_out": 0.05,  # one probe of each grid
    "patience": 9,
}


def one_step(config: PeftConfig | None, shards: bool, **options: Any) -> dict[str, torch.Tensor]:
    """What is trained after one step on few probes, one of them held out: fewer than processes."""
    target = tiny_encoder("siglip", seed=2)
    target = shard(target) if shards else target
    found = fit(descriptor(n=5), target, copy.deepcopy(config), max_steps=1, batch_size=4, held_out=0.2, **options)
    return {name: p.detach().clone() for name, p in found.model.named_parameters() if p.requires_grad}


def resumed(folder: Path) -> list[Any]:
    """Losses and tensors of a training on shards, and of its last two steps done again from a checkpoint."""
    found = []
    config = LoraConfig(r=4, target_modules=TOWER, lora_dropout=0.3)
    for again in (False, True):
        target = shard(tiny_encoder("siglip", seed=2))
        options = {"max_steps": 6, "save_steps": 4, "logging_steps": 1, "resume_from_checkpoint": again}
        done = fit(descriptor(n=8), target, config, output_dir=folder, **options)
        process_state().wait_for_everyone()
        found.append((done.losses, {name: p.detach().clone() for name, p in trained(done.model).items()}))
    return found


def refusals(target: DualEncoder) -> dict[str, str]:
    """What is said of adapters that can't be trained on shards, and of targets that are split otherwise."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor

    size = process_state().num_processes
    parallel, nowhere = tiny_encoder("siglip", seed=2), tiny_encoder("siglip", seed=2)
    layer = parallel.model.get_submodule(TOWER[0])
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("data", "tensor"))
    both = copy.deepcopy(parallel)
    layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["data"], [Shard(0)]))
    layer = both.model.get_submodule(TOWER[0])
    layer.weight = torch.nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["tensor"], [Shard(0)]))
    fully_shard(both.model, mesh=mesh["data"])
    nowhere.model.to("meta")
    cases: dict[str, tuple[DualEncoder, PeftConfig | None]] = {
        "dora": (target, LoraConfig(target_modules=TOWER, use_dora=True)),
        "pissa": (target, LoraConfig(target_modules=TOWER, init_lora_weights="pissa")),
        "norms": (target, LNTuningConfig(target_modules=["layer_norm1"])),
        "biases": (target, LoraConfig(target_modules=TOWER, bias="lora_only")),
        "saved": (target, LoraConfig(target_modules=TOWER, modules_to_save=["post_layernorm"])),
        "text": (target, LoraConfig(target_modules=r"text_model.*q_proj")),
        "tensor parallel": (parallel, None),
        "both": (both, None),
        "meta": (shard(nowhere), None),
    }
    said = {}
    for name, (encoder, config) in cases.items():
        model = encoder.model
        before = {key: (type(p), p.requires_grad) for key, p in model.named_parameters()}
        with pytest.raises((PlatonicError, EncoderError)) as raised:
            fit(descriptor(n=5), encoder, config)
        said[name] = str(raised.value)
        assert encoder.model is model
        assert {key: (type(p), p.requires_grad) for key, p in model.named_parameters()} == before
    return said


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two processes have left what they found."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "program.py").write_text(PROGRAM)
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    run = subprocess.run(
        [*command, str(folder / "program.py"), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "view tensor" not in run.stderr
    return folder


@pytest.fixture(scope="module")
def found(launched: Path) -> dict[str, Any]:
    everything_found: dict[str, Any] = torch.load(launched / "found.pt")
    assert everything_found["processes"] == 2
    return everything_found


@pytest.mark.parametrize(
    ("name", "options"), [("whole", {}), ("sharded", {}), ("options", OPTIONS)], ids=["whole", "sharded", "options"]
)
def test_two_processes_equal_one(
    found: dict[str, Any], launched: Path, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    tensors, losses, held_out, embeddings = found[name]
    expected, single, single_held_out, single_embeddings = work(tmp_path / "one", **options)
    assert [step for step, _ in losses] == [2, 4, 6]
    for here, wanted in ((losses, single), (held_out, single_held_out)):
        torch.testing.assert_close(torch.tensor(here), torch.tensor(wanted), rtol=1e-5, atol=1e-7)
    assert tensors.keys() == expected.keys()
    for key, values in expected.items():
        torch.testing.assert_close(tensors[key], values, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(embeddings, single_embeddings, rtol=0, atol=1e-5)
    assert [path.name for path in (launched / name).glob("checkpoint-*")] == ["checkpoint-6"]

    plain = tiny_encoder("siglip", seed=2)
    plain.model = PeftModel.from_pretrained(plain.model, launched / name)
    saved = plain.probe_features(plain.preprocess(tiny_images(3))).unit
    torch.testing.assert_close(saved, single_embeddings, rtol=0, atol=1e-5)
    configs = [json.loads((f / "adapter_config.json").read_text()) for f in (launched / name, tmp_path / "one")]
    for config in configs:
        config["target_modules"].sort()
    assert configs[0] == configs[1]


def test_a_sharded_target_gives_the_bits_of_a_whole_one(found: dict[str, Any]) -> None:
    pairs = {"bf16": found["bf16"], **found["methods"], "LoRA": [found["whole"][0], found["sharded"][0]]}
    for name, (whole, sharded) in pairs.items():
        for key, values in whole.items():
            assert torch.equal(sharded[key], values), f"{name}: {key}"


def test_a_training_on_shards_resumes_bit_for_bit(found: dict[str, Any]) -> None:
    (losses, tensors), (again, tensors_again) = found["resumed"]
    assert again == losses
    assert all(torch.equal(tensors_again[name], values) for name, values in tensors.items())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dora", r"starts without looking at the weights.* got LORA with use_dora=True"),
        ("pissa", r"starts without looking at the weights.* init_lora_weights='pissa'"),
        ("norms", r"starts without looking at the weights.* got LN_TUNING"),
        ("biases", r"adapter of new tensors alone.* got 4 .*self_attn\.[qv]_proj\.base_layer\.bias"),
        ("saved", r"adapter of new tensors alone.* got 2 .*post_layernorm\.modules_to_save"),
        ("text", r"Expected a gradient in each of \d+ trainable tensors"),
        ("tensor parallel", r"by `fully_shard` alone, got .*q_proj\.weight with placements"),
        ("both", r"by `fully_shard` alone, got .*q_proj\.weight with placements"),
        ("meta", r"Expected the target's shards on cpu, .* got meta"),
    ],
)
def test_what_shards_do_not_allow_is_refused(found: dict[str, Any], name: str, message: str) -> None:
    assert re.search(message, found["refused"][name])


def test_a_launch_that_would_shard_the_adapter_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.FSDP)
    with pytest.raises(PlatonicError, match="got FSDP, which would shard the adapter, too.*`fully_shard`"):
        fit(descriptor(n=5), tiny_encoder("siglip", seed=2))


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
