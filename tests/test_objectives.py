from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import tiny_images
from torch import Tensor

from hf_platonic.affinities import row_centred, spread
from hf_platonic.descriptor import TaskDescriptor
from hf_platonic.errors import PlatonicError
from hf_platonic.objectives import calibrated, wanted_change
from hf_platonic.probes import ProbeSet
from hf_platonic.recipes import Choices, automatic, choices_of
from hf_platonic.sources import Source

N, M = 6, 4
PROBES = ProbeSet(tiny_images(N), prompts=["a", "b", "c", "d"])


def matrix(seed: int) -> Tensor:
    return 0.1 * torch.randn(N, M, generator=torch.Generator().manual_seed(seed)) + 0.2


def made(seed: int, *, base: bool = True, factor: float = 1.0, offset: float = 0.0) -> TaskDescriptor:
    """As a family would extract it that holds its cosines `factor` times as far apart, `offset` higher."""
    before = factor * matrix(50) + offset
    return TaskDescriptor(
        factor * matrix(seed), PROBES.grid, spread=spread(before), base_affinity=before if base else None
    )


def test_as_it_is_is_the_delta_itself() -> None:
    found = made(0)
    assert wanted_change([found], matrix(9)) is found.delta
    torch.testing.assert_close(wanted_change([found, made(1)], matrix(9)), matrix(0) + matrix(1))


def test_calibration_undoes_a_familys_scale() -> None:
    target = matrix(9)
    plain, tripled = (wanted_change([made(0, factor=f)], target, calibration="spread") for f in (1.0, 3.0))
    torch.testing.assert_close(tripled, plain)
    torch.testing.assert_close(plain, matrix(0) * spread(target) / spread(matrix(50)))
    ready = calibrated(made(0), 0.5)
    assert ready.spread == 0.5
    assert ready.base_affinity is not None
    assert spread(ready.base_affinity) == pytest.approx(0.5, rel=1e-6)


def test_the_endpoint_is_what_the_fine_tune_ended_at_in_the_targets_scale() -> None:
    target, source = matrix(9), made(0)
    for seen in (source, made(0, factor=2.0, offset=0.3)):
        change = wanted_change([seen], target, objective="endpoint", calibration="spread")
        ratio = spread(target) / spread(matrix(50))
        torch.testing.assert_close(row_centred(target) + change, ratio * row_centred(matrix(50) + matrix(0)))
    raw = wanted_change([source], target, objective="endpoint")
    torch.testing.assert_close(raw, row_centred(matrix(50) + matrix(0) - target))
    negated = wanted_change([-source], target, objective="endpoint")
    torch.testing.assert_close(negated, row_centred(matrix(50) - matrix(0) - target))


def test_the_own_endpoint_is_the_own_change() -> None:
    own = made(0)
    assert own.base_affinity is not None
    change = wanted_change([own], own.base_affinity, objective="endpoint", calibration="spread")
    torch.testing.assert_close(change, row_centred(own.delta), rtol=1e-4, atol=1e-6)


def test_endpoints_of_one_base_add_their_changes() -> None:
    change = wanted_change([made(0), made(1)], matrix(9), objective="endpoint")
    torch.testing.assert_close(change, row_centred(matrix(50) + matrix(0) + matrix(1) - matrix(9)))


def test_refuses_what_a_descriptor_cannot_give() -> None:
    with pytest.raises(PlatonicError, match="store_base=True"):
        wanted_change([made(0, base=False)], matrix(9), objective="endpoint")
    with pytest.raises(
        PlatonicError, match="one source of a grid for the endpoint objective, got 2 .* TaskDescriptor.consensus"
    ):
        wanted_change([made(0), made(1, offset=0.3, factor=2.0)], matrix(9), objective="endpoint")
    with pytest.raises(PlatonicError, match="Expected spreads above 0"):
        calibrated(replace(made(0), spread=0.0), 0.1)


def test_options_take_the_place_of_the_recipes() -> None:
    terms = [made(0)]
    assert choices_of("paper", terms) == Choices()
    assert choices_of("paper", terms).as_in_the_paper
    assert choices_of("paper", terms, probe_ridge=0.1).streams
    assert not choices_of("paper", terms, probe_ridge="gcv").streams
    assert choices_of("paper", terms, objective="endpoint").calibration == "spread"
    assert choices_of("paper", terms, objective="endpoint", calibration="none").calibration == "none"
    assert choices_of("paper", terms, preserve="default").combine == "joint"
    kept = choices_of("paper", terms, preserve=PROBES, preserve_weight=2)
    assert kept.preserve == (PROBES,)
    assert not kept.as_in_the_paper
    assert kept.to_dict()["preserve"] == {"grids": [PROBES.grid.fingerprint], "weight": 2.0}
    assert choices_of("paper", terms, preserve="default").to_dict()["preserve"]["grids"] == "default"


def on(prompts: list[str], seed: int = 0) -> TaskDescriptor:
    """A descriptor with base affinity and a source, on probes with these prompts."""
    grid = PROBES.with_prompts(prompts=prompts).grid
    before = matrix(50)[:, : len(prompts)]
    sources = (Source({"name": "base"}, {"name": "tuned"}),)
    return TaskDescriptor(matrix(seed)[:, : len(prompts)], grid, sources, spread(before), before)


def test_automatic_goes_by_what_descriptors_carry() -> None:
    first, other = on(["a", "b"]), on(["c", "d"], seed=1)
    single = automatic([first])
    assert single == Choices("endpoint", "spread", "sum", (), probe_ridge="gcv", site="features")
    both = automatic([first, other])
    assert (both.objective, both.combine, both.preserve) == ("endpoint", "joint", "default")
    same_prompts = replace(first, grid=ProbeSet(tiny_images(N, seed=3), prompts=["a", "b"]).grid)
    assert (automatic([first, same_prompts]).combine, automatic([first, same_prompts]).preserve) == ("joint", ())
    assert automatic([-first]) == Choices("change", "spread", "sum", ())
    assert automatic([-first], preserving=True) == single
    kept = choices_of("auto", [-first], preserve=PROBES)
    assert kept == replace(single, combine="joint", preserve=(PROBES,))
    assert choices_of("auto", [-first], preserve=[]) == automatic([-first])
    assert automatic([first, -other]).objective == "change"
    assert automatic([first, on(["a", "b"], seed=2)]).objective == "change"  # endpoints of one grid don't add
    assert automatic([replace(first, base_affinity=None)]) == replace(single, objective="change")
    assert automatic([replace(first, spread=0.0)]) == replace(single, objective="change", calibration="none")


def test_options_take_the_place_of_the_automatic_ones() -> None:
    terms = [on(["a", "b"]), on(["c", "d"], seed=1)]
    assert choices_of("auto", terms) == automatic(terms)
    apart = choices_of("auto", terms, combine="sum", probe_ridge=0.5, objective="change", calibration="none")
    assert apart == Choices(probe_ridge=0.5, site="features")
    assert not apart.as_in_the_paper
    kept = choices_of("auto", terms[:1], preserve=PROBES)
    assert (kept.combine, kept.preserve) == ("joint", (PROBES,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "mine"}, r"Expected `recipe` out of \('paper', 'auto'\)"),
        ({"objective": "end"}, r"Expected `objective` out of \('change', 'endpoint'\), got 'end'"),
        ({"calibration": True}, "Expected `calibration` out of"),
        ({"combine": "both"}, "Expected `combine` out of"),
        ({"combine": "sum", "preserve": PROBES}, 'Expected combine="joint" with `preserve`'),
        ({"preserve": "all"}, 'Expected `preserve` to be a ProbeSet, several, or "default"'),
        ({"preserve": [1]}, "Expected `preserve` to be a ProbeSet"),
        ({"preserve_weight": 0}, "Expected `preserve_weight` above 0"),
    ],
)
def test_refuses_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlatonicError, match=message):
        choices_of(**{"recipe": "paper", "descriptors": [made(0)], **options})
