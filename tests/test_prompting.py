from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import tiny_encoder, tiny_images

from hf_platonic.descriptor import TaskDescriptor
from hf_platonic.encoders.encoder import DualEncoder
from hf_platonic.errors import PlatonicError, PromptError
from hf_platonic.extraction import extract
from hf_platonic.probes import ProbeSet
from hf_platonic.prompting import combinations, with_prompts

NAMES = ("cat", "dog", "red bird", "two cars")
TEMPLATES = ("a {}", "one {} here")


@pytest.fixture(scope="module")
def models() -> tuple[DualEncoder, DualEncoder]:
    """A base and a fine-tune of its probe tower."""
    base, tuned = tiny_encoder("clip"), tiny_encoder("clip")
    other = dict(tiny_encoder("clip", seed=1).model.named_parameters())
    with torch.no_grad():
        for name, parameter in tuned.model.named_parameters():
            if not name.startswith("text") and "logit" not in name:
                parameter.lerp_(other[name], 0.3)
    return base, tuned


@pytest.fixture(scope="module")
def descriptor(models: tuple[DualEncoder, DualEncoder]) -> TaskDescriptor:
    probes = ProbeSet(tiny_images(6), class_names=NAMES, templates=TEMPLATES)
    return extract(*models, probes, name="task", store_base=True, progress=False)


def test_classes_of_the_grid_are_taken_as_they_are(
    models: tuple[DualEncoder, DualEncoder], descriptor: TaskDescriptor
) -> None:
    chosen = [3, 0, 2]
    words = {"class_names": [NAMES[i] for i in chosen], "templates": TEMPLATES}
    found, share = with_prompts(descriptor, models[0], **words)
    assert share == pytest.approx(1.0, abs=1e-4)
    assert torch.equal(found.delta, descriptor.delta[:, chosen])
    assert found.probes is not None
    again = extract(*models, found.probes, store_base=True, progress=False)
    assert found.grid == again.grid
    assert found.base_affinity is not None
    torch.testing.assert_close(found.base_affinity, again.base_affinity, rtol=0, atol=1e-5)
    torch.testing.assert_close(found.delta, again.delta, rtol=0, atol=1e-5)
    assert found.predictions is not None
    assert torch.equal(found.predictions, again.predictions)
    assert found.spread == pytest.approx(again.spread, rel=1e-4)
    assert (found.name, found.sources) == ("task", descriptor.sources)


def test_is_exact_in_the_span_of_the_old_prompts(models: tuple[DualEncoder, DualEncoder]) -> None:
    words = [f"{a} {b}" for a in ("a", "one", "my", "no", "q7") for b in ("cat", "dog", "zebra", "car", "x y", "+!")]
    assert len(words) > models[0].embedding_dim
    probes = ProbeSet(tiny_images(6), prompts=words)
    wide = extract(*models, probes, store_base=True, progress=False)
    found, share = with_prompts(wide, models[0], prompts=["an ant", "the bee", "some crab"], prompt_ridge=1e-9)
    assert share == pytest.approx(1.0, abs=1e-3)
    assert [source.changes for source in found.sources] == [
        (f"its 3 columns combined out of {len(words)} other prompts', which cover {share:.2f} of them",)
    ]
    assert found.probes is not None
    again = extract(*models, found.probes, store_base=True, progress=False)
    torch.testing.assert_close(found.delta, again.delta, rtol=0, atol=1e-4)
    assert found.base_affinity is not None
    torch.testing.assert_close(found.base_affinity, again.base_affinity, rtol=0, atol=1e-4)


def test_is_linear_and_multiples_keep_their_predictions(
    models: tuple[DualEncoder, DualEncoder], descriptor: TaskDescriptor
) -> None:
    words = {"class_names": ["dog", "cat"], "templates": TEMPLATES}
    found, _ = with_prompts(descriptor, models[0], **words)
    scaled, _ = with_prompts(-2 * descriptor, models[0], **words)
    torch.testing.assert_close(scaled.delta, -2 * found.delta)
    assert found.predictions is not None
    assert torch.equal(scaled.predictions, found.predictions)
    bare, _ = with_prompts(replace(descriptor, base_affinity=None, probes=None), models[0], **words)
    assert torch.equal(bare.delta, found.delta)
    assert (bare.base_affinity, bare.predictions, bare.probes) == (None, None, None)
    assert bare.spread == descriptor.spread


def test_refuses_prompts_that_the_old_ones_do_not_cover(
    models: tuple[DualEncoder, DualEncoder], descriptor: TaskDescriptor
) -> None:
    names = ["cat", "%%%", "12345 6789", "zzz"]
    with pytest.raises(PromptError, match=r"cover a share of at least 0\.99, got 0\.\d\d; least covered: '"):
        with_prompts(descriptor, models[0], class_names=names, templates=TEMPLATES, least_share=0.99)
    _, share = with_prompts(descriptor, models[0], class_names=names, templates=TEMPLATES, least_share=0.0)
    assert 0 <= share < 0.99
    with pytest.raises(PlatonicError, match=r"`least_share` in \[0, 1\], got 2"):
        with_prompts(descriptor, models[0], prompts=["x"], least_share=2)
    with pytest.raises(PromptError, match="neither"):
        with_prompts(descriptor, models[0])


def test_refuses_a_teachers_scores(models: tuple[DualEncoder, DualEncoder], descriptor: TaskDescriptor) -> None:
    assert descriptor.probes is not None
    teacher = TaskDescriptor.from_scores(descriptor.delta, descriptor.probes)
    with pytest.raises(PlatonicError, match="a teacher's scores have no text space"):
        with_prompts(teacher, models[0], prompts=["a cat"])


def test_combinations_are_found_and_what_is_new_is_not() -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.nn.functional.normalize(torch.randn(4, 9, generator=generator, dtype=torch.float64), dim=1)
    mixed = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    weights, shares = combinations(old, mixed @ old, prompt_ridge=1e-12)
    torch.testing.assert_close(weights, mixed, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(shares, torch.ones(4, dtype=torch.float64))
    outside = torch.linalg.svd(old).Vh[4:7]
    assert float(combinations(old, outside)[1].max()) < 1e-6
    half = torch.cat([old[:1] + outside[:1], old[:1] - outside[:1]])  # they differ only where nothing is known
    assert float(combinations(old, half)[1][-1]) < 1e-6
    assert float(combinations(old, half[:1])[1][-1]) == pytest.approx(0.5, abs=1e-5)
