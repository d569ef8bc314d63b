"""Tables: the figures of `results.json` in rows and columns, for Markdown and for the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Table", "as_markdown", "first_with", "markdown", "modalities", "tables"]

Results = Mapping[str, Any]


@dataclass(frozen=True)
class Table:
    """One table.

    Attributes:
        key: For links and for picking it out, e.g. "image-methods".
        title: Its heading.
        header: Names of the columns.
        rows: Cells as text, the first of a row naming it.
        note: What a reader needs to know to read it.
    """

    key: str
    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


# A JSON object has no order: what comes first is always asked of the suite's lists.


def modalities(results: Results) -> list[str]:
    """The modalities that were measured, in the suite's order."""
    return [
        m for m in dict.fromkeys(model["modality"] for model in results["suite"]["models"]) if m in results["summary"]
    ]


def first_with(results: Results, found: Mapping[str, Any]) -> str | None:
    """The suite's first method that is a key of the mapping and not empty there."""
    return next((m["name"] for m in results["suite"]["methods"] if found.get(m["name"])), None)


def tables(results: Results) -> list[Table]:
    """All tables of a run, from what is in its `results.json`."""
    found = []
    methods = [method["name"] for method in results["suite"]["methods"]]
    for modality in modalities(results):
        summary = results["summary"][modality]
        costly = [(name, summary["on_cases_of"][name]) for name in methods if name in summary["on_cases_of"]]
        found += [
            _levels(modality, summary),
            _methods(f"{modality}-methods", f"Transfer, {modality} tasks", summary["methods"], _METHODS_NOTE),
            *(
                _methods(f"{modality}-cases-{i}", f"All methods on the cases of “{name}”, {modality} tasks", rows, "")
                for i, (name, rows) in enumerate(costly)
            ),
            _baselines(modality, summary),
            _effects(results, modality, summary, "addition"),
            _effects(results, modality, summary, "negation"),
            _per_task(results, modality, summary),
            _pairs(results, modality, summary),
            _alignment(modality, summary),
        ]
    found.append(_not_run(results))
    return [table for table in found if table is not None and table.rows]


def markdown(results: Results) -> str:
    """The tables as one Markdown document."""
    suite = results["suite"]
    parts = [
        f"# Benchmark: {suite['name']}",
        suite["description"],
        f"{len(suite['models'])} models, {len(suite['tasks'])} tasks, {len(suite['controls'])} controls, "
        f"seeds {', '.join(map(str, suite['seeds']))}; hf-platonic {results['library_version']}. "
        "Brackets are 95 % intervals from a bootstrap over tasks and test inputs.",
    ]
    for table in tables(results):
        parts += [f"## {table.title}", as_markdown(table), table.note]
    return "\n\n".join(part for part in parts if part) + "\n"


def as_markdown(table: Table) -> str:
    """One table in Markdown."""
    lines = [table.header, ("---",) * len(table.header), *table.rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


_METHODS_NOTE = (
    "Gain: accuracy with other models' descriptors less zero-shot accuracy. Own gain: the same with the target's own "
    "descriptor. Retention: the first over the second, each summed before dividing. The last but one is the accuracy "
    "that the best of a fixed list of strengths reaches, picked for each case by test labels: a bound, not a result. "
    "Forecast: rank correlation, over all transfers, of the gain promised without labels with the gain found."
)


def _levels(modality: str, summary: Mapping[str, Any]) -> Table:
    names = {
        "zero_shot": "zero-shot (floor)",
        "linear_probe": "linear probe on the base embeddings, with labels (for scale)",
        "fine_tuned": "fine-tuned target, with labels (ceiling)",
    }
    rows = [(names[key], _interval(value)) for key in names if (value := summary["levels"].get(key))]
    return Table(f"{modality}-levels", f"Floor and ceiling, {modality} tasks", ("", "accuracy"), tuple(rows))


def _methods(key: str, title: str, rows: Sequence[Mapping[str, Any]], note: str) -> Table:
    header = (
        *("method", "cases", "accuracy", "gain", "own gain", "retention"),
        *("share of fine-tuning gain", "normalised accuracy", "at the oracle's strength", "forecast"),
    )
    lines = [
        (
            *(row["method"], str(row["cases"]), _interval(row["accuracy"]), _interval(row["gain"], sign=True)),
            _value(row["own_gain"], sign=True),
            *(_interval(row["retention"], digits=2), _interval(row["share_of_fine_tuning"], digits=2)),
            *(_value(row["normalized_accuracy"], digits=2), _number(row["oracle_accuracy"])),
            _number(row["forecast_correlation"], digits=2),
        )
        for row in rows
    ]
    return Table(key, title, header, tuple(lines), note)


def _baselines(modality: str, summary: Mapping[str, Any]) -> Table:
    names = {
        "random": "random descriptor with the own one's norm",
        "weights": "another model's weight change added, where every shape fits",
    }
    rows = []
    for row in summary["baselines"]:
        rows.append((names[row["baseline"]], str(row["cases"]), _interval(row["gain"], sign=True)))
        if "method_gain" in row:
            name = f"“{row['method']}” on the same cases"
            rows.append((name, str(row["cases"]), _interval(row["method_gain"], sign=True)))
    return Table(f"{modality}-baselines", f"Baselines, {modality} tasks", ("baseline", "cases", "gain"), tuple(rows))


def _effects(results: Results, modality: str, summary: Mapping[str, Any], kind: str) -> Table:
    titles = {"addition": "Addition", "negation": "Negation"}
    kinds = {"pair": "two tasks", "all": "all tasks at once", "one": "one task"}
    whose = {"other": "others' descriptors", "own": "own descriptors"}
    controls_of = [c for c in results["suite"]["controls"] if c["modality"] == modality]
    extra = [c["name"] for c in controls_of if c["kind"] == "retrieval"]
    header = (
        *("method", "edit", "strength", "tasks before", "tasks after", "controls before", "controls after"),
        *(f"{name}, recall at 1" for name in extra),
    )
    rows = []
    for row in summary[kind]:
        controls = [row["controls"].get(name) for name in extra]
        rows.append(
            (
                *(row["method"], f"{kinds[row['kind']]}, {whose[row['sources']]}"),
                ", ".join(f"{strength:g}" for strength in row["strengths"]),
                *(_value(row["before"]), _interval(row["after"])),
                *(_value(row.get("control_before")), _interval(row.get("control_after"))),
                *(f"{_value(c['before'])} → {_value(c['after'])}" if c else "" for c in controls),
            )
        )
    note = "Mean accuracy over the edited tasks, and over the controls, which an edit should leave alone."
    return Table(f"{modality}-{kind}", f"{titles[kind]}, {modality} tasks", header, tuple(rows), note)


def _per_task(results: Results, modality: str, summary: Mapping[str, Any]) -> Table | None:
    if not summary["methods"]:
        return None
    method = summary["methods"][0]["method"]
    found = summary["by_task"][method]
    models = [m["name"] for m in results["suite"]["models"] if m["modality"] == modality]
    accuracy = results["accuracy"]

    def mean(table: Mapping[str, Mapping[str, float]], task: str) -> float | None:
        values = [table[model][task] for model in models if task in table.get(model, {})]
        return sum(values) / len(values) if values else None

    rows = []
    for spec in results["suite"]["tasks"]:
        name = spec["name"]
        if name in found:
            zero = mean(accuracy["zero_shot"], name) or 0.0
            gains = (found[name]["gain"], found[name]["own_gain"])
            levels = [None if gain is None else zero + gain for gain in gains]
            rows.append(
                (
                    *(name, str(spec["prompts"]), str(spec["probes"]), str(spec["test"])),
                    *map(_number, (zero, *levels)),
                    *(_number(mean(accuracy[key], name)) for key in ("linear_probe", "fine_tuned")),
                )
            )
    header = (
        *("task", "prompts", "probes", "test inputs", "zero-shot", "others' descriptor", "own descriptor"),
        *("linear probe", "fine-tuned"),
    )
    note = f"Mean accuracy over targets, sources and seeds; method “{method}”."
    return Table(f"{modality}-tasks", f"By task, {modality}", header, tuple(rows), note)


def _pairs(results: Results, modality: str, summary: Mapping[str, Any]) -> Table | None:
    method = first_with(results, summary["pairs"])
    if method is None:
        return None
    matrix = summary["pairs"][method]
    models = [m["name"] for m in results["suite"]["models"] if m["modality"] == modality]
    rows = [
        (f"from {name}", *(_number(v, sign=True) for v in line)) for name, line in zip(models, matrix, strict=True)
    ]
    note = f"Mean gain over tasks and seeds; method “{method}”. Own descriptors are on the diagonal."
    return Table(f"{modality}-pairs", f"By source and target, {modality}", ("", *models), tuple(rows), note)


def _alignment(modality: str, summary: Mapping[str, Any]) -> Table | None:
    found = summary["alignment"].get("rank_correlation", {})
    names = {"mutual_neighbours": "mutual 10-nearest neighbours", "linear_cka": "linear CKA"}
    rows = [(names[key], _number(found[key], digits=2)) for key in names if key in found]
    note = "Spearman's rank correlation over ordered pairs of models between the alignment of their base embeddings "
    note += f"on the probes and the retention; method “{summary['alignment'].get('method')}”."
    title = f"Does alignment foretell retention? {modality}"
    return Table(f"{modality}-alignment", title, ("alignment", "rank correlation with retention"), tuple(rows), note)


def _not_run(results: Results) -> Table:
    rows = [(row["method"], str(row["cells"]), row["reason"]) for row in results["not_run"]]
    return Table("not-run", "What could not be run", ("method", "cells", "reason"), tuple(rows))


def _interval(estimate: Mapping[str, float] | None, *, digits: int = 3, sign: bool = False) -> str:
    if estimate is None:
        return "n/a"
    shown = [_number(estimate[key], digits=digits, sign=sign) for key in ("value", "low", "high")]
    return f"{shown[0]} [{shown[1]}, {shown[2]}]"


def _value(estimate: Mapping[str, float] | None, *, digits: int = 3, sign: bool = False) -> str:
    return _number(None if estimate is None else estimate["value"], digits=digits, sign=sign)


def _number(value: float | None, *, digits: int = 3, sign: bool = False) -> str:
    return "n/a" if value is None else f"{value:{'+' if sign else ''}.{digits}f}"
