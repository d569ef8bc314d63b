"""Figures: the PNG files of a report, each drawn from `results.json` alone."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .tables import first_with, modalities

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Picture", "pictures", "require_matplotlib"]

Results = Mapping[str, Any]

_INK, _GREY, _BLUE, _PALE, _DARK, _WARM = "#1f2933", "#c4cbd4", "#2f6fb7", "#9cc3ea", "#30363d", "#d9822b"
_DPI = 150


@dataclass(frozen=True)
class Picture:
    """One figure.

    Attributes:
        key: For its file name, e.g. "image-methods".
        title: Its heading.
        caption: What is shown, and what of.
        png: The image file's bytes.
        width: In inches.
    """

    key: str
    title: str
    caption: str
    png: bytes
    width: float


def pictures(results: Results) -> list[Picture]:
    """All figures of a run, from what is in its `results.json`.

    Raises:
        ImportError: Without matplotlib.
    """
    require_matplotlib()
    found = []
    for modality in modalities(results):
        for name, title, draw in _PLAN:
            drawn = draw(results, modality)
            if drawn is not None:
                figure, caption = drawn
                width = float(figure.get_figwidth())
                found.append(Picture(f"{modality}-{name}", f"{title}, {modality}", caption, _png(figure), width))
    return found


def require_matplotlib() -> None:
    """Nothing, where figures can be drawn.

    Raises:
        ImportError: Without matplotlib.
    """
    if find_spec("matplotlib") is None:
        raise ImportError(
            "Expected matplotlib for a report's figures, found none. Install it with "
            "`pip install 'hf-platonic[benchmark]'`."
        )


_Drawn = tuple["Figure", str] | None


def _methods(results: Results, modality: str) -> _Drawn:
    summary = results["summary"][modality]
    rows = [row for row in summary["methods"] if row["gain"] is not None]
    if not rows:
        return None
    figure, (axes,) = _figure(1, 1, (8.0, 0.9 + 0.48 * len(rows)))
    for y, row in enumerate(rows):
        gain = row["gain"]
        low, high = gain["value"] - gain["low"], gain["high"] - gain["value"]
        axes.barh(y, gain["value"], 0.58, color=_BLUE, zorder=2)
        axes.errorbar(gain["value"], y, xerr=[[max(low, 0)], [max(high, 0)]], color=_INK, lw=1.2, capsize=3, zorder=3)
        if row["own_gain"] is not None:
            axes.plot(row["own_gain"]["value"], y, "D", color=_WARM, ms=6, zorder=4)
    levels = summary["levels"]
    ceiling = levels["fine_tuned"]["value"] - levels["zero_shot"]["value"]
    axes.axvline(ceiling, color=_DARK, lw=1.4, ls="--")
    axes.axvline(0, color=_INK, lw=0.8)
    axes.set_yticks(range(len(rows)), [_label(row, len(summary["by_task"].get(row["method"], {}))) for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("gain in accuracy over zero-shot")
    _legend(
        figure,
        [
            ("bar", _BLUE, "others' descriptors, 95 % interval"),
            ("D", _WARM, "own descriptor"),
            ("--", _DARK, "fine-tuned"),
        ],
    )
    return figure, (
        "Mean gain over tasks, targets, sources and seeds. The intervals are wide because tasks differ; all methods "
        "were measured on the same tasks and inputs, but for those that say how many."
    )


def _label(row: Mapping[str, Any], tasks: int) -> str:
    return f"{row['method']}\n({tasks} tasks, {row['cases']} cases)"


def _targets(results: Results, modality: str) -> _Drawn:
    summary = results["summary"][modality]
    if not summary["methods"]:
        return None
    method = summary["methods"][0]["method"]
    gains, models = summary["by_target"][method], _names(results, "models", modality)
    accuracy = results["accuracy"]
    tasks = _names(results, "tasks", modality)

    def mean(kind: str, model: str) -> float:
        values = [accuracy[kind][model][task] for task in tasks if task in accuracy[kind].get(model, {})]
        return sum(values) / len(values) if values else 0.0

    zero = [mean("zero_shot", model) for model in models]
    series = [
        ("zero-shot", _GREY, zero),
        ("others' descriptors", _BLUE, [z + (gains[m]["gain"] or 0) for m, z in zip(models, zero, strict=True)]),
        ("own descriptor", _PALE, [z + (gains[m]["own_gain"] or 0) for m, z in zip(models, zero, strict=True)]),
        ("fine-tuned", _DARK, [mean("fine_tuned", model) for model in models]),
    ]
    figure, (axes,) = _figure(1, 1, (max(6.5, 1.5 * len(models) + 1), 3.6))
    for index, (name, colour, values) in enumerate(series):
        places = [x + (index - 1.5) * 0.2 for x in range(len(models))]
        axes.bar(places, values, 0.19, color=colour, label=name, zorder=2)
    axes.set_xticks(range(len(models)), [_wrapped(model, 14) for model in models])
    axes.set_ylim(0, 1)
    axes.set_ylabel("accuracy")
    figure.legend(frameon=False, ncols=4, loc="outside upper center", fontsize=8.5)
    return figure, f"Mean accuracy over the tasks, by target; method “{method}”."


def _pairs(results: Results, modality: str) -> _Drawn:
    summary = results["summary"][modality]
    models = _names(results, "models", modality)
    method = first_with(results, summary["pairs"])
    if method is None or len(models) < 2:
        return None
    values = summary["pairs"][method]
    side = 2.2 + 0.75 * len(models)
    figure, (axes,) = _figure(1, 1, (side + 1.2, side))
    _heatmap(axes, values, models, models, limits=None, colours="Blues", signed=True)
    axes.set_ylabel("source")
    axes.set_xlabel("target")
    return figure, f"Mean gain over tasks and seeds; method “{method}”. On the diagonal are the own descriptors."


def _across_models(results: Results, modality: str) -> _Drawn:
    likeness = results["likeness"].get(modality)
    if likeness is None or len(likeness["models"]) < 2:
        return None
    return _grid_of_heatmaps(
        {task: likeness["across_models"][task] for task in likeness["tasks"]},
        likeness["models"],
        "Cosine between the descriptors of different models, for each task: how far the change that a fine-tune "
        "makes belongs to the task rather than to the model. First seed.",
    )


def _across_tasks(results: Results, modality: str) -> _Drawn:
    likeness = results["likeness"].get(modality)
    if likeness is None or len(likeness["tasks"]) < 2:
        return None
    return _grid_of_heatmaps(
        {model: likeness["across_tasks"][model] for model in likeness["models"]},
        likeness["tasks"],
        "Cosine between the descriptors of different tasks, for each model, on probes and prompts of all tasks "
        "together: near zero where tasks don't interfere. First seed.",
    )


def _grid_of_heatmaps(found: Mapping[str, Sequence[Sequence[float]]], names: Sequence[str], caption: str) -> _Drawn:
    columns = min(3 if len(names) > 6 else 4, len(found))
    rows = -(-len(found) // columns)
    cell = 1.0 + 0.3 * len(names)
    figure, panels = _figure(rows, columns, (columns * (cell + 0.3) + 0.6, rows * (cell + 0.6)))
    for index, (axes, (title, values)) in enumerate(zip(panels, found.items(), strict=False)):
        left, bottom = index % columns == 0, index >= len(found) - columns
        _heatmap(axes, values, names if left else None, names if bottom else None, limits=(-1, 1), colours="RdBu_r")
        axes.set_title(title, fontsize=9.5)
    for axes in panels[len(found) :]:
        axes.set_axis_off()
    return figure, caption


def _shared(results: Results, modality: str) -> _Drawn:
    likeness = results["likeness"].get(modality)
    if likeness is None or not likeness["shared"]:
        return None
    by_task = {task: likeness["shared"][task] for task in likeness["tasks"]}
    shares = {task: sum(found.values()) / len(found) for task, found in by_task.items()}
    figure, (axes,) = _figure(1, 1, (7.0, 1.0 + 0.34 * len(shares)))
    names = list(shares)
    axes.barh(names, [shares[name] for name in names], 0.6, color=_BLUE, zorder=2)
    axes.barh(names, [1 - shares[name] for name in names], 0.6, left=list(shares.values()), color=_GREY, zorder=2)
    for y, (name, found) in enumerate(by_task.items()):
        axes.plot(list(found.values()), [y] * len(found), "o", color=_INK, ms=3, alpha=0.7, zorder=3)
        axes.text(1.01, y, f"{shares[name]:.2f}", va="center", fontsize=8.5)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of the descriptor's squared norm")
    _legend(figure, [("bar", _BLUE, "shared"), ("bar", _GREY, "the model's own"), ("o", _INK, "each model")])
    return figure, (
        "How much of a model's descriptor lies along the mean of the other models' descriptors of that task: the part "
        "that can be transferred. Means over models, and each model as a dot. First seed."
    )


def _alignment(results: Results, modality: str) -> _Drawn:
    found = results["summary"][modality]["alignment"]
    if len(found.get("points", ())) < 3:
        return None
    figure, panels = _figure(1, 2, (8.4, 3.5))
    names = {"mutual_neighbours": "mutual 10-nearest neighbours", "linear_cka": "linear CKA"}
    for axes, (key, name) in zip(panels, names.items(), strict=True):
        xs, ys = [point[key] for point in found["points"]], [point["retention"] for point in found["points"]]
        axes.plot(xs, ys, "o", color=_BLUE, ms=5, alpha=0.8, zorder=2)
        correlation = found["rank_correlation"][key]
        shown = "n/a" if correlation is None else f"{correlation:+.2f}"
        axes.set_title(f"rank correlation {shown}", fontsize=9.5)
        axes.set_xlabel(name)
    panels[0].set_ylabel("retention of the pair")
    return figure, (
        "Each dot is a source and a target. Left to right: how alike their base embeddings of the probes are, before "
        f"any fine-tune. Upwards: how much of the own gain is kept; method “{found['method']}”."
    )


def _curves(results: Results, modality: str) -> _Drawn:
    found = results["summary"][modality]["curves"]
    names = {"probes": "number of probes", "rank": "rank of the operator", "ridge": "ridge on the probe side"}
    if not all(name in found for name in names):
        return None
    figure, panels = _figure(1, 3, (10.5, 3.4))
    for axes, (key, name) in zip(panels, names.items(), strict=True):
        for whose, colour, marker in (("other", _BLUE, "o"), ("own", _WARM, "D")):
            line = found[key].get(whose, [])
            axes.plot([x for x, _ in line], [y for _, y in line], marker=marker, color=colour, ms=4, lw=1.6)
        axes.axhline(found["zero_shot"], color=_GREY, lw=1.4, ls="--")
        axes.set_xscale("log", base=10 if key == "ridge" else 2)
        if key != "ridge":
            ticks = [x for x, _ in found[key]["other"]]
            axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
            axes.minorticks_off()
        axes.set_xlabel(name)
        axes.grid(axis="x", color="#eceff3", lw=0.8)
    lowest = min(axes.get_ylim()[0] for axes in panels)
    highest = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(lowest, highest)
    panels[0].set_ylabel("accuracy")
    _legend(
        figure,
        [("o", _BLUE, "next model's descriptor"), ("D", _WARM, "own descriptor"), ("--", _GREY, "zero-shot")],
    )
    return figure, (
        f"Mean accuracy over {found['cases']} pairs of target and task, first seed; method “{found['method']}” but "
        "for what varies. A task with fewer prompts than a rank has reached its end there. The curves show how "
        "sensitive the method is; nothing was chosen by them."
    )


def _effects(results: Results, modality: str) -> _Drawn:
    summary = results["summary"][modality]
    panels_of = [
        ("addition", "all", "All tasks added at once"),
        ("addition", "pair", "Two tasks added"),
        ("negation", "one", "One task negated"),
    ]
    rows = {
        title: [r for r in summary[kind] if r["kind"] == which and r["sources"] == "other" and "control_change" in r]
        for kind, which, title in panels_of
    }
    rows = {title: found for title, found in rows.items() if found}
    if not rows:
        return None
    methods = list(dict.fromkeys(row["method"] for found in rows.values() for row in found))
    figure, panels = _figure(1, len(rows), (3.6 * len(rows) + 0.4, 3.6))
    colours = [_BLUE, _WARM, "#3a9d78", "#8a5fb4", "#c2455c", "#6b7785", "#b09a2f", "#4aa5b5"]
    for axes, (title, found) in zip(panels, rows.items(), strict=True):
        for row in found:
            index = methods.index(row["method"])
            x, y = row["control_change"]["value"], row["change"]["value"]
            axes.plot(x, y, "osD^vPX*"[index % 8], color=colours[index % 8], ms=8, zorder=3)
        axes.axhline(0, color=_INK, lw=0.8)
        axes.axvline(0, color=_INK, lw=0.8)
        axes.margins(0.18)
        axes.set_title(title, fontsize=9.5)
        axes.set_xlabel("change on the controls")
        axes.grid(axis="x", color="#eceff3", lw=0.8)
    panels[0].set_ylabel("change on the edited tasks")
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], marker="osD^vPX*"[i % 8], color=colours[i % 8], ls="", ms=7, label=method)
        for i, method in enumerate(methods)
    ]
    figure.legend(handles=handles, frameon=False, ncols=min(3, len(methods)), loc="outside lower center", fontsize=8.5)
    return figure, (
        "Change of accuracy on the edited tasks against that on the controls, with other models' descriptors. An "
        "ideal addition is high up and on the vertical line; an ideal negation low down and on it."
    )


_PLAN: tuple[tuple[str, str, Callable[[Results, str], _Drawn]], ...] = (
    ("methods", "Gain by method", _methods),
    ("targets", "Accuracy by target", _targets),
    ("pairs", "Gain by source and target", _pairs),
    ("effects", "Addition and negation", _effects),
    ("across-models", "Descriptors across models", _across_models),
    ("across-tasks", "Descriptors across tasks", _across_tasks),
    ("shared", "Shared and own part", _shared),
    ("likeness", "Alignment and retention", _alignment),
    ("curves", "Probes, rank and ridge", _curves),
)


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")  # no pyplot: no state, no display
    panels = [figure.add_subplot(rows, columns, index + 1) for index in range(rows * columns)]
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color("#8a94a0")
        axes.tick_params(colors=_INK, labelsize=8.5)
        axes.set_axisbelow(True)
        axes.grid(axis="y", color="#eceff3", lw=0.8)
    return figure, panels


def _heatmap(
    axes: Axes,
    values: Sequence[Sequence[float | None]],
    rows: Sequence[str] | None,
    columns: Sequence[str] | None,
    *,
    limits: tuple[float, float] | None,
    colours: str,
    signed: bool = False,
) -> None:
    numbers = [[float("nan") if value is None else value for value in line] for line in values]
    shown = [value for line in numbers for value in line if value == value]
    low, high = limits or (min(0.0, *shown), max(*shown, 1e-6))
    axes.imshow(numbers, cmap=colours, vmin=low, vmax=high)
    axes.grid(visible=False)
    size = 8.5 if len(numbers) <= 6 else 6.5
    for i, line in enumerate(numbers):
        for j, value in enumerate(line):
            # Dark cells: both ends of a two-sided scale, the upper end of a one-sided one.
            depth = abs(value) / max(abs(low), abs(high)) if limits is not None else (value - low) / (high - low)
            strong = depth > 0.62
            text = f"{value:+.2f}" if signed else f"{value:.2f}".replace("0.", ".", 1)
            axes.text(j, i, text, ha="center", va="center", fontsize=size, color="white" if strong else _INK)
    axes.set_xticks(range(len(numbers[0])), columns or [""] * len(numbers[0]), rotation=40, ha="right")
    axes.set_yticks(range(len(numbers)), rows or [""] * len(numbers))
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _legend(figure: Figure, entries: Sequence[tuple[str, str, str]]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    handles: list[Any] = []
    for kind, colour, name in entries:
        if kind == "bar":
            handles.append(Patch(color=colour, label=name))
        elif kind == "--":
            handles.append(Line2D([], [], color=colour, ls="--", label=name))
        else:
            handles.append(Line2D([], [], color=colour, marker=kind, ls="", label=name))
    figure.legend(handles=handles, frameon=False, ncols=3, loc="outside upper center", fontsize=8.5)


def _names(results: Results, what: str, modality: str) -> list[str]:
    return [entry["name"] for entry in results["suite"][what] if entry["modality"] == modality]


def _wrapped(name: str, width: int) -> str:
    return "\n".join(textwrap.wrap(name, width))


def _png(figure: Figure) -> bytes:
    buffer = io.BytesIO()
    # Without the version of matplotlib in it, the same results give the same file.
    figure.savefig(buffer, format="png", dpi=_DPI, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()
