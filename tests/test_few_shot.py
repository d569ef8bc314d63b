from __future__ import annotations

import pytest
import torch
from test_extraction import pair
from tiny import tiny_encoder, tiny_images

from hf_platonic import finish_transfer
from hf_platonic.encoding import encode_columns, encode_probes
from hf_platonic.errors import EncoderError, PlatonicError
from hf_platonic.evaluation import EvaluationSet, accuracy
from hf_platonic.extraction import extract
from hf_platonic.few_shot import finish
from hf_platonic.operator import Operator
from hf_platonic.probes import ProbeSet
from hf_platonic.transfers import transfer

WORDS = ["a cat", "a dog in the snow", "one bird"]


def rows(k: int = 9) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    generator = torch.Generator().manual_seed(0)
    unit = torch.nn.functional.normalize(torch.randn(k, 8, generator=generator), dim=1)
    prompts = torch.nn.functional.normalize(torch.randn(3, 8, generator=generator), dim=1)
    return unit, prompts, [i % 3 for i in range(k)]


def test_a_weak_penalty_fits_the_examples_and_a_strong_one_stays_at_the_start() -> None:
    unit, prompts, labels = rows()
    start = Operator(0.1 * torch.ones(8, 2), torch.ones(2, 8))
    moved = finish(start, unit, unit, prompts, labels, penalty=1e-4)
    assert accuracy(moved.apply(unit, unit), prompts, labels) == 1.0
    kept = finish(start, unit, unit, prompts, labels, penalty=1e6)
    torch.testing.assert_close(kept.dense(), start.dense(), rtol=0, atol=1e-4)


def test_it_is_a_minimum_of_what_it_says() -> None:
    """The gradient of the whole objective by a dense E vanishes in the examples' span."""
    unit, prompts, labels = rows()
    start = Operator(0.1 * torch.randn(8, 2, generator=torch.Generator().manual_seed(1)), torch.eye(2, 8))
    s, penalty = 0.7, 0.05
    found = finish(start, unit, unit, prompts, labels, strength=s, penalty=penalty)
    v, g, basis = unit.double(), prompts.double(), torch.linalg.qr(prompts.double().T)[0].T
    change = (found.dense() - start.dense()).double() @ basis.T
    change.requires_grad_(True)
    cosines = v @ g.T
    t = 3 / (cosines - cosines.mean(dim=1, keepdim=True)).square().mean().sqrt()
    z = torch.nn.functional.normalize(v + s * v @ (start.dense().double() + change @ basis), dim=1) @ g.T
    loss = torch.nn.functional.cross_entropy(t * z, torch.tensor(labels))
    loss = loss + penalty / 2 * t**2 * (s * change).square().sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert change.grad is not None
    # Along the examples' span, where E lies; the unit rows here have mean squared norm 1.
    assert float((v @ change.grad).abs().max()) < 1e-4 * float(t)


def test_bad_input_is_refused() -> None:
    unit, prompts, labels = rows()
    start = Operator(torch.zeros(8, 1), torch.zeros(1, 8))
    for options, message in (
        ({"strength": 0.0}, "strength that isn't 0 and 9 labels from 0 to 2, got strength 0"),
        ({"penalty": 0.0}, "`penalty` above 0"),
    ):
        with pytest.raises(PlatonicError, match=message):
            finish(start, unit, unit, prompts, labels, **options)
    with pytest.raises(PlatonicError, match="9 labels from 0 to 2, got .* labels .0, 3"):
        finish(start, unit, unit, prompts, [0, 3, *labels[2:]])


@pytest.mark.parametrize("site", ["output", "features"])
def test_a_transferred_adapter_learns_its_examples_and_keeps_its_strength(site: str) -> None:
    base, tuned = pair("siglip")
    task = extract(base, tuned, ProbeSet(tiny_images(10), prompts=WORDS))
    target = tiny_encoder(seed=2)
    examples = ProbeSet(tiny_images(6, seed=4), prompts=WORDS)
    labels = [0, 1, 2, 0, 1, 2]
    model = transfer(task, target, site=site, strength=0.5)  # type: ignore[arg-type]
    before = model.base_model.get_operator("default")
    finish_transfer(model, target, EvaluationSet(examples, labels), unlabelled=task.probes, penalty=1e-6)
    after = model.base_model.get_operator("default")
    assert after.site == before.site
    assert model.base_model.get_strengths() == {"default": 0.5}
    made = model.peft_config["default"].provenance
    assert made["finished"] == [
        {"examples": 6, "classes": 3, "penalty": 1e-6, "unlabelled": task.grid.fingerprint},
    ]
    assert not {"verified", "forecast"} & made.keys()
    columns = encode_columns(target, examples.columns)
    assert accuracy(encode_probes(target, examples).unit, columns, labels) == 1.0


def test_only_models_of_this_method_are_finished() -> None:
    from peft import LoraConfig, get_peft_model

    target = tiny_encoder(seed=2)
    lora = get_peft_model(target.model, LoraConfig(target_modules=["q_proj"]))
    examples = EvaluationSet(ProbeSet(tiny_images(3), prompts=WORDS), [0, 1, 2])
    with pytest.raises(EncoderError, match="of type PLATONIC, got LoraModel"):
        finish_transfer(lora, target, examples)
    base, tuned = pair("siglip")
    task = extract(base, tuned, ProbeSet(tiny_images(10), prompts=WORDS))
    target = tiny_encoder(seed=2)
    words = transfer(task, target, tower="text")
    with pytest.raises(PlatonicError, match=r"adapter on visual_projection.*got one on .'text_projection'"):
        finish_transfer(words, target, examples)
