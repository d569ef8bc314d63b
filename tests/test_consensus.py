from __future__ import annotations

import math

import pytest
import torch
from tiny import tiny_images
from torch import Tensor

from hf_platonic.affinities import row_centred, spread
from hf_platonic.consensus import Consensus, agreement_weights
from hf_platonic.descriptor import TaskDescriptor
from hf_platonic.encoders.identity import EncoderIdentity
from hf_platonic.errors import GridMismatchError, PlatonicError
from hf_platonic.objectives import wanted_change
from hf_platonic.probes import ProbeSet
from hf_platonic.sources import Source

N, M = 40, 5
PROBES = ProbeSet(tiny_images(N), prompts=list("abcde"))


def noise(seed: int) -> Tensor:
    return torch.randn(N, M, generator=torch.Generator().manual_seed(seed))


def source(seed: int, *, own: float = 0.5, factor: float = 1.0, base: bool = True) -> TaskDescriptor:
    """The shared change with a part of its own, from a family of its own scale."""
    before = factor * (noise(1000) + own * noise(seed + 100))
    who = EncoderIdentity(f"model-{seed}", None, None, None, "clip", "", "")
    return TaskDescriptor(
        factor * (noise(2000) + own * noise(seed)),
        PROBES.grid,
        sources=(Source(who, who),),
        spread=spread(before),
        base_affinity=before if base else None,
        name="task",
    )


def corrupted(seed: int, size: float) -> TaskDescriptor:
    return TaskDescriptor(size * noise(seed), PROBES.grid, spread=1.0, base_affinity=noise(seed + 1))


def test_of_one_is_itself_and_of_equals_is_theirs() -> None:
    one = source(0)
    found = Consensus.of([one])
    torch.testing.assert_close(found.descriptor.delta, one.delta)
    assert found.descriptor.spread == pytest.approx(one.spread)
    assert (found.weights, found.agreement) == ((1.0,), (1.0,))
    assert found.shared == pytest.approx(1.0)
    twice = Consensus.of([one, one, 2 * one])  # one says it twice as loudly
    assert twice.residual == pytest.approx(1 - (4 / 3) ** 2 / 2, abs=0.2)
    assert all(a == pytest.approx(1.0) for a in twice.agreement)


def test_brings_families_of_any_scale_to_one() -> None:
    alike = Consensus.of([source(0), source(1), source(2)])
    scaled = Consensus.of([source(0), source(1, factor=4.0), source(2, factor=0.25)])
    torch.testing.assert_close(scaled.descriptor.delta, alike.descriptor.delta)
    assert scaled.descriptor.spread == pytest.approx(alike.descriptor.spread)
    assert alike.descriptor.spread == pytest.approx(math.prod(source(i).spread for i in range(3)) ** (1 / 3))
    assert [s.base.repo for s in scaled.descriptor.sources] == ["model-0", "model-1", "model-2"]
    assert [s.coefficient for s in scaled.descriptor.sources] == pytest.approx(scaled.weights)
    assert scaled.descriptor.name == "task"


def test_what_is_peculiar_cancels() -> None:
    sources = [source(i) for i in range(6)]
    found = Consensus.of(sources)
    shared = row_centred(noise(2000))

    def cosine(change: Tensor) -> float:
        return float(torch.nn.functional.cosine_similarity(row_centred(change).flatten(), shared.flatten(), dim=0))

    assert cosine(found.descriptor.delta) > max(cosine(s.delta) for s in sources)
    # A shared part of 1 and own parts of .25 a source: what is left of them in the mean of six is a sixth.
    assert found.shared == pytest.approx((1 + 0.25 / 6) / 1.25, abs=0.05)
    assert found.shared + found.residual == pytest.approx(1.0)
    assert sum(found.weights) == pytest.approx(1.0)


@pytest.mark.parametrize("size", [1.0, 100.0])
def test_one_bad_source_is_left_out(size: float) -> None:
    good = [source(0), source(1), source(2)]
    alone = Consensus.of(good)
    found = Consensus.of([*good, corrupted(7, size)])
    assert found.weights[3] < 0.05
    assert found.agreement[3] < 0.2
    assert found.descriptor.cosine(alone.descriptor) > 0.97
    equal = Consensus.of([*good, corrupted(7, size)], weighting="equal")
    assert equal.descriptor.cosine(alone.descriptor) < found.descriptor.cosine(alone.descriptor)


def test_a_source_that_contradicts_gets_nothing() -> None:
    found = Consensus.of([source(0), source(1), -source(2)])
    assert found.weights[2] == 0.0
    assert found.agreement[2] < -0.5
    assert "model-2" not in [s.base.repo for s in found.descriptor.sources]


def test_two_against_one_of_the_same_size() -> None:
    weights, agreement = agreement_weights([noise(0), 0.9 * noise(0), -noise(0)])
    assert weights == pytest.approx([0.5, 0.5, 0.0])
    assert agreement == pytest.approx([1.0, 1.0, -1.0])


def test_where_nobody_agrees_all_count_alike() -> None:
    weights, agreement = agreement_weights([noise(0), -noise(0)])
    assert weights == [0.5, 0.5]
    assert agreement == pytest.approx([-1.0, -1.0])
    assert agreement_weights([torch.zeros(2, 2), torch.zeros(2, 2)])[0] == [0.5, 0.5]


def test_its_endpoint_is_the_mean_of_the_calibrated_endpoints() -> None:
    sources = [source(0), source(1, factor=3.0), source(2, factor=0.5)]
    found = Consensus.of(sources)
    target = 0.3 * noise(5)
    options = {"objective": "endpoint", "calibration": "spread"}
    each = [wanted_change([s], target, **options) for s in sources]  # type: ignore[arg-type]
    mean = sum(w * change for w, change in zip(found.weights, each, strict=True))
    torch.testing.assert_close(
        wanted_change([found.descriptor], target, **options),  # type: ignore[arg-type]
        mean,
        rtol=1e-4,
        atol=1e-5,
    )
    assert TaskDescriptor.consensus([source(0), source(1, base=False)]).base_affinity is None


def test_refuses() -> None:
    with pytest.raises(PlatonicError, match="a list of at least one descriptor, got \\[\\]"):
        Consensus.of([])
    with pytest.raises(PlatonicError, match="Expected `weighting` out of"):
        Consensus.of([source(0)], weighting="median")  # type: ignore[arg-type]
    with pytest.raises(PlatonicError, match="Expected spreads above 0"):
        Consensus.of([source(0), TaskDescriptor(noise(1), PROBES.grid)])
    other = ProbeSet(tiny_images(N), prompts=list("abcdf"))
    with pytest.raises(GridMismatchError, match="the probes agree, the prompts don't"):
        Consensus.of([source(0), TaskDescriptor(noise(1), other.grid, spread=1.0)])
