"""LoRA matching: the objective, which adapters it trains, and that a training is what it says."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.tracking import GeneralTracker
from peft import AdaLoraConfig, IA3Config, LoHaConfig, LoraConfig, PeftConfig, PeftModel, PromptTuningConfig, TaskType
from test_extraction import PROMPTS, pair
from test_transfers import affinities, descriptor
from tiny import FAMILIES, SOURCES, tiny_clips, tiny_encoder, tiny_images, tiny_parts, tiny_probes

from hf_platonic import MatchingArguments, ProbeSet, match_affinities, playground, transfer
from hf_platonic.descriptor import TaskDescriptor
from hf_platonic.encoders.encoder import DualEncoder
from hf_platonic.encoding import encode_columns, encode_probes
from hf_platonic.errors import EncoderError, PlatonicError, ProbeError
from hf_platonic.extraction import extract
from hf_platonic.matching import Matching, default_lora_config, matching_losses
from hf_platonic.matching.adapters import add_adapter, require_gradients
from hf_platonic.matching.objective import ProbeTower
from hf_platonic.matching.rows import Rows, Steps, held_out_rows
from hf_platonic.objectives import wanted_change
from hf_platonic.solutions import solve_operators

OTHER = ["red", "green", "blue", "a dark one"]


@pytest.fixture(scope="module")
def task() -> TaskDescriptor:
    return descriptor()


@pytest.fixture(scope="module")
def second() -> TaskDescriptor:
    return descriptor("siglip", n=7, seed=3, prompts=OTHER)


def fit(terms: Any, target: DualEncoder, config: PeftConfig | None = None, **options: Any) -> Matching:
    chosen = {"max_steps": 4, "batch_size": 8, "learning_rate": 1e-2, **options}
    return match_affinities(terms, target, lora_config=config, training_args=MatchingArguments(**chosen))


def trained(model: PeftModel) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if "lora_" in name}


def test_the_objective_is_a_mean_over_each_probes_own_prompts() -> None:
    generator = torch.Generator().manual_seed(0)
    unit = torch.nn.functional.normalize(torch.randn(5, 3, generator=generator), dim=1)
    columns = [torch.nn.functional.normalize(torch.randn(m, 3, generator=generator), dim=1) for m in (2, 4)]
    grids = [1, 0, 1, 1, 0]
    goals = [torch.randn(len(columns[grid]), generator=generator) for grid in grids]
    expected = [
        sum(float(unit[row] @ columns[grid][j] - goals[row][j]) ** 2 for j in range(len(columns[grid])))
        / len(columns[grid])
        for row, grid in enumerate(grids)
    ]
    assert matching_losses(unit, columns, goals, grids).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("family", ["clip", "siglip", "vision-text-dual-encoder", "clap"])
def test_untrained_it_has_the_loss_of_the_descriptors_themselves(family: str) -> None:
    first = descriptor("clap" if family == "clap" else "clip")
    terms = [first, -0.5 * descriptor("clap" if family == "clap" else "siglip", n=7, seed=3, prompts=OTHER)]
    found = fit(terms, tiny_encoder(family, seed=2), max_steps=1, batch_size=64, weight_decay=0.0)
    rows = torch.cat([term.delta.square().mean(dim=1) for term in terms])
    assert found.losses == [(1, pytest.approx(float(rows.mean()), rel=1e-5))]


@pytest.mark.parametrize("objective", ["change", "endpoint"])
def test_untrained_it_has_the_loss_of_what_the_objective_asks_for(objective: Any) -> None:
    base, tuned = pair()
    probes = ProbeSet(tiny_probes(base, 12), prompts=PROMPTS)
    term = extract(base, tuned, probes, store_base=True)
    target = tiny_encoder("siglip", seed=2)
    asked = wanted_change([term], affinities(target, probes), objective=objective, calibration="spread")
    arguments = MatchingArguments(max_steps=1, batch_size=64, weight_decay=0.0)
    found = match_affinities(term, target, objective=objective, calibration="spread", training_args=arguments)
    assert found.losses == [(1, pytest.approx(float(asked.square().mean()), rel=1e-4))]
    assert (found.provenance["objective"], found.provenance["calibration"]) == (objective, "spread")


def test_trains_terms_of_several_grids_jointly(task: TaskDescriptor, second: TaskDescriptor) -> None:
    target = tiny_encoder("metaclip_2", seed=2)
    assert task.probes is not None
    assert second.probes is not None
    sets = (task.probes, second.probes)
    before = [affinities(target, probes) for probes in sets]
    found = fit([task, second], target, max_steps=60, num_train_epochs=60)
    after = [affinities(target, probes) for probes in sets]
    for term, a, b in zip((task, second), before, after, strict=True):
        assert float((b - a - term.delta).square().mean()) < 0.5 * float(term.delta.square().mean())
    assert found.losses[-1][1] < 0.4 * found.losses[0][1]
    assert isinstance(found.model, PeftModel)
    assert target.model is found.model
    assert not any(module.training for module in found.model.modules())
    assert found.provenance["method"] == "lora"
    assert [term["grid"] for term in found.provenance["terms"]] == [t.grid.fingerprint for t in (task, second)]


@pytest.mark.parametrize("family", [*FAMILIES, *SOURCES])
def test_every_trainable_tensor_of_the_default_adapter_gets_a_gradient(family: str) -> None:
    target = DualEncoder(*tiny_parts(family))
    batch = target.preprocess(tiny_probes(target, 2))
    config = default_lora_config(target, batch)
    model = add_adapter(target, config, "default", seed=0)
    require_gradients(ProbeTower(target), batch)
    layers = {name.partition(".lora_A")[0] for name, _ in model.named_parameters() if "lora_A" in name}
    assert layers
    assert not any("text" in name for name in layers)
    ends = {name.rpartition(".")[2] for name in layers}
    expected = {
        "align": {"expand_conv", "project_conv", "squeeze", "reduce", "expand"},
        "blip": {"qkv"},
        "blip_itc": {"qkv"},
    }.get(family, {"q_proj", "v_proj", "query", "value"})
    assert ends <= expected


def test_a_convolutional_tower_gets_its_pointwise_layers() -> None:
    target = DualEncoder.from_pretrained(playground.model_path("convnext-bert"))
    config = default_lora_config(target, target.preprocess(tiny_images(2, size=(32, 32))))
    assert {name.rpartition(".")[2] for name in config.target_modules} == {"pwconv1", "pwconv2"}
    assert (config.r, config.lora_alpha, config.lora_dropout) == (16, 32, 0.0)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=2, target_modules=["out_proj"]),  # one of them inside SigLIP's nn.MultiheadAttention
        LoraConfig(r=2, target_modules=r".*text_model.*q_proj"),
        LoraConfig(r=2, target_modules=r".*vision_model.*q_proj", bias="all"),
    ],
    ids=["multihead attention", "text tower", "all biases"],
)
def test_refuses_tensors_without_a_gradient_and_leaves_the_target_as_it_was(
    config: LoraConfig, task: TaskDescriptor
) -> None:
    target = tiny_encoder("siglip", seed=2)
    inner, before = target.model, {k: v.clone() for k, v in target.model.state_dict().items()}
    with pytest.raises(PlatonicError, match=r"Expected a gradient in each of \d+ trainable tensors, got none in \d+"):
        fit(task, target, config)
    assert target.model is inner
    assert all(parameter.requires_grad for parameter in inner.parameters())
    assert inner.state_dict().keys() == before.keys()
    assert all(torch.equal(v, before[k]) for k, v in inner.state_dict().items())


@pytest.mark.parametrize(
    "config",
    [
        # PEFT reaches the second layer, and ends there.
        LoraConfig(target_modules=["q_proj", "fc1"], rank_pattern={"fc1": 0}),
        LoraConfig(target_modules=r"text_model.*q_proj", modules_to_save=["post_layernorm"]),
    ],
    ids=["half of it", "copies"],
)
def test_an_adapter_that_fails_leaves_every_layer_as_it_was(task: TaskDescriptor, config: PeftConfig) -> None:
    target = tiny_encoder("siglip", seed=2)
    inner, before = target.model, dict(target.model.named_modules())
    with pytest.raises((ValueError, PlatonicError)):
        fit(task, target, config)
    assert target.model is inner
    assert dict(inner.named_modules()) == before
    assert len(trained(fit(task, target, max_steps=1).model)) == 8


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LoraConfig(task_type=TaskType.FEATURE_EXTRACTION, target_modules=["q_proj"]), "Expected `task_type` None"),
        (PromptTuningConfig(num_virtual_tokens=2), "Expected `task_type` None|got PROMPT_TUNING"),
        (AdaLoraConfig(total_step=10, target_modules=["q_proj"]), "got ADALORA"),
        (LoraConfig(target_modules=["q_proj"], inference_mode=True), "trainable tensors, got none"),
    ],
    ids=["task type", "prompt", "adalora", "frozen"],
)
def test_refuses_adapters_it_cannot_train(config: PeftConfig, message: str, task: TaskDescriptor) -> None:
    with pytest.raises(PlatonicError, match=message):
        fit(task, tiny_encoder(seed=2), config)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=2, use_dora=True, target_modules=r"vision_model.*q_proj"),
        LoHaConfig(r=2, target_modules=r"vision_model.*v_proj"),
        IA3Config(target_modules=r"vision_model.*(fc2|v_proj)", feedforward_modules=r"vision_model.*fc2"),
    ],
    ids=["DoRA", "LoHa", "IA3"],
)
def test_trains_other_adapters_of_the_probe_tower(config: PeftConfig, task: TaskDescriptor) -> None:
    found = fit(task, tiny_encoder(seed=2), config, max_steps=12, logging_steps=1)
    assert found.losses[-1][1] < found.losses[0][1]


def test_parts_of_a_batch_recomputed_layers_and_memory_change_nothing(task: TaskDescriptor) -> None:
    whole = trained(fit(task, tiny_encoder(seed=2)).model)
    for options in ({"gradient_accumulation_steps": 3}, {"gradient_checkpointing": True}):
        again = trained(fit(task, tiny_encoder(seed=2), **options).model)
        for name, values in whole.items():
            torch.testing.assert_close(again[name], values, rtol=1e-3, atol=1e-5)
    for workers in (0, 1):
        arguments = MatchingArguments(max_steps=4, batch_size=8, learning_rate=1e-2, cache_gib=0.0)
        found = match_affinities(task, tiny_encoder(seed=2), training_args=arguments, num_workers=workers)
        assert all(torch.equal(values, whole[name]) for name, values in trained(found.model).items())


def test_gradient_checkpointing_needs_a_model_that_has_it(task: TaskDescriptor) -> None:
    target = tiny_encoder(seed=2)
    target.model.supports_gradient_checkpointing = False
    with pytest.raises(PlatonicError, match="Expected a model with gradient checkpointing, got CLIPModel"):
        fit(task, target, gradient_checkpointing=True)


def test_the_global_random_state_is_left_alone_and_the_seed_decides(task: TaskDescriptor) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = trained(fit(task, tiny_encoder(seed=2), seed=1).model)
    assert torch.equal(torch.rand(3), expected)
    again, other = (trained(fit(task, tiny_encoder(seed=2), seed=seed).model) for seed in (1, 2))
    assert all(torch.equal(values, first[name]) for name, values in again.items())
    assert not all(torch.equal(values, first[name]) for name, values in other.items())


def test_batches_are_full_and_see_every_probe_equally_often() -> None:
    rows = [3, 5, 7, 11, 13]
    steps = Steps(rows, 4, start=0, stop=5, seed=0)
    batches = list(steps)
    assert [len(batch) for batch in batches] == [4] * 5
    assert sorted(row for batch in batches for row in batch) == sorted(rows * 4)
    assert list(Steps(rows, 4, start=2, stop=5, seed=0)) == batches[2:]
    shares = [Steps(rows, 4, start=0, stop=5, parts=2, processes=2, process=p, seed=0) for p in (0, 1)]
    for step in range(5):
        together = [row for part in (0, 1) for share in shares for row in share[2 * step + part]]
        assert together == batches[step]
    assert steps[1:3] == batches[1:3]
    with pytest.raises(IndexError, match="Expected an index below 5, got 5"):
        steps[5]


def test_a_held_out_slice_is_of_every_grid() -> None:
    sets = [ProbeSet(tiny_images(n), prompts=PROMPTS) for n in (10, 1, 4)]
    held = held_out_rows(Rows(tiny_encoder(), sets), 0.2, seed=0)
    assert [sum(first <= row < last for row in held) for first, last in ((0, 10), (10, 11), (11, 15))] == [2, 0, 1]
    assert held_out_rows(Rows(tiny_encoder(), sets), 0.0, seed=0) == []


def test_stops_early_and_keeps_the_best(task: TaskDescriptor) -> None:
    target = tiny_encoder(seed=2)
    assert task.probes is not None
    before = affinities(target, task.probes)
    found = fit(task, target, learning_rate=30.0, held_out=0.25, patience=2, max_steps=40)
    assert found.steps < 40
    assert len(found.held_out) == 3  # before training, and two epochs that were worse
    torch.testing.assert_close(affinities(target, task.probes), before, rtol=0, atol=1e-6)

    found = fit(task, tiny_encoder(seed=2), held_out=0.25, max_steps=12, num_train_epochs=20)
    assert found.steps == 12
    assert [step for step, _ in found.held_out] == [0, 2, 4, 6, 8, 10, 12]


class Recorder(GeneralTracker):
    """Keeps what is logged, and breaks off at a step."""

    name = "recorder"
    requires_logging_directory = False

    def __init__(self, stop: int | None = None) -> None:
        super().__init__()
        self.values: list[tuple[int | None, dict[str, Any]]] = []
        self.config: dict[str, Any] = {}
        self.finished, self.stop = False, stop

    @property
    def tracker(self) -> list[Any]:
        return self.values

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        if step == self.stop:
            raise ConnectionError("broken off")
        self.values.append((step, values))

    def finish(self) -> None:
        self.finished = True


def test_trackers_see_every_value(task: TaskDescriptor) -> None:
    recorder = Recorder()
    found = fit(task, tiny_encoder(seed=2), report_to=(recorder,), logging_steps=2, held_out=0.2)
    assert recorder.config["learning_rate"] == 1e-2
    assert [(step, v["loss"]) for step, v in recorder.values if "loss" in v] == found.losses
    assert [(s, v["held_out_loss"]) for s, v in recorder.values if "held_out_loss" in v] == found.held_out[1:]
    assert recorder.finished
    with pytest.raises(ImportError, match=r"Expected an installed tracker among .* got 'comet_ml'"):
        fit(task, tiny_encoder(seed=2), report_to=("comet_ml",))


def test_a_resumed_training_equals_an_uninterrupted_one_bit_for_bit(task: TaskDescriptor, tmp_path: Path) -> None:
    config = {"r": 4, "target_modules": r"vision_model.*[qv]_proj", "lora_dropout": 0.3}
    options: dict[str, Any] = {
        **{"max_steps": 7, "logging_steps": 1, "held_out": 0.2, "patience": 9},
        **{"save_steps": 2, "output_dir": tmp_path / "b", "resume_from_checkpoint": True},
    }
    whole = fit(task, tiny_encoder(seed=2), LoraConfig(**config), **{**options, "output_dir": tmp_path / "a"})
    recorder = Recorder(stop=6)
    with pytest.raises(ConnectionError, match="broken off"):
        fit(task, tiny_encoder(seed=2), LoraConfig(**config), **options, report_to=(recorder,))
    assert recorder.finished
    assert [path.name for path in (tmp_path / "b").glob("checkpoint-*")] == ["checkpoint-4"]
    resumed = fit(task, tiny_encoder(seed=2), LoraConfig(**config), **options)
    assert resumed.losses == whole.losses
    assert resumed.held_out == whole.held_out
    before = trained(whole.model)
    assert all(torch.equal(values, before[name]) for name, values in trained(resumed.model).items())
    for name in ("adapter_model.safetensors", "matching.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()

    with pytest.raises(PlatonicError, match="Expected a checkpoint of training"):
        fit(-task, tiny_encoder(seed=2), LoraConfig(**config), **options)


PLAIN = """
import sys, torch
sys.modules["hf_platonic"] = None  # importing it is an error now
from peft import PeftModel
from transformers import SiglipModel
base, inputs, *adapters = sys.argv[1:]
for adapter in adapters:
    model = PeftModel.from_pretrained(SiglipModel.from_pretrained(base), adapter).get_base_model().eval()
    with torch.no_grad():
        found = model.get_image_features(**torch.load(inputs)).pooler_output
    torch.save(torch.nn.functional.normalize(found, dim=1), adapter + "/out.pt")
"""


def test_peft_alone_loads_and_merges_the_saved_adapter(task: TaskDescriptor, tmp_path: Path) -> None:
    tiny_encoder("siglip", seed=2).model.save_pretrained(tmp_path / "base")
    assert task.probes is not None
    inputs = tiny_encoder("siglip").preprocess([task.probes[i] for i in range(3)])
    torch.save(inputs, tmp_path / "inputs.pt")
    targets = {}
    for start in (None, "closed_form"):
        targets[str(start)] = tiny_encoder("siglip", seed=2)
        model = fit(task, targets[str(start)], output_dir=tmp_path / str(start), warm_start=start).model
    with pytest.warns(UserWarning, match="have invalid shape"):  # PEFT's false alarm, see `warm_start`
        model.save_pretrained(tmp_path / "by hand")
    written = [tmp_path / name / "adapter_model.safetensors" for name in ("by hand", "closed_form")]
    assert written[0].read_bytes() == written[1].read_bytes()
    places = [tmp_path / name for name in ("base", "inputs.pt", *targets)]
    subprocess.run([sys.executable, "-c", PLAIN, *map(str, places)], check=True, capture_output=True)
    for name, target in targets.items():
        live = target.probe_features(inputs).unit
        torch.testing.assert_close(torch.load(tmp_path / name / "out.pt"), live, rtol=0, atol=1e-5)
        target.model = target.model.merge_and_unload()
        torch.testing.assert_close(target.probe_features(inputs).unit, live, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["clip", "siglip", "clap", "groupvit"])
def test_the_closed_form_is_an_exact_start_and_stays(family: str) -> None:
    task = descriptor("clap" if family == "clap" else "clip")
    assert task.probes is not None
    (operator,) = solve_operators([task], tiny_encoder(family, seed=2))
    base = tiny_encoder(family, seed=2)
    features = encode_probes(base, task.probes)
    expected = operator.apply(features.unit, features.design)

    target = tiny_encoder(family, seed=2)
    start = fit(task, target, warm_start="closed_form", max_steps=1, learning_rate=1e-9, batch_size=64)
    torch.testing.assert_close(encode_probes(target, task.probes).unit, expected, rtol=0, atol=1e-5)
    rest = expected @ encode_columns(base, task.grid.columns).T - affinities(base, task.probes) - task.delta
    assert start.losses == [(1, pytest.approx(float(rest.square().mean()), rel=1e-4))]

    target = tiny_encoder(family, seed=2)
    found = fit(task, target, warm_start="closed_form", max_steps=30, num_train_epochs=30)
    assert found.losses[-1][1] < start.losses[0][1]
    last = target.site.module
    first, after = trained(start.model), trained(found.model)
    assert all(torch.equal(after[name], first[name]) for name in after if f"{last}." in name)
    assert any(not torch.equal(after[name], first[name]) for name in after)
    assert all(not values.any() for name, values in after.items() if name.endswith(".bias") and last not in name)


def test_what_the_closed_form_start_cannot_say_exactly_is_refused(task: TaskDescriptor) -> None:
    def refused(message: str, config: PeftConfig | None, family: str = "clip") -> None:
        with pytest.raises(PlatonicError, match=message):
            fit(task, tiny_encoder(family, seed=2), config, warm_start="closed_form")

    layers = ["vision_model.encoder.layers.0.self_attn.q_proj"]
    refused("Expected a LoraConfig with a list", LoHaConfig(target_modules=layers))
    refused("Expected a LoraConfig with a list", LoraConfig(target_modules=".*q_proj"))
    refused("Expected a plain LoRA for warm_start", LoraConfig(target_modules=layers, use_dora=True))
    refused("without visual_projection", LoraConfig(target_modules=[*layers, "visual_projection"]))
    target = tiny_encoder("siglip", seed=2)
    torch.nn.Module.register_parameter(target.model.get_submodule(layers[0]), "bias", None)
    with pytest.raises(PlatonicError, match=r"Expected layers with a bias beside vision_model\.head\.mlp\.fc2"):
        fit(task, target, LoraConfig(target_modules=layers), warm_start="closed_form")


def test_transfer_dispatches_and_keeps_the_methods_options_apart(task: TaskDescriptor) -> None:
    arguments = MatchingArguments(max_steps=2, batch_size=8)
    target = tiny_encoder(seed=2)
    model = transfer(task, target, method="lora", training_args=arguments, adapter_name="mine")
    again = match_affinities(task, tiny_encoder(seed=2), training_args=arguments, adapter_name="mine").model
    assert model.peft_config["mine"].peft_type.value == "LORA"
    first = trained(model)
    assert all(torch.equal(values, first[name]) for name, values in trained(again).items())

    with pytest.raises(EncoderError, match=r"(?s)Expected a target without adapters .*merge_and_unload"):
        transfer(task, target, method="lora")
    assert target.model is model
    assert any("lora_A" in name for name, _ in model.named_parameters())
    with pytest.raises(PlatonicError, match=r'Expected `strength`, `site` with method="closed_form" alone'):
        transfer(task, tiny_encoder(seed=2), method="lora", strength=0.5, site="output")
    with pytest.raises(PlatonicError, match=r'Expected `combine` with method="closed_form" alone'):
        transfer(task, tiny_encoder(seed=2), method="lora", combine="joint")
    with pytest.raises(PlatonicError, match=r'Expected `training_args` with method="lora" alone'):
        transfer(task, tiny_encoder(seed=2), training_args=arguments)
    with pytest.raises(PlatonicError, match='Expected `method` "closed_form" or "lora", got \'qlora\''):
        transfer(task, tiny_encoder(seed=2), method="qlora")  # type: ignore[arg-type]
    with pytest.raises(PlatonicError, match="Expected `training_args` to be MatchingArguments, got dict"):
        transfer(task, tiny_encoder(seed=2), method="lora", training_args={})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"learning_rate": 0.0}, "Expected `learning_rate` to be a finite number above 0, got 0.0"),
        ({"weight_decay": -1}, "Expected `weight_decay` to be a finite number of at least 0"),
        ({"batch_size": 1.5}, "Expected `batch_size` to be a whole number of at least 1, got 1.5"),
        ({"held_out": 1.0}, r"Expected `held_out` to be a share in \[0, 1\)"),
        ({"max_steps": True}, "Expected `max_steps`"),
        ({"max_grad_norm": float("nan")}, "Expected `max_grad_norm`"),
        ({"patience": 2}, "Expected `held_out` above 0 with `patience`"),
        ({"save_steps": 2}, "Expected `output_dir` with `save_steps`"),
        ({"warm_start": "pca"}, 'Expected `warm_start` to be "closed_form" or None'),
        ({"mixed_precision": "int4"}, "Expected `mixed_precision`"),
        ({"report_to": "wandb"}, r"Expected a tuple of trackers, got 'wandb'. Pass \('wandb',\)"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlatonicError, match=message):
        MatchingArguments(**options)


def test_probes_of_another_modality_are_refused(task: TaskDescriptor) -> None:
    with pytest.raises(ProbeError, match="audio"):
        fit(task, tiny_encoder("clap", seed=2))


def test_shows_bars_where_asked(task: TaskDescriptor, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = MatchingArguments(max_steps=2, batch_size=8, logging_steps=1)
    match_affinities(task, tiny_encoder(seed=2), training_args=arguments, progress=True)
    shown = capsys.readouterr().err
    assert "base affinities" in shown
    assert "matching" in shown
    assert "loss=" in shown


def test_more_parts_than_probes_and_a_loss_that_is_not_finite_are_refused(task: TaskDescriptor) -> None:
    with pytest.raises(PlatonicError, match="at least one probe for each of 1 processes and 9 accumulation steps"):
        fit(task, tiny_encoder(seed=2), batch_size=8, gradient_accumulation_steps=9)
    broken = extract(*pair(), task.probes)
    broken.delta[0, 0] = float("inf")
    with pytest.raises(PlatonicError, match="Expected a finite loss, got inf at step 1"):
        fit(broken, tiny_encoder(seed=2), logging_steps=1, batch_size=64)


def test_clips_in_parts_are_trained_as_they_are_read() -> None:
    def target() -> DualEncoder:
        return DualEncoder(*tiny_parts("clap", seed=2), long_clips="mean")

    base, tuned = (DualEncoder(e.model, e.processor, long_clips="mean") for e in pair("clap"))
    clips = [*tiny_clips(3), *tiny_clips(3, seed=1, seconds=2.3)]
    task = extract(base, tuned, ProbeSet(clips, prompts=PROMPTS))
    found = fit(task, target(), max_steps=1, batch_size=64)
    assert found.losses == [(1, pytest.approx(float(task.delta.square().mean()), rel=1e-4))]


def test_the_base_is_read_in_the_precision_of_the_training(task: TaskDescriptor) -> None:
    AcceleratorState._reset_state()  # accelerate knows one precision a process
    try:
        found = fit(task, tiny_encoder(seed=2), max_steps=1, batch_size=64, mixed_precision="bf16")
    finally:
        AcceleratorState._reset_state()
    assert found.losses == [(1, pytest.approx(float(task.delta.square().mean()), rel=1e-3))]
    single = trained(fit(task, tiny_encoder(seed=2), max_steps=1, batch_size=64).model)
    assert any(not torch.equal(values, single[name]) for name, values in trained(found.model).items())
