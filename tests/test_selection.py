"""Generalised cross-validation against hat matrices and scikit-learn."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import RidgeCV

from hf_platonic.errors import PlatonicError
from hf_platonic.selection import RIDGES, GridSpectrum, folds
from hf_platonic.solve import GridSolver, closed_form


def noisy(n: int, p: int, m: int, *, noise: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    scales = torch.logspace(0, -2, p, dtype=torch.float64)
    design = torch.randn(n, p, generator=g, dtype=torch.float64) * scales
    prompts = torch.linalg.qr(torch.randn(max(m, 8), m, generator=g, dtype=torch.float64))[0].T
    truth = torch.randn(p, m, generator=g, dtype=torch.float64)
    delta = design @ truth + noise * torch.randn(n, m, generator=g, dtype=torch.float64)
    return design, prompts, delta


@pytest.mark.parametrize(("n", "p"), [(60, 12), (12, 30)])
def test_scores_are_those_of_the_hat_matrices(n: int, p: int) -> None:
    design, prompts, delta = noisy(n, p, 5, noise=0.3)
    found = GridSpectrum.of(design, prompts).scores(delta, [1e-3, 1.0], prompt_ridge=0.2)
    for ridge, score in zip([1e-3, 1.0], found.tolist(), strict=True):
        left, right = closed_form(design, prompts, delta, probe_ridge=ridge, prompt_ridge=0.2)
        fitted = design @ left @ right @ prompts.T
        solver = GridSolver.of(design, prompts, probe_ridge=ridge, prompt_ridge=0.2)
        hat = torch.stack(
            [
                design @ left @ right @ prompts.T
                for unit in torch.eye(n * 5, dtype=torch.float64).reshape(n * 5, n, 5)
                for left, right in solver.solve([unit], design)
            ]
        ).reshape(n * 5, n * 5)
        left_over = 1 - float(hat.trace()) / (n * 5)
        assert score == pytest.approx(float((delta - fitted).square().mean()) / left_over**2, rel=1e-9)


def test_chooses_as_scikit_learn_does() -> None:
    design, prompts, delta = noisy(80, 20, 3, noise=0.5)
    scale = float(design.square().sum()) / 20
    alphas = [ridge * scale for ridge in RIDGES]
    # Its efficient leave-one-out errors are close to, not the same as, the generalised ones.
    theirs = RidgeCV(alphas=alphas, fit_intercept=False).fit(design.numpy(), (delta @ torch.eye(3).double()).numpy())
    ours = GridSpectrum.of(design, prompts).best(delta, prompt_ridge=1e-12)
    assert abs(math.log10(ours * scale) - math.log10(float(np.asarray(theirs.alpha_)))) <= 0.51


def test_more_noise_asks_for_more_ridge() -> None:
    cases = [noisy(100, 30, 4, noise=noise) for noise in (1e-3, 0.3, 10.0)]
    chosen = [GridSpectrum.of(design, prompts).best(delta) for design, prompts, delta in cases]
    assert chosen == sorted(chosen)
    assert chosen[0] < chosen[-1]


def test_the_chosen_ridge_predicts_new_probes_nearly_as_well_as_the_best() -> None:
    excess = []
    for seed in range(5):
        design, prompts, delta = noisy(400, 40, 4, noise=0.4, seed=seed)
        errors = {}
        for ridge in RIDGES:
            left, right = closed_form(design[:80], prompts, delta[:80], probe_ridge=ridge)
            errors[ridge] = float((design[80:] @ left @ right @ prompts.T - delta[80:]).square().mean())
        excess.append(errors[GridSpectrum.of(design[:80], prompts).best(delta[:80])] / min(errors.values()))
    assert sum(excess) / 5 <= 1.05


def test_refuses_what_cannot_be_scored() -> None:
    design, prompts, delta = noisy(10, 4, 3, noise=0.1)
    with pytest.raises(PlatonicError, match="Expected `ridge` above 0"):
        GridSpectrum.of(design, prompts).scores(delta, [0.0])
    with pytest.raises(PlatonicError, match="at least one ridge"):
        GridSpectrum.of(design, prompts).best(delta, ridges=[])


def test_folds_hold_every_probe_out_once() -> None:
    assert sorted(torch.cat(folds(10, 4)).tolist()) == list(range(10))
    assert len(folds(3, 4)) == 3
