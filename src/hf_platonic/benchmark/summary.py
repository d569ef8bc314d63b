"""Summary: the means, shares, curves and correlations of one modality, with bootstrap intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from .analysis import rank_correlation
from .bootstrap import Bootstrap
from .setting import Setting
from .store import unpack
from .suites import MethodSpec
from .sweeps import COUNTS, RANKS

__all__ = ["Cell", "Summary"]

Cell = dict[str, Any]
"""A finished cell, as `Store.get` gives it."""


_PLACES = {
    **dict.fromkeys(("control", "probe", "sweep", "likeness"), 1),
    **dict.fromkeys(("source", "baseline"), 2),
    **dict.fromkeys(("transfer", "addition", "negation"), 3),
}
"""Where in the key of a kind of cell its model stands, or its modality."""


class Summary:
    """Means over the tasks, targets, sources and seeds of one modality, with bootstrap intervals."""

    def __init__(self, setting: Setting, modality: str, cells: Mapping[str, list[Cell]]) -> None:
        self.setting, self.suite = setting, setting.suite
        self.models, self.tasks = setting.models_of(modality), setting.tasks_of(modality)
        self.controls = setting.controls_of(modality)
        mine = {
            kind: [c for c in found if c["key"][_PLACES[kind]] in (modality, *self.models)]
            for kind, found in cells.items()
        }
        sizes = {c["key"][-1]: c["n"] for c in (*mine["source"], *mine["control"])}
        self.boot = Bootstrap(sizes, [task for task in self.tasks if task in sizes])
        self.sizes = sizes
        source, control, probe = mine["source"], mine["control"], mine["probe"]
        self.zero = {(c["key"][2], c["key"][3]): self._read(c["key"][3], c["zero_shot"]) for c in source}
        self.fine = {(c["key"][2], c["key"][3]): self._read(c["key"][3], c["fine_tuned"]) for c in source}
        self.control = {(c["key"][1], c["key"][2]): self._read(c["key"][2], c["zero_shot"]) for c in control}
        self.probe = {(c["key"][1], c["key"][2]): self._read(c["key"][2], c["correct"]) for c in probe if c["correct"]}
        # By method, then (seed, target, task): replicates of the accuracy by source.
        self.edited: dict[str, dict[tuple[str, str, str], dict[str, Tensor]]] = defaultdict(dict)
        self.oracle: dict[str, dict[tuple[str, str, str], dict[str, float]]] = defaultdict(dict)
        self.forecast: dict[str, dict[tuple[str, str, str], dict[str, float]]] = defaultdict(dict)
        for cell in mine["transfer"]:
            _, seed, method, target, task = cell["key"]
            if cell["cases"]:
                found = {case["source"]: self._read(task, case["correct"]) for case in cell["cases"]}
                self.edited[method][seed, target, task] = found
                best = {case["source"]: case["oracle"]["accuracy"] for case in cell["cases"] if "oracle" in case}
                self.oracle[method][seed, target, task] = best
                self.forecast[method][seed, target, task] = {
                    case["source"]: case["forecast"] for case in cell["cases"] if case.get("forecast") is not None
                }
        self.cells = mine

    def figures(self) -> dict[str, Any]:
        """All of the modality's summary."""
        methods = self.suite.methods
        costly = [m for m in methods if m.cases == "cycle" or m.tasks or m.seeds is not None]
        if len({(m.cases, m.tasks, m.seeds) for m in methods}) == 1:
            costly = []  # all are on the same few cases
        return {
            "levels": self._levels(),
            "methods": [row for m in methods if (row := self._method(m, self._any, self.tasks)) is not None],
            "on_cases_of": {
                m.name: [row for other in methods if (row := self._method(other, *self._cases_of(m))) is not None]
                for m in costly
                if self.edited.get(m.name)
            },
            "by_target": self._by(lambda key: key[1], self.models),
            "by_task": self._by(lambda key: key[2], self.tasks),
            "pairs": self._pairs(),
            "baselines": self._baselines(),
            "addition": self._effects("addition"),
            "negation": self._effects("negation"),
            "alignment": self._alignment(),
            "curves": self._curves(),
        }

    def _read(self, name: str, bits: str) -> Tensor:
        return self.boot.accuracy(name, unpack(bits, self.sizes[name]))

    def _per_task(self, values: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        by_task: dict[str, list[Tensor]] = defaultdict(list)
        for task, value in values:
            by_task[task].append(value)
        return {task: torch.stack(found).mean(dim=0) for task, found in by_task.items()}

    def _mean(self, values: Iterable[tuple[str, Tensor]]) -> Tensor:
        return self.boot.over_tasks(self._per_task(values))

    def _levels(self) -> dict[str, Any]:
        """Accuracies of the targets themselves, with nothing transferred."""
        found = {"zero_shot": self.zero, "fine_tuned": self.fine, "linear_probe": self.probe}
        return {
            name: self.boot.estimate(self._mean((key[1], value) for key, value in table.items()))
            for name, table in found.items()
            if table
        }

    @staticmethod
    def _any(source: str, target: str) -> bool:
        return True

    def _cases_of(self, method: MethodSpec) -> tuple[Callable[[str, str], bool], Sequence[str], Sequence[str] | None]:
        """Which sources, tasks and seeds a costly method was run on."""

        def chosen(source: str, target: str) -> bool:
            return source in ("others", self.setting.others(target)[0]) or method.cases == "all"

        count = 1 if method.cases == "cycle" else method.seeds
        seeds = None if count is None else [str(seed) for seed in self.suite.seeds[:count]]
        return chosen, method.tasks or self.tasks, seeds

    def _method(
        self,
        method: MethodSpec,
        chosen: Callable[[str, str], bool],
        tasks: Sequence[str],
        seeds: Sequence[str] | None = None,
    ) -> dict[str, Any] | None:
        """One row: what other models' descriptors gain by a method, next to the target's own."""
        found = self.edited.get(method.name, {})
        keys = [key for key in found if key[2] in tasks and (seeds is None or key[0] in seeds)]
        given = {
            key: torch.stack(values).mean(dim=0)
            for key in keys
            if (values := [v for s, v in found[key].items() if s != key[1] and chosen(s, key[1])])
        }
        if not given:
            return None
        own = self._own(method)
        zero = {key: self.zero[key[1:]] for key in given}
        fine = {key: self.fine[key[1:]] for key in given}

        def mean(table: Mapping[tuple[str, str, str], Tensor]) -> Tensor:
            return self._mean((key[2], value) for key, value in table.items())

        gain, fine_gain = mean(given) - mean(zero), mean(fine) - mean(zero)
        whole = own if own is not None and all(key in own for key in given) else None
        own_gain = None if whole is None else mean({key: whole[key] for key in given}) - mean(zero)
        best = [
            value
            for key in given
            for source, value in self.oracle[method.name][key].items()
            if source != key[1] and chosen(source, key[1])
        ]
        estimate = self.boot.estimate
        return {
            "method": method.name,
            "cases": sum(
                1 for key in given for s in self.edited[method.name][key] if s != key[1] and chosen(s, key[1])
            ),
            "tasks": len({key[2] for key in given}),
            "zero_shot": estimate(mean(zero)),
            "accuracy": estimate(mean(given)),
            "gain": estimate(gain),
            "own_gain": None if own_gain is None else estimate(own_gain),
            "retention": None if own_gain is None else estimate(_ratio(gain, own_gain)),
            "share_of_fine_tuning": estimate(_ratio(gain, fine_gain)),
            "own_share_of_fine_tuning": None if own_gain is None else estimate(_ratio(own_gain, fine_gain)),
            "normalized_accuracy": estimate(
                self._mean((key[2], _ratio(value, fine[key])) for key, value in given.items())
            ),
            "oracle_accuracy": round(fmean(best), 6) if best else None,
            "forecast_correlation": self._forecast(method, given, chosen),
        }

    def _forecast(
        self, method: MethodSpec, keys: Iterable[tuple[str, str, str]], chosen: Callable[[str, str], bool]
    ) -> float | None:
        """Rank correlation over transfers of the gain that was forecast without labels and the gain found."""
        pairs = [
            (promised, float(self.edited[method.name][key][source][0] - self.zero[key[1:]][0]))
            for key in keys
            for source, promised in self.forecast[method.name].get(key, {}).items()
            if source != key[1] and chosen(source, key[1])
        ]
        return rank_correlation(*zip(*pairs, strict=True)) if len(pairs) > 2 else None

    def _own(self, method: MethodSpec) -> dict[tuple[str, str, str], Tensor] | None:
        """Accuracies with the target's own descriptor, by the method or by one that differs in its sources alone."""
        for other in (method, *self.suite.methods):
            same = other.realisation == method.realisation and dict(other.options) == dict(method.options)
            found = self.edited.get(other.name, {})
            own = {key: values[key[1]] for key, values in found.items() if key[1] in values}
            if same and own:
                return own
        return None

    def _by(self, part: Callable[[tuple[str, str, str]], str], names: Sequence[str]) -> dict[str, Any]:
        """By method, then target or task: the mean gain of other models' descriptors, and of the own one."""
        out: dict[str, Any] = {}
        for method, found in self.edited.items():
            rows = {}
            for name in names:
                keys = [key for key in found if part(key) == name]
                given = [float(v[0] - self.zero[k[1:]][0]) for k in keys for s, v in found[k].items() if s != k[1]]
                own = [float(v[0] - self.zero[k[1:]][0]) for k in keys for s, v in found[k].items() if s == k[1]]
                if given or own:
                    rows[name] = {"gain": _mean_of(given), "own_gain": _mean_of(own)}
            out[method] = rows
        return out

    def _pairs(self) -> dict[str, Any]:
        """By method: the mean gain of each source (rows) on each target (columns), over tasks and seeds."""
        out = {}
        for method in self.suite.methods:
            found = self.edited.get(method.name, {})
            if method.sources != "one" or method.cases != "all" or not found:
                continue
            out[method.name] = [
                [self._pair_gain(found, source, target) for target in self.models] for source in self.models
            ]
        return out

    def _pair_gain(self, found: Mapping[tuple[str, str, str], dict[str, Tensor]], source: str, target: str) -> Any:
        return _mean_of(
            float(values[source][0] - self.zero[key[1:]][0])
            for key, values in found.items()
            if key[1] == target and source in values
        )

    def _baselines(self) -> list[dict[str, Any]]:
        """A random descriptor; weights added, next to the first method on the same cases."""
        rows = []
        random: list[tuple[str, Tensor]] = []
        weights: list[tuple[str, Tensor]] = []
        same: list[tuple[str, Tensor]] = []
        first = next((m.name for m in self.suite.methods if self.edited.get(m.name)), None)
        for cell in self.cells["baseline"]:
            _, seed, target, task = cell["key"]
            for case in cell["cases"]:
                gain = self._read(task, case["correct"]) - self.zero[target, task]
                (random if case["baseline"] == "random" else weights).append((task, gain))
                if case["baseline"] == "weights" and first is not None:
                    reference = self.edited[first].get((seed, target, task), {}).get(case["source"])
                    if reference is not None:
                        same.append((task, reference - self.zero[target, task]))
        if random:
            rows.append({"baseline": "random", "cases": len(random), "gain": self.boot.estimate(self._mean(random))})
        if weights:
            row = {"baseline": "weights", "cases": len(weights), "gain": self.boot.estimate(self._mean(weights))}
            if same:
                row |= {"method": first, "method_gain": self.boot.estimate(self._mean(same))}
            rows.append(row)
        return rows

    def _effects(self, kind: str) -> list[dict[str, Any]]:
        """Additions or negations by method, number of tasks and whose descriptors: on the tasks, on the controls."""
        groups: dict[tuple[str, str, str], list[tuple[str, Cell]]] = defaultdict(list)
        for cell in self.cells[kind]:
            _, _, method, target = cell["key"]
            for case in cell["cases"]:
                whose = "own" if set(case["sources"]) == {target} else "other"
                groups[method, case.get("kind", "one"), whose].append((target, case))
        rows = []
        order = [m.name for m in self.suite.methods]
        for (method, which, whose), found in sorted(groups.items(), key=lambda item: order.index(item[0][0])):
            before = self._mean((task, self.zero[target, task]) for target, case in found for task in case["tasks"])
            after = self._mean(
                (task, self._read(task, case["after"][task]["correct"]))
                for target, case in found
                for task in case["tasks"]
            )
            row = {"method": method, "kind": which, "sources": whose, "cases": len(found)}
            row |= {"before": self.boot.estimate(before), "after": self.boot.estimate(after)}
            row["change"] = self.boot.estimate(after - before)
            controls = {name: self._control(name, found) for name in self.controls}
            row["controls"] = {
                name: {"before": self.boot.estimate(a), "after": self.boot.estimate(b)}
                for name, (a, b) in controls.items()
            }
            classified = [
                controls[name] for name in self.controls if self.suite.control(name).kind == "classification"
            ]
            if classified:
                a, b = (torch.stack(part).mean(dim=0) for part in zip(*classified, strict=True))
                row["control_before"], row["control_after"] = self.boot.estimate(a), self.boot.estimate(b)
                row["control_change"] = self.boot.estimate(b - a)
            row["strengths"] = sorted({case["strength"] for _, case in found})
            rows.append(row)
        return rows

    def _control(self, name: str, found: Sequence[tuple[str, Cell]]) -> tuple[Tensor, Tensor]:
        """A control before and after, in the mean over cases."""
        before = torch.stack([self.control[target, name] for target, _ in found])
        after = torch.stack([self._read(name, case["control_after"][name]["correct"]) for _, case in found])
        return before.mean(dim=0), after.mean(dim=0)

    def _alignment(self) -> dict[str, Any]:
        """How alike two models' embeddings are, against the retention between them by the first method."""
        likeness = next(iter(self.cells["likeness"]), None)
        method = next((m.name for m in self.suite.methods if m.name in self._pairs()), None)
        if likeness is None or method is None:
            return {}
        gains = self._pairs()[method]
        points = []
        for pair in likeness["alignment"]:
            for source, target in (pair["models"], pair["models"][::-1]):
                i, j = self.models.index(source), self.models.index(target)
                own = gains[j][j]
                if own is not None and own > 0 and gains[i][j] is not None:
                    points.append(
                        {"source": source, "target": target, "retention": round(gains[i][j] / own, 6)}
                        | {name: pair[name] for name in ("mutual_neighbours", "linear_cka")}
                    )
        retention = [point["retention"] for point in points]
        return {
            "method": method,
            "points": points,
            "rank_correlation": {
                name: rank_correlation([point[name] for point in points], retention)
                for name in ("mutual_neighbours", "linear_cka")
            },
        }

    def _curves(self) -> dict[str, Any]:
        """Mean accuracy along each sweep, for other models' descriptors and for the own ones."""
        lines: dict[tuple[str, str], list[dict[float, float]]] = defaultdict(list)
        for cell in self.cells["sweep"]:
            _, target, _ = cell["key"]
            for source in dict.fromkeys(case["source"] for case in cell["cases"]):
                whose = "own" if source == target else "other"
                for curve in ("probes", "rank", "ridge"):
                    line = {
                        c["x"]: c["accuracy"] for c in cell["cases"] if (c["source"], c["curve"]) == (source, curve)
                    }
                    lines[curve, whose].append(line)
        swept = {(c["key"][1], c["key"][2]) for c in self.cells["sweep"]}
        curves: dict[str, Any] = {
            "method": next((c["method"] for c in self.cells["sweep"]), None),
            "cases": len(swept),
            "zero_shot": _mean_of(float(self.zero[key][0]) for key in swept),
            "fine_tuned": _mean_of(float(self.fine[key][0]) for key in swept),
        }
        for (curve, whose), found in lines.items():
            grid = {"probes": COUNTS, "rank": RANKS}.get(curve) or sorted(found[0])
            top = max(max(line) for line in found)
            xs = [x for x in sorted({*grid, top}) if x <= top and all(min(line) <= x for line in found)]
            # A task with fewer probes or prompts than x is at its end there.
            means = [fmean(line[max(at for at in line if at <= x)] for line in found) for x in xs]
            curves.setdefault(curve, {})[whose] = [[x, round(value, 6)] for x, value in zip(xs, means, strict=True)]
        return curves


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """`a / b`; NaN where the second isn't above zero, which leaves nothing to be a share of."""
    return torch.where(b > 0, a / torch.where(b > 0, b, torch.ones_like(b)), torch.nan)


def _mean_of(values: Iterable[float]) -> float | None:
    found = list(values)
    return round(fmean(found), 6) if found else None
