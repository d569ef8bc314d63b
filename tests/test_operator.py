from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, normalize

from hf_platonic.errors import PlatonicError
from hf_platonic.operator import Operator


def operator(p: int, r: int, d: int, site: str = "output", seed: int = 0) -> Operator:
    generator = torch.Generator().manual_seed(seed)
    left, right = torch.randn(p, r, generator=generator), torch.randn(r, d, generator=generator)
    return Operator(left.double() / p, right.double(), site)  # type: ignore[arg-type]


def draws(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


@pytest.mark.parametrize("bias", [True, False])
def test_output_fold_equals_apply(bias: bool) -> None:
    op = operator(16, 3, 16)
    weight, offset, inputs = draws(16, 9), draws(16, seed=6) if bias else None, draws(20, 9, seed=7)
    raw = linear(inputs, weight, offset)
    unit = normalize(raw, dim=-1)
    folded = normalize(linear(inputs, *op.fold(weight, offset, strength=0.7)), dim=-1)
    torch.testing.assert_close(folded, op.apply(unit, unit, strength=0.7), rtol=0, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_input_fold_equals_apply_behind_a_residual(bias: bool) -> None:
    op = operator(9 + bias, 3, 16, "input")
    weight, offset = draws(16, 9), draws(16, seed=6) if bias else None
    inputs, residual = draws(20, 9, seed=7), draws(20, 16, seed=8)
    raw = residual + linear(inputs, weight, offset)
    size = raw.norm(dim=1, keepdim=True)
    design = torch.cat([inputs, torch.ones(20, 1).double()], dim=1) / size if bias else inputs / size
    folded = normalize(residual + linear(inputs, *op.fold(weight, offset, strength=-1.5)), dim=-1)
    torch.testing.assert_close(folded, op.apply(raw / size, design, strength=-1.5), rtol=0, atol=1e-12)


def test_arithmetic_is_that_of_matrices() -> None:
    a, b = operator(16, 3, 16), operator(16, 4, 16, seed=1)
    torch.testing.assert_close((2 * a - b).dense(), 2 * a.dense() - b.dense())
    torch.testing.assert_close(((a + b) - b).dense(), a.dense())
    assert (a + b).rank == 7
    assert (a + a * 0.5).rank == 3  # operators of one grid share their right factor


def test_compressing_changes_nothing() -> None:
    total = operator(6, 5, 6) + operator(6, 4, 6, seed=1)
    assert total.compressed().rank == 6
    torch.testing.assert_close(total.compressed().dense(), total.dense())
    assert operator(6, 2, 6).compressed().rank == 2


def test_folding_keeps_the_dtype() -> None:
    weight, bias = operator(8, 2, 8).fold(torch.ones(8, 3, dtype=torch.bfloat16), torch.ones(8, dtype=torch.bfloat16))
    assert bias is not None
    assert weight.dtype == bias.dtype == torch.bfloat16


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(PlatonicError, match="one site, got output .* and input"):
        operator(16, 3, 16) + operator(16, 3, 16, "input")
    with pytest.raises(PlatonicError, match="square operator"):
        operator(9, 3, 16)
    with pytest.raises(PlatonicError, match=r"Expected `weight` of shape \(16, 'any'\), got \(15, 9\)"):
        operator(16, 3, 16).fold(draws(15, 9), None)
    with pytest.raises(PlatonicError, match="`strength` to be finite, got nan"):
        operator(16, 3, 16).apply(draws(2, 16), draws(2, 16), strength=float("nan"))
    with pytest.raises(PlatonicError, match="finite"):
        operator(16, 3, 16) * float("inf")
    with pytest.raises(TypeError):
        operator(16, 3, 16) + 1.0  # type: ignore[operator]
