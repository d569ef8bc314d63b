from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from tiny import FAMILIES, tiny_encoder, tiny_images, tiny_probes

from hf_platonic.affinities import affinity, row_centred, spread
from hf_platonic.encoders.encoder import DualEncoder
from hf_platonic.encoding import encode_columns, encode_probes
from hf_platonic.errors import EncoderError, PlatonicError, ProbeError, PromptError
from hf_platonic.extraction import extract
from hf_platonic.probes import ProbeSet

PROMPTS = ["a cat", "a dog", "one bird"]


def pair(family: str = "clip") -> tuple[DualEncoder, DualEncoder]:
    """A base and the same model with other weights in the probe tower."""
    base, tuned = tiny_encoder(family), tiny_encoder(family)
    other = dict(tiny_encoder(family, seed=1).model.named_parameters())
    with torch.no_grad():
        for name, parameter in tuned.model.named_parameters():
            if not name.startswith("text") and "logit" not in name:
                parameter.lerp_(other[name], 0.3)
    return base, tuned


@pytest.mark.parametrize("family", FAMILIES)
def test_is_the_change_of_the_models_own_cosines(family: str) -> None:
    base, tuned = pair(family)
    probes = ProbeSet(tiny_probes(base, 7), prompts=PROMPTS)
    found = extract(base, tuned, probes, name="task", store_base=True, batch_size=3)
    before, after = (affinity(encode_probes(e, probes).unit, e.encode_prompts(PROMPTS).cpu()) for e in (base, tuned))
    torch.testing.assert_close(found.delta, after - before, rtol=0, atol=1e-5)
    assert found.base_affinity is not None
    torch.testing.assert_close(found.base_affinity, before, rtol=0, atol=1e-5)
    assert found.spread == pytest.approx(spread(before), rel=1e-4)
    assert found.grid == probes.grid
    assert (found.sources[0].base, found.sources[0].tuned) == (base.identity, tuned.identity)
    assert float(found.delta.abs().max()) > 1e-3


def test_batch_size_and_workers_change_nothing() -> None:
    base, tuned = pair()
    probes = ProbeSet(tiny_images(7), prompts=PROMPTS)
    whole = extract(base, tuned, probes, batch_size=7)
    for options in ({"batch_size": 1}, {"batch_size": 3}, {"batch_size": 3, "num_workers": 1}):
        torch.testing.assert_close(extract(base, tuned, probes, **options).delta, whole.delta, rtol=0, atol=1e-6)


def test_each_probe_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    base, tuned = pair()
    probes = ProbeSet(tiny_images(6), prompts=PROMPTS)
    seen = []
    original = ProbeSet.__getitem__

    def counting(self: ProbeSet, index: int) -> object:
        seen.append(index)
        return original(self, index)

    monkeypatch.setattr(ProbeSet, "__getitem__", counting)
    extract(base, tuned, probes, batch_size=4)
    assert sorted(seen) == list(range(6))
    seen.clear()
    workers = ProbeSet(tiny_images(6, seed=1), prompts=PROMPTS)
    extract(base, tuned, workers, batch_size=4, num_workers=1)
    assert seen == []  # decoded and hashed in the worker


def test_permuting_probes_and_prompts_permutes() -> None:
    base, tuned = pair()
    probes = ProbeSet(tiny_images(6), prompts=PROMPTS)
    order = [3, 1, 5, 0, 2, 4]
    whole = extract(base, tuned, probes)
    rows = extract(base, tuned, probes.select(order))
    columns = extract(base, tuned, probes.with_prompts(prompts=[PROMPTS[i] for i in (2, 0, 1)]))
    torch.testing.assert_close(rows.delta, whole.delta[order], rtol=0, atol=1e-6)
    torch.testing.assert_close(columns.delta, whole.delta[:, [2, 0, 1]], rtol=0, atol=1e-6)
    assert len({d.grid.fingerprint for d in (whole, rows, columns)}) == 3


def test_templates_are_averaged_to_one_column() -> None:
    base, _ = pair()
    probes = ProbeSet(tiny_images(2), class_names=["cat", "dog"], templates=("a {}", "one {}"))
    singles = base.encode_prompts(["a cat", "one cat", "a dog", "one dog"]).reshape(2, 2, -1)
    expected = torch.nn.functional.normalize(singles.mean(dim=1), dim=-1)
    torch.testing.assert_close(encode_columns(base, probes.columns), expected)


def test_a_tuned_text_tower_counts_too() -> None:
    base, _ = pair()
    tuned = tiny_encoder()
    with torch.no_grad():
        tuned.model.text_projection.weight.add_(0.1)
    assert float(extract(base, tuned, ProbeSet(tiny_images(3), prompts=PROMPTS)).delta.abs().max()) > 1e-3


def test_leaves_models_and_random_state_as_they_were() -> None:
    base, tuned = pair()
    base.model.train()
    before = copy.deepcopy(base.model.state_dict())
    state = torch.get_rng_state()
    extract(base, tuned, ProbeSet(tiny_images(3), prompts=PROMPTS))
    assert base.model.training
    assert all(torch.equal(v, before[k]) for k, v in base.model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)


def test_refuses_one_model_twice_and_wrong_modalities() -> None:
    base, tuned = pair()
    probes = ProbeSet(tiny_images(3), prompts=PROMPTS)
    with pytest.raises(EncoderError, match="got one object twice"):
        extract(base, DualEncoder(base.model, base.processor), probes)
    with pytest.raises(EncoderError, match="one modality, got image .* and audio"):
        extract(base, tiny_encoder("clap"), probes)
    with pytest.raises(ProbeError, match="Expected audio probes for CLAP, got image probes"):
        extract(tiny_encoder("clap"), tiny_encoder("clap"), probes)
    with pytest.raises(PlatonicError, match="`batch_size` to be a whole number of at least 1, got 0"):
        extract(base, tuned, probes, batch_size=0)


def test_names_the_probe_that_gives_no_number() -> None:
    base, tuned = pair()
    images = tiny_images(5)
    probes = ProbeSet([*images[:4], images[4].resize((4, 4))], prompts=PROMPTS)
    with torch.no_grad():
        tuned.model.visual_projection.weight.fill_(float("nan"))
    with pytest.raises(ProbeError, match="NaN or infinity for probe 0") as caught:
        extract(base, tuned, probes, batch_size=2)
    assert caught.value.index == 0


def test_refuses_encoders_that_see_nothing() -> None:
    base, tuned = pair()
    same = ProbeSet([tiny_images(1)[0]] * 3, prompts=PROMPTS)
    with pytest.raises(ProbeError, match="same one for probe 0 and the 2 others"):
        extract(base, tuned, same)


def test_refuses_prompts_that_become_one() -> None:
    base, tuned = pair()
    long = "word " * 100
    with pytest.raises(PromptError, match="same tokens|truncat"):
        extract(base, tuned, ProbeSet(tiny_images(2), prompts=[long + "cat", long + "dog"]))


def test_spread_of_known_matrices() -> None:
    assert spread(torch.full((4, 3), 0.7)) == 0.0
    matrix = torch.tensor([[1.0, -1.0], [2.0, 0.0]])
    assert spread(matrix) == 1.0
    assert float(row_centred(matrix).sum()) == 0.0
    assert math.isclose(spread(matrix), spread(matrix + 5.0))


def test_some_rows_of_a_descriptor_are_the_extraction_on_those_probes() -> None:
    base, tuned = pair()
    probes = ProbeSet(tiny_probes(base, 8), prompts=PROMPTS)
    whole = extract(base, tuned, probes, store_base=True)
    part, direct = whole.select([1, 4, 6]), extract(base, tuned, probes.select([1, 4, 6]), store_base=True)
    torch.testing.assert_close(part.delta, direct.delta, rtol=0, atol=1e-6)
    assert part.grid.fingerprint == direct.grid.fingerprint
    assert part.spread == pytest.approx(direct.spread, rel=1e-4)
    assert part.predictions is not None
    assert direct.predictions is not None
    assert torch.equal(part.predictions, direct.predictions)
    with pytest.raises(PlatonicError, match="with its probes at hand"):
        replace(whole, probes=None).select([0])


def test_predictions_are_the_fine_tunes_nearest_prompts() -> None:
    base, tuned = pair()
    probes = ProbeSet(tiny_probes(base, 8), prompts=PROMPTS)
    found = extract(base, tuned, probes, store_base=True)
    assert found.predictions is not None
    assert found.base_affinity is not None
    assert torch.equal(found.predictions.long(), (found.base_affinity + found.delta).argmax(dim=1))
    assert (2.0 * found).predictions is found.predictions
    assert (found + found).predictions is None
