"""Writes docs/sites.md: where a target can be edited, and what each place reaches on the playground.

    python docs/sites.py [--json FILE]

About twelve minutes on one core, offline. Ridges and strength are fixed here, before any label is looked at; labels
are used for accuracies alone, and a few to train on.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_platonic import playground
from hf_platonic.affinities import affinity
from hf_platonic.encoders.encoder import DualEncoder, ProbeFeatures
from hf_platonic.encoding import encode_columns, encode_probes
from hf_platonic.evaluation import accuracy
from hf_platonic.extraction import extract
from hf_platonic.few_shot import finish
from hf_platonic.objectives import wanted_change
from hf_platonic.operator import Operator
from hf_platonic.probes import ProbeSet
from hf_platonic.scaling import scaled
from hf_platonic.solutions import solve_transfer
from hf_platonic.solve import GridSolver
from hf_platonic.views import RememberingEncoder

PAGE = Path(__file__).with_suffix(".md")
RUN: dict[str, Any] = {"batch_size": 100, "progress": False}
RIDGES = (0.01, 0.1)
PROBES = 400
DRAWS = {"image": 3, "audio": 1}  # of probes; the handwritten digits have only one
WAYS: dict[str, dict[str, Any]] = {
    "change": {"objective": "change", "calibration": "none"},
    "endpoint": {"objective": "endpoint", "calibration": "spread"},
}
SHOTS, SEEDS, PENALTIES = (1, 4, 16), 3, (1e-4, 1e-3, 1e-2)
SITES = {
    "own": "the family's own",
    "input": 'site="input"',
    "last": 'site="features", features=1',
    "means": 'site="features", without "std"',
    "features": 'site="features"',
}


def load(name: str, task: str | None, memory: dict[str, Any]) -> DualEncoder:
    """A model of the playground, fine-tuned on a task if one is named."""
    adapter = None if task is None else playground.adapter_path(name, task)
    encoder = RememberingEncoder.from_pretrained(playground.model_path(name), adapter=adapter)
    encoder.memory = memory
    return encoder


def columns_of(deep: DualEncoder, site: str) -> list[int]:
    """Which columns of the full features design a site reads."""
    widths = [deep._linear.in_features, *(feature.size for feature in deep.site.features)]
    ends = torch.tensor(widths).cumsum(0).tolist()
    spans = [range(end - width, end) for end, width in zip(ends, widths, strict=True)]
    last = deep.site.features[-1].module
    kept = [spans[0]] + [
        span
        for feature, span in zip(deep.site.features, spans[1:], strict=True)
        if site == "features"
        or (site == "means" and feature.pooling != "std")
        or (site == "last" and feature.module == last)
    ]
    ones = [ends[-1]] if site != "input" or deep._linear.bias is not None else []
    return [column for span in kept for column in span] + ones


def design(features: ProbeFeatures, deep: DualEncoder, site: str) -> Tensor:
    """What an operator at the site multiplies."""
    if site == "own" and deep.family.site is not None and deep.family.site.kind == "output":
        return features.unit
    return features.design[:, columns_of(deep, "input" if site == "own" else site)]


def measured(modality: Any) -> dict[str, Any]:
    """Mean gains by site, way and ridge, and the fine-tuning gain, over all targets, tasks and draws of probes."""
    models = playground.model_names(modality)
    tasks = playground.IMAGE_TASKS if modality == "image" else playground.AUDIO_TASKS
    found: dict[str, list[float]] = {}
    zero: list[float] = []
    tuning: list[float] = []
    memories: dict[str, dict[str, Any]] = {model: {} for model in models}
    deeps = {model: load(model, None, memories[model]).at(site="features") for model in models}
    for name in tasks:
        task = playground.load_task(name)
        words = {"class_names": task.class_names, "templates": task.templates[:1]}
        draws = 1 if name == "handwritten_digits" else DRAWS[modality]
        inputs = task.split("probes", PROBES * draws).inputs
        sets = [ProbeSet(inputs[i : i + PROBES], **words) for i in range(0, len(inputs), PROBES)]
        split = task.split("test")
        held_out, labels = ProbeSet(split.inputs, **words), split.labels or ()
        tuned = {model: load(model, name, memories[model]) for model in models}
        descriptors = {
            model: [extract(deeps[model], tuned[model], probes, store_base=True, **RUN) for probes in sets]
            for model in models
        }
        for target, deep in deeps.items():
            columns = encode_columns(deep, held_out.columns)
            test = encode_probes(deep, held_out, **RUN)
            before = accuracy(test.unit, columns, labels)
            after = encode_probes(tuned[target], held_out, **RUN).unit
            zero.append(before)
            tuning.append(accuracy(after, encode_columns(tuned[target], held_out.columns), labels) - before)
            for draw, probes in enumerate(sets):
                seen = encode_probes(deep, probes, **RUN)
                asked = {
                    way: {m: wanted_change([descriptors[m][draw]], affinity(seen.unit, columns), **o) for m in models}
                    for way, o in WAYS.items()
                }
                for site in SITES:
                    full, moved = (design(features, deep, site) for features in (seen, test))
                    (rows,), scaling = scaled([full], "input" if site in ("own", "input") else "features")
                    moved = (moved if scaling is None else scaling.apply(moved)).double()
                    for ridge in RIDGES:
                        solver = GridSolver.of(rows, columns, probe_ridge=ridge)
                        for way, wanted in asked.items():
                            others = [u for model, u in wanted.items() if model != target]
                            cases = {"own": [wanted[target]], "one": others, "all": [torch.stack(others).mean(dim=0)]}
                            for who, us in cases.items():
                                for left, right in solver.solve(us, rows):
                                    unit = test.unit + (moved @ left @ right).float()
                                    gain = accuracy(unit, columns, labels) - before
                                    # Each task counts the same, however many draws it has.
                                    share = found.setdefault(f"{site} {way} {ridge:g} {who} {target} {name}", [])
                                    share.append(gain)
        for memory in memories.values():
            memory.clear()
    gains: dict[str, list[float]] = {}
    for key, values in found.items():
        gains.setdefault(" ".join(key.split(" ")[:4]), []).append(mean(values))
    return {
        "zero_shot": mean(zero),
        "fine_tuning": mean(tuning),
        "gains": {key: mean(values) for key, values in gains.items()},
    }


def finished() -> dict[str, float]:
    """Mean accuracies on images after a few labelled examples, from the next family's edit and from zero-shot."""
    models = playground.model_names("image")
    found: dict[str, list[float]] = {}
    memories: dict[str, dict[str, Any]] = {model: {} for model in models}
    deeps = {model: load(model, None, memories[model]).at(site="features") for model in models}
    for name in playground.IMAGE_TASKS:
        task = playground.load_task(name)
        words = {"class_names": task.class_names, "templates": task.templates[:1]}
        probes = ProbeSet(task.split("probes").inputs, **words)
        test, train = task.split("test"), task.split("train", 800)
        test_set, train_set = ProbeSet(test.inputs, **words), ProbeSet(train.inputs, **words)
        labels, known = torch.tensor(test.labels), torch.tensor(train.labels)
        for target, source in zip(models, (*models[1:], models[0]), strict=True):
            deep, tuned = deeps[target], load(source, name, memories[source])
            descriptor = extract(deeps[source], tuned, probes, store_base=True, **RUN)
            solution = solve_transfer(descriptor, deep, objective="endpoint", probe_ridge=0.1, **RUN)
            start = solution.operator
            nothing = Operator(torch.zeros_like(start.left), start.right, start.site)
            columns = encode_columns(deep, probes.columns)
            seen, pool, unlabelled = (encode_probes(deep, each, **RUN) for each in (test_set, train_set, probes))
            for seed in range(SEEDS):
                order = torch.randperm(len(known), generator=torch.Generator().manual_seed(seed))
                for shots in SHOTS:
                    rows = torch.cat([order[known[order] == c][:shots] for c in range(len(columns))])
                    for penalty in PENALTIES:
                        for who, operator in (("transferred", start), ("zero-shot", nothing)):
                            ended = finish(
                                operator,
                                pool.unit[rows],
                                pool.design[rows],
                                columns,
                                known[rows].tolist(),
                                unlabelled=unlabelled.design,
                                penalty=penalty,
                            )
                            unit = ended.apply(seen.unit, seen.design)
                            key = f"{who} {shots} {penalty:g}"
                            found.setdefault(key, []).append(accuracy(unit, columns, labels.tolist()))
            for who, operator in (("transferred", start), ("zero-shot", nothing)):
                unit = operator.apply(seen.unit, seen.design)
                found.setdefault(f"{who} 0", []).append(accuracy(unit, columns, labels.tolist()))
        for memory in memories.values():
            memory.clear()
    return {key: mean(values) for key, values in found.items()}


def shots_table(found: dict[str, float]) -> str:
    """Accuracies by start and penalty, a column for each number of examples."""
    lines = [
        f"| start | penalty | none | {' | '.join(f'{n} a class' for n in SHOTS)} |",
        "|" + "---|" * (3 + len(SHOTS)),
    ]
    for who in ("zero-shot", "transferred"):
        for penalty in PENALTIES:
            cells = [f"{found[f'{who} {shots} {penalty:g}']:.3f}" for shots in SHOTS]
            lines.append(f"| {who} | {penalty:g} | {found[f'{who} 0']:.3f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def table(found: dict[str, Any], columns: Sequence[str]) -> str:
    """Gains, and in brackets their share of the fine-tuning gain."""
    titles = {"own": "own descriptor", "one": "one other family", "all": "mean of the other families"}
    shown = [(way, who) for way in WAYS for who in columns if (way, who) != ("endpoint", "own")]
    head = ["place", "ridge", *(f"{titles[who]}, {way}" for way, who in shown)]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for site, title in SITES.items():
        for ridge in RIDGES:
            cells = [
                f"{gain:+.3f} ({gain / found['fine_tuning']:.2f})"
                for way, who in shown
                for gain in [found["gains"][f"{site} {way} {ridge:g} {who}"]]
            ]
            lines.append(f"| {title} | {ridge:g} | {' | '.join(cells)} |")
    return "\n".join(lines)


def mean(values: Iterable[float]) -> float:
    """Their mean."""
    found = list(values)
    return sum(found) / len(found)


TEXT = """# Where a target is edited

Written by `python docs/sites.py`.

| `site` | an operator multiplies | merges | as a plain LoRA |
|---|---|---|---|
| "output" | `v`, the unit embedding | yes | yes |
| "input" | `[u, 1] / norm(z)`: `u` goes into the layer that writes the embedding `z` | yes | yes |
| "features" | `[u, f, 1] / norm(z)`: `f` is read from inner layers of the probe tower | no | no |

```python
model = transfer(descriptor, target, site="features", objective="endpoint", probe_ridge=0.1)
model.save_pretrained("edit")  # PeftModel.from_pretrained(fresh_base, "edit") is all it takes to use it

view = target.at(site="features", features=12)  # more blocks, or exactly those named
model = transfer(descriptor, view)
```

* **What is read.** The tower's blocks are found by running it: the longest list of modules that each run once and hand
  on tokens or a map. Of each: the mean and the standard deviation over tokens or positions, and the class token where
  there is one; padding tokens (SigLIP 2 NaFlex) count like others. At most six blocks, evenly spaced, the last
  always among them. A family's row may name its `feature_modules`; `target.at(site="features").site.features` says
  what was found, and so do the adapter's config and its `provenance`.
* **How it is solved.** As everywhere, with columns brought to mean 0 and standard deviation 1 on the probes, for all
  grids of a joint solve together; what is stored acts on raw features (`hf_platonic.scaling`). One solve, linear in
  the descriptor, rank at most the number of prompts. With fewer probes than columns the dual form is used, so memory
  is n x p for the design and n x n for its Gram; with more, the Gram is p x p in float64: 3 GB at p = 20,000. Fewer
  blocks help: `features=2`.
* **How it runs.** A PEFT adapter on the last linear layer, with hooks on the blocks that keep pooled rows until that
  layer takes them, in the same forward pass and thread. Named adapters, strengths, sums, `disable_adapter`, training,
  saving, copies and `transformers`' pipelines work as with the other sites. The edited layer called by itself, or
  with other rows than the tower has just seen, is an error.
* **What it can't do.** No weight of the last layer sees `f`, so `merge_and_unload`, `merge_adapter` and `export_lora`
  refuse, and say so. site="input" is the part that merges. The text tower has no such site, and neither have families
  without an affine last layer.

## What each place reaches

Six image-text families and eight tasks of the playground, {probes} unlabelled probes a task, {draws} draws of them
(handwritten digits: one), s = 1. Mean gain in accuracy over zero-shot, and in brackets its share of the gain of
fine-tuning ({image_tuning:+.3f} from {image_zero:.3f}). "change" is the paper's objective, "endpoint" the calibrated
one of [beyond.md](beyond.md).

{image}

Two audio-text models and four tasks, one draw; fine-tuning gains {audio_tuning:+.3f} from {audio_zero:.3f}.

{audio}

The paper's ridge is .01. With several hundred standardised columns and {probes} probes .1 is the better one here; no
label was used to fix either beforehand. Standard deviations over tokens let a linear read-out see second-order
statistics. Tried once and left out because they added nothing beside these: maxima over tokens, means over image
quarters, random ReLU and Fourier features of `f`, one scale for each block instead of each column, the embedding
itself, centred prompts. Means and deviations of the hidden units of the blocks' MLPs add a little for three times the
columns; `feature_modules` or `features=[...]` can name them.

## From a few labelled examples

A transferred edit is a head start for those who do have a few labels. `finish_transfer` moves the operator as little
as it takes to tell the examples apart: cross-entropy with a penalty on the distance from the start (`few_shot.py`).

```python
model = transfer(descriptor, target, site="features", objective="endpoint", probe_ridge=0.1, strength=1.0)
finish_transfer(model, target, EvaluationSet(examples, labels), unlabelled=descriptor.probes)
```

Mean accuracy over the six image families and eight tasks, {seeds} draws of examples; each family starts from the next
one's descriptor (endpoint, ridge .1), or from zero-shot at the same site with the same probes to standardise by.
The default penalty is the last, fixed beforehand on the audio tasks; in smaller runs others, from 1e-5 to 1, left the
order of the two starts as it is.

{shots}
"""


def main() -> None:
    """Measures, and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {modality: measured(modality) for modality in DRAWS}
    found["few_shot"] = finished()
    page = TEXT.format(
        probes=PROBES,
        draws=DRAWS["image"],
        image=table(found["image"], ("own", "one", "all")),
        audio=table(found["audio"], ("own", "one")),
        shots=shots_table(found["few_shot"]),
        seeds=SEEDS,
        **{f"{m}_tuning": found[m]["fine_tuning"] for m in DRAWS},
        **{f"{m}_zero": found[m]["zero_shot"] for m in DRAWS},
    )
    PAGE.write_text(page, encoding="utf-8")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")


if __name__ == "__main__":
    main()
