"""Targets: every method's edits of one model, measured on its cached features."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from ..descriptor import TaskDescriptor
from ..encoders.encoder import DualEncoder
from ..errors import PlatonicError
from ..matching import MatchingArguments
from ..operator import Operator
from ..selection import Forecast
from ..solutions import solve_transfer
from ..transfers import transfer
from ..views import View
from .baselines import add_weights, random_like
from .setting import Place, Setting, place_of, unsupported
from .store import pack
from .suites import MethodSpec
from .workbench import TaskData

__all__ = ["STRENGTHS", "Edit", "Target", "measure_costly", "measure_target"]

STRENGTHS = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0)
"""Among these the oracle picks by test labels: an upper bound in a column of its own, never a result."""


@dataclass(frozen=True, eq=False)
class Edit:
    """One solved edit.

    Attributes:
        operator: What is applied.
        strength: The strength it is applied at.
        forecast: What it promises without labels, where its terms allow one.
        place: Where.
    """

    operator: Operator
    strength: float
    forecast: Forecast | None
    place: Place


class Target:
    """One model under edit, for one seed; it is run on nothing that it has seen before.

    Args:
        setting: The run.
        seed: Which probes were drawn.
        model: Its name.
        encoder: The base model; loaded if None.
    """

    def __init__(self, setting: Setting, seed: int, model: str, encoder: DualEncoder | None = None) -> None:
        self.setting, self.seed, self.model = setting, seed, model
        self.modality = setting.modality(model)
        self.encoder = setting.base(model) if encoder is None else encoder
        self._views: dict[tuple[str, Place], View] = {}
        self._descriptors: dict[tuple[str, str], TaskDescriptor] = {}

    @cached_property
    def tasks(self) -> tuple[str, ...]:
        """Names of the tasks it is edited for."""
        return self.setting.tasks_of(self.modality)

    @cached_property
    def controls(self) -> tuple[str, ...]:
        """Names of the sets that an edit should leave alone."""
        return self.setting.controls_of(self.modality)

    @property
    def others(self) -> tuple[str, ...]:
        """The models it receives from, the next one first."""
        return self.setting.others(self.model)

    def data(self, name: str) -> TaskData:
        """The data of a task or control."""
        return self.setting.data_of(self.seed, name)

    def view(self, name: str, place: Place = (None, None)) -> View:
        """The base model's view of a task's or control's test set, at a place where an edit acts."""
        if (name, place) not in self._views:
            site, tower = place
            encoder = self.encoder.at(site=site, tower=tower)
            self._views[name, place] = View.of(
                encoder, self.data(name).test, tower=tower or "probe", **self.setting.passes
            )
        return self._views[name, place]

    def descriptor(self, source: str, task: str) -> TaskDescriptor:
        """The descriptor of one model, or the consensus of all others where the source is "others"."""
        key = (source, task)
        if key not in self._descriptors:
            if source == "others":
                found = TaskDescriptor.consensus([self.descriptor(other, task) for other in self.others])
            else:
                found = self.setting.descriptor(self.seed, source, self.data(task))
            self._descriptors[key] = found
        return self._descriptors[key]

    def solve(self, terms: TaskDescriptor | Sequence[TaskDescriptor], options: Mapping[str, Any]) -> Edit:
        """One closed-form edit, with a method's options as they are; `preserve: controls` means the suite's own.

        Of a control that is classified the unlabelled half is preserved, and the other one measured.
        """
        arguments = {**self.setting.passes, **options}
        if arguments.get("preserve") == "controls":
            kept = [self.data(name) for name in self.controls]
            arguments["preserve"] = [data.probes for data in kept if data.kind == "classification"]
        solution = solve_transfer(terms, self.encoder, **arguments)
        site = options.get("site")
        if site is None and options.get("tower") is None and solution.operator.site != self.encoder.site.kind:
            site = solution.operator.site  # a recipe has chosen
        return Edit(solution.operator, solution.strength, solution.forecast, (site, options.get("tower")))

    def correct(self, edit: Edit, name: str, *, strength: float | None = None) -> Tensor:
        """Whether each test input is right under an edit, shape (n,), bool."""
        view = self.view(name, edit.place)
        return view.correct(edit.operator, strength=edit.strength if strength is None else strength)

    def trained(self, terms: TaskDescriptor | Sequence[TaskDescriptor], options: Mapping[str, Any]) -> DualEncoder:
        """A newly loaded copy of the model with a LoRA trained to the terms."""
        from peft import LoraConfig

        encoder = self.setting.bench.encoder(self.model)
        arguments: dict[str, Any] = {**self.setting.passes, **options}
        for name, kind in (("training_args", MatchingArguments), ("lora_config", LoraConfig)):
            if isinstance(arguments.get(name), Mapping):  # as YAML writes them
                arguments[name] = kind(**arguments[name])
        transfer(terms, encoder, method="lora", **arguments)
        return encoder


def measure_target(setting: Setting, model: str) -> None:
    """Finishes the cells of one model as a target: transfers, additions, negations and baselines.

    Args:
        setting: The run, with all sources measured.
        model: Its name.
    """
    encoder: DualEncoder | None = None
    for seed in setting.suite.seeds:
        target = Target(setting, seed, model, encoder)
        encoder = target.encoder
        for method in setting.suite.methods:
            if method.cases == "all" and method.takes(setting.suite.seeds, seed):
                _measure(target, method)
        for task in target.tasks:
            _cell(target, ("baseline", seed, model, task), None, _baselines, task)
    setting.bench.forget(model)


def measure_costly(setting: Setting, model: str) -> None:
    """Finishes a target's cells of the costly methods: for the first seed, from the next model.

    Args:
        setting: The run, with all sources measured.
        model: Its name.
    """
    costly = [method for method in setting.suite.methods if method.cases == "cycle"]
    if costly:
        target = Target(setting, setting.suite.seeds[0], model)
        for method in costly:
            _measure(target, method)
        setting.bench.forget(model)


def _measure(target: Target, method: MethodSpec) -> None:
    reason = unsupported(method)
    key = (target.seed, method.name, target.model)
    for task in target.tasks:
        if "transfer" in method.parts and (not method.tasks or task in method.tasks):
            _cell(target, ("transfer", *key, task), reason, _transfers, method, task)
    if method.realisation == "closed_form":
        if {"pairs", "all"} & set(method.parts):
            _cell(target, ("addition", *key), reason, _additions, method)
        if "negation" in method.parts:
            _cell(target, ("negation", *key), reason, _negations, method)


def _cell(
    target: Target,
    key: tuple[object, ...],
    reason: str | None,
    measure: Callable[..., list[dict[str, Any]]],
    *arguments: Any,
) -> None:
    """One cell with its cases, or with the reason why there are none; skipped if finished before."""
    store = target.setting.store
    if store.has(*key):
        return
    start = time.perf_counter()
    cases: list[dict[str, Any]] = []
    if reason is None:
        try:
            cases = measure(target, *arguments)
        except PlatonicError as error:
            reason = str(error)
    store.put(*key, cases=cases, reason=reason, seconds=time.perf_counter() - start)


def _sources(target: Target, method: MethodSpec) -> list[str]:
    """Whose descriptors a method moves to the target; the target's own last."""
    if method.sources == "own":
        return [target.model]
    chosen = target.others[:1] if method.cases == "cycle" else target.others
    return [*(("others",) if method.sources == "others" else chosen), *[target.model] * method.own]


def _transfers(target: Target, method: MethodSpec, task: str) -> list[dict[str, Any]]:
    cases = []
    for source in _sources(target, method):
        term = target.descriptor(source, task)
        if method.realisation == "lora":
            encoder = target.trained(term, method.options)
            view = View.of(encoder, target.data(task).test, **target.setting.passes)
            cases.append({"source": source, "strength": None, **_scored(view.correct())})
            continue
        edit = target.solve(term, method.options)
        oracle = {s: _share(target.correct(edit, task, strength=s)) for s in STRENGTHS}
        best = max(oracle, key=lambda s: oracle[s])
        cases.append(
            {
                "source": source,
                "strength": round(edit.strength, 6),
                "rank": edit.operator.rank,
                **_scored(target.correct(edit, task)),
                "forecast": None if edit.forecast is None else round(edit.forecast.gain, 6),
                "oracle": {"strength": best, "accuracy": oracle[best]},
            }
        )
    return cases


def _additions(target: Target, method: MethodSpec) -> list[dict[str, Any]]:
    """Pairs of neighbouring tasks from one other model, and all tasks at once, each from another one in turn."""
    tasks, others = target.tasks, target.others
    neighbours = list(zip(tasks, (*tasks[1:], *tasks[:1]), strict=True)) if len(tasks) > 2 else []
    plans: list[tuple[str, Sequence[str], list[str]]] = []
    for source in _one_of_each(target, method):
        plans += [("pair", pair, [source] * 2) for pair in neighbours if "pairs" in method.parts]
        turns = [others[i % len(others)] for i in range(len(tasks))] if source in others else [source] * len(tasks)
        plans += [("all", tasks, turns)] if "all" in method.parts else []
    cases = []
    for kind, names, donors in plans:
        terms = [target.descriptor(donor, task) for donor, task in zip(donors, names, strict=True)]
        edit = target.solve(terms, method.options)
        cases.append({"kind": kind, "tasks": list(names), "sources": donors, **_effects(target, edit, names)})
    return cases


def _one_of_each(target: Target, method: MethodSpec) -> list[str]:
    """The next model, or the mean of the others, and the target itself, as far as the method has them."""
    chosen = _sources(target, method)
    return [source for source in chosen if source != target.model][:1] + [target.model] * (target.model in chosen)


def _negations(target: Target, method: MethodSpec) -> list[dict[str, Any]]:
    """Each task taken away by the descriptor of the next model (or the mean of the others), coefficient -1."""
    cases = []
    for source in _one_of_each(target, method):
        for task in target.tasks:
            edit = target.solve(-target.descriptor(source, task), method.options)
            cases.append({"tasks": [task], "sources": [source], **_effects(target, edit, [task])})
    return cases


def _effects(target: Target, edit: Edit, tasks: Sequence[str]) -> dict[str, Any]:
    return {
        "strength": round(edit.strength, 6),
        "after": {task: _scored(target.correct(edit, task)) for task in tasks},
        "control_after": {name: _scored(target.correct(edit, name)) for name in target.controls},
    }


def _baselines(target: Target, task: str) -> list[dict[str, Any]]:
    """A random descriptor with the own one's norm, by the suite's first closed form; weights added as they are."""
    cases = []
    own = target.descriptor(target.model, task)
    reference = next((m for m in target.setting.suite.methods if m.realisation == "closed_form"), None)
    if reference is not None and unsupported(reference) is None and place_of(reference)[1] != "text":
        edit = target.solve(random_like(own, seed=target.seed), reference.options)
        cases.append({"baseline": "random", "source": None, **_scored(target.correct(edit, task))})
    if target.seed == target.setting.suite.seeds[0]:  # weights don't depend on the probes
        for source in target.others:
            encoder = target.setting.bench.encoder(target.model)
            delta = target.setting.bench.weight_delta(source, task)
            if delta is not None and add_weights(encoder, delta):
                view = View.of(encoder, target.data(task).test, **target.setting.passes)
                cases.append({"baseline": "weights", "source": source, **_scored(view.correct())})
    return cases


def _scored(correct: Tensor) -> dict[str, Any]:
    return {"accuracy": _share(correct), "correct": pack(correct)}


def _share(correct: Tensor) -> float:
    return round(float(correct.double().mean()), 6)
