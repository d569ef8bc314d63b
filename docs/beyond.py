"""Writes docs/beyond.md: the options that go beyond the paper, with what each does on the playground.

    python docs/beyond.py [--json FILE]

About three minutes on one core, offline. Strengths, ridges and weights are fixed here, before any label is looked at;
labels are used for accuracies alone. Controls are cut in two: one half, unlabelled, is preserved, the other measured.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from hf_platonic import playground
from hf_platonic.consensus import Consensus
from hf_platonic.descriptor import TaskDescriptor
from hf_platonic.encoders.encoder import DualEncoder
from hf_platonic.evaluation import EvaluationSet
from hf_platonic.extraction import extract
from hf_platonic.fits import AGREEMENT_RIDGES, AGREEMENT_STRENGTHS
from hf_platonic.joint import JointTerm, joint_solve
from hf_platonic.objectives import wanted_change
from hf_platonic.operator import Operator
from hf_platonic.probes import ProbeSet
from hf_platonic.readings import Reading
from hf_platonic.selection import RIDGES
from hf_platonic.solve import GridSolver
from hf_platonic.views import RememberingEncoder, View

PAGE = Path(__file__).with_suffix(".md")
RUN: dict[str, Any] = {"batch_size": 100, "progress": False}
PAPER: dict[str, Any] = {"objective": "change", "calibration": "none"}
CALIBRATED: dict[str, Any] = {"objective": "change", "calibration": "spread"}
SETTINGS: dict[str, Any] = {
    "low": min(RIDGES),
    "high": max(RIDGES),
    "ridges": ", ".join(f"{ridge:g}" for ridge in AGREEMENT_RIDGES),
    "strengths": ", ".join(f"{strength:g}" for strength in sorted(AGREEMENT_STRENGTHS)),
}
ENDPOINT: dict[str, Any] = {"objective": "endpoint", "calibration": "spread"}


@dataclass(frozen=True, eq=False)
class Target:
    """One model's side of everything: what a solve sees, and what is measured."""

    grids: dict[str, Reading]
    controls: dict[str, Reading]
    views: dict[str, View]
    kind: Any

    def closed_form(self, task: str, wanted: torch.Tensor) -> Operator:
        """The operator of one term alone."""
        design = self.grids[task].features.design
        left, right = GridSolver.of(design, self.grids[task].columns).solve([wanted], design)[0]
        return Operator(left.float(), right.float(), self.kind)

    def jointly(self, wanted: dict[str, torch.Tensor], preserve: str | None) -> Operator:
        """The operator of all terms and of what is to be preserved: "default", "control" or nothing."""
        read = self.grids
        terms = [JointTerm(read[k].features.design, read[k].columns, u) for k, u in wanted.items()]
        if preserve == "default":
            for task in wanted:
                others = torch.cat([read[k].columns for k in wanted if k != task])
                terms.append(JointTerm(read[task].features.design, others))
        elif preserve == "control":
            terms += [JointTerm(c.features.design, c.columns) for c in self.controls.values()]
        found = joint_solve(terms)
        return Operator(found.left.float(), found.right.float(), self.kind)


def load(name: str, task: str | None, memory: dict[str, Any]) -> DualEncoder:
    """A model of the playground, fine-tuned on a task if one is named."""
    adapter = None if task is None else playground.adapter_path(name, task)
    encoder = RememberingEncoder.from_pretrained(playground.model_path(name), adapter=adapter)
    encoder.memory = memory
    return encoder


@dataclass(frozen=True, eq=False)
class World:
    """The playground's image models and tasks, with every family's descriptors."""

    models: tuple[str, ...]
    tasks: tuple[str, ...]
    bases: dict[str, DualEncoder]
    probes: dict[str, ProbeSet]
    preserved: dict[str, ProbeSet]  # by control
    tests: dict[str, EvaluationSet]  # by task or control
    descriptors: dict[tuple[str, str], TaskDescriptor]  # by (model, task)
    tuned: dict[tuple[str, str], float]


def prepared() -> World:
    """Descriptors of every model on every task, from one pass each."""
    models, tasks = playground.model_names("image"), playground.IMAGE_TASKS
    world = World(models, tasks, {}, {}, {}, {}, {}, {})
    for name in tasks:
        task = playground.load_task(name)
        split = task.split("test")
        world.probes[name] = probe_set(task, task.split("probes").inputs)
        world.tests[name] = EvaluationSet(probe_set(task, split.inputs), split.labels or ())
    for name in playground.controls("image"):
        task = playground.load_control(name)
        split = task.split("test")
        half = len(split) // 2
        world.preserved[name] = probe_set(task, split.inputs[:half])
        world.tests[name] = EvaluationSet(probe_set(task, split.inputs[half:]), (split.labels or ())[half:])
    for model in models:
        memory: dict[str, Any] = {}
        world.bases[model] = base = load(model, None, memory)
        for name in tasks:
            tuned = load(model, name, memory)
            world.descriptors[model, name] = extract(
                base, tuned, world.probes[name], name=name, store_base=True, **RUN
            )
            world.tuned[model, name] = View.of(tuned, world.tests[name], batch_size=RUN["batch_size"]).accuracy()
    return world


def probe_set(task: playground.Task, inputs: list[Any]) -> ProbeSet:
    """The inputs with the task's classes in its first template."""
    return ProbeSet(inputs, class_names=task.class_names, templates=task.templates[:1])


def measured(world: World, site: Any) -> dict[str, Any]:
    """Every figure of the page for one edit site, None being the family's own."""
    models, tasks, descriptors, tuned = world.models, world.tasks, world.descriptors, world.tuned
    controls = list(world.preserved)
    targets: dict[str, Target] = {}
    for model, base in world.bases.items():
        edited = base.at(site=site)
        targets[model] = Target(
            {task: Reading.of(edited, probes, **RUN) for task, probes in world.probes.items()},
            {name: Reading.of(edited, probes, **RUN) for name, probes in world.preserved.items()},
            {name: View.of(edited, data, batch_size=RUN["batch_size"]) for name, data in world.tests.items()},
            edited.site.kind,
        )
    zero = {(m, k): targets[m].views[k].accuracy() for m in models for k in tasks}
    fine_tuning = mean(tuned[key] - zero[key] for key in zero)

    def others(model: str) -> list[str]:
        at = models.index(model)
        return [*models[at + 1 :], *models[:at]]

    def wanted(model: str, task: str, terms: Sequence[TaskDescriptor], way: dict[str, Any]) -> torch.Tensor:
        return wanted_change(terms, targets[model].grids[task].affinity, **way)

    def gain(model: str, task: str, term: TaskDescriptor, way: dict[str, Any], strength: float) -> float:
        operator = targets[model].closed_form(task, wanted(model, task, [term], way))
        return targets[model].views[task].accuracy(operator, strength=strength) - zero[model, task]

    def single(way: dict[str, Any], strength: float, sources: Callable[[str, str], Iterable[TaskDescriptor]]) -> float:
        return mean(
            mean(gain(model, task, term, way, strength) for term in sources(model, task))
            for model in models
            for task in tasks
        )

    def each(model: str, task: str) -> list[TaskDescriptor]:
        return [descriptors[source, task] for source in others(model)]

    def agreed(model: str, task: str) -> list[TaskDescriptor]:
        return [Consensus.of(each(model, task)).descriptor]

    def spoilt(model: str, task: str) -> list[TaskDescriptor]:
        first, *good = each(model, task)
        assert first.base_affinity is not None
        shifted = replace(first, delta=first.delta.roll(1, 1), base_affinity=first.base_affinity.roll(1, 1))
        return [shifted, *good]

    def by(weighting: Any) -> Callable[[str, str], list[TaskDescriptor]]:
        return lambda model, task: [Consensus.of(spoilt(model, task), weighting=weighting).descriptor]

    own = single(PAPER, 1.0, lambda model, task: [descriptors[model, task]])
    rows = [
        ("own descriptor, paper's recipe, s = 1", own),
        ("one source, paper's recipe, s = .5", single(PAPER, 0.5, each)),
        ("one source, paper's recipe, s = 1", single(PAPER, 1.0, each)),
        ("one source, calibrated", single(CALIBRATED, 1.0, each)),
        ("one source, endpoint", single(ENDPOINT, 1.0, each)),
        ("consensus of the others, calibrated", single(CALIBRATED, 1.0, agreed)),
        ("consensus of the others, endpoint", single(ENDPOINT, 1.0, agreed)),
        ("… one of five sources with its classes mixed up, equal weights", single(ENDPOINT, 1.0, by("equal"))),
        ("… one of five sources with its classes mixed up", single(ENDPOINT, 1.0, by("agreement"))),
    ]

    def composed(solve: Callable[[str], tuple[list[str], Operator]], strength: float) -> dict[str, float]:
        task_after, control_after = [], []
        for model in models:
            names, operator = solve(model)
            views = targets[model].views
            task_after.append(mean(views[k].accuracy(operator, strength=strength) for k in names))
            control_after.append(mean(views[c].accuracy(operator, strength=strength) for c in controls))
        return {"task": mean(task_after), "control": mean(control_after)}

    def added(way: dict[str, Any], preserve: str | None, *, joint: bool, agree: bool = False) -> Any:
        def solve(model: str) -> tuple[list[str], Operator]:
            sources = others(model)
            asked = {}
            for i, task in enumerate(tasks):
                terms = agreed(model, task) if agree else [descriptors[sources[i % len(sources)], task]]
                asked[task] = wanted(model, task, terms, way)
            if joint:
                return list(tasks), targets[model].jointly(asked, preserve)
            parts = [targets[model].closed_form(task, u) for task, u in asked.items()]
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            return list(tasks), total

        return solve

    def negated(way: dict[str, Any], preserve: str | None, task: str) -> Any:
        def solve(model: str) -> tuple[list[str], Operator]:
            u = wanted(model, task, [-descriptors[others(model)[0], task]], way)
            if preserve is None:
                return [task], targets[model].closed_form(task, u)
            return [task], targets[model].jointly({task: u}, preserve)

        return solve

    def negation(way: dict[str, Any], preserve: str | None) -> dict[str, float]:
        found = [composed(negated(way, preserve, task), 1.0) for task in tasks]
        return {key: mean(case[key] for case in found) for key in ("task", "control")}

    before = {
        "task": mean(zero.values()),
        "control": mean(targets[m].views[c].accuracy() for m in models for c in controls),
    }
    return {
        "zero_shot": before["task"],
        "fine_tuned": mean(tuned.values()),
        "single": [{"what": w, "gain": g, "share": g / fine_tuning, "retention": g / own} for w, g in rows],
        "shared": mean(Consensus.of(each(m, k)).shared for m in models for k in tasks),
        "addition": [
            {"what": "before", **before},
            {"what": "signed sum, s = .5 (paper's recipe)", **composed(added(PAPER, None, joint=False), 0.5)},
            {"what": "joint", **composed(added(PAPER, None, joint=True), 1.0)},
            {"what": "joint, calibrated", **composed(added(CALIBRATED, None, joint=True), 1.0)},
            {"what": "joint, endpoint", **composed(added(ENDPOINT, None, joint=True), 1.0)},
            {"what": "joint, endpoint, default control", **composed(added(ENDPOINT, "default", joint=True), 1.0)},
            {"what": "joint, endpoint, control preserved", **composed(added(ENDPOINT, "control", joint=True), 1.0)},
            {
                "what": "joint, endpoint of the consensus, control preserved",
                **composed(added(ENDPOINT, "control", joint=True, agree=True), 1.0),
            },
        ],
        "negation": [
            {"what": "before", **before},
            {"what": "closed form, s = 1 (paper's recipe)", **negation(PAPER, None)},
            {"what": "joint, control preserved", **negation(PAPER, "control")},
            {"what": "joint, calibrated, control preserved", **negation(CALIBRATED, "control")},
            {"what": "joint, endpoint, control preserved", **negation(ENDPOINT, "control")},
        ],
    }


def mean(values: Iterable[float]) -> float:
    """The mean of any number of values above 0."""
    found = list(values)
    return sum(found) / len(found)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def page(figures: dict[str, dict[str, Any]]) -> str:
    """The page with the figures in it."""
    own, reads = figures["own_site"], figures["input_site"]
    single = table(
        ["", "gain", "of the fine-tuning gain", "retention", "gain at the input site", "of the fine-tuning gain"],
        (
            [
                a["what"],
                *(f"{a['gain']:+.3f}", f"{a['share']:.2f}", f"{a['retention']:.2f}"),
                *(f"{b['gain']:+.3f}", f"{b['share']:.2f}"),
            ]
            for a, b in zip(own["single"], reads["single"], strict=True)
        ),
    )
    composed = {
        name: table(
            ["", "tasks", "control", "tasks, input site", "control, input site"],
            (
                [a["what"], *(f"{x[key]:.3f}" for x in (a, b) for key in ("task", "control"))]
                for a, b in zip(own[name], reads[name], strict=True)
            ),
        )
        for name in ("addition", "negation")
    }
    return TEXT.format(
        single=single,
        zero_shot=f"{own['zero_shot']:.3f}",
        fine_tuned=f"{own['fine_tuned']:.3f}",
        shared=f"{own['shared']:.2f}",
        **SETTINGS,
        **composed,
    )


TEXT = """# Beyond the paper

Written by `python docs/beyond.py`. Options of `transfer`, `solve_transfer` and, one descriptor at a time,
`solve_operators`; each works by itself and with the others, at either edit site and in either tower. Without any of
them `recipe="paper"` holds, whose operators they leave as they are, bit for bit. Rows are samples, `V (n, d)` the
target's unit probe embeddings, `D (n, p)` its design (`V` itself at an output site), `G (m, d)` its prompts,
`U (n, m)` the descriptor, `A_s` and `A_t = V G'` the base affinities of source and target, `C` the removal of each
row's mean, `spread(A)` the root mean square of `A C`.

## Calibration: `calibration="spread"`

Families differ in how far apart they hold their cosines. `U` becomes `U spread(A_t) / spread(A_s)`. The one number a
descriptor needs for it, its `spread`, is always stored.

## Endpoint: `objective="endpoint"`

Asks for what the fine-tune ended at rather than for what it changed: with `r = spread(A_t) / spread(A_s)`,

    U_end = r (A_s + U) C - A_t C.

`A_s` has to be kept: `extract(..., store_base=True)`, which doubles the file. At an output site and s = 1 the target's
own affinity lies in the span of its design, so the second part cancels it up to the ridge, and what remains is a
ridge regression of the fine-tuned affinity on the target's embeddings. The target then answers as the fine-tune would,
with its mistakes too; and the scale r hardly matters, unless something else is preserved. With a coefficient c, the
endpoint is `A_s + c U`.

## Consensus: `TaskDescriptor.consensus([...])`, `Consensus.of([...])`

One task's descriptors from several sources on one grid, each brought to the geometric mean of their spreads, then
averaged with weights `w_i ~ max(cos_i, 0) min(1, median norm / norm_i)`, where `cos_i` is the cosine of source i with
the weighted mean of the others (a fixed point). A source that agrees with nobody, or is far too loud, hardly counts.
`Consensus` reports the weights, the agreements, and which share of the mean squared norm is shared (on the
playground {shared} in the mean) and which is each source's own. Where all keep their base affinity, so does the
consensus, and the endpoint objective asks for the mean of their endpoints.

## Joint solve: `combine="joint"`

A signed sum of operators lets every term move the other terms' probes and prompts. Instead one `X` is solved for all:

    sum_l  w_l / n_l  ( |D_l X G_l' - c_l U_l|^2 + mu_Gl |D_l X|^2 + mu_Fl |X G_l'|^2 + mu_Fl mu_Gl |X|^2 ),

with every grid's own ridges, so that a single term gives the closed form. Conjugate gradients in float64 to a relative
residual of 1e-8 (steps and residual are in the adapter's `provenance`), in the span of the prompts, with a
preconditioner that is exact where the prompts of all grids are linearly independent: then whitening the prompts makes
the problem fall apart into one ridge regression a term, in a few steps. With more prompts than dimensions and nothing
to preserve it takes hundreds. `benchmarks/joint.py` has steps and times.

## Preservation: `preserve=`

Grids that enter the joint solve with target zero and weight `preserve_weight`, 1 unless given:

- probe sets, unlabelled, with prompts of their own: what should stay as it is;
- `"default"`: every term's probes with the other terms' prompts. It needs no further data, but several terms. At
  weight 1 all prompts see all probes alike, which makes it the closed form on one large grid: all probes by all
  prompts, with the terms' changes in their blocks and zero elsewhere.

## Any teacher: `TaskDescriptor.from_scores(scores, probes)`

Anything that scores probes against class names (a classifier's logits, an ensemble, a remote service, shares of human
votes) becomes a descriptor for the endpoint objective: `S C / rms(S C)` over a base affinity of zero, with spread 1,
so that no temperature or offset matters. `2 * descriptor` asks for scores twice as far apart. Columns are found by
name (`class_names=`).

## The receiver's own words: `prompts=`

`transfer(..., prompts={{"dog": ["ein Hund", "der Hund"], "cat": "eine Katze"}})` gives the target its own texts for
the columns, aligned by class name; several texts are averaged as templates are. The descriptor stays as it is.

## Settings without labels: `probe_ridge="gcv"`, `"agreement"`, `strength="agreement"`

`"gcv"` takes for every grid the ridge with the smallest generalised cross-validation score (Golub, Heath and Wahba
1979). With the eigenvalues `e_i` of `D'D`, `g_j` of `GG'`, `h_i = e_i / (e_i + mu_F)`, `k_j = g_j / (g_j + mu_G)` and
the fit `F` of `U`,

    GCV = |U - F|^2 / (n m (1 - tau)^2),  tau = sum(h) sum(k) / (n m),

over ridges from {low:g} to {high:g}, two a decade, from one eigendecomposition. A preserved grid without a term of its
own takes the geometric mean of the others'.

`"agreement"` goes by the fine-tune's own answers on the probes, which a descriptor keeps (`predictions`, four bytes a
probe) and which need no labels. Operators are solved without a quarter of the probes, and the share of these on which
the edited target answers as the fine-tune does decides: each quarter in turn for separate solves, the first for a
joint one. Ridges {ridges} and strengths
{strengths} are tried; of equally good ones the larger ridge and the
strength nearer to 1 are taken. It's for added terms with predictions of their own: a sum on one grid has none,
and agreement with what is to be negated would ask for no edit at all.

## Forecast: `Solution.forecast`, `provenance["forecast"]`

The same share on held-out probes, before and after the edit at the settings used, whatever the recipe. Its `gain` is
the gain in accuracy to expect where the fine-tune is right. There is none without predictions, nor for grids whose
features stay on several processes or take more than 1 GiB. Where settings were chosen by agreement it's the best of
those tried, and a little too good.

## All together: `recipe="auto"`

By what the terms carry and the target's family allows, without labels:

- at `site="features"`, where the family's inner layers are known; else, and in the text tower, at its own site;
- the endpoint, if every term keeps its base affinity and is alone on its grid; else the change; calibrated where
  spreads are known;
- a joint solve for terms on several grids, with the default control where their prompts differ;
- ridges by `"gcv"`, strength 1;
- where anything is taken away and `preserve=` doesn't say what to leave alone: the change, at the family's own site,
  with the paper's ridge, since more would take much else away with it.

Every option that is given takes the place of the recipe's.

## On the playground

Six image families, eight tasks, 400 unlabelled probes each, one seed; {zero_shot} zero-shot, {fine_tuned} fine-tuned.
Ridges are the paper's, weights 1, strength 1 unless stated. "Input site" is `site="input"` for every family; otherwise
each family's own. Terms added or negated come from other families than the target. Retention is relative to the own
descriptor's gain at s = 1.

{single}

All eight tasks added at once; the control is what the models were pre-trained on, one half preserved where it says so,
the other half measured:

{addition}

One task negated, means over tasks and targets:

{negation}
"""


def main() -> None:
    """Measures, and writes the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    # peft 0.21 asks every model it wraps for a name that transformers 5.24 has deprecated.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    world = prepared()
    figures = {"own_site": measured(world, None), "input_site": measured(world, "input")}
    PAGE.write_text(page(figures))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    sys.stdout.write(f"{PAGE}\n")


if __name__ == "__main__":
    main()
