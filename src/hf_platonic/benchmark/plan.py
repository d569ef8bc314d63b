"""What a suite would use and about how long it would take, told without loading or downloading anything."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..playground.tasks import split_size
from .suites import MethodSpec, ModelSpec, Suite, TaskSpec

__all__ = ["SPEEDS", "Plan", "format_plan", "plan"]

SPEEDS: Mapping[str, float] = {"a GPU that sustains 15 TFLOP/s": 15.0, "two CPU cores at 0.1 TFLOP/s": 0.1}
"""Speeds to estimate times at, in 10^12 floating-point operations a second. The second is what ViT-B/32 reached."""

_BACKWARD = 3  # a forward pass and a backward one, which costs about twice as much
_WIDTH = 110


@dataclass(frozen=True)
class Plan:
    """A suite spelled out, as plain JSON values.

    Attributes:
        suite: Its name.
        description: What it's for.
        seeds: Of the probes.
        models: A row for each model.
        data: A row for each task and control.
        prompts: By task or control, every prompt; none for retrieval, whose captions come with the data.
        methods: A row for each way to transfer, with its transfers of single tasks for one seed.
        work: A row for each model and stage: `inputs` passes through the probe tower, `gflops` in all or None, and
            `seconds` by speed.
        unverified: Names of the rows whose facts weren't read from a published source.
    """

    suite: str
    description: str
    seeds: tuple[int, ...]
    models: tuple[dict[str, Any], ...]
    data: tuple[dict[str, Any], ...]
    prompts: dict[str, tuple[str, ...]]
    methods: tuple[dict[str, Any], ...]
    work: tuple[dict[str, Any], ...]
    unverified: tuple[str, ...]

    def seconds(self, speed: str) -> float:
        """All stages whose operations are known, at one of the speeds; decoding and downloads come on top."""
        known = [row["seconds"][speed] for row in self.work if row["seconds"] is not None]
        return float(sum(known))


def plan(suite: Suite, *, speeds: Mapping[str, float] = SPEEDS) -> Plan:
    """Everything a run of the suite would use.

    Args:
        suite: The suite.
        speeds: By name, in 10^12 floating-point operations a second, above 0.

    Returns:
        The plan. LoRA realisations are counted as cases, not as time: how long they train is an option of theirs.
    """
    everything = [("task", task) for task in suite.tasks] + [("control", task) for task in suite.controls]
    return Plan(
        suite.name,
        suite.description,
        suite.seeds,
        tuple(_model_row(model) for model in suite.models),
        tuple(_data_row(role, task) for role, task in everything),
        {
            task.name: tuple(task.templates[0].replace("{}", name) for name in task.class_names)
            for _, task in everything
            if task.class_names
        },
        tuple(_method_row(suite, method) for method in suite.methods),
        tuple(row for model in suite.models for row in _work(suite, model, speeds)),
        tuple(model.name for model in suite.models if not model.verified)
        + tuple(task.name for _, task in everything if not task.verified),
    )


def _model_row(model: ModelSpec) -> dict[str, Any]:
    return {
        "name": model.name,
        "modality": model.modality,
        "from": model.path,
        "loader": model.loader,
        "revision": model.revision or "main",
        "parameters_millions": model.parameters_millions,
        "download_mb": None if model.parameters_millions is None else round(model.parameters_millions * 4, 1),
        "gflops_per_input": model.gflops,
        "embedding_dim": model.embedding_dim,
        "licence": model.licence,
    }


def _data_row(role: str, task: TaskSpec) -> dict[str, Any]:
    data = task.data
    columns = f"{data.input_column or '(the typed one)'}, {data.label_column}"
    return {
        "name": task.name,
        "role": role,
        "modality": task.modality,
        "kind": task.kind,
        "source": data.source,
        "from": data.path if data.config is None else f"{data.path} ({data.config})",
        "revision": data.revision or "main",
        "columns": None if data.source == "playground" else columns,
        "splits": _splits(task),
        "classes": len(task.class_names) or None,
        "train": task.train_size,
        "test": _tested(task) if role == "task" else _tested_of_control(task),
        "probes": _probes(task) if role == "task" else None,
        "download_mb": data.size_mb,
        "standard_templates": task.standard_templates,
        "licence": task.licence,
        "note": task.note,
    }


def _splits(task: TaskSpec) -> str:
    data = task.data
    if data.fold_column is not None:
        folds = ", ".join(map(str, data.test_folds))
        return f"{data.train}, {data.fold_column} {folds} for the test"
    if data.train is not None and data.train == data.test:
        return f"{data.train}, {100 * (data.holdout or 0):.0f} % held out"
    return data.test if data.train is None else f"{data.train} / {data.test}"


def _method_row(suite: Suite, method: MethodSpec) -> dict[str, Any]:
    cases = 0
    for modality in dict.fromkeys(model.modality for model in suite.models):
        models = sum(model.modality == modality for model in suite.models)
        tasks = [task for task in suite.tasks if task.modality == modality]
        chosen = sum(not method.tasks or task.name in method.tasks for task in tasks)
        few = method.cases == "cycle" or method.sources == "others"
        others = 0 if method.sources == "own" else min(1 if few else models, models - 1)
        own = 1 if method.own or method.sources == "own" else 0
        cases += models * chosen * (others + own)
    return {
        "name": method.name,
        "sources": method.sources,
        "realisation": method.realisation,
        "options": dict(method.options),
        "cases": cases,
    }


def _work(suite: Suite, model: ModelSpec, speeds: Mapping[str, float]) -> list[dict[str, Any]]:
    tasks = [task for task in suite.tasks if task.modality == model.modality]
    controls = [task for task in suite.controls if task.modality == model.modality]
    test = sum(_tested(task) or 0 for task in tasks)
    passes = {
        "accuracies": 2 * test + sum(_tested_of_control(task) or 0 for task in controls),
        "descriptors": 2 * len(suite.seeds) * sum(_probes(task) for task in tasks),
    }
    if suite.fine_tunes.kind == "lora":
        epochs = {task.name: suite.fine_tunes.recipe(model.name, task.name).epochs for task in tasks}
        passes = {"fine-tunes": _BACKWARD * sum((t.train_size or 0) * epochs[t.name] for t in tasks), **passes}
    rows = []
    for stage, inputs in passes.items():
        gflops = None if model.gflops is None else inputs * model.gflops
        seconds = None if gflops is None else {name: gflops / (1000 * speed) for name, speed in speeds.items()}
        rows.append({"model": model.name, "stage": stage, "inputs": inputs, "gflops": gflops, "seconds": seconds})
    return rows


def _probes(task: TaskSpec) -> int:
    """As many as the split has; the playground's unlabelled split is drawn from besides."""
    if task.train_size is None:
        return task.probe_count
    pool = task.train_size
    if task.data.source == "playground":
        pool += split_size(task.data.path, "probes")
    return min(task.probe_count, pool)


def _tested(task: TaskSpec) -> int | None:
    if task.per_class is None:
        return task.test_size
    return min(task.per_class * len(task.class_names), task.test_size or task.per_class * len(task.class_names))


def _tested_of_control(task: TaskSpec) -> int | None:
    """The other half is kept unlabelled."""
    if task.per_class is not None:
        return _tested(task)
    return None if task.test_size is None else task.test_size - task.test_size // 2


def format_plan(found: Plan) -> str:
    """The plan as text: tables of models, data sets, methods and times, then every prompt."""
    lines = [f"Suite {found.suite}: {found.description}", f"Seeds: {', '.join(map(str, found.seeds))}", ""]
    columns = [
        "name",
        "from",
        "loader",
        "revision",
        "parameters_millions",
        "gflops_per_input",
        "embedding_dim",
        "licence",
    ]
    lines += [f"Models ({len(found.models)})", *_table(found.models, columns), ""]
    columns = [
        "name",
        "role",
        "from",
        "revision",
        "splits",
        "columns",
        "classes",
        "train",
        "test",
        "probes",
        "download_mb",
    ]
    lines += [f"Data sets ({len(found.data)})", *_table(found.data, [*columns, "licence"]), ""]
    lines += [f"  {row['name']}: {row['note']}" for row in found.data if row["note"]]
    lines += ["", f"Ways to transfer ({len(found.methods)})"]
    lines += [*_table(found.methods, ["name", "sources", "realisation", "options", "cases"]), ""]
    lines += ["Passes through the probe tower (a training step counts as three)"]
    lines += [*_table(found.work, ["model", "stage", "inputs"]), ""]
    unknown = any(row["seconds"] is None for row in found.work)
    known = [row for row in found.work if row["seconds"] is not None]
    for name in known[0]["seconds"] if known else ():
        least = "at least " if unknown else "about "
        lines.append(f"Estimated time on {name}: {least}{_duration(found.seconds(name))}, without LoRA realisations.")
    if not known:
        lines.append("Estimated time: unknown, since the models' operations per input aren't given.")
    if found.unverified:
        lines += ["", f"Not verified against a published source: {', '.join(found.unverified)}."]
        lines.append("Columns and label names are compared with the data set's own when it is loaded.")
    lines += ["", "Prompts"]
    counts = {row["name"]: row["standard_templates"] for row in found.data}
    for task, prompts in found.prompts.items():
        usual = f"; the usual list has {counts[task]} templates" if counts[task] else ""
        lines.append(f"  {task} ({len(prompts)} prompts, one template{usual})")
        lines += textwrap.wrap(
            " | ".join(prompts), _WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False
        )
    return "\n".join(lines)


def _table(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[str]:
    cells = [[name.replace("_", " ") for name in columns], *([_cell(row[name]) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return [
        "  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={item}" for key, item in value.items()) or "-"
    return "-" if value is None else f"{value:,}" if isinstance(value, (int, float)) else str(value)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
