"""LoRA matching at the paper's recipe against the closed form, on the playground's image models and tasks.

    python benchmarks/lora_playground.py [--json FILE] [--cells DIR] [--only TARGET ...] [--processes N]
        [--probes N] [--own] [--departures]

Every target and task: its own descriptor, and the next model's (in the order of `playground.model_names`), by LoRA
and by the closed form at s = .5 and 1; then pairs of tasks from the next model, fitted jointly by one LoRA against
the sum of their operators. Accuracy on the test splits; nothing is chosen by it, the recipe is the default one.
Each target runs in a process of its own, N at a time; with `--cells` its figures are kept there, and not computed
again. `--probes` are the task's unlabelled ones, then inputs of its training split; 400 unless said, which makes 125
optimizer steps, where the paper's own tasks reach the recipe's 540. About half an hour on one core; `--own` leaves
other models' descriptors out.

With `--departures` besides, own descriptors by two label-free departures from the recipe: from the closed form on,
and at a learning rate chosen by the loss on held-out probes.

Figures are means over all cases; retention is the sum of the transferred gains over that of the own ones. `loads with
plain PEFT` counts targets whose saved adapter gives the same embeddings in a process without this package.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from _figures import arguments, child, report

from hf_platonic import (
    EvaluationSet,
    MatchingArguments,
    ProbeSet,
    TaskDescriptor,
    extract,
    match_affinities,
    playground,
    zero_shot_accuracy,
)
from hf_platonic.matching import Matching
from hf_platonic.solutions import solve_operators
from hf_platonic.views import Memory, RememberingEncoder, View

MODELS = playground.model_names("image")
TASKS = playground.IMAGE_TASKS
PAIRS = tuple(zip(TASKS[::2], TASKS[1::2], strict=True))
STRENGTHS = (0.5, 1.0)
RATES = (3e-4, 1e-3, 3e-3, 1e-2)
PLAIN = """
import sys, torch
sys.modules["hf_platonic"] = None  # importing it is an error now
from peft import PeftModel
from transformers import AutoModel
base = AutoModel.from_pretrained(sys.argv[1], dtype=torch.float32)
model = PeftModel.from_pretrained(base, sys.argv[2]).get_base_model().eval()
with torch.no_grad():
    found = model.get_image_features(torch.load(sys.argv[3])["pixel_values"]).pooler_output
torch.save(torch.nn.functional.normalize(found, dim=1), sys.argv[4])
"""


def load(model: str, memory: Memory, task: str | None = None) -> RememberingEncoder:
    adapter = None if task is None else playground.adapter_path(model, task)
    encoder = RememberingEncoder.from_pretrained(playground.model_path(model), adapter=adapter)
    encoder.memory = memory
    return encoder


def data(count: int) -> tuple[dict[str, ProbeSet], dict[str, EvaluationSet]]:
    """So many unlabelled probes by task, and test sets by task or control."""
    probes, tests = {}, {}
    for name in (*TASKS, *playground.controls("image")):
        data = playground.load_task(name) if name in TASKS else playground.load_control(name)
        words = {"class_names": data.class_names, "templates": data.templates[:1]}
        if name in TASKS:
            inputs = [*data.split("probes").inputs, *data.split("train").inputs][:count]
            probes[name] = ProbeSet(inputs, **words)
        test = data.split("test")
        tests[name] = EvaluationSet(ProbeSet(test.inputs, **words), test.labels)
    return probes, tests


def cells(target: str, count: int, own: bool) -> dict[str, Any]:
    """Accuracies of one target, unedited, and edited in every way."""
    source = MODELS[(MODELS.index(target) + 1) % len(MODELS)]
    probes, tests = data(count)
    controls = [name for name in tests if name not in TASKS]
    found: dict[tuple[str, str], TaskDescriptor] = {}
    memories: dict[str, Memory] = {target: {}, source: {}}
    for model in (target,) if own else (target, source):
        base = load(model, memories[model])
        for task in TASKS:
            found[model, task] = extract(
                base, load(model, memories[model], task), probes[task], name=task, batch_size=100, progress=False
            )
    base = load(target, memories[target])
    views = {name: View.of(base, data, batch_size=100) for name, data in tests.items()}
    results: dict[str, Any] = {"zero_shot": {name: view.accuracy() for name, view in views.items()}, "cases": []}
    operators = dict(
        zip(found, solve_operators(list(found.values()), base, batch_size=100, progress=False), strict=True)
    )

    def case(kind: str, model: str, tasks: tuple[str, ...]) -> None:
        encoder = load(target, memories[target])
        started = time.perf_counter()
        matching = match_affinities([found[model, task] for task in tasks], encoder, batch_size=100, progress=False)
        seconds = time.perf_counter() - started
        total = operators[model, tasks[0]]
        for task in tasks[1:]:
            total = total + operators[model, task]
        measured = (*tasks, *controls)
        after = {"lora": {name: View.of(encoder, tests[name], batch_size=100).accuracy() for name in measured}}
        for s in STRENGTHS:
            after[f"s = {s:g}"] = {name: views[name].accuracy(total, strength=s) for name in measured}
        results["cases"].append(
            {"kind": kind, "tasks": tasks, "after": after, "seconds": seconds}
            | {"steps": matching.steps, "last_loss": matching.losses[-1][1]}
        )
        if (kind, tasks) == ("own", TASKS[:1]):
            results["plain_peft_deviation"] = plain_peft(target, encoder, matching.model)

    for task in TASKS:
        case("own", target, (task,))
        if not own:
            case("transferred", source, (task,))
    for pair in () if own else PAIRS:
        case("pair", source, pair)
    return results


def departures(target: str, count: int) -> dict[str, Any]:
    """Own descriptors by a LoRA that departs from the paper's recipe: from the closed form on, or at another rate.

    The rate is the one with the smallest held-out loss on a fifth of the first task's unlabelled probes.
    """
    probes, tests = data(count)
    memory: Memory = {}
    found = {
        task: extract(
            load(target, memory), load(target, memory, task), probes[task], name=task, batch_size=100, progress=False
        )
        for task in TASKS
    }

    def fit(task: str, **options: Any) -> tuple[RememberingEncoder, Matching]:
        encoder = load(target, memory)
        settings = MatchingArguments(**options)
        return encoder, match_affinities(found[task], encoder, training_args=settings, batch_size=100, progress=False)

    losses = {rate: fit(TASKS[0], learning_rate=rate, held_out=0.2)[1].held_out[-1][1] for rate in RATES}
    rate = min(RATES, key=lambda rate: losses[rate])
    results: dict[str, Any] = {"held_out_losses": {f"{key:g}": loss for key, loss in losses.items()}, "rate": rate}
    ways = {"lora, warm start": {"warm_start": "closed_form"}, "lora, rate by held-out loss": {"learning_rate": rate}}
    for way, options in ways.items():
        results[way] = {task: zero_shot_accuracy(fit(task, **options)[0], tests[task]) for task in TASKS}
    return results


def plain_peft(target: str, encoder: RememberingEncoder, model: Any) -> float:
    """The largest difference of unit embeddings between here and a process that has PEFT but not this package."""
    probes = [playground.load_task(TASKS[0]).split("test").inputs[i] for i in range(8)]
    inputs = encoder.preprocess(probes)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(f"{folder}/adapter", save_embedding_layers=False)
        torch.save(inputs, f"{folder}/inputs.pt")
        options = [playground.model_path(target), f"{folder}/adapter", f"{folder}/inputs.pt", f"{folder}/out.pt"]
        subprocess.run([sys.executable, "-c", PLAIN, *map(str, options)], check=True, capture_output=True)
        return float((torch.load(f"{folder}/out.pt") - encoder.probe_features(inputs).unit).abs().max())


def summary(found: dict[str, dict[str, Any]], departed: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Means over all cases."""
    gains: dict[tuple[str, str], list[float]] = {}
    control: dict[tuple[str, str], list[float]] = {}
    seconds = []
    for results in found.values():
        before = results["zero_shot"]
        for case in results["cases"]:
            seconds.append(case["seconds"])
            for way, after in case["after"].items():
                gain = statistics.fmean(after[task] - before[task] for task in case["tasks"])
                gains.setdefault((case["kind"], way), []).append(gain)
                change = statistics.fmean(after[n] - before[n] for n in after if n not in TASKS)
                control.setdefault((case["kind"], way), []).append(change)
    figures = {"zero-shot accuracy": statistics.fmean(r["zero_shot"][t] for r in found.values() for t in TASKS)}
    for (kind, way), values in gains.items():
        figures[f"{kind} gain, {way}"] = statistics.fmean(values)
    for way in ("lora", *(f"s = {s:g}" for s in STRENGTHS)) if ("transferred", "lora") in gains else ():
        figures[f"retention, {way}"] = sum(gains["transferred", way]) / sum(gains["own", way])
    for way in ("lora, warm start", "lora, rate by held-out loss") if departed else ():
        figures[f"own gain, {way}"] = statistics.fmean(
            results[way][task] - found[target]["zero_shot"][task]
            for target, results in departed.items()
            for task in TASKS
        )
    for (kind, way), values in control.items():
        figures[f"{kind} control change, {way}"] = statistics.fmean(values)
    pairs = zip(gains["own", "lora"], gains["own", "s = 1"], strict=True)
    figures["own cases where lora gains more than s = 1"] = float(sum(a > b for a, b in pairs))
    figures["own cases"] = float(len(gains["own", "lora"]))
    figures["loads with plain PEFT"] = float(sum(r["plain_peft_deviation"] <= 1e-5 for r in found.values()))
    figures["seconds a training, mean"] = statistics.fmean(seconds)
    return figures


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cells", type=Path, metavar="DIR", help="keep each target's figures here, and reuse them")
    parser.add_argument("--only", choices=MODELS, action="append")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--probes", type=int, default=400)
    parser.add_argument("--own", action="store_true", help="own descriptors alone")
    parser.add_argument("--departures", action="store_true", help="also those that depart from the recipe")
    parser.add_argument("--here", choices=MODELS, help="one target, in this process; prints its figures as JSON")
    options = parser.parse_args()
    if options.here:
        torch.set_num_threads(1)
        if options.departures:
            print(json.dumps(departures(options.here, options.probes)))
        else:
            print(json.dumps(cells(options.here, options.probes, options.own)))
        return

    def of(target: str, *extra: str) -> dict[str, Any]:
        name = f"{target}-{options.probes}{''.join(extra)}.json"
        kept = None if options.cells is None else options.cells / name
        if kept is not None and kept.is_file():
            return json.loads(kept.read_text())
        results: dict[str, Any] = child("--here", target, "--probes", str(options.probes), *extra)
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(results))
        return results

    targets = options.only or MODELS
    with ThreadPoolExecutor(options.processes) as pool:
        only = ("--own",) if options.own else ()
        found = dict(zip(targets, pool.map(lambda target: of(target, *only), targets), strict=True))
        far = targets if options.departures else ()
        departed = dict(zip(far, pool.map(lambda target: of(target, "--departures"), far), strict=True))
    report(summary(found, departed), options.json)


if __name__ == "__main__":
    main()
