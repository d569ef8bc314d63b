from __future__ import annotations

import pytest
import torch
from test_solve import SHAPES, grid, relative
from torch import Tensor
from torch.nn.functional import normalize

from hf_platonic.errors import PlatonicError
from hf_platonic.joint import JointTerm, joint_solve
from hf_platonic.solve import closed_form

P, D = 9, 12


def units(rows: int, columns: int, seed: int) -> Tensor:
    """Unit rows that resemble each other, as embeddings do."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(rows, columns, generator=generator)
    return normalize(noise + torch.randn(columns, generator=generator), dim=-1)


def term(n: int, m: int, seed: int, *, weight: float = 1.0, control: bool = False, p: int = P) -> JointTerm:
    delta = torch.randn(n, m, generator=torch.Generator().manual_seed(100 + seed))
    return JointTerm(units(n, p, seed), units(m, D, seed + 50), None if control else delta, weight)


def kronecker(terms: list[JointTerm], probe_ridge: float, prompt_ridge: float) -> Tensor:
    """The normal equations as one dense system."""
    p, d = terms[0].design.shape[1], terms[0].prompts.shape[1]
    system, right = torch.zeros(p * d, p * d, dtype=torch.float64), torch.zeros(p, d, dtype=torch.float64)
    for one in terms:
        design, prompts, w = one.design.double(), one.prompts.double(), one.weight / len(one.design)
        mu_f = probe_ridge * torch.linalg.svdvals(design).square().mean()
        mu_g = prompt_ridge * torch.linalg.svdvals(prompts).square().mean()
        probe_side = design.T @ design + mu_f * torch.eye(p)
        system += w * torch.kron(probe_side, prompts.T @ prompts + mu_g * torch.eye(d))
        if one.delta is not None:
            right += w * design.T @ one.delta.double() @ prompts
    return torch.linalg.solve(system, right.flatten()).reshape(p, d)


@pytest.mark.parametrize(
    "terms",
    [
        pytest.param([term(30, 4, 0), term(20, 3, 1)], id="independent prompts"),
        pytest.param([term(30, 6, 0), term(20, 8, 1, weight=0.3), term(25, 7, 2)], id="more prompts than dimensions"),
        pytest.param([term(30, 4, 0), term(25, 9, 1, control=True, weight=2.0)], id="a control"),
        pytest.param([term(3, 4, 0), term(2, 3, 1), term(2, 2, 2, control=True)], id="fewer probes than columns"),
        pytest.param([term(1, 1, 0), term(1, 2, 1)], id="single probes"),
    ],
)
@pytest.mark.parametrize("ridges", [(1e-2, 1e-6), (1e-1, 1e-2), (1e-4, 1e-4)])
def test_agrees_with_the_dense_system(terms: list[JointTerm], ridges: tuple[float, float]) -> None:
    found = joint_solve(terms, probe_ridge=ridges[0], prompt_ridge=ridges[1])
    assert relative(found.left @ found.right, kronecker(terms, *ridges)) < 1e-6
    assert found.residual <= 1e-8
    assert found.left.dtype == found.right.dtype == torch.float64
    assert found.left.shape[1] <= D


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ridges", [(1e-2, 1e-6), (1e-1, 1e-2)])
def test_one_term_is_the_closed_form(shape: tuple[int, int, int], ridges: tuple[float, float]) -> None:
    design, prompts, delta = grid(*shape)
    left, right = closed_form(design, prompts, delta, probe_ridge=ridges[0], prompt_ridge=ridges[1])
    found = joint_solve([JointTerm(design, prompts, delta, 0.7)], probe_ridge=ridges[0], prompt_ridge=ridges[1])
    assert relative(found.left @ found.right, left @ right) < 1e-8
    assert found.iterations <= 2


def test_the_same_term_twice_counts_as_one() -> None:
    once, twice = joint_solve([term(30, 4, 0)]), joint_solve([term(30, 4, 0), term(30, 4, 0)])
    assert relative(twice.left @ twice.right, once.left @ once.right) < 1e-8


def test_independent_prompts_take_few_steps_whatever_the_probes() -> None:
    terms = [
        JointTerm(
            units(40, 30, i), units(4, 64, 9 + i), torch.randn(40, 4, generator=torch.Generator().manual_seed(i))
        )
        for i in range(6)
    ]
    control = JointTerm(units(50, 30, 20), torch.cat([one.prompts for one in terms]))
    assert joint_solve(terms).iterations <= 15
    assert joint_solve([*terms, control]).iterations <= 15


def test_terms_do_not_disturb_each_other_as_their_sum_does() -> None:
    maps = torch.randn(3, P, 3, generator=torch.Generator().manual_seed(7))
    terms = [JointTerm(t.design, t.prompts, t.design @ maps[i]) for i in range(3) for t in [term(60, 3, i)]]
    found = joint_solve(terms, probe_ridge=1e-4)
    together = found.left @ found.right
    parts = [closed_form(t.design, t.prompts, t.delta, probe_ridge=1e-4) for t in terms if t.delta is not None]
    summed = sum(left @ right for left, right in parts)

    def error(x: Tensor) -> float:
        return sum(float((t.design.double() @ x @ t.prompts.double().T - t.delta).square().sum()) for t in terms)

    assert error(together) < 0.01 * error(summed)


def test_a_control_is_moved_less_the_more_it_weighs() -> None:
    moved = []
    for weight in (1e-3, 1.0, 1e3):
        control = term(40, 9, 1, control=True, weight=weight)
        found = joint_solve([term(30, 4, 0), control])
        moved.append(float((control.design.double() @ found.left @ found.right @ control.prompts.double().T).norm()))
    assert moved[0] > moved[1] > moved[2]
    assert moved[2] < 0.1 * moved[0]


def test_terms_that_share_a_design_share_its_gram() -> None:
    first, second = term(30, 4, 0), term(30, 3, 1)
    shared = [first, JointTerm(first.design, second.prompts, second.delta, 0.5)]
    apart = [first, JointTerm(first.design.clone(), second.prompts, second.delta, 0.5)]
    a, b = joint_solve(shared), joint_solve(apart)
    assert relative(a.left @ a.right, b.left @ b.right) < 1e-8


def test_is_linear_and_zero_for_zero() -> None:
    terms = [term(30, 6, 0), term(20, 8, 1)]
    none = joint_solve([JointTerm(t.design, t.prompts, torch.zeros_like(t.delta)) for t in terms])  # type: ignore[arg-type]
    assert float(none.left.abs().max()) == 0.0
    assert (none.iterations, none.residual) == (0, 0.0)
    parts = [
        joint_solve([JointTerm(t.design, t.prompts, t.delta if i == j else None) for j, t in enumerate(terms)])
        for i in range(2)
    ]
    whole = joint_solve(terms)
    assert relative(sum(p.left @ p.right for p in parts), whole.left @ whole.right) < 1e-6  # type: ignore[arg-type]


def test_says_when_it_did_not_get_there() -> None:
    terms = [term(30, 6, 0), term(20, 8, 1), term(25, 7, 2)]
    with pytest.warns(RuntimeWarning, match="stopped at a relative residual of .* after 3 steps"):
        found = joint_solve(terms, max_iterations=3)
    assert found.residual > 1e-8


def test_refuses() -> None:
    good = term(30, 4, 0)
    with pytest.raises(PlatonicError, match="at least one term with a delta"):
        joint_solve([])
    with pytest.raises(PlatonicError, match="at least one term with a delta"):
        joint_solve([term(30, 4, 0, control=True)])
    with pytest.raises(PlatonicError, match="Expected `design` of shape"):
        joint_solve([good, term(30, 4, 0, p=P + 1)])
    with pytest.raises(PlatonicError, match="Expected `delta` of shape"):
        joint_solve([JointTerm(good.design, good.prompts, torch.zeros(30, 5))])
    with pytest.raises(PlatonicError, match="Expected `weight` above 0"):
        joint_solve([JointTerm(good.design, good.prompts, good.delta, 0.0)])
    with pytest.raises(PlatonicError, match="Expected `probe_ridge` above 0"):
        joint_solve([good], probe_ridge=0.0)
    with pytest.raises(PlatonicError, match="too small for these designs"):
        joint_solve([JointTerm(torch.ones(30, P), good.prompts, good.delta)], probe_ridge=1e-18)
    with pytest.raises(PlatonicError, match="positive finite sum of squares"):
        joint_solve([JointTerm(torch.zeros(30, P), good.prompts, good.delta)])
