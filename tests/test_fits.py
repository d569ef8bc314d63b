"""Fits against the solves they are made of, and choices whose answer is known by construction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_solve import relative
from torch import Tensor

from hf_platonic.errors import PlatonicError
from hf_platonic.fits import Equation, Problem, agreement, best_by_agreement, chosen_ridges, forecast_of
from hf_platonic.joint import JointTerm, joint_solve
from hf_platonic.scaling import scaled
from hf_platonic.selection import RIDGES, GridSpectrum, folds
from hf_platonic.solve import closed_form

N, M, D = 14, 3, 5


def unit(rows: int, seed: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(rows, D, generator=torch.Generator().manual_seed(seed)), dim=1)


def grid(seed: int, *, n: int = N) -> Equation:
    """Random embeddings, changes and predictions, at an output site."""
    g = torch.Generator().manual_seed(seed)
    rows = unit(n, seed)
    wanted = 0.3 * torch.randn(n, M, generator=g)
    return Equation(rows, rows, unit(M, seed + 50), wanted, predictions=torch.randint(M, (n,), generator=g))


def dense(equation: Equation, rows: Tensor, ridge: float) -> Tensor:
    assert equation.wanted is not None
    left, right = closed_form(equation.design[rows], equation.columns, equation.wanted[rows], probe_ridge=ridge)
    return left @ right


def others(held: Tensor, n: int = N) -> Tensor:
    return torch.tensor([i for i in range(n) if i not in set(held.tolist())])


def turning(size: float, *, text: bool = False) -> Problem:
    """Probes at three class prompts, and a change towards the next class, which is what the fine-tune answers.

    An operator that fits it exactly needs `s size > 0.5` for that answer; a ridge shrinks it by
    `h = 4 / (4 + 3 ridge)`: of four equal directions three are there, each of mean square 4 / 3 of the design's.
    """
    at = torch.arange(12) % 3
    rows, columns = torch.eye(4)[at], torch.eye(4)[:3]
    wanted = size * (torch.eye(3)[(at + 1) % 3] - torch.eye(3)[at])
    return Problem((Equation(rows, rows, columns, wanted, predictions=(at + 1) % 3),), "sum", "output", text)


def test_a_sum_adds_one_closed_form_a_grid() -> None:
    first, second = grid(0), grid(1, n=9)
    found, report = Problem((first, second), "sum", "output").solve([0.1, 0.01], 1e-6)
    expected = dense(first, torch.arange(N), 0.1) + dense(second, torch.arange(9), 0.01)
    assert relative(found.dense().double(), expected) < 1e-5
    assert report == {}
    text, _ = Problem((first, second), "sum", "output", text=True).solve([0.1, 0.01], 1e-6)
    assert torch.equal(text.dense(), found.dense().T)


def test_joint_is_the_joint_solve_with_every_grids_own_ridge() -> None:
    first, second = grid(0), grid(1, n=9)
    kept = replace(first, columns=second.columns, wanted=None, weight=0.5, predictions=None, memo={})
    found, report = Problem((first, second, kept), "joint", "output").solve([0.1, 0.01, 0.1], 1e-6)
    expected = joint_solve(
        [
            JointTerm(first.design, first.columns, first.wanted, 1.0, 0.1),
            JointTerm(second.design, second.columns, second.wanted, 1.0, 0.01),
            JointTerm(first.design, second.columns, None, 0.5, 0.1),
        ]
    )
    assert relative(found.dense().double(), expected.left @ expected.right) < 1e-5
    assert report == {"iterations": expected.iterations, "residual": expected.residual}


def test_scaled_features_are_folded_back() -> None:
    equation = grid(2)
    raw = torch.cat([7 * torch.randn(N, 2, generator=torch.Generator().manual_seed(3)) + 2, torch.ones(N, 1)], dim=1)
    (design,), scaling = scaled([raw], "features")
    found, _ = Problem((replace(equation, design=design),), "sum", "features", scaling=scaling).solve([0.1], 1e-6)
    expected = design.double() @ dense(replace(equation, design=design), torch.arange(N), 0.1)
    assert relative(raw.double() @ found.dense().double(), expected) < 1e-5


def test_every_probe_is_held_out_once_and_never_seen() -> None:
    equation = grid(0)
    parts = Problem((equation,), "sum", "output").held_out([0.1], 1e-6)
    assert len(parts) == 4
    for part, held in zip(parts, folds(N), strict=True):
        assert torch.equal(part.equation.unit, equation.unit[held])
        assert relative(part.left @ part.right, dense(equation, others(held), 0.1)) < 1e-9
    assert equation.wanted is not None
    spoilt = equation.wanted.clone()
    spoilt[folds(N)[1]] = 9.0
    again = Problem((replace(equation, wanted=spoilt, memo={}),), "sum", "output").held_out([0.1], 1e-6)
    assert torch.equal(again[1].left @ again[1].right, parts[1].left @ parts[1].right)
    assert not torch.equal(again[0].left @ again[0].right, parts[0].left @ parts[0].right)


def test_grids_of_different_sizes_take_turns_together() -> None:
    large, small = grid(0), grid(1, n=3)  # four turns of one, three of the other
    parts = Problem((large, small), "sum", "output").held_out([0.1, 0.1], 1e-6)
    assert len(parts) == 8
    for turn in range(4):
        held = folds(N)[turn], folds(3)[turn % 3]
        expected = dense(large, others(held[0]), 0.1) + dense(small, others(held[1], 3), 0.1)
        for part in parts[2 * turn : 2 * turn + 2]:
            assert relative(part.left @ part.right, expected) < 1e-9


def test_a_joint_solve_holds_every_fourth_probe_out_of_all_its_grids() -> None:
    first, second = grid(0), grid(1)
    kept = replace(first, columns=second.columns, wanted=None, predictions=None, memo={})
    control = replace(grid(2), wanted=None, predictions=None)
    parts = Problem((first, second, kept, control), "joint", "output").held_out([0.1] * 4, 1e-6)
    assert len(parts) == 2
    held = folds(N)[0]
    rest = others(held)
    assert first.wanted is not None
    assert second.wanted is not None
    design = first.design[rest]
    expected = joint_solve(
        [
            JointTerm(design, first.columns, first.wanted[rest]),
            JointTerm(second.design[rest], second.columns, second.wanted[rest]),
            JointTerm(design, second.columns),
            JointTerm(control.design, control.columns),
        ],
        probe_ridge=0.1,
    )
    for part, equation in zip(parts, (first, second), strict=True):
        assert torch.equal(part.equation.unit, equation.unit[held])
        assert relative(part.left @ part.right, expected.left @ expected.right) < 1e-9


@pytest.mark.parametrize("text", [False, True])
def test_agreement_and_forecast_are_what_the_construction_says(text: bool) -> None:
    parts = turning(0.6, text=text).held_out([1e-3], 1e-9)
    assert [agreement(parts, s) for s in (-1.0, 0.0, 0.5, 1.0)] == [0.0, 0.0, 0.0, 1.0]
    forecast = forecast_of(parts, 1.0)
    assert (forecast.before, forecast.after, forecast.gain) == (0.0, 1.0, 1.0)
    half = turning(0.6, text=text)
    (equation,) = half.equations
    assert equation.predictions is not None
    wrong = torch.where(torch.arange(12) < 6, equation.predictions, (equation.predictions + 1) % 3)
    mixed = replace(half, equations=(replace(equation, predictions=wrong),))
    assert forecast_of(mixed.held_out([1e-3], 1e-9), 1.0).after == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("size", "asked", "expected"),
    [
        # Ridge 1 would need a strength above 2.19, ridge 0.1 one above 1.34; 1.5 is the nearest to 1.
        (0.4, ("agreement", "agreement"), ([0.1], 1.5)),
        (0.4, (0.01, "agreement"), ([0.01], 1.5)),
        (0.4, (1e-3, 1.0), ([1e-3], 1.0)),
        (0.6, ("agreement", 1.0), ([0.1], 1.0)),  # 0.6 h > 0.5 up to a ridge of 0.27
        (2.0, ("agreement", "agreement"), ([1.0], 1.0)),  # all good: the largest ridge, the strength at 1
    ],
)
def test_the_best_pair_is_chosen(size: float, asked: Any, expected: Any) -> None:
    problem = turning(size)
    ridges, strength, parts = best_by_agreement(problem, *asked, 1e-9)
    assert (ridges, strength) == expected
    own = problem.held_out(ridges, 1e-9)
    assert agreement(parts, strength) == agreement(own, strength)


def test_without_predictions_nothing_is_forecast_and_nothing_chosen_by_them() -> None:
    (equation,) = turning(0.6).equations
    bare = Problem((replace(equation, predictions=None),), "sum", "output")
    assert best_by_agreement(bare, 0.1, 0.5, 1e-6) == ([0.1], 0.5, [])
    for asked in (("agreement", 1.0), (0.1, "agreement")):
        with pytest.raises(PlatonicError, match="predictions on two probes or more of every grid"):
            best_by_agreement(bare, *asked, 1e-6)  # type: ignore[arg-type]
    assert not Problem((equation.at(torch.tensor([0])),), "sum", "output").can_forecast


def test_cross_validated_ridges_are_each_grids_own() -> None:
    first, second = grid(0), grid(1, n=9)
    kept = replace(second, columns=first.columns, wanted=None, predictions=None, memo={})
    control = replace(grid(2), wanted=None, predictions=None)
    assert first.wanted is not None
    assert second.wanted is not None
    a = GridSpectrum.of(first.design, first.columns).best(first.wanted, prompt_ridge=1e-3)
    b = GridSpectrum.of(second.design, second.columns).best(second.wanted, prompt_ridge=1e-3)
    problem = Problem((first, second, kept, control), "joint", "output")
    assert chosen_ridges(problem, "gcv", 1e-3) == [a, b, b, pytest.approx((a * b) ** 0.5)]
    assert {a, b} <= set(RIDGES)
    assert chosen_ridges(problem, 0.2, 1e-3) == [0.2] * 4
    with pytest.raises(PlatonicError, match="`probe_ridge` above 0"):
        chosen_ridges(problem, -1.0, 1e-3)
