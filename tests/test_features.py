"""Edits that read inner features: exact against their operator, live, saved, copied, and never merged."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from family_checks import task_of
from peft import PeftModel, get_peft_model
from sklearn.preprocessing import StandardScaler
from test_extraction import PROMPTS, pair
from test_families import scores
from test_transfers import affinities, descriptor
from tiny import FAMILIES, SOURCES, tiny_clips, tiny_encoder, tiny_images, tiny_parts
from torch import Tensor

from hf_platonic import PlatonicConfig, initialize_platonic_weights
from hf_platonic._pooling import pool
from hf_platonic.bank import OperatorBank
from hf_platonic.descriptor import TaskDescriptor
from hf_platonic.encoders import DualEncoder, Feature
from hf_platonic.encoders import families as table
from hf_platonic.encoding import encode_columns, encode_probes
from hf_platonic.errors import BaseMismatchError, EncoderError, PlatonicError
from hf_platonic.export import export_lora
from hf_platonic.extraction import extract
from hf_platonic.probes import ProbeSet
from hf_platonic.scaling import FeatureScaling
from hf_platonic.solutions import solve_operators, solve_transfer
from hf_platonic.solve import closed_form
from hf_platonic.transfers import transfer


@pytest.fixture(scope="module")
def task() -> TaskDescriptor:
    return descriptor()


@pytest.fixture
def target() -> DualEncoder:
    return tiny_encoder(seed=2)


def units(encoder: DualEncoder, n: int = 5) -> Tensor:
    return encoder.encode_probes(tiny_images(n, seed=7)).unit


def hooks(model: torch.nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_reads_its_blocks_and_the_live_edit_is_its_operator(family: str) -> None:
    task = descriptor("clap" if family.startswith("clap") else "clip")
    target = tiny_encoder(family, seed=2)
    assert task.probes is not None
    view = target.at(site="features")
    assert {"mean", "std"} <= {f.pooling for f in view.site.features} <= {"mean", "std", "first"}
    assert len({f.module for f in view.site.features}) in (2, 3)
    features = encode_probes(view, task.probes)
    assert features.design.shape[1] == view.design_dim
    (operator,) = solve_operators([task], target, site="features")
    assert operator.site == "features"
    expected = operator.apply(features.unit, features.design, strength=0.7)
    assert float((expected - features.unit).abs().max()) > 1e-3

    before = {k: v.clone() for k, v in target.model.state_dict().items()}
    model = transfer(task, target, site="features", strength=0.7)
    torch.testing.assert_close(encode_probes(target, task.probes).unit, expected, rtol=0, atol=1e-5)
    provenance = model.peft_config["default"].provenance
    assert provenance["verified"]["live"] < 1e-5
    assert provenance["verified"]["merged"] is None
    assert provenance["features"] == [list(f) for f in view.site.features]
    plain = model.unload()
    assert hooks(plain) == 0
    assert all(torch.equal(v, before[k]) for k, v in plain.state_dict().items())


def test_the_design_is_what_the_modules_hand_on(target: DualEncoder) -> None:
    view = target.at(site="features")
    seen: dict[str, Any] = {}
    for feature in view.site.features:
        target.model.get_submodule(feature.module).register_forward_hook(
            lambda _, __, out, name=feature.module: seen.__setitem__(name, out)
        )
    inputs = view.preprocess(tiny_images(3))
    with torch.no_grad():
        vision = target.model.vision_model(**inputs)
        z = target.model.visual_projection(vision.pooler_output)
    rows = [vision.pooler_output]
    for name in ("vision_model.encoder.layers.0", "vision_model.encoder.layers.1"):
        hidden = seen[name][0] if isinstance(seen[name], tuple) else seen[name]
        rows += [hidden.mean(dim=1), hidden.std(dim=1, correction=0), hidden[:, 0]]
    expected = torch.cat([*rows, torch.ones(3, 1)], dim=1) / z.norm(dim=1, keepdim=True)
    torch.testing.assert_close(view.probe_features(inputs).design, expected, rtol=0, atol=1e-6)


def test_the_operator_is_the_ridge_solution_on_standardised_features(
    task: TaskDescriptor, target: DualEncoder
) -> None:
    assert task.probes is not None
    view = target.at(site="features")
    design = encode_probes(view, task.probes).design.double()
    norm = 1 / design[:, -1:]
    scaled = StandardScaler().fit_transform((design[:, :-1] * norm).numpy())
    wanted = torch.cat([torch.as_tensor(scaled), torch.ones_like(norm)], dim=1) / norm
    left, right = closed_form(wanted, encode_columns(target, task.grid.columns), task.delta, probe_ridge=0.1)
    (operator,) = solve_operators([task], target, site="features", probe_ridge=0.1)
    found = (design @ operator.left.double()) @ operator.right.double()
    torch.testing.assert_close(found, wanted @ left @ right, rtol=1e-4, atol=1e-6)


def test_scaling_maps_there_and_back_and_drops_dead_columns() -> None:
    generator = torch.Generator().manual_seed(0)
    f = torch.randn(9, 4, generator=generator, dtype=torch.float64) * torch.tensor([1e-3, 1.0, 50.0, 0.0]) + 3
    norm = 1 + torch.rand(9, 1, generator=generator, dtype=torch.float64)
    design = torch.cat([f, torch.ones(9, 1)], dim=1) / norm
    scaling = FeatureScaling.of(design)
    left = torch.randn(5, 2, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(design @ scaling.fold(left), scaling.apply(design) @ left)
    assert scaling.scale[3] == 0
    assert not bool(scaling.fold(left)[3].any())
    halves = FeatureScaling.of(design[:4], design[4:])
    torch.testing.assert_close(halves.centre, scaling.centre)
    torch.testing.assert_close(FeatureScaling.of(design.repeat(300, 1)).scale, scaling.scale)  # in chunks
    torch.testing.assert_close(scaling.apply(design.repeat(300, 1)), scaling.apply(design).repeat(300, 1))
    with pytest.raises(PlatonicError, match="last column is one over the embeddings' norms"):
        FeatureScaling.of(design - 1)
    with pytest.raises(PlatonicError, match="at least one probe to take means over"):
        FeatureScaling.of(design[:0])


def test_blocks_are_spaced_evenly_and_may_be_chosen(task: TaskDescriptor) -> None:
    import transformers as tf
    from tiny import TEXT, VISION

    config = tf.CLIPConfig(
        text_config={**TEXT, "vocab_size": 600, "bos_token_id": 512, "eos_token_id": 513, "pad_token_id": 0},
        vision_config={**VISION, "num_hidden_layers": 12},
        projection_dim=16,
    )
    deep = DualEncoder(tf.CLIPModel(config), tiny_parts()[1])

    def read(features: Any) -> list[int]:
        found = deep.at(site="features", features=features).site.features
        return sorted({int(f.module.rpartition(".")[2]) for f in found})

    assert read(6) == [1, 3, 5, 7, 9, 11]
    assert read(1) == [11]
    assert read(5) == [2, 5, 8, 11]
    assert read(100) == list(range(12))
    chosen = (Feature("vision_model.encoder.layers.4", "first", 20),)
    view = deep.at(site="features", features=chosen)
    assert view.site.features == chosen
    assert view.encode_probes(tiny_images(2)).design.shape == (2, 20 + 20 + 1)
    wrong = deep.at(site="features", features=[Feature("vision_model.encoder.layers.4", "mean", 7)])
    with pytest.raises(EncoderError, match=r"layers.4` to run once with 7 features for each of 2 inputs, got shapes"):
        wrong.encode_probes(tiny_images(2))
    with pytest.raises(EncoderError, match="number of blocks of at least 1, got 0"):
        deep.at(site="features", features=0)
    with pytest.raises(PlatonicError, match="features as .module, 'mean' or 'std' or 'first', size., got 'last'"):
        deep.at(site="features", features=["last"])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("clip", {"tower": "text"}, 'site "output" for the text tower of CLIP, got "features"'),
        *((family, {}, "affine layer that writes its probe embedding") for family in SOURCES),
    ],
)
def test_places_without_features_are_refused(family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(EncoderError, match=message):
        tiny_encoder(family).at(site="features", **options)


def test_a_row_names_its_blocks_or_none_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    monkeypatch.setattr(table, "_FAMILIES", dict(table._FAMILIES))
    row = table._FAMILIES["clip"]
    table._FAMILIES["clip"] = replace(row, feature_modules=r"vision_model\.encoder\.layers\.\d+\.mlp")
    found = tiny_encoder().at(site="features").site.features
    assert [f.module for f in found[::3]] == [f"vision_model.encoder.layers.{i}.mlp" for i in (0, 1)]
    table._FAMILIES["clip"] = replace(row, feature_modules="nothing")
    with pytest.raises(EncoderError, match="modules named 'nothing' that each run once a pass.*`feature_modules`"):
        tiny_encoder().at(site="features")
    table._FAMILIES["clip"] = row
    parts = tiny_parts()
    parts[0].vision_model.encoder.layers = torch.nn.Sequential(*parts[0].vision_model.encoder.layers)
    with pytest.raises(EncoderError, match="list of blocks .* in the probe tower of CLIP, got none"):
        DualEncoder(*parts).at(site="features")


def test_pooling_takes_rows_tokens_and_maps() -> None:
    x = torch.arange(24.0)
    assert torch.equal(pool(x.reshape(4, 6), "mean"), x.reshape(4, 6))
    assert torch.equal(pool((x.reshape(2, 3, 4), None), "first"), x.reshape(2, 3, 4)[:, 0])
    torch.testing.assert_close(pool(x.reshape(2, 3, 2, 2).bfloat16(), "mean"), x.reshape(2, 3, 4).mean(dim=2))
    torch.testing.assert_close(pool(x.reshape(2, 3, 4), "std"), x.reshape(2, 3, 4).std(dim=1, correction=0))
    equal = torch.ones(2, 3, 4, requires_grad=True)
    pool(equal, "std").sum().backward()
    assert equal.grad is not None
    assert not bool(equal.grad.any())
    with pytest.raises(PlatonicError, match=r"rows, tokens or a map .* got \(24,\)"):
        pool(x, "mean")
    with pytest.raises(PlatonicError, match="rows, tokens or a map .* got str"):
        pool("x", "mean")


def test_it_is_not_merged_and_the_error_says_what_is_exact(
    task: TaskDescriptor, target: DualEncoder, tmp_path: Path
) -> None:
    model = transfer(task, target, site="features")
    live = units(target)
    (operator,) = solve_operators([task], target, site="features")
    layer = model.base_model.model.visual_projection
    assert not layer.supports_lora_conversion("default")
    for act in (
        model.merge_and_unload,
        model.merge_adapter,
        layer.merge,
        lambda: layer.get_delta_weight("default"),
        lambda: export_lora(model, tmp_path),
        lambda: operator.fold(layer.weight, None),
    ):
        with pytest.raises(PlatonicError, match='no weight of the last layer sees.*save_pretrained.*site="input"'):
            act()
    assert torch.equal(units(target), live)


def test_signed_adapters_add_up_and_switch_off(task: TaskDescriptor, target: DualEncoder) -> None:
    other = descriptor("siglip", n=9, seed=1)
    base = units(target)
    view = target.at(site="features").encode_probes(tiny_images(5, seed=7))
    first, second = (solve_operators([d], target, site="features")[0] for d in (task, other))
    transfer(task, target, site="features", adapter_name="one")
    model = transfer(other, target, site="features", adapter_name="two")
    transfer(task, target, adapter_name="plain")
    model.set_strengths({"one": 1.5, "two": -0.5})
    expected = (1.5 * first - 0.5 * second).apply(view.unit, view.design)
    torch.testing.assert_close(units(target), expected, rtol=0, atol=1e-5)
    model.base_model.add_weighted_adapter(["one", "two"], [2.0, 2.0], "both")
    model.set_strengths({"both": 0.5})
    torch.testing.assert_close(units(target), expected, rtol=0, atol=1e-5)
    with model.disable_adapter():
        assert torch.equal(units(target), base)
    with pytest.raises(PlatonicError, match="operators of one site"):
        model.base_model.add_weighted_adapter(["one", "plain"], [1.0, 1.0], "no")
    transfer(task, target.at(site="features", features=1), adapter_name="short")
    with pytest.raises(PlatonicError, match="read the same inner features, got different ones"):
        model.base_model.add_weighted_adapter(["short"] * 1 + ["one"], [1.0, 1.0], "no")
    model.set_strengths({"plain": 1.0})
    for name in ("one", "two", "both", "short"):
        model.delete_adapter(name)
    assert hooks(model) == 0


def test_factors_train_and_gradients_agree_with_the_operator(task: TaskDescriptor, target: DualEncoder) -> None:
    view = target.at(site="features")
    config = PlatonicConfig(r=2, site="features", features=view.site.features, init_weights=False)
    inputs = target.preprocess(tiny_images(4))
    features = view.probe_features(inputs)
    model = get_peft_model(target.model, config)
    layer = model.base_model.model.visual_projection
    z = model.get_image_features(**inputs).pooler_output
    z.square().sum().backward()
    left = layer.platonic_left["default"]
    raw = features.design / features.design[:, -1:]
    expected = raw.T @ (2 * z.detach() @ layer.platonic_right["default"].detach().T)
    torch.testing.assert_close(left.grad, expected, rtol=1e-4, atol=1e-4)


def test_initialising_fills_an_adapter_that_names_its_features(task: TaskDescriptor, target: DualEncoder) -> None:
    view = target.at(site="features", features=1)
    model = get_peft_model(target.model, PlatonicConfig(site="features", features=view.site.features, strength=0.5))
    initialize_platonic_weights(model, task, target.processor)
    once = tiny_encoder(seed=2)
    transfer(task, once.at(site="features", features=1))
    torch.testing.assert_close(units(DualEncoder(model, target.processor)), units(once), rtol=0, atol=1e-6)
    for options in ({"site": "features"}, {"site": "input", "features": view.site.features}):
        with pytest.raises(PlatonicError, match='Expected `features` at site "features" and nowhere else'):
            PlatonicConfig(**options)  # type: ignore[arg-type]


def test_saved_it_loads_in_a_fresh_process_by_peft_alone(
    task: TaskDescriptor, target: DualEncoder, tmp_path: Path
) -> None:
    target.model.save_pretrained(tmp_path / "base")
    transfer(task, target, site="features").save_pretrained(tmp_path / "adapter")
    torch.save((target.preprocess(tiny_images(3)), target.encode_probes(tiny_images(3)).unit), tmp_path / "seen.pt")
    code = (
        "import sys, torch, hf_platonic; from pathlib import Path; p = Path(sys.argv[1])\n"
        "from peft import PeftModel; from transformers import CLIPModel\n"
        "m = PeftModel.from_pretrained(CLIPModel.from_pretrained(p / 'base'), p / 'adapter').eval()\n"
        "inputs, unit = torch.load(p / 'seen.pt')\n"
        "with torch.no_grad(): z = m.get_image_features(**inputs).pooler_output\n"
        "print(float((torch.nn.functional.normalize(z, dim=1) - unit).abs().max()))"
    )
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert float(run.stdout) < 1e-6
    shallow = tiny_parts()[0]
    shallow.vision_model.encoder.layers = shallow.vision_model.encoder.layers[:1]
    config = PlatonicConfig.from_pretrained(tmp_path / "adapter")
    config.base_sketch = None
    with pytest.raises(BaseMismatchError, match=r"a module `vision_model.encoder.layers.1` to read features from"):
        PeftModel.from_pretrained(shallow, tmp_path / "adapter", config=config)


def test_copies_of_a_model_read_their_own_features(task: TaskDescriptor, target: DualEncoder) -> None:
    inputs = target.preprocess(tiny_images(4))
    model = transfer(task, target, site="features", strength=1.0)
    with torch.no_grad():
        expected = model.get_image_features(**inputs).pooler_output
        for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(again.get_image_features(**inputs).pooler_output, expected)
            again.base_model.model.vision_model.encoder.layers[0].mlp.fc1.weight.mul_(2)
            changed = again.get_image_features(**inputs).pooler_output
            assert float((changed - expected).abs().max()) > 1e-4
            fresh = PeftModel(copy.deepcopy(again.unload()), model.peft_config["default"])
            operator = model.base_model.get_operator("default")
            fresh.base_model.load_factors("default", operator.left, operator.right)
            assert torch.equal(fresh.get_image_features(**inputs).pooler_output, changed)
        assert torch.equal(model.get_image_features(**inputs).pooler_output, expected)


def test_threads_do_not_see_each_others_features(task: TaskDescriptor, target: DualEncoder) -> None:
    model = transfer(task, target, site="features", strength=1.0)
    batches = [target.preprocess(tiny_images(4, seed=seed)) for seed in range(4)]
    found: dict[int, list[Tensor]] = {}

    def run(index: int) -> None:
        with torch.no_grad():
            found[index] = [model.get_image_features(**batches[index]).pooler_output for _ in range(5)]

    run(0)
    alone = found[0][0]
    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(row, alone) for row in found[0])
    for index in range(1, 4):
        assert all(torch.equal(row, found[index][0]) for row in found[index])


def test_the_edited_layer_alone_is_refused_and_nothing_is_left_behind(
    task: TaskDescriptor, target: DualEncoder
) -> None:
    inputs = target.preprocess(tiny_images(4))
    model = transfer(task, target, site="features")
    layer = model.base_model.model.visual_projection
    live = units(target)
    with torch.no_grad():
        pooled = model.base_model.model.vision_model(**inputs).pooler_output
        layer(pooled)  # of the same pass
        with pytest.raises(PlatonicError, match=r"4 rows of 20 features from .* got none.*not the edited layer alone"):
            layer(pooled)
        model.base_model.model.vision_model(**inputs)
        with pytest.raises(PlatonicError, match=r"3 rows of 20 features from .* got \(4, 20\)"):
            layer(pooled[:3])
        model.base_model.model.vision_model(**inputs)
        with model.disable_adapter():
            layer(pooled)
    assert layer._reader.take() == {}
    assert torch.equal(units(target), live)


def test_a_bank_keeps_what_its_entries_read(task: TaskDescriptor, target: DualEncoder, tmp_path: Path) -> None:
    view = target.at(site="features")
    bank = OperatorBank.solve({"a": task}, target, site="features")
    bank.save_pretrained(tmp_path)
    loaded = OperatorBank.from_pretrained(tmp_path)
    assert loaded.site == bank.site == view.site
    assert torch.equal(loaded.operators["a"].dense(), bank.operators["a"].dense())
    rows = view.encode_probes(tiny_images(5, seed=7))
    expected = bank.operators["a"].apply(rows.unit, rows.design)
    model = PeftModel.from_pretrained(target.model, tmp_path / "a")
    torch.testing.assert_close(units(DualEncoder(model, target.processor)), expected, rtol=0, atol=1e-5)


def test_a_joint_solve_of_one_term_is_the_closed_form_and_keeps_what_it_should(target: DualEncoder) -> None:
    base, tuned = pair("siglip")
    probes = ProbeSet(tiny_images(9), prompts=PROMPTS)
    own = extract(base, tuned, probes, store_base=True)
    options: dict[str, Any] = {"site": "features", "objective": "endpoint", "probe_ridge": 0.1}
    alone = solve_transfer(own, target, **options).operator
    joint = solve_transfer(own, target, combine="joint", **options).operator
    torch.testing.assert_close(joint.dense(), alone.dense(), rtol=1e-3, atol=1e-5)
    control = ProbeSet(tiny_images(9, seed=3), prompts=["a", "b"])
    view = target.at(site="features")
    rows = encode_probes(view, control)
    columns = encode_columns(target, control.columns)
    moved = []
    for weight in (1e-3, 1e3):
        found = solve_transfer(own, target, preserve=control, preserve_weight=weight, **options).operator
        moved.append(float(((rows.design @ found.left) @ found.right @ columns.T).norm()))
    assert moved[1] < 0.2 * moved[0]


def test_a_pipeline_runs_on_the_live_edit(target: DualEncoder) -> None:
    before = scores(target.model, target.processor, "image")
    model = transfer(task_of("clip"), target, site="features", strength=1.0).get_base_model()
    after = np.reshape(scores(model, target.processor, "image"), (2, 3))
    prompts = [f"This is a photo of {label}." for label in ("cat", "snow", "bird")]
    with torch.no_grad():
        cosines = target.encode_probes(tiny_images(2)).unit @ target.encode_prompts(prompts).T
        expected = (model.logit_scale.exp() * cosines).softmax(dim=1)
    np.testing.assert_allclose(after, expected.numpy(), rtol=0, atol=2e-5)
    assert np.abs(after.ravel() - before).max() > 1e-4


@pytest.mark.parametrize("fused", [False, True])
def test_long_clips_are_averaged_over_their_parts(fused: bool) -> None:
    family = "clap_fused" if fused else "clap"
    target = DualEncoder(*tiny_parts(family, seed=2), long_clips="mean")
    task = descriptor("clap")
    clips = tiny_clips(3, seed=5, seconds=2.5)
    view = target.at(site="features").encode_probes(clips)
    (operator,) = solve_operators([task], target, site="features")
    transfer(task, target, site="features", strength=0.7)
    expected = operator.apply(view.unit, view.design, strength=0.7)
    torch.testing.assert_close(target.encode_probes(clips).unit, expected, rtol=0, atol=1e-5)


def test_an_adapter_moves_affinities_further_than_at_the_output(task: TaskDescriptor) -> None:
    assert task.probes is not None
    found = {}
    for site in ("output", "features"):
        target = tiny_encoder("metaclip_2", seed=2)
        before = affinities(target, task.probes)
        transfer(task, target, site=site, strength=1.0)  # type: ignore[arg-type]
        found[site] = float((affinities(target, task.probes) - before - task.delta).norm())
    assert found["features"] < found["output"]
    assert len(PROMPTS) == task.grid.m
