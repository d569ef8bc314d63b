from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from test_extraction import PROMPTS, pair
from tiny import FAMILIES, tiny_encoder, tiny_images, tiny_probes
from torch import Tensor

from hf_platonic import PlatonicConfig, initialize_platonic_weights
from hf_platonic.affinities import affinity
from hf_platonic.bank import OperatorBank
from hf_platonic.descriptor import TaskDescriptor
from hf_platonic.encoders.encoder import DualEncoder
from hf_platonic.encoding import encode_columns, encode_probes
from hf_platonic.errors import EncoderError, GridMismatchError, PlatonicError
from hf_platonic.extraction import extract
from hf_platonic.probes import ProbeSet
from hf_platonic.solutions import solve_operators, solve_transfer
from hf_platonic.solve import closed_form
from hf_platonic.terms import paper_strength
from hf_platonic.transfers import transfer

IMAGE_FAMILIES = [name for name in FAMILIES if not name.startswith("clap")]


def descriptor(family: str = "clip", *, n: int = 12, seed: int = 0, prompts: list[str] = PROMPTS) -> TaskDescriptor:
    base, tuned = pair(family)
    return extract(base, tuned, ProbeSet(tiny_probes(base, n, seed=seed), prompts=prompts), name=f"{family}-{seed}")


def affinities(encoder: DualEncoder, probes: ProbeSet) -> Tensor:
    return affinity(encode_probes(encoder, probes).unit, encode_columns(encoder, probes.columns))


@pytest.fixture(scope="module")
def clip_task() -> TaskDescriptor:
    return descriptor()


@pytest.mark.parametrize("family", FAMILIES)
def test_live_merged_and_operator_agree_and_unmerging_restores(family: str) -> None:
    task = descriptor("clap" if family.startswith("clap") else "clip")
    assert task.probes is not None
    target = tiny_encoder(family, seed=2)
    before = {k: v.clone() for k, v in target.model.state_dict().items()}
    (operator,) = solve_operators([task], tiny_encoder(family, seed=2))
    features = encode_probes(target, task.probes)
    columns = encode_columns(target, task.grid.columns)
    expected = affinity(operator.apply(features.unit, features.design, strength=0.5), columns)

    model = transfer(task, target)
    live = affinities(target, task.probes)
    torch.testing.assert_close(live, expected, rtol=0, atol=1e-5)
    assert float((live - affinity(features.unit, columns)).abs().max()) > 1e-4

    model.merge_adapter()
    torch.testing.assert_close(affinities(target, task.probes), live, rtol=0, atol=1e-5)
    model.unmerge_adapter()
    restored = model.unload()
    assert restored.state_dict().keys() == before.keys()
    assert all(torch.equal(v, before[k]) for k, v in restored.state_dict().items())


def test_is_the_closed_form_on_the_targets_embeddings(clip_task: TaskDescriptor) -> None:
    target = tiny_encoder("metaclip_2", seed=2)
    assert clip_task.probes is not None
    features = encode_probes(target, clip_task.probes)
    left, right = closed_form(features.unit, encode_columns(target, clip_task.grid.columns), clip_task.delta)
    (operator,) = solve_operators([clip_task], target)
    torch.testing.assert_close(operator.dense().double(), left @ right, rtol=1e-4, atol=1e-5)


def test_own_descriptor_moves_towards_the_fine_tune() -> None:
    base, tuned = pair("siglip")
    probes = ProbeSet(tiny_images(10), prompts=PROMPTS)
    task = extract(base, tuned, probes)
    wanted = affinities(tuned, probes)
    before = float((affinities(base, probes) - wanted).norm())
    transfer(task, base, strength=1.0)
    assert float((affinities(base, probes) - wanted).norm()) < 0.5 * before


@pytest.mark.parametrize("source", IMAGE_FAMILIES)
def test_every_family_gives_to_every_other(source: str) -> None:
    task = descriptor(source)
    for family in IMAGE_FAMILIES:
        assert (
            transfer(task, tiny_encoder(family, seed=3)).peft_config["default"].provenance["terms"][0]["name"]
            == task.name
        )


def test_strengths_of_the_paper(clip_task: TaskDescriptor) -> None:
    other = descriptor("siglip", seed=1)
    assert paper_strength(clip_task) == 0.5
    assert paper_strength(clip_task + other) == 0.5
    assert paper_strength(-clip_task) == 1.0
    assert paper_strength(clip_task - other) == 0.5
    model = transfer(-clip_task, tiny_encoder(seed=2))
    assert model.peft_config["default"].strength == 1.0


def test_terms_on_several_grids_sum_their_operators(clip_task: TaskDescriptor) -> None:
    other = descriptor("siglip", n=9, seed=1, prompts=["red", "green", "blue", "black"])
    target = tiny_encoder("siglip2", seed=2)
    parts = solve_operators([clip_task, other], target)
    model = transfer(clip_task - other, target, strength=0.7)
    layer = model.base_model.get_operator("default")
    torch.testing.assert_close(layer.dense(), parts[0].dense() - parts[1].dense(), rtol=1e-4, atol=1e-5)


def test_adding_and_subtracting_gives_the_first_back(clip_task: TaskDescriptor) -> None:
    other = descriptor("siglip", n=12)
    assert clip_task.probes is not None
    both = tiny_encoder("metaclip_2", seed=2)
    transfer((clip_task + other) - other, both)
    one = tiny_encoder("metaclip_2", seed=2)
    transfer(clip_task, one)
    torch.testing.assert_close(
        affinities(both, clip_task.probes), affinities(one, clip_task.probes), rtol=0, atol=1e-5
    )


def test_a_second_transfer_is_solved_against_the_base_and_adds(clip_task: TaskDescriptor) -> None:
    other = descriptor("siglip", n=9, seed=1)
    target = tiny_encoder("metaclip_2", seed=2)
    transfer(clip_task, target, adapter_name="first")
    model = transfer(other, target, adapter_name="second")
    assert model.base_model.active_adapters == ["first", "second"]
    alone = solve_operators([other], tiny_encoder("metaclip_2", seed=2))[0]
    torch.testing.assert_close(model.base_model.get_operator("second").dense(), alone.dense(), rtol=1e-4, atol=1e-5)


def test_a_bank_composes_signed_sums(clip_task: TaskDescriptor) -> None:
    other = descriptor("siglip", seed=0)
    target = tiny_encoder("metaclip_2", seed=2)
    bank = OperatorBank.solve({("clip", "task"): clip_task, ("siglip", "task"): other}, target)
    composed = bank.compose({("clip", "task"): 1.5, ("siglip", "task"): -0.5})
    (expected,) = solve_operators([1.5 * clip_task - 0.5 * other], target)  # type: ignore[list-item]
    torch.testing.assert_close(composed.dense(), expected.dense(), rtol=1e-4, atol=1e-5)
    with pytest.raises(PlatonicError, match="Expected keys of the bank"):
        bank.compose({("clip", "nothing"): 1.0})
    with pytest.raises(PlatonicError, match="Expected keys of the bank"):
        bank.compose({})


def test_initialising_fills_an_adapter_of_get_peft_model(clip_task: TaskDescriptor) -> None:
    target = tiny_encoder("siglip", seed=2)
    model = get_peft_model(target.model, PlatonicConfig(r=2, strength=0.5))
    initialize_platonic_weights(model, clip_task, target.processor)
    once = tiny_encoder("siglip", seed=2)
    transfer(clip_task, once)
    assert clip_task.probes is not None
    torch.testing.assert_close(
        affinities(DualEncoder(model, target.processor), clip_task.probes), affinities(once, clip_task.probes)
    )
    assert model.peft_config["default"].r == 3
    with pytest.raises(PlatonicError, match="adapter named 'other', got adapters .'default'"):
        initialize_platonic_weights(model, clip_task, target.processor, adapter_name="other")
    elsewhere = tiny_encoder("clip", seed=2)
    wrong = get_peft_model(elsewhere.model, PlatonicConfig(target_modules=["text_projection"], site="output"))
    with pytest.raises(PlatonicError, match="adapter on visual_projection .* got one on .'text_projection'"):
        initialize_platonic_weights(wrong, clip_task, elsewhere.processor)


@pytest.mark.parametrize("strength", [None, 0.3, "agreement"])
def test_initialising_takes_the_strength_that_is_asked_for(strength: Any, clip_task: TaskDescriptor) -> None:
    kept = 0.05
    expected = solve_transfer(clip_task, tiny_encoder("siglip", seed=2), strength=strength or kept)
    target = tiny_encoder("siglip", seed=2)
    model = get_peft_model(target.model, PlatonicConfig(strength=kept))
    initialize_platonic_weights(model, clip_task, target.processor, strength=strength)
    assert model.get_strengths() == {"default": expected.strength}
    assert model.peft_config["default"].provenance["forecast"] == expected.provenance["forecast"]
    assert clip_task.probes is not None
    bare = tiny_encoder("siglip", seed=2)
    features = encode_probes(bare, clip_task.probes)
    unit = expected.operator.apply(features.unit, features.design, strength=expected.strength)
    found = encode_probes(DualEncoder(model, target.processor), clip_task.probes).unit
    torch.testing.assert_close(found, unit, rtol=0, atol=1e-5)


def test_initialising_leaves_the_place_to_the_config(clip_task: TaskDescriptor) -> None:
    target = tiny_encoder(seed=2)
    model = get_peft_model(target.model, PlatonicConfig())
    with pytest.raises(PlatonicError, match=r"place of the edit in the PlatonicConfig, got \['site'\] here"):
        initialize_platonic_weights(model, clip_task, target.processor, site="input")


def test_a_fresh_process_loads_what_this_one_saved(clip_task: TaskDescriptor, tmp_path: Path) -> None:
    target = tiny_encoder("siglip2", seed=2)
    target.model.save_pretrained(tmp_path / "base")
    target.processor.save_pretrained(tmp_path / "base")
    loaded = DualEncoder.from_pretrained(tmp_path / "base")
    clip_task.save_pretrained(tmp_path / "descriptor", include_probes=True)
    transfer(TaskDescriptor.from_pretrained(tmp_path / "descriptor"), loaded).save_pretrained(tmp_path / "adapter")
    assert clip_task.probes is not None
    torch.save(affinities(loaded, clip_task.probes), tmp_path / "expected.pt")
    code = (
        "import sys, torch, hf_platonic; from pathlib import Path; p = Path(sys.argv[1])\n"
        "from hf_platonic.affinities import affinity\n"
        "from hf_platonic.encoding import encode_columns, encode_probes\n"
        "e = hf_platonic.DualEncoder.from_pretrained(p / 'base', adapter=p / 'adapter')\n"
        "s = hf_platonic.ProbeSet.from_pretrained(p / 'descriptor' / 'probes')\n"
        "a = affinity(encode_probes(e, s).unit, encode_columns(e, s.columns))\n"
        "print(float((a - torch.load(p / 'expected.pt')).abs().max()))"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 1e-6


def test_refuses_terms_without_their_probes(clip_task: TaskDescriptor) -> None:
    bare = TaskDescriptor(clip_task.delta, clip_task.grid, clip_task.sources)
    with pytest.raises(GridMismatchError, match=r"got grids none.*pass them as `probes=`"):
        transfer(bare, tiny_encoder(seed=2))
    other = ProbeSet(tiny_images(12, seed=8), prompts=PROMPTS)
    with pytest.raises(GridMismatchError, match="the probes differ"):
        transfer(bare, tiny_encoder(seed=2), probes=other)
    assert clip_task.probes is not None
    assert isinstance(transfer(bare, tiny_encoder(seed=2), probes=[other, clip_task.probes]), PeftModel)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strength": float("nan")}, "`strength` to be finite"),
        ({"strength": float("inf")}, "`strength` to be finite"),
        ({"probe_ridge": 0.0}, "`probe_ridge` above 0"),
        ({"prompt_ridge": -1.0}, "`prompt_ridge` above 0"),
    ],
)
def test_refuses_unusable_options(clip_task: TaskDescriptor, options: dict[str, float], message: str) -> None:
    target = tiny_encoder(seed=2)
    with pytest.raises(PlatonicError, match=message):
        transfer(clip_task, target, **options)  # type: ignore[arg-type]
    assert not isinstance(target.model, PeftModel)


def test_refuses_what_is_no_term(clip_task: TaskDescriptor) -> None:
    with pytest.raises(PlatonicError, match="at least one term"):
        transfer([], tiny_encoder(seed=2))
    with pytest.raises(PlatonicError, match="Expected TaskDescriptor terms, got str"):
        transfer(["a"], tiny_encoder(seed=2))  # type: ignore[list-item]
    with pytest.raises(PlatonicError, match="at least one descriptor"):
        solve_operators([], tiny_encoder(seed=2))


def test_refuses_to_mix_with_another_peft_method(clip_task: TaskDescriptor) -> None:
    from peft import LoraConfig

    target = tiny_encoder(seed=2)
    lora = DualEncoder(get_peft_model(target.model, LoraConfig(target_modules=["q_proj"])), target.processor)
    with pytest.raises(EncoderError, match="of type PLATONIC, got LoraModel.*merge_and_unload"):
        transfer(clip_task, lora)
