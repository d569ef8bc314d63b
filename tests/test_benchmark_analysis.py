"""Bootstrap, measures of likeness, sweeps and the memory of features, against oracles and constructions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from test_extraction import PROMPTS
from tiny import tiny_encoder, tiny_images
from torch.nn.functional import normalize

from hf_platonic.benchmark.analysis import linear_cka, mutual_neighbours, rank_correlation, shared_share
from hf_platonic.benchmark.baselines import add_weights, random_like
from hf_platonic.benchmark.bootstrap import Bootstrap
from hf_platonic.benchmark.store import pack, unpack
from hf_platonic.benchmark.sweeps import truncated
from hf_platonic.descriptor import TaskDescriptor
from hf_platonic.encoders.encoder import ProbeFeatures
from hf_platonic.encoding import encode_columns, encode_probes
from hf_platonic.errors import PlatonicError
from hf_platonic.extraction import extract
from hf_platonic.operator import Operator
from hf_platonic.probes import ProbeSet
from hf_platonic.solutions import solve_operators
from hf_platonic.views import FeatureMemory, RememberingEncoder, View


def rows(n: int, d: int, seed: int = 0) -> torch.Tensor:
    return normalize(torch.randn(n, d, generator=torch.Generator().manual_seed(seed)), dim=1)


def descriptor(seed: int = 1) -> TaskDescriptor:
    probes = ProbeSet(tiny_images(8), class_names=PROMPTS)
    return extract(tiny_encoder("clip", seed=0), tiny_encoder("clip", seed=seed), probes, name="task")


def test_neighbours_by_a_loop_and_by_chance() -> None:
    a, b = rows(40, 6), rows(40, 9, seed=1)
    expected = []
    for i in range(40):
        near = [set((x @ x[i] - 2 * (torch.arange(40) == i)).topk(5).indices.tolist()) for x in (a, b)]
        expected.append(len(near[0] & near[1]) / 5)
    assert mutual_neighbours(a, b, k=5) == pytest.approx(np.mean(expected))
    turn = torch.linalg.qr(rows(6, 6, seed=2))[0]
    assert mutual_neighbours(a, a @ turn, k=5) == 1.0
    assert mutual_neighbours(a, b, k=39) == 1.0
    with pytest.raises(PlatonicError, match="Expected `k` from 1 to 39 for 40 inputs, got 40"):
        mutual_neighbours(a, b, k=40)


def test_cka_by_its_gram_form_and_its_invariances() -> None:
    a, b = rows(30, 5).double(), rows(30, 8, seed=1).double()
    centre = torch.eye(30, dtype=torch.float64) - 1 / 30
    k, m = centre @ (a @ a.T) @ centre, centre @ (b @ b.T) @ centre
    expected = float((k * m).sum() / (k.norm() * m.norm()))
    assert linear_cka(a, b) == pytest.approx(expected)
    turn = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))[0]
    assert linear_cka(a, 3 * a @ turn + 1) == pytest.approx(1.0)
    assert linear_cka(a, torch.ones(30, 2)) == 0.0


def test_rank_correlation_is_spearmans() -> None:
    x, y = [1.0, 2.0, 2.0, 5.0, 3.0, 0.0], [2.0, 1.0, 4.0, 9.0, 4.0, 4.0]
    assert rank_correlation(x, y) == pytest.approx(spearmanr(x, y).statistic)
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None
    assert rank_correlation([1, 2], [1, 2]) is None


def test_shared_shares_of_known_mixtures() -> None:
    base = descriptor()
    same = [base, 2 * base, 0.5 * base]
    assert shared_share(same) == pytest.approx([1.0] * 3, abs=1e-6)
    noise = torch.randn(base.delta.shape, generator=torch.Generator().manual_seed(0))
    noise -= base.delta * float((noise * base.delta).sum() / base.delta.square().sum())
    odd = TaskDescriptor(noise, base.grid)
    assert shared_share([base, base, odd])[2] == pytest.approx(0.0, abs=1e-6)


def test_bootstrap_intervals_cover_what_they_should() -> None:
    """The interval of one task's accuracy is the binomial one; of many tasks it's theirs."""
    rng = np.random.default_rng(0)
    correct = torch.from_numpy(rng.random(400) < 0.6)
    boot = Bootstrap({"a": 400}, ["a"], replicates=2000)
    found = boot.estimate(boot.accuracy("a", correct))
    assert found is not None
    share = float(correct.double().mean())
    assert found["value"] == pytest.approx(share, abs=1e-6)
    half = 1.96 * (share * (1 - share) / 400) ** 0.5
    assert found["low"] == pytest.approx(share - half, abs=0.01)
    assert found["high"] == pytest.approx(share + half, abs=0.01)

    names = [f"t{i}" for i in range(50)]
    boot = Bootstrap(dict.fromkeys(names, 100), names, replicates=2000)
    levels = rng.random(50)
    values = {n: boot.accuracy(n, torch.from_numpy(rng.random(100) < p)) for n, p in zip(names, levels, strict=True)}
    whole = boot.estimate(boot.over_tasks(values))
    assert whole is not None
    spread = 1.96 * float(torch.stack([v[0] for v in values.values()]).std()) / 50**0.5
    # Inputs drawn anew within tasks add a little to the spread between them.
    assert 0.9 * spread < (whole["high"] - whole["low"]) / 2 < 1.25 * spread
    part = boot.over_tasks({name: values[name] for name in names[:2]})
    assert float(part[0]) == pytest.approx((float(values["t0"][0]) + float(values["t1"][0])) / 2)
    with pytest.raises(PlatonicError, match="at least one task"):
        boot.over_tasks({})
    assert boot.estimate(torch.full((3,), torch.nan)) is None


def test_booleans_survive_packing() -> None:
    flags = torch.arange(21) % 3 == 0
    assert torch.equal(unpack(pack(flags), 21), flags)


def test_truncation_is_the_best_of_its_rank_and_exact_at_the_end() -> None:
    g = torch.Generator().manual_seed(0)
    operator = Operator(torch.randn(7, 4, generator=g), torch.randn(4, 6, generator=g), "input")
    u, s, vh = torch.linalg.svd(operator.dense(), full_matrices=False)
    for rank in (1, 2, 4):
        found = truncated(operator, rank)
        assert found.rank == rank
        torch.testing.assert_close(found.dense(), (u[:, :rank] * s[:rank]) @ vh[:rank], rtol=0, atol=1e-5)


def test_a_random_descriptor_has_the_norm_and_nothing_else() -> None:
    own = descriptor()
    drawn = random_like(own, seed=3)
    assert drawn.norm() == pytest.approx(own.norm())
    assert abs(drawn.cosine(own)) < 0.5
    assert torch.equal(drawn.delta, random_like(own, seed=3).delta)
    assert not torch.equal(drawn.delta, random_like(own, seed=4).delta)


def test_weights_are_added_where_they_fit_and_only_there() -> None:
    one, other = tiny_encoder("clip", seed=0), tiny_encoder("clip", seed=1)
    before = {name: value.clone() for name, value in one.model.state_dict().items()}
    delta = {
        name: value - before[name] for name, value in other.model.state_dict().items() if value.is_floating_point()
    }
    assert add_weights(one, delta)
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(value, other.model.state_dict()[name])
    assert not add_weights(tiny_encoder("siglip", seed=0), delta)
    assert not add_weights(one, {})


def remembering(family: str, *, seed: int = 0) -> RememberingEncoder:
    plain = tiny_encoder(family, seed=seed)
    encoder = RememberingEncoder(plain.model, plain.processor)
    encoder.keep_features(FeatureMemory())
    return encoder


@pytest.mark.parametrize("site", ["output", "input"])
def test_what_is_recalled_is_what_was_computed(site: str, tmp_path: Path) -> None:
    probes = ProbeSet(tiny_images(7), class_names=PROMPTS)
    encoder = remembering("clip")
    place = encoder.at(site=site)  # type: ignore[arg-type]
    plain = encode_probes(tiny_encoder("clip", seed=0).at(site=site), probes, batch_size=3)  # type: ignore[arg-type]
    calls: list[int] = []
    encoder.model.vision_model.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    first = encode_probes(place, probes, batch_size=3)
    assert len(calls) == 3
    for batch_size in (3, 7):
        again = encode_probes(place, probes, batch_size=batch_size)
        for found in (first, again):
            assert torch.equal(found.unit, plain.unit)
            assert torch.equal(found.design, plain.design)
    assert len(calls) == 3

    assert encoder.features is not None
    encoder.features.save(tmp_path / "features.safetensors")
    fresh = remembering("clip")
    fresh.keep_features(FeatureMemory.load(tmp_path / "features.safetensors"))
    fresh.model.vision_model.register_forward_hook(lambda *_: calls.append(1))  # type: ignore[union-attr]
    loaded = encode_probes(fresh.at(site=site), probes, batch_size=7)  # type: ignore[arg-type]
    assert torch.equal(loaded.design, plain.design)
    assert len(calls) == 3


def test_nothing_is_recalled_of_an_edited_model_or_beyond_the_limit() -> None:
    probes = ProbeSet(tiny_images(4), class_names=PROMPTS)
    encoder = remembering("clip")
    encode_probes(encoder, probes)
    assert encoder.recall(probes.content_hashes, design=True) is not None
    assert encoder.recall([*probes.content_hashes[:2], None], design=True) is None
    encoder.model = tiny_encoder("clip", seed=5).model
    assert encoder.recall(probes.content_hashes, design=True) is None
    edited = encode_probes(encoder, probes).unit
    assert torch.equal(edited, encode_probes(tiny_encoder("clip", seed=5), probes).unit)

    small = FeatureMemory(limit=2 * 4 * 3)
    small.remember(["aa", "bb", "cc"], ProbeFeatures(torch.eye(3), torch.eye(3)), None)
    assert small.recall(["aa", "bb"], None) is not None
    assert small.recall(["cc"], None) is None


def test_a_view_of_the_text_tower_is_the_edited_models() -> None:
    from hf_platonic.evaluation import EvaluationSet, zero_shot_accuracy
    from hf_platonic.transfers import transfer

    task = descriptor()
    assert task.probes is not None
    target = tiny_encoder("siglip", seed=3)
    data = EvaluationSet(task.probes, [0, 1, 2, 0, 1, 2, 0, 1])
    (operator,) = solve_operators([task], target, tower="text")
    view = View.of(target.at(tower="text"), data, tower="text")
    before = view.affinities()
    after = view.affinities(operator, strength=0.7)
    accuracy = view.accuracy(operator, strength=0.7)
    transfer(task, target, tower="text", strength=0.7)
    live = encode_probes(target, task.probes).unit @ encode_columns(target, task.probes.columns).T
    torch.testing.assert_close(after, live, rtol=0, atol=1e-5)
    assert float((after - before).abs().max()) > 1e-3
    assert accuracy == zero_shot_accuracy(target, data)
