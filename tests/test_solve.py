from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor
from torch.nn.functional import normalize

from hf_platonic.errors import PlatonicError
from hf_platonic.solve import GridSolver, ProbeSums, RidgeInverse, closed_form

SHAPES = [(200, 10, 64), (50, 10, 96), (300, 80, 64), (40, 80, 64), (64, 64, 64), (1, 2, 8), (30, 1, 8)]


def grid(n: int, m: int, d: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    design = normalize(torch.randn(n, d, generator=generator), dim=-1)
    prompts = normalize(torch.randn(m, d, generator=generator), dim=-1)
    return design, prompts, 0.1 * torch.randn(n, m, generator=generator)


def svd_oracle(design: Tensor, prompts: Tensor, delta: Tensor, probe_ridge: float, prompt_ridge: float) -> Tensor:
    """The paper's route: thin SVDs of both sides with filters s / (s^2 + mu)."""
    uf, sf, vf = torch.linalg.svd(design.double(), full_matrices=False)
    ug, sg, vg = torch.linalg.svd(prompts.double().T, full_matrices=False)
    filter_f = sf / (sf**2 + probe_ridge * (sf**2).mean())
    filter_g = sg / (sg**2 + prompt_ridge * (sg**2).mean())
    return ((vf.T * filter_f) @ (uf.T @ delta.double() @ vg.T) @ (ug * filter_g).T).double()


def relative(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ridges", [(1e-2, 1e-6), (1e-1, 1e-2), (1e-5, 1e-6)])
def test_agrees_with_thin_svds(shape: tuple[int, int, int], ridges: tuple[float, float]) -> None:
    design, prompts, delta = grid(*shape)
    left, right = closed_form(design, prompts, delta, probe_ridge=ridges[0], prompt_ridge=ridges[1])
    assert relative(left @ right, svd_oracle(design, prompts, delta, *ridges)) < 1e-8
    assert left.shape[1] == min(shape[1], shape[2])
    assert left.dtype == right.dtype == torch.float64


def test_agrees_with_two_ridge_regressions() -> None:
    design, prompts, delta = grid(120, 7, 24)
    f, g, u = (t.double().numpy() for t in (design, prompts, delta))
    mu_f = 1e-2 * (np.linalg.svd(f, compute_uv=False) ** 2).mean()
    mu_g = 1e-3 * (np.linalg.svd(g, compute_uv=False) ** 2).mean()
    probe_side = Ridge(alpha=mu_f, fit_intercept=False, solver="cholesky").fit(f, u).coef_.T  # (d, m)
    expected = Ridge(alpha=mu_g, fit_intercept=False, solver="cholesky").fit(g, probe_side.T).coef_  # (d, d)
    left, right = closed_form(design, prompts, delta, probe_ridge=1e-2, prompt_ridge=1e-3)
    np.testing.assert_allclose((left @ right).numpy(), expected, rtol=1e-8, atol=1e-12)


def test_solves_the_stated_objective() -> None:
    design, prompts, delta = (t.double() for t in grid(40, 5, 12))
    left, right = closed_form(design, prompts, delta, probe_ridge=0.05, prompt_ridge=0.02)
    mu_f = 0.05 * torch.linalg.svdvals(design).square().mean()
    mu_g = 0.02 * torch.linalg.svdvals(prompts).square().mean()
    x = (left @ right).requires_grad_()
    objective = (
        (design @ x @ prompts.T - delta).square().sum()
        + mu_g * (design @ x).square().sum()
        + mu_f * (x @ prompts.T).square().sum()
        + mu_f * mu_g * x.square().sum()
    )
    (gradient,) = torch.autograd.grad(objective, x)
    assert float(gradient.abs().max()) < 1e-12


def test_recovers_a_planted_operator() -> None:
    design, prompts, _ = grid(500, 12, 16)
    planted = torch.randn(16, 12, generator=torch.Generator().manual_seed(1)).double() @ prompts.double()
    delta = design.double() @ planted @ prompts.double().T
    left, right = closed_form(design, prompts, delta, probe_ridge=1e-12, prompt_ridge=1e-12)
    assert relative(left @ right, planted) < 1e-9


def test_nearly_parallel_prompts_keep_their_digits_in_float32() -> None:
    design, prompts, delta = grid(200, 8, 32)
    prompts = normalize(prompts[:1] + 1e-3 * prompts, dim=-1)
    left, right = closed_form(design, prompts, delta)
    stored = left.float() @ right.float()
    assert relative(stored.double(), left @ right) < 1e-6
    torch.testing.assert_close(right @ right.T, torch.eye(8).double())


def test_primal_equals_dual() -> None:
    design, prompts, delta = grid(30, 6, 48)
    dual = GridSolver.of(design, prompts)
    sums = ProbeSums.zeros(48, 6)
    sums.update(design, [delta])
    primal = GridSolver.from_sums(sums, prompts)
    (a,), b = dual.solve([delta], design), primal.solve_cross(sums.cross)
    assert relative(a[0] @ a[1], b[0] @ b[1]) < 1e-9


@pytest.mark.parametrize("ridge", [1e-2, 1e-4, 1e-6, 1e-8])
@pytest.mark.parametrize("n", [5, 20])
def test_few_probes_on_several_processes_equal_the_dual_form(n: int, ridge: float) -> None:
    """Sums only add in the primal form, whose null space then has p - n dimensions: what rounding makes of that."""
    design, prompts, delta = grid(n, 7, 48)
    design = normalize(design + 1.0, dim=-1)  # one direction far above the others, as embeddings have
    parts = [ProbeSums.zeros(48, 7) for _ in range(2)]
    for part, rows in zip(parts, (slice(0, 3), slice(3, n)), strict=True):
        part.update(design[rows], [delta[rows]])
    sums = parts[0].merge(parts[1])
    left, right = GridSolver.from_sums(sums, prompts, probe_ridge=ridge).solve_cross(sums.cross)
    dual = GridSolver.of(design, prompts, probe_ridge=ridge)
    assert dual.design is not None
    ((expected, _),) = dual.solve([delta], design)
    assert relative(left @ right, expected @ right) < n * 2.2e-16 / ridge


def test_streamed_and_merged_sums_equal_the_whole() -> None:
    design, prompts, delta = grid(5000, 6, 32)
    whole, first, second = (ProbeSums.zeros(32, 6) for _ in range(3))
    whole.update(design, [delta])
    for start in range(0, 2600, 130):
        first.update(design[start : start + 130], [delta[start : start + 130]])
    second.update(design[2600:], [delta[2600:]])
    merged = first.merge(second)
    assert merged.n == 5000
    assert relative(merged.gram, whole.gram) < 1e-13
    assert relative(merged.cross, whole.cross) < 1e-13
    left, right = GridSolver.from_sums(merged, prompts).solve_cross(merged.cross)
    expected = closed_form(design, prompts, delta)
    assert relative(left @ right, expected[0] @ expected[1]) < 1e-10


def test_several_descriptors_side_by_side() -> None:
    design, _, delta = grid(100, 6, 32)
    sums = ProbeSums.zeros(32, 12)
    sums.update(design, [delta, 2 * delta])
    assert torch.equal(2 * sums.cross[:, :6], sums.cross[:, 6:])


def test_linear_in_the_descriptor() -> None:
    design, prompts, delta = grid(90, 6, 32)
    other = grid(90, 6, 32, seed=3)[2]
    solver = GridSolver.of(design, prompts)
    (a, _), (b, _), (both, _) = solver.solve([delta, other, 2 * delta - other], design)
    assert relative(2 * a - b, both) < 1e-6  # 2 * delta - other is rounded to float32


def test_permuting_probes_changes_nothing_and_permuting_prompts_permutes() -> None:
    design, prompts, delta = grid(90, 6, 32)
    order, columns = torch.randperm(90, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 1, 0, 5, 2, 4])
    expected = closed_form(design, prompts, delta)
    for got in (
        closed_form(design[order], prompts, delta[order]),
        closed_form(design, prompts[columns], delta[:, columns]),
    ):
        assert relative(got[0] @ got[1], expected[0] @ expected[1]) < 1e-9


def test_singular_gram_falls_back_with_a_warning() -> None:
    gram = torch.tensor([[1.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    with pytest.warns(RuntimeWarning, match="numerical rank 1 of 2 at ridge 1e-18"):
        inverse = RidgeInverse.of(gram, 1e-18, rank=2)
    solution = inverse.apply(torch.tensor([[2.0], [2.0]], dtype=torch.float64))
    torch.testing.assert_close(solution, torch.ones(2, 1, dtype=torch.float64))


@pytest.mark.parametrize("ridge", [0.0, -1.0, float("nan"), float("inf"), "x"])
def test_refuses_unusable_ridges(ridge: float) -> None:
    with pytest.raises(PlatonicError, match="Expected `ridge`"):
        closed_form(*grid(20, 3, 8), probe_ridge=ridge)


def test_refuses_shapes_that_disagree_and_empty_designs() -> None:
    design, prompts, delta = grid(20, 3, 8)
    with pytest.raises(PlatonicError, match=r"Expected `delta` of shape \(20, 3\), got \(19, 3\)"):
        closed_form(design, prompts, delta[1:])
    with pytest.raises(PlatonicError, match="positive finite mean squared singular value"):
        closed_form(torch.zeros(20, 8), prompts, delta)
    with pytest.raises(PlatonicError, match="Expected 4 descriptor columns"):
        ProbeSums.zeros(8, 4).update(design, [delta])
    with pytest.raises(PlatonicError, match="at least one probe"):
        GridSolver.from_sums(ProbeSums.zeros(8, 3), prompts)
    with pytest.raises(PlatonicError, match="primal form"):
        GridSolver.of(design[:4], prompts).solve_cross(torch.zeros(8, 3))
