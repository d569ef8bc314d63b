"""The page: a report as one HTML file that needs nothing from elsewhere, and the files beside it."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._files import write_atomic
from ..errors import PlatonicError
from .figures import Picture, pictures
from .results import RESULTS_VERSION
from .tables import Table, markdown, modalities, tables

__all__ = ["PAGE_NAME", "headline", "page", "read_results", "write_report"]

PAGE_NAME = "report.html"
TABLES_NAME = "tables.md"
FIGURES_NAME = "figures"
RESULTS_NAME = "results.json"

_STYLE = """
:root { --ink: #1f2933; --soft: #5b6673; --line: #dfe4ea; --band: #f6f8fa; --accent: #2f6fb7; }
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
body { margin: 0; color: var(--ink); background: #fff;
  font: 16px/1.6 "Source Sans 3", "Segoe UI", "Helvetica Neue", Helvetica, Arial, "DejaVu Sans", sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 2.5rem 1.5rem 5rem; }
h1 { font-size: 2.1rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.5rem; margin: 3.2rem 0 .8rem; padding-top: 1.2rem; border-top: 2px solid var(--ink); }
h3 { font-size: 1.12rem; margin: 2.2rem 0 .5rem; }
p { max-width: 46rem; margin: .5rem 0 1rem; }
.lead { font-size: 1.15rem; color: var(--soft); }
nav { margin: 1.4rem 0 0; } nav a { margin-right: 1.2rem; }
a { color: var(--accent); text-decoration: none; } a:hover { text-decoration: underline; }
.cards { display: flex; flex-wrap: wrap; gap: .9rem; margin: 1.4rem 0; }
.card { flex: 1 1 10rem; border: 1px solid var(--line); border-radius: .5rem; padding: .8rem 1rem; }
.card b { display: block; font-size: 1.7rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.card span { color: var(--soft); font-size: .9rem; line-height: 1.35; display: block; }
.scroll { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: collapse; font-size: .88rem; line-height: 1.35; font-variant-numeric: tabular-nums; }
th, td { padding: .42rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { vertical-align: bottom; color: var(--soft); font-weight: 600; border-bottom: 1.5px solid var(--ink);
  white-space: normal; min-width: 4.6rem; }
th:first-child, td:first-child, .word { text-align: left; }
td:first-child { font-weight: 600; white-space: normal; min-width: 11rem; }
td.long { white-space: normal; min-width: 16rem; text-align: left; }
td small { display: block; color: var(--soft); font-size: .78rem; }
tbody tr:nth-child(even) { background: var(--band); }
.note, figcaption { color: var(--soft); font-size: .9rem; max-width: 46rem; margin-top: .4rem; }
figure { margin: 1.4rem 0 2.4rem; } figure img { max-width: 100%; height: auto; display: block; }
footer { margin-top: 4rem; color: var(--soft); font-size: .88rem; border-top: 1px solid var(--line);
  padding-top: 1rem; }
@media (max-width: 640px) { main { padding: 1.5rem 1rem 3rem; } h1 { font-size: 1.6rem; } }
@media print { nav { display: none; } figure, table { break-inside: avoid; } }
"""


def read_results(folder: Path) -> dict[str, Any]:
    """The `results.json` in a folder.

    Raises:
        PlatonicError: If there's none, it isn't one, or its schema is newer than this library.
    """
    path = folder / RESULTS_NAME
    if not path.is_file():
        raise PlatonicError(f"Expected {RESULTS_NAME} in {folder}, found none. Run the benchmark with --out first.")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        version = found["schema_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise PlatonicError(f"Expected a benchmark's results in {path}, got something else. Run it again.") from error
    if not isinstance(version, int) or version > RESULTS_VERSION:
        raise PlatonicError(
            f"Expected schema {RESULTS_VERSION} or older in {path}, got {version!r}. "
            f"Install hf-platonic {found.get('library_version')} or newer."
        )
    return dict(found)


def write_report(folder: Path) -> Path:
    """Draws tables, figures and page from a folder's `results.json`, and nothing else.

    Args:
        folder: With the JSON; `tables.md`, `figures/*.png` and `report.html` are written beside it.

    Returns:
        The page's path.

    Raises:
        PlatonicError: If the JSON can't be used.
        ImportError: Without matplotlib.
    """
    results = read_results(folder)
    drawn = pictures(results)
    figures = folder / FIGURES_NAME
    figures.mkdir(exist_ok=True)
    for picture in drawn:
        content = picture.png
        write_atomic(figures / f"{picture.key}.png", lambda path, content=content: path.write_bytes(content))  # type: ignore[misc]
    _write(folder / TABLES_NAME, markdown(results))
    _write(folder / PAGE_NAME, page(results, drawn))
    return folder / PAGE_NAME


def headline(results: Mapping[str, Any]) -> str:
    """Method, gain and retention by modality, as text for a terminal."""
    lines = []
    for modality in modalities(results):
        summary = results["summary"][modality]
        lines.append(f"{modality}: zero-shot {summary['levels']['zero_shot']['value']:.3f}")
        for row in summary["methods"]:
            kept = "n/a" if row["retention"] is None else f"{row['retention']['value']:.2f}"
            lines.append(f"  {row['method']:40} gain {row['gain']['value']:+.3f}  retention {kept}")
    lines += [f"not run: {row['method']}: {row['reason']}" for row in results["not_run"]]
    return "\n".join(lines)


def page(results: Mapping[str, Any], drawn: list[Picture]) -> str:
    """The whole page, with the figures inside it."""
    suite = results["suite"]
    title = f"Benchmark: {suite['name']}"
    found = tables(results)
    measured = modalities(results)
    parts = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="lead">{_text(suite["description"])}</p>',
        f"<p>{_text(_protocol(results))}</p>",
        "<nav>" + "".join(f'<a href="#{m}">{m.capitalize()}</a>' for m in [*measured, "setup"]) + "</nav>",
    ]
    for modality in measured:
        parts.append(f'<h2 id="{modality}">{modality.capitalize()}</h2>')
        parts.append(_cards(results["summary"][modality]))
        mine = {t.key.removeprefix(f"{modality}-"): t for t in found if t.key.startswith(f"{modality}-")}
        shown = {p.key.removeprefix(f"{modality}-"): p for p in drawn if p.key.startswith(f"{modality}-")}
        for name in dict.fromkeys([*_ORDER, *mine, *shown]):
            if name in shown:
                parts.append(_figure(shown[name]))
            if name in mine:
                parts.append(_table(mine[name]))
    parts.append('<h2 id="setup">Setup</h2>')
    parts.append(_table(_models(results)))
    parts += [_table(table) for table in found if table.key == "not-run"]
    parts.append(
        f"<footer>hf-platonic {_text(results['library_version'])}, schema {results['schema_version']}. Everything "
        "here is drawn from results.json beside this file; docs/benchmark.md in the project says what its keys "
        "mean. Method: Park and Cho 2026, arXiv 2610.00929.</footer>"
    )
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{_text(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


_ORDER = ("methods", "levels", "targets", "tasks", "pairs", "baselines", "effects", "addition", "negation")


def _protocol(results: Mapping[str, Any]) -> str:
    suite = results["suite"]
    counts = [f"{len(suite[key])} {key}" for key in ("models", "tasks", "controls")]
    seeds = ", ".join(map(str, suite["seeds"]))
    return (
        f"{', '.join(counts)}; probes drawn with seeds {seeds}. Descriptors are taken on unlabelled probes; labels "
        "serve for accuracies, for fine-tunes and for what says that it uses them. Strengths and ridges were fixed "
        "beforehand or chosen without labels. Brackets are 95 % intervals from a bootstrap over tasks and test inputs."
    )


def _cards(summary: Mapping[str, Any]) -> str:
    """The figures that a hurried reader wants."""
    if not summary["methods"]:
        return ""
    best = summary["methods"][0]
    levels = summary["levels"]
    found = [
        (f"{levels['zero_shot']['value']:.3f}", "zero-shot accuracy"),
        (f"{best['accuracy']['value']:.3f}", f"with other models' descriptors, “{best['method']}”"),
        (f"{levels['fine_tuned']['value']:.3f}", "fine-tuned, with labels"),
    ]
    if best["retention"] is not None:
        found.append((f"{best['retention']['value']:.0%}", "of the own descriptor's gain is kept"))
    if best["share_of_fine_tuning"] is not None:
        found.append((f"{best['share_of_fine_tuning']['value']:.0%}", "of the fine-tuning gain is reached"))
    cards = "".join(f'<div class="card"><b>{value}</b><span>{_text(name)}</span></div>' for value, name in found)
    return f'<div class="cards">{cards}</div>'


def _models(results: Mapping[str, Any]) -> Table:
    suite = results["suite"]
    rows = [("model", model["name"], model["modality"], "") for model in suite["models"]]
    for t in suite["tasks"]:
        details = f"{t['kind']}, {t['prompts']} prompts, {t['probes']} probes, {t['test']} test"
        rows.append(("task", t["name"], t["modality"], details))
    rows += [("control", t["name"], t["modality"], f"{t['kind']}, {t['test']} test") for t in suite["controls"]]
    rows += [
        ("method", m["name"], "", f"{m['realisation'].replace('_', ' ')}, options {json.dumps(m['options'])}")
        for m in suite["methods"]
    ]
    return Table("setup", "What was compared", ("", "name", "modality", "details"), tuple(rows))


def _table(table: Table) -> str:
    kinds = [' class="word"' if _is_word(cell) else "" for cell in table.rows[0]]
    head = "".join(f"<th{kind}>{_text(name)}</th>" for name, kind in zip(table.header, kinds, strict=True))
    lines = "\n".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in table.rows)
    note = f'<p class="note">{_text(table.note)}</p>' if table.note else ""
    return (
        f'<h3 id="table-{table.key}">{_text(table.title)}</h3>\n<div class="scroll"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{lines}\n</tbody>\n</table></div>\n{note}"
    )


def _cell(text: str) -> str:
    value, bracket, interval = text.partition(" [")
    if bracket and interval.endswith("]") and not _is_word(value):
        return f"<td>{_text(value)}<small>{_text(interval[:-1].replace(', ', ' to '))}</small></td>"
    kind = ' class="long"' if len(text) > 60 else ' class="word"' if _is_word(text) else ""
    return f"<td{kind}>{_text(text)}</td>"


def _is_word(text: str) -> bool:
    return text[:1].isalpha() and text != "n/a"


def _figure(picture: Picture) -> str:
    data = base64.b64encode(picture.png).decode()
    width = f"width: {98 * picture.width:.0f}px"  # one scale for all, so that their words are of one size
    return (
        f'<h3>{_text(picture.title)}</h3>\n<figure id="figure-{picture.key}">'
        f'<img src="data:image/png;base64,{data}" alt="{_text(picture.title)}" style="{width}">'
        f"<figcaption>{_text(picture.caption)}</figcaption></figure>"
    )


def _text(value: object) -> str:
    return html.escape(str(value))


def _write(path: Path, text: str) -> None:
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
