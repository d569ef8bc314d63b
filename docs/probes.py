"""Writes docs/probes.md: how many probes a transfer needs, which ones, and what other probes than the task's cost.

    python docs/probes.py [--json FILE] [--again FILE]

Offline. Everything is fixed here before any label is looked at; labels are used for accuracies alone.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from hf_platonic import playground
from hf_platonic.coresets import select_probes
from hf_platonic.descriptor import TaskDescriptor
from hf_platonic.evaluation import EvaluationSet
from hf_platonic.extraction import extract
from hf_platonic.probes import ProbeSet
from hf_platonic.prompting import LEAST_SHARE, with_prompts
from hf_platonic.solutions import solve_transfer
from hf_platonic.views import FeatureMemory, Memory, RememberingEncoder, View

PAGE = Path(__file__).with_suffix(".md")
RUN: dict[str, Any] = {"batch_size": 100, "progress": False}
SEEDS = (21, 22)
PROBES, SIZES, DRAWS = 1200, (60, 120, 240), 2
TENTH, SCENES = PROBES // 10, 200
HOW = ("variance", "logdet", "random")
WAYS: dict[str, dict[str, Any]] = {
    "paper": {"recipe": "paper", "strength": 1.0},
    "auto": {"recipe": "auto"},
}
OTHERS = {
    "objects": "objects of the corpus",
    "letters": "letters of the corpus",
    "pooled": "the other seven tasks' probes, pooled",
}


class Pair:
    """A source with a fine-tune and a target, each run once on each input."""

    def __init__(self, base: RememberingEncoder, tuned: RememberingEncoder, target: RememberingEncoder) -> None:
        self.base, self.tuned, self.target = base, tuned, target

    def gains(self, probes: ProbeSet, test: EvaluationSet) -> dict[str, float]:
        """Accuracy over zero-shot, by way, of a transfer on these probes."""
        return self.transferred(extract(self.base, self.tuned, probes, store_base=True, **RUN), test)

    def transferred(self, descriptor: TaskDescriptor, test: EvaluationSet) -> dict[str, float]:
        """Accuracy over zero-shot, by way, of a descriptor in the target."""
        found = {}
        for way, options in WAYS.items():
            solution = solve_transfer(descriptor, self.target, **options, **RUN)
            view = View.of(solution.target, test, batch_size=RUN["batch_size"])
            found[way] = view.accuracy(solution.operator, strength=solution.strength) - view.accuracy()
        return found


def load(name: str, task: str | None, memory: Memory) -> RememberingEncoder:
    """A model of the playground, fine-tuned on a task if one is named, that sees each input once."""
    adapter = None if task is None else playground.adapter_path(name, task)
    encoder = RememberingEncoder.from_pretrained(playground.model_path(name), adapter=adapter)
    encoder.memory = memory
    encoder.keep_features(FeatureMemory())
    return encoder


def pool(task: playground.Task) -> list[Any]:
    """All unlabelled inputs of a task: its training images and its own probes."""
    probes = task.split("probes", None if task.name == "handwritten_digits" else PROBES)
    return [*task.split("train").inputs, *probes.inputs]


def drawn(count: int, seed: int) -> list[int]:
    """Positions of the probes of one seed."""
    return sorted(np.random.default_rng(seed).choice(count, PROBES, replace=False).tolist())


class Stage:
    """One task with its unlabelled pool, its test set and, lazily, every target with the next model as source."""

    def __init__(self, name: str) -> None:
        self.task = playground.load_task(name)
        self.words = {"class_names": self.task.class_names, "templates": self.task.templates[:1]}
        self.unlabelled = ProbeSet(pool(self.task), **self.words)
        split = self.task.split("test")
        self.test = EvaluationSet(ProbeSet(split.inputs, **self.words), split.labels or ())

    def pairs(self) -> Iterator[Pair]:
        """Targets in turn."""
        models = playground.model_names("image")
        memories: dict[str, Memory] = {model: {} for model in models}
        bases = {model: load(model, None, memories[model]) for model in models}
        for target, source in zip(models, (*models[1:], models[0]), strict=True):
            yield Pair(bases[source], load(source, self.task.name, memories[source]), bases[target])

    def gains(self, cases: Callable[[Pair], dict[str, list[ProbeSet]]]) -> dict[str, float]:
        """Mean gains over all pairs, by way and case."""
        found: dict[str, list[float]] = {}
        for pair in self.pairs():
            for case, sets in cases(pair).items():
                gains = [pair.gains(each, self.test) for each in sets]
                for way in WAYS:
                    found.setdefault(f"{way} {case}", []).append(mean(gain[way] for gain in gains))
        return {key: mean(values) for key, values in found.items()}


def some(pair: Pair, probes: ProbeSet, sizes: Sequence[int], seed: int) -> dict[str, list[ProbeSet]]:
    """Probe sets of these sizes, by how they are chosen."""
    ranked = {how: select_probes(pair.base, probes, max(sizes), criterion=how, **RUN) for how in HOW[:2]}
    orders = [np.random.default_rng([seed, draw]).permutation(PROBES).tolist() for draw in range(DRAWS)]
    cases: dict[str, list[ProbeSet]] = {}
    for size in sizes:
        cases |= {f"{how} {size}": [best.select(range(size))] for how, best in ranked.items()}
        cases[f"random {size}"] = [probes.select(order[:size]) for order in orders]
    return cases


def by_size(name: str) -> dict[str, float]:
    """Gains with few of a task's probes, of both seeds."""
    stage = Stage(name)

    def cases(pair: Pair) -> dict[str, list[ProbeSet]]:
        found: dict[str, list[ProbeSet]] = {}
        for seed in SEEDS:
            probes = stage.unlabelled.select(drawn(len(stage.unlabelled), seed))
            for case, sets in {"all": [probes], **some(pair, probes, SIZES, seed)}.items():
                found[case] = [*found.get(case, []), *sets]
        return found

    return stage.gains(cases)


def of_other_things(name: str) -> dict[str, float]:
    """Gains with a task's prompts on images of other things, and on its own."""
    stage = Stage(name)
    rest = [item for other in playground.IMAGE_TASKS if other != name for item in pool(playground.load_task(other))]
    inputs = {each: playground.load_control(each).split("test", PROBES).inputs for each in ("objects", "letters")}
    inputs["pooled"] = [rest[row] for row in drawn(len(rest), SEEDS[0])]
    others = {case: [ProbeSet(items, **stage.words)] for case, items in inputs.items()}
    own = stage.unlabelled.select(drawn(len(stage.unlabelled), SEEDS[0]))
    return stage.gains(lambda pair: {"all once": [own], **others})


def redundant(name: str) -> dict[str, float]:
    """Gains from a pool like a few videos: frames of scenes, some of which last much longer than others."""
    stage, rng = Stage(name), np.random.default_rng(SEEDS[0])
    scenes = [stage.unlabelled[int(row)] for row in rng.choice(len(stage.unlabelled), SCENES, replace=False)]
    lengths = 1 / np.arange(1, SCENES + 1)
    frames = []
    for scene in rng.choice(SCENES, PROBES, p=lengths / lengths.sum()):
        moved = np.roll(np.asarray(scenes[int(scene)], dtype=float), rng.integers(-1, 2, 2), axis=(0, 1))
        frames.append(Image.fromarray((moved + rng.normal(0, 2, moved.shape)).clip(0, 255).astype(np.uint8)))
    probes = ProbeSet(frames, **stage.words)

    def cases(pair: Pair) -> dict[str, list[ProbeSet]]:
        return {"frames": [probes], **{f"frames {k}": v for k, v in some(pair, probes, (TENTH,), SEEDS[0]).items()}}

    return stage.gains(cases)


def reworded(name: str) -> dict[str, float]:
    """Gains under the task's second template: of a descriptor extracted with it, and of one changed to it."""
    stage = Stage(name)
    if len(stage.task.templates) < 2:
        return {}
    probes = stage.unlabelled.select(drawn(len(stage.unlabelled), SEEDS[0])[::3])
    words = {**stage.words, "templates": stage.task.templates[1:2]}
    test = EvaluationSet(stage.test.probes.with_prompts(**words), stage.test.labels)
    found: dict[str, list[float]] = {}
    for pair in stage.pairs():
        extracted, changed = (
            extract(pair.base, pair.tuned, each, store_base=True, **RUN)
            for each in (probes.with_prompts(**words), probes)
        )
        changed, share = with_prompts(changed, pair.base, least_share=0.0, **words)
        found.setdefault("share", []).append(share)
        for case, descriptor in (("extracted", extracted), ("changed", changed)):
            for way, gain in pair.transferred(descriptor, test).items():
                found.setdefault(f"{way} {case}", []).append(gain)
    return {key: mean(values) for key, values in found.items()}


TASKS = ("shapes", "colours", "sizes", "counts", "textures", "backgrounds")
HALF = ("textures",)
PARTS = {
    by_size: TASKS,
    of_other_things: TASKS,
    redundant: HALF,
    reworded: HALF,
}


def mean_over_tasks(part: Callable[[str], dict[str, float]]) -> dict[str, float]:
    """The mean of a part's figures over those of its tasks that have them."""
    found = [figures for figures in map(part, PARTS[part]) if figures]
    return {key: mean(figures[key] for figures in found) for key in found[0]}


def mean(values: Iterable[float]) -> float:
    """Their mean."""
    known = list(values)
    return sum(known) / len(known)


def sizes_table(found: dict[str, float]) -> str:
    """Gains by number of probes, and in brackets their share of what all probes give."""
    head = ["probes", *(f"{way}, {how}" for way in WAYS for how in HOW)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for size in SIZES:
        cells = [cell(found, way, f"{how} {size}", "all") for way in WAYS for how in HOW]
        lines.append(f"| {size} | {' | '.join(cells)} |")
    whole = [f"{found[f'{way} all']:+.3f}" for way in WAYS for _ in HOW]
    return "\n".join([*lines, f"| {PROBES} | {' | '.join(whole)} |"])


def frames_table(found: dict[str, float]) -> str:
    """Gains from a redundant pool, and in brackets their share of what all of it gives."""
    lines = [f"| {PROBES:,} frames of {SCENES} scenes | {' | '.join(WAYS)} |", "|" + "---|" * (1 + len(WAYS))]
    lines.append("| all | " + " | ".join(f"{found[f'{way} frames']:+.3f}" for way in WAYS) + " |")
    for how in HOW:
        cells = [cell(found, way, f"frames {how} {TENTH}", "frames") for way in WAYS]
        lines.append(f"| {TENTH}, {how} | {' | '.join(cells)} |")
    return "\n".join(lines)


def wording_table(found: dict[str, float]) -> str:
    """Gains under another template, and in brackets their share of what an extraction with it gives."""
    lines = [f"| descriptor | {' | '.join(WAYS)} |", "|" + "---|" * (1 + len(WAYS))]
    lines.append("| extracted with it | " + " | ".join(f"{found[f'{way} extracted']:+.3f}" for way in WAYS) + " |")
    cells = [cell(found, way, "changed", "extracted") for way in WAYS]
    return "\n".join([*lines, f"| changed to it | {' | '.join(cells)} |"])


def others_table(found: dict[str, float]) -> str:
    """Gains with other probes than the task's, and in brackets their share of what the task's give."""
    lines = [f"| {PROBES:,} probes | {' | '.join(WAYS)} |", "|" + "---|" * (1 + len(WAYS))]
    own = [f"{found[f'{way} all once']:+.3f}" for way in WAYS]
    lines.append(f"| the task's own | {' | '.join(own)} |")
    for case, title in OTHERS.items():
        lines.append(f"| {title} | {' | '.join(cell(found, way, case, 'all once') for way in WAYS)} |")
    return "\n".join(lines)


def cell(found: dict[str, float], way: str, case: str, whole: str) -> str:
    """A gain and its share of another."""
    gain = found[f"{way} {case}"]
    return f"{gain:+.3f} ({gain / found[f'{way} {whole}']:.2f})"


TEXT = """# Which probes

Written by `python docs/probes.py`. Six image families of the playground and {count} of its tasks
({tasks}); each family's source is the next one. Mean gain in accuracy over zero-shot;
"paper" is `recipe="paper"` at s = 1, "auto" `recipe="auto"`. No ridge, strength or size was chosen on labels.
"variance" was added after "logdet" had lost to random draws in a trial on two image tasks and one pair of models, and
made the default after a trial on the audio tasks alone. The tasks `positions` and `handwritten_digits` aren't in these
tables: the run was ended before they were measured, and in an early trial other tasks' probes did badly on digits.

## How many, and which ones

```python
few = select_probes(base, probes, {tenth})  # one pass of the base model; neither labels nor prompts are looked at
descriptor = extract(base, tuned, few)
```

`select_probes` takes probes greedily by the base model's unit embeddings (`hf_platonic.coresets`): those that leave
least uncertainty about the whole pool (`criterion="variance"`, the default) or span the largest volume ("logdet", by
ridge leverage scores). Best first, so `few.select(range(60))` is the choice of 60. The ridge is the paper's, .01.

{probes:,} probes a task, drawn uniformly by seeds {seeds}; "random" is the mean of {draws} draws out of these. In
brackets the share of the gain with all {probes:,}.

{sizes}

{verdict}

The same from a pool with much repetition ({half}): {probes:,} frames of {scenes} of the task's images,
moved by a pixel and with a little noise, where the k-th image lasts 1/k as long as the first. In brackets the share of
what all frames give.

{frames}

## Other probes than the task's

The task's prompts on images that have nothing to do with it, seed {first}; in brackets the share of what the task's
own probes give.

{others}

## Other prompts after extraction

```python
changed, share = with_prompts(descriptor, base, class_names=names, templates=["one {{}}"])  # hf_platonic.prompting
```

A fine-tune that left the text tower alone has `U = (V_1 - V_0) G'`. Then new prompts that are combinations of the old
ones, `G_2 = W G`, have `U W'`: no probe and no fine-tune is needed. Classes that the grid has already are taken as
they are. `share` says how much of what tells the new prompts apart the old ones cover, as squared norm; below
{least:g} `with_prompts` refuses, as more would be lost than kept. Where the grid has as many independent prompts as
the embedding has dimensions, it's exact for any new ones.

Tasks that have a second template ({worded}), under that template, {few} probes; in brackets the share of what
a descriptor extracted with it gives. The old prompts cover {share:.2f} of the new ones.

{wording}
"""


def verdict(found: dict[str, float]) -> str:
    """Whether a tenth of the probes keeps 95 % of the gain."""
    best = {way: max(found[f"{way} {how} {TENTH}"] for how in HOW) / found[f"{way} all"] for way in WAYS}
    said = "; ".join(f"{way} {share:.2f}, {'reached' if share >= 0.95 else 'missed'}" for way, share in best.items())
    return f"Target: ten times fewer probes keep .95 of the gain. The best of the three choices: {said}."


def main() -> None:
    """Measures, or reads what was measured, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON, too")
    parser.add_argument("--again", type=Path, metavar="FILE", help="write the page from such a file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # peft 0.21 asks every model it wraps for a name that transformers 5.24 has deprecated.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    if options.again is None:
        found = {key: value for part in PARTS for key, value in mean_over_tasks(part).items()}
    else:
        found = json.loads(options.again.read_text())
    page = TEXT.format(
        probes=PROBES,
        seeds=" and ".join(map(str, SEEDS)),
        draws=DRAWS,
        first=SEEDS[0],
        sizes=sizes_table(found),
        verdict=verdict(found),
        others=others_table(found),
        tenth=TENTH,
        count=len(TASKS),
        tasks=", ".join(TASKS),
        half=", ".join(HALF),
        worded=", ".join(name for name in HALF if len(playground.load_task(name).templates) > 1),
        scenes=SCENES,
        frames=frames_table(found),
        least=LEAST_SHARE,
        few=len(range(0, PROBES, 3)),
        share=found["share"],
        wording=wording_table(found),
    )
    PAGE.write_text(page, encoding="utf-8")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")


if __name__ == "__main__":
    main()
