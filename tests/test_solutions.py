from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel, get_peft_model
from test_extraction import PROMPTS, pair
from test_solve import relative
from tiny import tiny_encoder, tiny_images, tiny_parts
from torch import Tensor

from hf_platonic.affinities import affinity, row_centred, spread
from hf_platonic.descriptor import TaskDescriptor
from hf_platonic.encoders.encoder import DualEncoder
from hf_platonic.encoding import encode_columns, encode_probes
from hf_platonic.errors import PlatonicError, PromptError
from hf_platonic.extraction import extract
from hf_platonic.joint import JointTerm, joint_solve
from hf_platonic.probes import ProbeSet
from hf_platonic.readings import Reading
from hf_platonic.selection import GridSpectrum
from hf_platonic.solutions import Solution, solve_operators, solve_transfer
from hf_platonic.solve import GridSolver
from hf_platonic.transfers import initialize_platonic_weights, transfer
from hf_platonic.tuner import PlatonicConfig

COLOURS = ["red", "green", "blue", "black"]


def extracted(family: str, prompts: list[str], *, n: int, seed: int) -> TaskDescriptor:
    probes = ProbeSet(tiny_images(n, seed=seed), prompts=prompts)
    return extract(*pair(family), probes, name=f"{family}-{seed}", store_base=True)


@pytest.fixture(scope="module")
def tasks() -> tuple[TaskDescriptor, TaskDescriptor]:
    return extracted("clip", PROMPTS, n=20, seed=0), extracted("siglip", COLOURS, n=18, seed=1)


def reading(task: TaskDescriptor, **place: Any) -> Reading:
    assert task.probes is not None
    return Reading.of(target().at(**place), task.probes)


def target(family: str = "metaclip_2") -> Any:
    return tiny_encoder(family, seed=2)


def edited(solution: Solution, seen: Reading) -> Tensor:
    unit = solution.operator.apply(seen.features.unit, seen.features.design, strength=solution.strength)
    return affinity(unit, seen.columns)


@pytest.mark.parametrize("place", [{}, {"site": "input"}, {"tower": "text"}])
def test_the_papers_recipe_is_the_sum_of_closed_forms_bit_for_bit(
    tasks: tuple[TaskDescriptor, TaskDescriptor], place: dict[str, Any]
) -> None:
    parts = []
    for task in tasks:
        assert task.probes is not None
        encoder = target().at(**place)
        features = encode_probes(encoder, task.probes)
        solver = GridSolver.of(features.design, encode_columns(encoder, task.grid.columns))
        parts.append([side.float() for side in solver.solve([task.delta], features.design)[0]])
    left, right = torch.cat([left for left, _ in parts], dim=1), torch.cat([right for _, right in parts])
    if place.get("tower") == "text":
        left, right = right.T, left.T
    for options in ({}, {"recipe": "paper"}):
        found = solve_transfer(list(tasks), target(), **options, **place)
        assert torch.equal(found.operator.left, left)
        assert torch.equal(found.operator.right, right)
        assert found.strength == 0.5
        assert "objective" not in found.provenance


def test_the_endpoint_brings_the_fine_tunes_answers(tasks: tuple[TaskDescriptor, TaskDescriptor]) -> None:
    task = tasks[0]
    assert task.base_affinity is not None
    seen = reading(task)
    wanted = row_centred(task.base_affinity + task.delta) * spread(seen.affinity) / task.spread

    def distance(found: Tensor) -> float:
        return float((row_centred(found) - wanted).norm())

    change = distance(edited(solve_transfer(task, target(), strength=1.0), seen))
    solution = solve_transfer(task, target(), objective="endpoint", probe_ridge=1e-4)
    assert solution.strength == 1.0
    assert distance(edited(solution, seen)) < 0.5 * min(change, distance(seen.affinity))
    assert solution.provenance["objective"] == "endpoint"
    assert solution.provenance["calibration"] == "spread"
    teacher = TaskDescriptor.from_scores(task.base_affinity + task.delta, task.probes)  # type: ignore[arg-type]
    taught = solve_transfer(teacher, target(), objective="endpoint", probe_ridge=1e-4)
    assert distance(edited(taught, seen)) < min(change, distance(seen.affinity))


def test_calibration_scales_the_operator(tasks: tuple[TaskDescriptor, TaskDescriptor]) -> None:
    (plain,), (scaled,) = (solve_operators([tasks[0]], target(), calibration=c) for c in ("none", "spread"))
    ratio = spread(reading(tasks[0]).affinity) / tasks[0].spread
    torch.testing.assert_close(scaled.dense(), ratio * plain.dense(), rtol=1e-4, atol=1e-6)
    whole = solve_transfer([tasks[0], 3 * tasks[0]], target(), calibration="spread")
    torch.testing.assert_close(whole.operator.dense(), 4 * scaled.dense(), rtol=1e-4, atol=1e-5)
    assert whole.strength == 1.0


@pytest.mark.parametrize("place", [{}, {"site": "input"}])
def test_joint_is_the_joint_solve_of_what_the_target_sees(
    tasks: tuple[TaskDescriptor, TaskDescriptor], place: dict[str, Any]
) -> None:
    found = solve_transfer([tasks[0], -tasks[1]], target(), combine="joint", **place)
    first, second = (reading(task, **place) for task in tasks)
    expected = joint_solve(
        [
            JointTerm(first.features.design, first.columns, tasks[0].delta),
            JointTerm(second.features.design, second.columns, -tasks[1].delta),
        ]
    )
    assert relative(found.operator.dense().double(), expected.left @ expected.right) < 1e-5
    assert found.strength == 1.0
    assert found.provenance["combine"] == "joint"
    assert found.provenance["iterations"] == expected.iterations
    assert found.provenance["residual"] <= 1e-8


def test_joint_serves_every_term_better_than_the_sum(tasks: tuple[TaskDescriptor, TaskDescriptor]) -> None:
    def error(**options: Any) -> float:
        solution = solve_transfer(list(tasks), target(), strength=1.0, probe_ridge=1e-4, **options)
        seen = [reading(task) for task in tasks]
        moved = [
            s.features.design @ solution.operator.dense() @ s.columns.T - t.delta
            for s, t in zip(seen, tasks, strict=True)
        ]
        return sum(float(part.square().sum()) for part in moved)

    assert error(combine="joint") < 0.5 * error()


def test_preserving_keeps_the_control_where_it_was(tasks: tuple[TaskDescriptor, TaskDescriptor]) -> None:
    control = ProbeSet(tiny_images(15, seed=5), prompts=["a house", "a tree"])
    seen = Reading.of(target(), control)

    def moved(**options: Any) -> float:
        return float(
            (edited(solve_transfer(tasks[0], target(), strength=1.0, **options), seen) - seen.affinity).norm()
        )

    free, kept, firmly = moved(), moved(preserve=control), moved(preserve=[control], preserve_weight=100.0)
    assert firmly < kept < 0.8 * free
    found = solve_transfer(tasks[0], target(), preserve=control)
    assert found.provenance["preserve"] == {"grids": [control.grid.fingerprint], "weight": 1.0}


def test_the_default_control_is_every_terms_probes_with_the_others_prompts(
    tasks: tuple[TaskDescriptor, TaskDescriptor],
) -> None:
    found = solve_transfer(list(tasks), target(), preserve="default", preserve_weight=0.5)
    first, second = (reading(task) for task in tasks)
    expected = joint_solve(
        [
            JointTerm(first.features.design, first.columns, tasks[0].delta),
            JointTerm(second.features.design, second.columns, tasks[1].delta),
            JointTerm(first.features.design, second.columns, None, 0.5),
            JointTerm(second.features.design, first.columns, None, 0.5),
        ]
    )
    assert relative(found.operator.dense().double(), expected.left @ expected.right) < 1e-5
    with pytest.raises(PlatonicError, match="terms with different prompts for preserve"):
        solve_transfer(tasks[0], target(), preserve="default")


def test_the_text_tower_takes_the_transpose(tasks: tuple[TaskDescriptor, TaskDescriptor]) -> None:
    options: dict[str, Any] = {"objective": "endpoint", "combine": "joint"}
    probe = solve_transfer(list(tasks), target(), **options)
    text = solve_transfer(list(tasks), target(), tower="text", **options)
    torch.testing.assert_close(text.operator.dense(), probe.operator.dense().T, rtol=1e-4, atol=1e-5)


def test_the_receivers_own_words_stand_for_the_columns(tasks: tuple[TaskDescriptor, TaskDescriptor]) -> None:
    task = tasks[0]
    assert task.probes is not None
    words = {"a dog": "ein Hund", "one bird": ["ein Vogel", "der Vogel"], "a cat": "eine Katze"}
    found = solve_transfer(task, target(), prompts=words)
    encoder = target()
    columns = encode_columns(encoder, [["eine Katze"], ["ein Hund"], ["ein Vogel", "der Vogel"]])
    features = encode_probes(encoder, task.probes)
    left, right = GridSolver.of(features.design, columns).solve([task.delta], features.design)[0]
    assert torch.equal(found.operator.left, left.float())
    assert torch.equal(found.operator.right, right.float())
    assert found.provenance["prompts"] == words
    german = TaskDescriptor(task.delta, (probes := task.probes.with_prompts(prompts=["x", "y", "z"])).grid)
    same = solve_transfer(task, target(), prompts=["x", "y", "z"])
    renamed = solve_transfer(german.with_probes(probes), target())
    assert torch.equal(same.operator.dense(), renamed.operator.dense())
    with pytest.raises(PromptError, match=r"no text for \['one bird'\] and texts for the unknown \['a bird'\]"):
        solve_transfer(task, target(), prompts={"a dog": "x", "a bird": "y", "a cat": "z"})


def test_transfer_writes_what_was_chosen(tasks: tuple[TaskDescriptor, TaskDescriptor]) -> None:
    options: dict[str, Any] = {"objective": "endpoint", "preserve": "default", "recipe": "paper"}
    expected = solve_transfer(list(tasks), target("siglip2"), **options)
    model = transfer(list(tasks), target("siglip2"), **options)
    found = model.base_model.get_operator("default")
    torch.testing.assert_close(found.dense(), expected.operator.dense(), rtol=1e-4, atol=1e-6)
    config = model.peft_config["default"]
    assert config.strength == 1.0
    assert config.provenance["preserve"] == {"grids": "default", "weight": 1.0}
    assert json.loads(json.dumps(config.provenance)) == config.provenance
    encoder = target("siglip2")
    empty = get_peft_model(encoder.model, PlatonicConfig())
    initialize_platonic_weights(empty, list(tasks), encoder.processor, **options)
    found = empty.base_model.get_operator("default")
    torch.testing.assert_close(found.dense(), expected.operator.dense(), rtol=1e-4, atol=1e-6)
    bare = extract(*pair("clip"), ProbeSet(tiny_images(5), prompts=PROMPTS))
    with pytest.raises(PlatonicError, match="Extract with store_base=True"):
        transfer(bare, target(), objective="endpoint")
    other = extract(*pair("siglip"), tasks[0].probes, store_base=True)  # type: ignore[arg-type]
    for combine in ("sum", "joint"):
        with pytest.raises(PlatonicError, match="Average them with TaskDescriptor.consensus"):
            solve_transfer([tasks[0], other], target(), objective="endpoint", combine=combine)  # type: ignore[arg-type]
    together = TaskDescriptor.consensus([tasks[0], other])
    assert solve_transfer(together, target(), objective="endpoint").operator.rank == len(PROMPTS)


# Choices without labels ----------------------------------------------------------------------------------------------


def agreeing(solution: Solution, task: TaskDescriptor, strength: float) -> float:
    """Share of the task's probes on which the edited target answers as the fine-tune does, seen or not."""
    assert task.predictions is not None
    seen = Reading.of(solution.target, task.probes)  # type: ignore[arg-type]
    unit = solution.operator.apply(seen.features.unit, seen.features.design, strength=strength)
    return float((affinity(unit, seen.columns).argmax(dim=1) == task.predictions).double().mean())


def test_the_papers_recipe_has_a_forecast_too(tasks: tuple[TaskDescriptor, TaskDescriptor]) -> None:
    found = solve_transfer(tasks[0], target())
    forecast = found.forecast
    assert forecast is not None
    # Folds of 20 probes are equally large, so that the mean over turns is the share of all.
    assert forecast.before == pytest.approx(agreeing(found, tasks[0], 0.0))
    assert 0.0 <= forecast.after <= 1.0
    assert found.provenance["forecast"] == {"before": forecast.before, "after": forecast.after, "gain": forecast.gain}
    negated = solve_transfer(-tasks[0], target()).forecast
    assert negated is not None
    assert negated.before == forecast.before
    assert negated.after <= forecast.after
    for terms in ([tasks[0], 2 * tasks[0]], replace(tasks[0], predictions=None)):
        bare = solve_transfer(terms, target())
        assert bare.forecast is None
        assert "forecast" not in bare.provenance


@pytest.mark.parametrize("options", [{}, {"tower": "text"}, {"site": "features"}, {"combine": "joint"}])
def test_a_choice_by_agreement_is_as_good_as_any_on_held_out_probes(
    tasks: tuple[TaskDescriptor, TaskDescriptor], options: dict[str, Any]
) -> None:
    chosen = solve_transfer(tasks[0], target(), strength="agreement", probe_ridge="agreement", **options)
    assert chosen.forecast is not None
    (ridge,) = chosen.provenance["chosen_probe_ridges"]
    assert chosen.provenance["probe_ridge"] == chosen.provenance["strength_by"] == "agreement"
    again = solve_transfer(tasks[0], target(), strength=chosen.strength, probe_ridge=ridge, **options)
    assert torch.equal(again.operator.dense(), chosen.operator.dense())
    assert again.forecast == chosen.forecast
    assert "strength_by" not in again.provenance
    for strength, other in ((1.0, 0.01), (0.5, 0.1), (2.0, 1e-4)):
        one = solve_transfer(tasks[0], target(), strength=strength, probe_ridge=other, **options)
        assert one.forecast is not None
        assert one.forecast.after <= chosen.forecast.after + 1e-9


def test_ridges_by_cross_validation_are_those_of_each_grid(tasks: tuple[TaskDescriptor, TaskDescriptor]) -> None:
    found = solve_transfer(list(tasks), target(), probe_ridge="gcv", strength=1.0)
    ridges = found.provenance["chosen_probe_ridges"]
    for task, ridge in zip(tasks, ridges, strict=True):
        seen = reading(task)
        assert GridSpectrum.of(seen.features.design, seen.columns).best(task.delta) == ridge
    parts = [
        solve_transfer(task, target(), probe_ridge=ridge).operator for task, ridge in zip(tasks, ridges, strict=True)
    ]
    torch.testing.assert_close(found.operator.dense(), (parts[0] + parts[1]).dense(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("place", [{}, {"tower": "text"}, {"site": "output"}])
def test_automatic_is_the_options_it_stands_for(
    tasks: tuple[TaskDescriptor, TaskDescriptor], place: dict[str, Any]
) -> None:
    site = place or {"site": "features"}
    found = solve_transfer(tasks[0], target(), recipe="auto", **place)
    same = solve_transfer(tasks[0], target(), objective="endpoint", probe_ridge="gcv", **site)
    assert torch.equal(found.operator.dense(), same.operator.dense())
    assert found.operator.site == same.operator.site
    assert found.strength == same.strength == 1.0
    assert found.provenance == same.provenance
    assert found.forecast == same.forecast is not None
    options: dict[str, Any] = {"preserve": "default", "probe_ridge": "gcv"}
    several = solve_transfer(list(tasks), target(), recipe="auto", **place)
    same = solve_transfer(list(tasks), target(), objective="endpoint", **options, **site)
    assert torch.equal(several.operator.dense(), same.operator.dense())
    # Where anything is taken away: the change, at the family's own site and the paper's ridge.
    several = solve_transfer([tasks[0], -tasks[1]], target(), recipe="auto", **place)
    same = solve_transfer([tasks[0], -tasks[1]], target(), calibration="spread", preserve="default", **place)
    assert torch.equal(several.operator.dense(), same.operator.dense())
    assert several.provenance["objective"] == "change"
    assert several.provenance["preserve"]["grids"] == "default"


def test_given_options_take_the_place_of_the_automatic_ones(tasks: tuple[TaskDescriptor, TaskDescriptor]) -> None:
    found = solve_transfer(
        list(tasks),
        target(),
        recipe="auto",
        objective="change",
        calibration="none",
        combine="sum",
        probe_ridge=0.02,
        site="output",
        strength=0.5,
    )
    same = solve_transfer(list(tasks), target(), probe_ridge=0.02, site="output")
    assert torch.equal(found.operator.dense(), same.operator.dense())
    assert found.strength == 0.5
    assert "chosen_probe_ridges" not in found.provenance


def test_automatic_stays_at_the_familys_own_site_where_no_inner_layers_are_known(
    tasks: tuple[TaskDescriptor, TaskDescriptor],
) -> None:
    def bare() -> DualEncoder:
        model, processor = tiny_parts(seed=2)
        model.vision_model.encoder.layers = torch.nn.Sequential(*model.vision_model.encoder.layers)
        return DualEncoder(model, processor)

    found = solve_transfer(tasks[0], bare(), recipe="auto")
    assert found.operator.site == "output"
    same = solve_transfer(tasks[0], bare(), objective="endpoint", probe_ridge="gcv")
    assert torch.equal(found.operator.dense(), same.operator.dense())


@pytest.mark.parametrize("place", [{}, {"tower": "text"}])
def test_an_automatic_transfer_is_written_and_loads_again(
    tasks: tuple[TaskDescriptor, TaskDescriptor], place: dict[str, Any], tmp_path: Path
) -> None:
    encoder = target("siglip2")
    model = transfer(tasks[0], encoder, recipe="auto", strength="agreement", **place)
    provenance = model.peft_config["default"].provenance
    assert provenance["verified"]["live"] < 1e-5
    assert set(provenance["forecast"]) == {"before", "after", "gain"}
    assert len(provenance["chosen_probe_ridges"]) == 1
    assert json.loads(json.dumps(provenance)) == provenance
    model.save_pretrained(tmp_path)
    again = DualEncoder(PeftModel.from_pretrained(target("siglip2").model, tmp_path), encoder.processor)
    assert tasks[0].probes is not None
    for read in (lambda e: e.encode_prompts(PROMPTS), lambda e: encode_probes(e, tasks[0].probes).unit):
        torch.testing.assert_close(read(again), read(encoder), rtol=0, atol=1e-6)
    assert again.model.peft_config["default"].provenance == provenance


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"strength": "best"}, r"Expected `strength` to be a number or one of \['agreement'\], got 'best'"),
        ({"probe_ridge": "cv"}, r"Expected `probe_ridge` to be a number or one of \['gcv', 'agreement'\], got 'cv'"),
        ({"recipe": "best"}, r"Expected `recipe` out of \('paper', 'auto'\), got 'best'"),
    ],
)
def test_refuses_unknown_choices(
    tasks: tuple[TaskDescriptor, TaskDescriptor], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(PlatonicError, match=message):
        solve_transfer(tasks[0], target(), **options)


@pytest.mark.parametrize("options", [{"strength": "agreement"}, {"probe_ridge": "agreement"}])
def test_refuses_choices_by_agreement_without_a_fine_tunes_answers(
    tasks: tuple[TaskDescriptor, TaskDescriptor], options: dict[str, Any]
) -> None:
    other = extract(*pair("siglip"), tasks[0].probes, store_base=True)  # type: ignore[arg-type]
    for terms in (replace(tasks[0], predictions=None), [tasks[0], other], [tasks[1], tasks[0], other]):
        for calibration in ("none", "spread"):
            with pytest.raises(PlatonicError, match='fine-tune\'s predictions for a choice by "agreement", got Task'):
                solve_transfer(terms, target(), calibration=calibration, **options)  # type: ignore[arg-type]
    with pytest.raises(PlatonicError, match='Expected added terms for a choice by "agreement", got the negated'):
        solve_transfer([tasks[1], -tasks[0]], target(), **options)


@pytest.mark.parametrize("recipe", ["paper", "auto"])
def test_prompts_that_a_target_cannot_tell_apart_are_refused_before_any_pass(
    recipe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    probes = ProbeSet(tiny_images(6), prompts=["A cat", "a cat"])
    term = TaskDescriptor(torch.ones(6, 2), probes.grid, probes=probes)
    seen: list[Any] = []
    preprocess = DualEncoder.preprocess

    def watched(encoder: DualEncoder, inputs: Any, **options: Any) -> Any:
        seen.extend(item for item in inputs if item in list(probes))
        return preprocess(encoder, inputs, **options)

    monkeypatch.setattr(DualEncoder, "preprocess", watched)
    with pytest.raises(PromptError, match=r"'A cat' and 'a cat'.*same to this model"):
        solve_transfer(term, tiny_encoder("siglip2"), recipe=recipe)
    assert seen == []
