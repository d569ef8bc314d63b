from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny_encoder, tiny_images
from torch import Tensor

import hf_platonic
from hf_platonic.coresets import Criterion, coreset, select_probes
from hf_platonic.encoding import encode_probes
from hf_platonic.errors import PlatonicError, ProbeError
from hf_platonic.probes import ProbeSet

CRITERIA: tuple[Criterion, ...] = ("variance", "logdet")
ROWS = torch.randn(30, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def worth(rows: Tensor, chosen: list[int], criterion: Criterion, ridge: float) -> float:
    """What is maximised, from its definition."""
    scale = ridge * rows.square().sum(dim=1).mean()
    matrix = scale * torch.eye(rows.shape[1], dtype=rows.dtype) + rows[chosen].T @ rows[chosen]
    if criterion == "logdet":
        kernel = rows[chosen] @ rows[chosen].T / scale
        return float(torch.logdet(torch.eye(len(chosen), dtype=rows.dtype) + kernel))
    return -float((rows @ torch.linalg.inv(matrix) * rows).sum())


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("ridge", [1e-4, 1e-2, 1.0])
def test_each_step_is_the_best_one(criterion: Criterion, ridge: float) -> None:
    expected: list[int] = []
    for _ in range(10):  # more than there are dimensions
        left = [i for i in range(len(ROWS)) if i not in expected]
        expected.append(max(left, key=lambda i: worth(ROWS, [*expected, i], criterion, ridge)))
    assert coreset(ROWS, 10, criterion=criterion, ridge=ridge) == expected
    assert coreset(ROWS, 3, criterion=criterion, ridge=ridge) == expected[:3]


@pytest.mark.parametrize("criterion", CRITERIA)
def test_neither_scale_nor_rotation_nor_order_matters(criterion: Criterion) -> None:
    chosen = coreset(ROWS, 8, criterion=criterion)
    rotation = torch.linalg.qr(ROWS[:4]).Q
    assert coreset(7.0 * ROWS @ rotation, 8, criterion=criterion) == chosen
    order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(1)).tolist()
    assert [order[i] for i in coreset(ROWS[order], 8, criterion=criterion)] == chosen


@pytest.mark.parametrize("criterion", CRITERIA)
def test_repeated_rows_wait_until_all_others_are_taken(criterion: Criterion) -> None:
    rows = ROWS[[0, 1, 0, 2, 1, 3, 0]]
    chosen = coreset(rows, 99, criterion=criterion)
    assert sorted(chosen[:4]) == [0, 1, 3, 5]
    assert sorted(chosen) == list(range(7))


def test_the_first_of_equals_is_taken() -> None:
    nearly = torch.eye(3) * torch.tensor([1.0, 1.0 + 1e-7, 1.0 - 1e-7])
    assert coreset(nearly, 3, criterion="logdet") == [0, 1, 2]


def test_variance_prefers_rows_that_stand_for_many() -> None:
    crowd = torch.tensor([[1.0, 0.0, 0.01 * i] for i in range(20)])
    rows = torch.cat([torch.tensor([[0.0, 1.5, 0.0]]), crowd])
    assert coreset(rows, 1, criterion="logdet") == [0]
    assert coreset(rows, 1, criterion="variance") != [0]


@pytest.mark.parametrize(
    ("rows", "k", "options", "error", "message"),
    [
        (ROWS, 0, {}, ProbeError, "`k` of at least 1, got 30 probes and k = 0"),
        (ROWS[:0], 1, {}, ProbeError, "got 0 probes"),
        (torch.zeros(3, 2), 1, {}, ProbeError, "rows that aren't all zero"),
        (torch.full((3, 2), float("nan")), 1, {}, ProbeError, "row"),
        (ROWS[0], 1, {}, PlatonicError, "`rows` of shape"),
        (ROWS, 1, {"ridge": 0.0}, PlatonicError, "`ridge` above 0"),
        (ROWS, 1, {"criterion": "best"}, PlatonicError, "`criterion` out of .* got 'best'"),
    ],
)
def test_refuses(rows: Tensor, k: int, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        coreset(rows, k, **options)


def test_probes_are_chosen_by_an_encoders_embeddings() -> None:
    encoder = tiny_encoder("clip")
    probes = ProbeSet(tiny_images(9), prompts=["a cat", "a dog"])
    found = select_probes(encoder, probes, 4, criterion="logdet", batch_size=4, progress=False)
    expected = coreset(encode_probes(encoder, probes, batch_size=4, progress=False).unit, 4, criterion="logdet")
    assert found.content_hashes == tuple(probes.content_hashes[i] for i in expected)
    assert found.prompts == probes.prompts
    assert hf_platonic.select_probes is select_probes
    with pytest.raises(ProbeError, match="k = -1"):
        select_probes(encoder, probes, -1)
