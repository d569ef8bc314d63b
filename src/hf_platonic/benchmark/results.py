"""Results: all cells of a run as one JSON value, with means, intervals and shares; the report needs nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .setting import Setting
from .store import unpack
from .suites import MethodSpec
from .summary import Cell, Summary

__all__ = ["RESULTS_VERSION", "collect"]

RESULTS_VERSION = 1
_CASE = ("strength", "rank", "accuracy", "oracle", "forecast")


def collect(setting: Setting) -> dict[str, Any]:
    """Everything that the finished cells of a run say, as plain JSON; docs/benchmark.md has the schema.

    Args:
        setting: The run; its store may lack cells, which are then missing from the means.
    """
    from .. import __version__

    suite, store = setting.suite, setting.store
    cells = {kind: list(store.cells(kind)) for kind in _KINDS}
    modalities = [m for m in ("image", "audio") if setting.models_of(m) and setting.tasks_of(m)]
    return {
        "schema_version": RESULTS_VERSION,
        "library_version": __version__,
        "suite": _described(setting, cells),
        "accuracy": {
            "zero_shot": _table(_first_seed(cells["source"]), "zero_shot"),
            "fine_tuned": _table(_first_seed(cells["source"]), "fine_tuned"),
            "linear_probe": _table(cells["probe"], "correct"),
            "control": _table(cells["control"], "zero_shot"),
        },
        "transfer": [
            {"seed": int(seed), "method": method, "source": case["source"], "target": target, "task": task}
            | {name: case.get(name) for name in _CASE}
            for cell in cells["transfer"]
            for _, seed, method, target, task in [cell["key"]]
            for case in cell["cases"]
        ],
        "baselines": [
            {"seed": int(cell["key"][1]), "target": cell["key"][2], "task": cell["key"][3]}
            | {name: case[name] for name in ("baseline", "source", "accuracy")}
            for cell in cells["baseline"]
            for case in cell["cases"]
        ],
        "addition": [_composed(cell, case) for cell in cells["addition"] for case in cell["cases"]],
        "negation": [_composed(cell, case) for cell in cells["negation"] for case in cell["cases"]],
        "sweeps": [
            {"target": cell["key"][1], "task": cell["key"][2], "method": cell["method"], **case}
            for cell in cells["sweep"]
            for case in cell["cases"]
        ],
        "likeness": {
            cell["key"][1]: {name: value for name, value in cell.items() if name not in ("key", "seconds")}
            for cell in cells["likeness"]
        },
        "summary": {modality: Summary(setting, modality, cells).figures() for modality in modalities},
        "not_run": _not_run(suite.methods, [*cells["transfer"], *cells["addition"], *cells["negation"]]),
    }


_KINDS = ("source", "control", "probe", "transfer", "baseline", "addition", "negation", "sweep", "likeness")


def _described(setting: Setting, cells: Mapping[str, list[Cell]]) -> dict[str, Any]:
    suite = setting.suite
    sizes = {c["key"][3]: (c["probes"], c["prompts"], c["n"]) for c in cells["source"]}
    controls = {c["key"][2]: c["n"] for c in cells["control"]}
    return {
        "name": suite.name,
        "description": suite.description,
        "seeds": list(suite.seeds),
        "models": [{"name": m.name, "modality": m.modality} for m in suite.models],
        "tasks": [
            {"name": t.name, "modality": t.modality, "kind": t.kind}
            | dict(zip(("probes", "prompts", "test"), sizes.get(t.name, (None,) * 3), strict=True))
            for t in suite.tasks
        ],
        "controls": [
            {"name": t.name, "modality": t.modality, "kind": t.kind, "test": controls.get(t.name)}
            for t in suite.controls
        ],
        "methods": [asdict(m) for m in suite.methods],
    }


def _composed(cell: Cell, case: Cell) -> dict[str, Any]:
    _, seed, method, target = cell["key"]
    found = {"seed": int(seed), "method": method, "target": target}
    found |= {name: case[name] for name in ("kind", "tasks", "sources", "strength") if name in case}
    for name in ("after", "control_after"):
        found[name] = {key: value["accuracy"] for key, value in case[name].items()}
    return found


def _table(cells: Iterable[Cell], name: str) -> dict[str, dict[str, float]]:
    """Accuracies by model, then task."""
    out: dict[str, dict[str, float]] = defaultdict(dict)
    for cell in cells:
        model, task = cell["key"][-2:]
        if cell[name] is not None:
            out[model][task] = round(float(unpack(cell[name], cell["n"]).double().mean()), 6)
    return dict(out)


def _first_seed(cells: Sequence[Cell]) -> list[Cell]:
    """The cells of one seed: accuracies before and after a fine-tune don't depend on the probes."""
    return [cell for cell in cells if cell["key"][1] == cells[0]["key"][1]]


def _not_run(methods: Sequence[MethodSpec], cells: Iterable[Cell]) -> list[dict[str, Any]]:
    found: dict[tuple[str, str], int] = defaultdict(int)
    for cell in cells:
        if cell["reason"] is not None:
            found[cell["key"][2], cell["reason"]] += 1
    order = [m.name for m in methods]
    return [
        {"method": method, "reason": reason, "cells": count}
        for (method, reason), count in sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
    ]
