"""The demo: descriptors from fine-tuned families, carried to every other family, on the models the package ships.

Nothing is trained and nothing is downloaded. Strengths and ridges are the paper's, fixed beforehand; labels are used
for accuracies alone.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from . import playground
from ._files import whole_folder
from ._processes import worker_processes
from .bank import OperatorBank
from .descriptor import TaskDescriptor
from .encoders.encoder import DualEncoder
from .encoding import encode_columns, encode_probes
from .evaluation import EvaluationSet, accuracy, evaluate
from .extraction import extract
from .playground.tasks import Modality
from .probes import ProbeSet
from .transfers import transfer
from .views import Memory, RememberingEncoder, View

__all__ = ["format_report", "run_demo"]

STRENGTHS = (1.0, 0.5)  # the second is what the paper's addition scripts use
_BATCH = 100


@dataclass(frozen=True, eq=False)
class _Suite:
    """All accuracies of one modality's models on its tasks, by model and task."""

    models: tuple[str, ...]
    tasks: tuple[str, ...]
    encoders: dict[str, DualEncoder]
    descriptors: dict[tuple[str, str], TaskDescriptor]  # by (model, task)
    tests: dict[str, EvaluationSet]  # by task or control
    zero_shot: dict[tuple[str, str], float]
    fine_tuned: dict[tuple[str, str], float]
    edited: dict[float, dict[tuple[str, str, str], float]]  # by strength, then (source, target, task)
    addition: list[dict[str, Any]]
    negation: list[dict[str, Any]]


def run_demo(*, out: str | Path | None = None, progress: bool | None = None) -> dict[str, Any]:
    """The demo's figures, as plain JSON values.

    Args:
        out: Folder for the saved descriptor and the merged checkpoint; a temporary one if None.
        progress: Whether to show bars; None: where stderr is a terminal.

    Returns:
        `zero_shot`, `fine_tuned`, `own_gain`, `transfer_gain`, `retention`, `addition`, `negation`, `audio`,
        `round_trip` and `seconds`. Accuracies and gains are shares in [0, 1]; each has a mean and per-task detail.
    """
    start = time.perf_counter()
    _settle()
    with worker_processes(1, _settle) as submit:  # sounds beside images, a core each
        audio = submit(_audio)
        images = _run_suite("image", progress=progress)
        report = _summary(images)
        report["addition"] = _composed(images.addition)
        report["negation"] = _composed(images.negation)
        report["audio"] = audio.result()
    with tempfile.TemporaryDirectory() as folder:
        report["round_trip"] = _round_trip(images, Path(folder if out is None else out))
    report["seconds"] = time.perf_counter() - start
    return report


def _audio() -> dict[str, Any]:
    return _summary(_run_suite("audio", progress=False))


def _settle() -> None:
    """One thread, since these models are too small to gain from more, and no words of other libraries in between."""
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # transformers 5.24 warns of its own default configuration whenever it logs SigLIP's
    # peft 0.21 asks every model it wraps for a name that transformers 5.24 has deprecated.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)


def _run_suite(modality: Modality, *, progress: bool | None) -> _Suite:
    models = playground.model_names(modality)
    tasks = playground.IMAGE_TASKS if modality == "image" else playground.AUDIO_TASKS
    loaded = {name: playground.load_task(name) for name in tasks}
    probes = {name: ProbeSet(data.split("probes").inputs, **_prompts(data)) for name, data in loaded.items()}
    loaded.update({name: playground.load_control(name) for name in playground.controls(modality)})
    tests = {}
    for name, data in loaded.items():
        split = data.split("test")
        tests[name] = EvaluationSet(ProbeSet(split.inputs, **_prompts(data)), split.labels or ())
    suite = _Suite(models, tasks, {}, {}, tests, {}, {}, {s: {} for s in STRENGTHS}, [], [])
    views: dict[str, dict[str, View]] = {}
    memories: dict[str, Memory] = {model: {} for model in models}
    for model in models:
        encoder = _load(model, None, memories[model])
        suite.encoders[model] = encoder
        views[model] = {name: View.of(encoder, data, batch_size=_BATCH) for name, data in tests.items()}
        for task in _bar(tasks, f"{model}: extract", progress):
            tuned = _load(model, task, memories[model])
            suite.descriptors[model, task] = extract(
                encoder, tuned, probes[task], name=task, batch_size=_BATCH, progress=False
            )
            suite.zero_shot[model, task] = views[model][task].accuracy()
            suite.fine_tuned[model, task] = View.of(tuned, tests[task], batch_size=_BATCH).accuracy()
    for model in _bar(models, "transfer", progress):
        _edit(suite, model, views[model])
        memories[model].clear()
    return suite


def _edit(suite: _Suite, target: str, views: Mapping[str, View]) -> None:
    """Every family's descriptors on one target; then pairs added and tasks negated, from one other family each."""
    bank = OperatorBank.solve(suite.descriptors, suite.encoders[target], batch_size=_BATCH, progress=False)
    for (source, task), operator in bank.operators.items():
        for strength, found in suite.edited.items():
            found[source, target, task] = views[task].accuracy(operator, strength=strength)
    control = [name for name in suite.tests if name not in suite.tasks]
    source = suite.models[(suite.models.index(target) + 1) % len(suite.models)]

    def measured(coefficients: Mapping[tuple[str, str], float], strength: float) -> dict[str, Any]:
        operator = bank.compose(coefficients)
        names = [task for _, task in coefficients]
        return {
            "source": source,
            "target": target,
            "tasks": names,
            "strength": strength,
            "before": {name: views[name].accuracy() for name in names},
            "after": {name: views[name].accuracy(operator, strength=strength) for name in names},
            "control_before": {name: views[name].accuracy() for name in control},
            "control_after": {name: views[name].accuracy(operator, strength=strength) for name in control},
        }

    for first, second in zip(suite.tasks, (*suite.tasks[1:], suite.tasks[0]), strict=True):
        suite.addition.append(measured({(source, first): 1.0, (source, second): 1.0}, 0.5))
        suite.negation.append(measured({(source, first): -1.0}, 1.0))


def _summary(suite: _Suite) -> dict[str, Any]:
    own = {s: {(m, t): suite.edited[s][m, m, t] for m in suite.models for t in suite.tasks} for s in STRENGTHS}

    def others(target: str, task: str, strength: float) -> float:
        return _mean(suite.edited[strength][s, target, task] for s in suite.models if s != target)

    moved = {s: {key: others(*key, s) for key in own[s]} for s in STRENGTHS}
    full, half = STRENGTHS

    def gain(scores: Mapping[tuple[str, str], float]) -> dict[tuple[str, str], float]:
        return {key: score - suite.zero_shot[key] for key, score in scores.items()}

    def table(strength: float) -> dict[str, dict[str, float]]:
        return {
            source: {
                target: _mean(
                    suite.edited[strength][source, target, task] - suite.zero_shot[target, task]
                    for task in suite.tasks
                )
                for target in suite.models
            }
            for source in suite.models
        }

    by_pair = table(full)
    fine_tuning = sum(gain(suite.fine_tuned).values())
    return {
        "zero_shot": _by(suite.zero_shot),
        "fine_tuned": _by(suite.fine_tuned),
        "own_gain": {
            **_by(gain(own[full])),
            "share_of_fine_tuning": sum(gain(own[full]).values()) / fine_tuning,
            "half_strength": _by(gain(own[half])),
        },
        "transfer_gain": {
            **_by(gain(moved[full])),
            "share_of_fine_tuning": sum(gain(moved[full]).values()) / fine_tuning,
            "half_strength": _by(gain(moved[half])),
            "source_by_target": by_pair,
        },
        "retention": {
            "mean": sum(gain(moved[full]).values()) / sum(gain(own[full]).values()),
            "half_strength": sum(gain(moved[half]).values()) / sum(gain(own[half]).values()),
            "per_task": {
                task: _ratio(
                    sum(gain(moved[full])[m, task] for m in suite.models),
                    sum(gain(own[full])[m, task] for m in suite.models),
                )
                for task in suite.tasks
            },
            "source_by_target": {
                source: {target: _ratio(by_pair[source][target], by_pair[target][target]) for target in suite.models}
                for source in suite.models
            },
        },
    }


def _composed(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over all cases, and per task over the cases it is part of."""
    tasks = list(dict.fromkeys(task for case in cases for task in case["tasks"]))
    fields = ("before", "after", "control_before", "control_after")
    return {
        "mean": {field: _mean(_mean(case[field].values()) for case in cases) for field in fields},
        "per_task": {
            task: {field: _mean(case[field][task] for case in cases if task in case["tasks"]) for field in fields[:2]}
            for task in tasks
        },
        "strength": cases[0]["strength"],
        "cases": list(cases),
    }


def _round_trip(suite: _Suite, folder: Path) -> dict[str, Any]:
    """Saves a descriptor and a merged checkpoint, and reads both back as a stranger would."""
    from transformers import AutoModel

    source, target = suite.models[0], suite.models[-1]
    task = suite.tasks[-1]
    saved = suite.descriptors[source, task]
    saved.save_pretrained(folder / "descriptor", include_probes=True)
    loaded = TaskDescriptor.from_pretrained(folder / "descriptor")

    encoder = DualEncoder.from_pretrained(playground.model_path(target))
    model = transfer(loaded, encoder, strength=1.0, batch_size=_BATCH)
    test = suite.tests[task]
    live = evaluate(encoder, {task: test}, batch_size=_BATCH)
    merged = model.merge_and_unload()
    with whole_folder(folder / "merged") as whole:
        merged.save_pretrained(whole)
        encoder.processor.save_pretrained(whole)
    ordinary = DualEncoder.from_pretrained(folder / "merged")
    again = encode_probes(ordinary, test.probes, batch_size=_BATCH)
    return {
        "source": source,
        "target": target,
        "task": task,
        "descriptor_equal": bool(torch.equal(saved.delta, loaded.delta)),
        "accuracy_before": live.before[task],
        "accuracy_live_adapter": live.after[task],
        "accuracy_merged_and_reloaded": accuracy(
            again.unit, encode_columns(ordinary, test.probes.columns), test.labels
        ),
        "merged_class": type(ordinary.model).__name__,
        "same_parameter_names": set(AutoModel.from_pretrained(playground.model_path(target)).state_dict())
        == set(ordinary.model.state_dict()),
    }


def format_report(report: Mapping[str, Any]) -> str:
    """The report as text for a terminal, at most 100 columns wide."""
    lines = ["Image tasks, mean accuracy over eight tasks; closed form, one other family as source", ""]
    lines += _families(report)
    lines += ["", "Gain by source (rows) and target (columns), s = 1; own descriptor on the diagonal", ""]
    lines += _matrix(report["transfer_gain"]["source_by_target"])
    lines += [
        "",
        f"Retention {report['retention']['mean']:.2f} at s = 1, {report['retention']['half_strength']:.2f} at s = .5",
        "",
    ]
    for name, title in (("addition", "Two tasks added"), ("negation", "One task negated")):
        found = report[name]
        mean = found["mean"]
        lines.append(
            f"{title} (s = {found['strength']:g}, {len(found['cases'])} cases): task {mean['before']:.3f} -> "
            f"{mean['after']:.3f}, control {mean['control_before']:.3f} -> {mean['control_after']:.3f}"
        )
    lines += ["", "Audio tasks, mean accuracy over four tasks", ""]
    lines += _families(report["audio"])
    lines.append(f"Retention {report['audio']['retention']['mean']:.2f} at s = 1")
    trip = report["round_trip"]
    equal = "bit-equal" if trip["descriptor_equal"] else "NOT EQUAL"
    lines += [
        "",
        f"Saved and reloaded: the descriptor of {trip['task']} from {trip['source']} is {equal};",
        f"{trip['target']} before {trip['accuracy_before']:.3f}, with it {trip['accuracy_live_adapter']:.3f};",
        f"merged and read back as an ordinary {trip['merged_class']} {trip['accuracy_merged_and_reloaded']:.3f}.",
        "",
        f"{report['seconds']:.0f} s",
    ]
    return "\n".join(lines)


def _families(report: Mapping[str, Any]) -> list[str]:
    names = ("zero_shot", "fine_tuned", "own_gain", "transfer_gain")
    lines = [f"{'':16}" + "".join(f"{name.replace('_', '-'):>15}" for name in names)]
    for model in report["zero_shot"]["per_model"]:
        lines.append(f"{model:16}" + "".join(f"{report[name]['per_model'][model]:>15.3f}" for name in names))
    lines.append(f"{'mean':16}" + "".join(f"{report[name]['mean']:>15.3f}" for name in names))
    shares = "".join(f"{report[name]['share_of_fine_tuning']:>15.0%}" for name in names[2:])
    lines.append(f"{'of fine-tuning gain':46}" + shares)
    return lines


def _matrix(table: Mapping[str, Mapping[str, float]]) -> list[str]:
    lines = [f"{'':16}" + "".join(f"{name:>14}" for name in table)]
    return lines + [f"{row:16}" + "".join(f"{value:>14.3f}" for value in table[row].values()) for row in table]


def _prompts(task: playground.Task) -> dict[str, Any]:
    return {"class_names": task.class_names, "templates": task.templates[:1]}


def _load(model: str, task: str | None, memory: Memory) -> RememberingEncoder:
    adapter = None if task is None else playground.adapter_path(model, task)
    encoder = RememberingEncoder.from_pretrained(playground.model_path(model), adapter=adapter)
    encoder.memory = memory
    return encoder


def _by(scores: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    models, tasks = (list(dict.fromkeys(key[i] for key in scores)) for i in (0, 1))
    return {
        "mean": _mean(scores.values()),
        "per_task": {task: _mean(scores[model, task] for model in models) for task in tasks},
        "per_model": {model: _mean(scores[model, task] for task in tasks) for model in models},
        "cells": {model: {task: scores[model, task] for task in tasks} for model in models},
    }


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0


def _ratio(a: float, b: float) -> float | None:
    """`a / b`, or None (JSON's null) where the own descriptors gain nothing to be a share of."""
    return a / b if b > 0 else None


def _bar(items: Sequence[str], description: str, progress: bool | None) -> Iterable[str]:
    hidden = None if progress is None else not progress
    found: Iterable[str] = tqdm(items, desc=description, leave=False, disable=hidden)
    return found
