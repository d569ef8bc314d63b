"""The documentation's tables from a benchmark's results.

hf-platonic benchmark --suite SUITE --out DIR
python docs/results.py DIR

Writes all tables to docs/results-SUITE.md and, of the suites `playground` and `beyond`, short ones to the README.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_platonic.benchmark.page import read_results
from hf_platonic.benchmark.tables import Table, as_markdown, markdown, modalities

HERE = Path(__file__).parent
MARKS = {"playground": "results", "beyond": "beyond"}
"""Between which comments of the README a suite's short tables stand."""
EFFECTS = {"pair": "two tasks added", "all": "all tasks added", "one": "one task negated"}


def number(estimate: Mapping[str, float] | None, *, sign: bool = False, digits: int = 3) -> str:
    """The figure alone."""
    return "" if estimate is None else f"{estimate['value']:{'+' if sign else ''}.{digits}f}"


def interval(estimate: Mapping[str, float] | None, *, digits: int = 2) -> str:
    """The figure with its 95 % interval."""
    if estimate is None:
        return ""
    return f"{estimate['value']:.{digits}f} [{estimate['low']:.{digits}f}, {estimate['high']:.{digits}f}]"


def methods(name: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """The transfers of one modality, or of the cases of one costly method."""
    header = (name, "gain", "own gain", "retention", "share of the fine-tuning gain")
    lines = [
        (
            *(row["method"], number(row["gain"], sign=True), number(row["own_gain"], sign=True)),
            *(interval(row["retention"]), interval(row["share_of_fine_tuning"])),
        )
        for row in rows
    ]
    return as_markdown(Table("", "", header, tuple(lines)))


def effects(summary: Mapping[str, Any]) -> str:
    """Additions and negations with other models' descriptors."""
    header = ("method", *EFFECTS.values(), *(f"… control, {name}" for name in EFFECTS.values()))
    found: dict[str, dict[str, Any]] = {}
    for row in (*summary["addition"], *summary["negation"]):
        if row["sources"] == "other":
            found.setdefault(row["method"], {})[row["kind"]] = row

    def change(row: Mapping[str, Any] | None, what: str) -> str:
        return "" if row is None else f"{number(row[f'{what}before'])} → {number(row[f'{what}after'])}"

    lines = [
        (method, *(change(rows.get(kind), what) for what in ("", "control_") for kind in EFFECTS))
        for method, rows in found.items()
    ]
    return as_markdown(Table("", "", header, tuple(lines)))


def short(results: Mapping[str, Any]) -> str:
    """What the README shows."""
    parts = []
    for modality in modalities(results):
        summary = results["summary"][modality]
        levels = {name: number(value) for name, value in summary["levels"].items()}
        models = sum(m["modality"] == modality for m in results["suite"]["models"])
        tasks = sum(t["modality"] == modality for t in results["suite"]["tasks"])
        baselines = {row["baseline"]: number(row["gain"], sign=True) for row in summary["baselines"]}
        text = (
            f"**{modality.capitalize()}**, {models} models, {tasks} tasks: zero-shot accuracy {levels['zero_shot']}, "
            f"fine-tuned {levels['fine_tuned']}, a linear probe with labels {levels['linear_probe']}; a random "
            f"descriptor of the own one's norm gains {baselines['random']}"
        )
        if "weights" in baselines:
            text += f", another model's weight change, where the shapes fit, {baselines['weights']}"
        everywhere = [row for row in summary["methods"] if row["method"] not in summary["on_cases_of"]]
        parts += [f"{text}.", methods(modality, everywhere)]
        for name, rows in summary["on_cases_of"].items():
            shown = [row for row in rows if row["method"] in (rows[0]["method"], name)]
            parts += [f"On the {shown[-1]['cases']} cases of “{name}”:", methods(modality, shown)]
        parts += ["Accuracy on the edited tasks, and on the controls:", effects(summary)]
    return "\n\n".join(parts)


def main(folder: Path) -> None:
    """Writes the files."""
    results = read_results(folder)
    name = results["suite"]["name"]
    path = HERE / f"results-{name}.md"
    path.write_text(markdown(results), encoding="utf-8")
    sys.stdout.write(f"{path}\n")
    if name in MARKS:
        start, end = (f"<!-- {slash}{MARKS[name]} -->" for slash in ("", "/"))
        readme = HERE.parent / "README.md"
        before, after = (readme.read_text(encoding="utf-8").split(mark)[i] for mark, i in ((start, 0), (end, 1)))
        readme.write_text(f"{before}{start}\n{short(results)}\n{end}{after}", encoding="utf-8")
        sys.stdout.write(f"{readme}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
