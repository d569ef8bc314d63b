"""Edits at the other site and in the other tower, and the check of every edit against its operator."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from test_extraction import PROMPTS
from test_transfers import affinities, descriptor
from tiny import FAMILIES, SOURCES, tiny_encoder, tiny_images, tiny_parts
from torch.nn.functional import normalize

from hf_platonic.bank import OperatorBank
from hf_platonic.descriptor import TaskDescriptor
from hf_platonic.encoders import DualEncoder, EditSite
from hf_platonic.encoding import encode_columns, encode_probes
from hf_platonic.errors import EncoderError, PlatonicError
from hf_platonic.export import export_lora
from hf_platonic.extraction import extract
from hf_platonic.probes import ProbeSet
from hf_platonic.solutions import solve_operators
from hf_platonic.solve import closed_form
from hf_platonic.transfers import transfer

TEXT_FAMILIES = (*FAMILIES, "align")


def task_for(family: str) -> TaskDescriptor:
    return descriptor("clap" if family.startswith("clap") else "clip")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_input_site_is_exact_for_every_family(family: str) -> None:
    task = task_for(family)
    target = tiny_encoder(family, seed=2)
    before = {k: v.clone() for k, v in target.model.state_dict().items()}
    (operator,) = solve_operators([task], target, site="input")
    assert operator.site == "input"
    assert task.probes is not None
    features = encode_probes(target.at(site="input"), task.probes)
    expected = operator.apply(features.unit, features.design, strength=0.7)
    assert float((expected - features.unit).abs().max()) > 1e-3

    model = transfer(task, target, site="input", strength=0.7)
    live = encode_probes(target, task.probes).unit
    torch.testing.assert_close(live, expected, rtol=0, atol=1e-5)
    verified = model.peft_config["default"].provenance["verified"]
    assert verified["tower"] == "probe"
    assert verified["rows"] == 8
    assert max(verified["live"], verified["merged"]) < 1e-5
    model.merge_adapter()
    torch.testing.assert_close(encode_probes(target, task.probes).unit, expected, rtol=0, atol=1e-5)
    model.unmerge_adapter()
    restored = model.unload().state_dict()
    assert all(torch.equal(v, before[k]) for k, v in restored.items())


@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_the_text_tower_is_exact_and_leaves_probes_alone(family: str) -> None:
    task = task_for(family)
    target = tiny_encoder(family, seed=2)
    assert task.probes is not None
    probes, prompts = encode_probes(target, task.probes).unit, target.encode_prompts(PROMPTS)
    (operator,) = solve_operators([task], target, tower="text")
    assert operator.rank <= len(PROMPTS)
    expected = operator.apply(prompts, prompts, strength=0.7)
    assert float((expected - prompts).abs().max()) > 1e-3

    model = transfer(task, target, tower="text", strength=0.7)
    torch.testing.assert_close(target.encode_prompts(PROMPTS), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(encode_probes(target, task.probes).unit, probes, rtol=0, atol=1e-6)
    verified = model.peft_config["default"].provenance["verified"]
    assert verified["tower"] == "text"
    assert max(verified["live"], verified["merged"]) < 1e-5
    target.model = model.merge_and_unload()
    torch.testing.assert_close(target.encode_prompts(PROMPTS), expected, rtol=0, atol=1e-5)


def test_the_text_operator_solves_the_problem_with_the_roles_swapped() -> None:
    task = descriptor("siglip")
    target = tiny_encoder("metaclip_2", seed=2)
    assert task.probes is not None
    units, columns = encode_probes(target, task.probes).unit, encode_columns(target, task.grid.columns)
    left, right = closed_form(columns, units, task.delta.T, probe_ridge=1e-3, prompt_ridge=1e-2)
    (operator,) = solve_operators([task], target, tower="text", probe_ridge=1e-2, prompt_ridge=1e-3)
    torch.testing.assert_close(operator.dense().double(), left @ right, rtol=1e-4, atol=1e-5)


def test_a_text_edit_moves_affinities_as_the_descriptor_says() -> None:
    task = descriptor("align")
    target = tiny_encoder("align")
    assert task.probes is not None
    before = affinities(target, task.probes)
    transfer(task, target, tower="text", strength=1.0)
    moved = affinities(target, task.probes) - before
    assert float((moved - task.delta).norm()) < 0.7 * float(task.delta.norm())


def test_edits_of_both_towers_live_in_one_model() -> None:
    task = descriptor()
    target = tiny_encoder(seed=2)
    transfer(task, target, adapter_name="pictures")
    image = target.encode_probes(tiny_images(3)).unit
    model = transfer(task, target, adapter_name="words", tower="text")
    assert torch.equal(target.encode_probes(tiny_images(3)).unit, image)
    assert model.base_model.active_adapters == ["pictures", "words"]
    with pytest.raises(PlatonicError, match="'words', which edits .'text_projection'.*Delete"):
        transfer(task, target, adapter_name="words")


def test_terms_of_one_grid_add_up_in_the_text_tower_without_growing() -> None:
    one, other = descriptor(), descriptor("siglip", seed=0)
    target = tiny_encoder("metaclip_2", seed=2)
    parts = solve_operators([one, other], target, tower="text")
    model = transfer([one, other], target, tower="text")
    found = model.base_model.get_operator("default")
    torch.testing.assert_close(found.dense(), parts[0].dense() + parts[1].dense(), rtol=1e-4, atol=1e-5)
    assert found.rank == len(PROMPTS)


@pytest.mark.parametrize("family", SOURCES)
def test_a_family_without_an_affine_last_layer_is_a_source_only(family: str) -> None:
    task = descriptor(family)
    assert float(task.delta.abs().max()) > 1e-3
    assert isinstance(transfer(task, tiny_encoder("clip", seed=2)), PeftModel)
    hint = "pass tower=.text" if family == "align" else "no edit of this tower would be exact.$"
    with pytest.raises(EncoderError, match=f"affine layer that writes its probe embedding.*{hint}"):
        transfer(task, tiny_encoder(family))


@pytest.mark.parametrize(
    ("family", "place", "message"),
    [
        ("siglip", {"site": "output"}, 'site "input" for the probe tower of SigLIP.*got "output"'),
        ("clip", {"site": "input", "tower": "text"}, 'site "output" for the text tower of CLIP, got "input"'),
        ("tipsv2", {"tower": "text"}, "writes its text embedding, got TIPSv2"),
        ("clip", {"site": "middle"}, "got 'middle' of 'probe'"),
        ("clip", {"tower": "image"}, "got None of 'image'"),
    ],
)
def test_places_that_are_not_exact_are_refused(family: str, place: dict[str, str], message: str) -> None:
    target = tiny_encoder(family)
    with pytest.raises(EncoderError, match=message):
        transfer(descriptor(), target, **place)  # type: ignore[arg-type]
    assert not isinstance(target.model, PeftModel)


def test_a_bank_keeps_its_place(tmp_path: Path) -> None:
    task = descriptor()
    target = tiny_encoder("siglip", seed=2)
    bank = OperatorBank.solve({"a": task}, target, tower="text")
    assert (bank.site.module, bank.site.tower) == ("text_model.head", "text")
    bank.save_pretrained(tmp_path)
    loaded = OperatorBank.from_pretrained(tmp_path)
    assert loaded.site == bank.site
    model = PeftModel.from_pretrained(target.model, tmp_path / "a")
    expected = bank.operators["a"]
    prompts = tiny_encoder("siglip", seed=2).encode_prompts(PROMPTS)
    live = DualEncoder(model, target.processor).encode_prompts(PROMPTS)
    torch.testing.assert_close(live, expected.apply(prompts, prompts), rtol=0, atol=1e-5)


@pytest.mark.parametrize("earlier", [False, True])
def test_an_edit_that_does_not_do_what_its_operator_says_is_taken_back(earlier: bool) -> None:
    parts = tiny_parts(seed=2)
    parts[0].visual_projection = torch.nn.Linear(20, 20, bias=False)
    parts[0].text_projection = torch.nn.Linear(24, 20, bias=False)
    target = DualEncoder(*parts)
    task = descriptor("siglip")
    assert task.probes is not None
    if earlier:
        transfer(task, target, adapter_name="good")
    # A layer whose size fits, but which doesn't write the embedding.
    target._site = EditSite("vision_model.encoder.layers.1.mlp.fc2", "output")
    before = encode_probes(target, task.probes).unit
    with pytest.raises(EncoderError, match="move its embeddings as the operator does, got a deviation"):
        transfer(task, target, adapter_name="wrong")
    assert torch.equal(encode_probes(target, task.probes).unit, before)
    if earlier:
        assert list(target.model.peft_config) == ["good"]
        assert target.model.base_model.active_adapters == ["good"]
    else:
        assert not isinstance(target.model, PeftModel)


def test_templates_are_edited_one_by_one() -> None:
    probes = ProbeSet(tiny_images(10), class_names=["cat", "dog"], templates=("a {}", "one {}"))
    base, tuned = tiny_encoder(), tiny_encoder(seed=1)
    task = extract(base, tuned, probes)
    target = tiny_encoder("metaclip_2", seed=2)
    singles = target.encode_prompts(["a cat", "one cat"])
    (operator,) = solve_operators([task], target, tower="text")
    transfer(task, target, tower="text", strength=1.0)
    edited = operator.apply(singles, singles)
    column = encode_columns(target, probes.columns)[0]
    torch.testing.assert_close(column, normalize(edited.mean(dim=0), dim=0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("place", [{"site": "input"}, {"tower": "text"}])
@pytest.mark.parametrize("family", ["clip", "siglip", "clap"])
def test_a_plain_lora_says_the_same(family: str, place: dict[str, str], tmp_path: Path) -> None:
    task = task_for(family)
    target = tiny_encoder(family, seed=2)
    model = transfer(task, target, strength=0.7, **place)  # type: ignore[arg-type]
    assert task.probes is not None
    probes, prompts = encode_probes(target, task.probes).unit, target.encode_prompts(PROMPTS)
    export_lora(model, tmp_path)
    plain = tiny_encoder(family, seed=2)
    lora = DualEncoder(PeftModel.from_pretrained(plain.model, tmp_path), plain.processor)
    torch.testing.assert_close(encode_probes(lora, task.probes).unit, probes, rtol=0, atol=1e-5)
    torch.testing.assert_close(lora.encode_prompts(PROMPTS), prompts, rtol=0, atol=1e-5)
