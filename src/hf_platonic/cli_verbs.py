"""`hf-platonic extract`, `transfer` and `evaluate`: on one process, or on many under a launcher.

Every process runs the same call; the main one downloads first, writes and prints.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ._files import whole_folder, write_json

__all__ = ["add_verbs"]

_DTYPES = ("float32", "bfloat16", "float16")


def add_verbs(commands: Any) -> None:
    """Adds the three commands to an argument parser's subparsers."""
    from .cli_data import add_data_options

    extract = commands.add_parser("extract", help="write down what a fine-tune does, as a task descriptor")
    extract.add_argument("--base", metavar="MODEL", help="the model before the fine-tune: Hub id or folder")
    tune = extract.add_mutually_exclusive_group(required=True)
    tune.add_argument(
        "--tuned", metavar="MODEL", help="the fine-tuned model; without --base an adapter on its own base"
    )
    tune.add_argument("--adapter", metavar="ADAPTER", help="a PEFT adapter on --base")
    tune.add_argument("--weights", metavar="WEIGHTS", help="fine-tuned weights of --base or one of its towers")
    tune.add_argument("--task-vector", metavar="WEIGHTS", help="the same as differences to --base")
    extract.add_argument("--base-revision", metavar="REV")
    extract.add_argument("--tuned-revision", metavar="REV", help="of whatever names the fine-tune")
    extract.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the descriptor goes")
    extract.add_argument("--name", help="the task's name")
    extract.add_argument("--store-base", action="store_true", help="keep the base affinity too")
    extract.add_argument("--include-probes", action="store_true", help="save the probes with the descriptor")
    extract.add_argument(
        "--resume-dir",
        type=Path,
        metavar="DIR",
        help="keep finished rows here and go on from them after an interruption; shared by all processes",
    )
    add_data_options(extract)
    extract.set_defaults(run=_extract)

    transfer = commands.add_parser("transfer", help="write descriptors into another model")
    transfer.add_argument(
        "terms", nargs="+", metavar="DESCRIPTOR[:COEFFICIENT]", help="Hub ids or folders, e.g. team/cars:-1"
    )
    transfer.add_argument("--target", required=True, metavar="MODEL", help="Hub id or folder")
    transfer.add_argument("--target-revision", metavar="REV")
    transfer.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="where the adapter or checkpoint goes"
    )
    transfer.add_argument("--merge", action="store_true", help="write an ordinary checkpoint instead of an adapter")
    transfer.add_argument("--recipe", choices=("paper", "auto"), help="the paper's (the default), or the best known")
    transfer.add_argument(
        "--method",
        choices=("closed_form", "lora"),
        help="one solve on the last layer (the default), or a LoRA in the tower, trained by the paper's recipe",
    )
    transfer.add_argument("--objective", choices=("change", "endpoint"), help="by default the recipe's")
    transfer.add_argument("--calibration", choices=("none", "spread"), help="by default the recipe's")
    transfer.add_argument("--combine", choices=("sum", "joint"), help="by default the recipe's")
    transfer.add_argument(
        "--strength",
        type=_number_or("agreement"),
        metavar="S",
        help='a number or "agreement"; by default the recipe\'s',
    )
    transfer.add_argument(
        "--site", choices=("output", "input", "features"), help="by default as recipe and family have it"
    )
    transfer.add_argument("--tower", choices=("probe", "text"))
    transfer.add_argument(
        "--probe-ridge", type=_number_or("gcv", "agreement"), metavar="MU", help='a number, "gcv" or "agreement"'
    )
    transfer.add_argument("--prompt-ridge", type=float)
    add_data_options(transfer, required=False)
    transfer.set_defaults(run=_transfer)

    evaluate = commands.add_parser("evaluate", help="zero-shot accuracy, and before and after an edit")
    evaluate.add_argument("--model", required=True, metavar="MODEL", help="Hub id or folder")
    evaluate.add_argument("--model-revision", metavar="REV")
    evaluate.add_argument("--adapter", metavar="ADAPTER", help="on the model; then both are measured")
    evaluate.add_argument("--adapter-revision", metavar="REV")
    evaluate.add_argument("--base", metavar="MODEL", help="the unedited model, to be measured beside an edited one")
    evaluate.add_argument("--base-revision", metavar="REV")
    evaluate.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to a file")
    add_data_options(evaluate, labels=True)
    evaluate.set_defaults(run=_evaluate)

    for command in (extract, transfer, evaluate):
        command.add_argument("--dtype", choices=_DTYPES, default="float32", help="of the models (default: float32)")
        command.add_argument("--batch-size", type=int, default=32, help="inputs a forward pass (default: %(default)s)")
        command.add_argument("--num-workers", type=int, default=0, help="processes that decode, for each process")
        command.add_argument("--quiet", action="store_true", help="no progress bars")


def _extract(options: argparse.Namespace) -> int:
    from .cli_data import probe_set
    from .errors import PlatonicError
    from .extraction import extract

    on_top = {
        key: value for key in ("adapter", "weights", "task_vector") if (value := getattr(options, key)) is not None
    }
    if on_top and options.base is None:
        raise PlatonicError(f"Expected --base for --{next(iter(on_top)).replace('_', '-')}, got none.")
    if on_top:
        tuned = _encoder(
            options.base, options, revision=options.base_revision, adapter_revision=options.tuned_revision, **on_top
        )
    else:
        tuned = _encoder(options.tuned, options, revision=options.tuned_revision)
    # An adapter's base is the same model with it off: one model in memory.
    alone = options.base is None or "adapter" in on_top
    base = None if alone else _encoder(options.base, options, revision=options.base_revision)
    descriptor = extract(
        base,
        tuned,
        probe_set(options),
        name=options.name,
        store_base=options.store_base,
        checkpoint=options.resume_dir,
        **_passes(options),
    )
    if _main():
        descriptor.save_pretrained(options.out, include_probes=options.include_probes)
        print(f"{descriptor} -> {options.out}")
    return 0


def _transfer(options: argparse.Namespace) -> int:
    from .cli_data import probe_set
    from .descriptor import TaskDescriptor
    from .export import PROVENANCE_NAME
    from .transfers import transfer

    terms = []
    for text in options.terms:
        where, coefficient = _term(text)
        with _first():
            terms.append(TaskDescriptor.from_pretrained(where) * coefficient)
    target = _encoder(options.target, options, revision=options.target_revision)
    names = ("recipe", "method", "objective", "calibration", "combine", "strength")
    chosen = {key: getattr(options, key) for key in (*names, "site", "tower", "probe_ridge", "prompt_ridge")}
    model = transfer(
        terms,
        target,
        probes=None if options.data is None else probe_set(options),
        **{key: value for key, value in chosen.items() if value is not None},
        **_passes(options),
    )
    if _main():
        provenance = getattr(next(iter(model.peft_config.values())), "provenance", {})
        with whole_folder(options.out) as folder:
            if options.merge:
                model.merge_and_unload().save_pretrained(folder)
                target.processor.save_pretrained(folder)
            else:
                model.save_pretrained(folder)
                if options.method == "lora":  # whose config has no place for it
                    write_json(folder / PROVENANCE_NAME, provenance)
        shown = {key: provenance[key] for key in ("verified", "forecast") if key in provenance}
        print(json.dumps({"out": str(options.out), "merged": options.merge, **shown}))
    return 0


def _evaluate(options: argparse.Namespace) -> int:
    from .cli_data import evaluation_set
    from .errors import PlatonicError
    from .evaluation import evaluate, zero_shot_accuracy

    if options.adapter is not None and options.base is not None:
        raise PlatonicError("Expected --adapter or --base, got both: with an adapter, --model is the base.")
    model = _encoder(
        options.model,
        options,
        revision=options.model_revision,
        adapter=options.adapter,
        adapter_revision=options.adapter_revision,
    )
    data = evaluation_set(options)
    figures: dict[str, Any]
    if options.adapter is None and options.base is None:
        figures = {"accuracy": zero_shot_accuracy(model, data, **_passes(options))}
    else:
        base = None if options.base is None else _encoder(options.base, options, revision=options.base_revision)
        found = evaluate(model, {"task": data}, base=base, **_passes(options))
        figures = {"before": found.before["task"], "after": found.after["task"], "gain": found.mean_gain}
    figures["n"] = len(data.probes)
    if _main():
        print(json.dumps(figures))
        if options.json is not None:
            write_json(options.json, figures)
    return 0


def _encoder(name: str, options: argparse.Namespace, **more: Any) -> Any:
    """The encoder on this process's device; the main process loads, and downloads, first."""
    import torch

    from .encoders import DualEncoder

    with _first():
        return DualEncoder.from_pretrained(name, dtype=getattr(torch, options.dtype), **more)


def _number_or(*words: str) -> Callable[[str], float | str]:
    """A parser of numbers that lets some words stand for one."""

    def parse(text: str) -> float | str:
        return text if text in words else float(text)

    parse.__name__ = " or ".join(["a number", *words])  # what argparse calls it in its error
    return parse


def _term(text: str) -> tuple[str, float]:
    """Repo or folder, and coefficient: "team/cars:-1" is ("team/cars", -1.0)."""
    where, colon, coefficient = text.rpartition(":")
    try:
        return (where, float(coefficient)) if colon else (text, 1.0)
    except ValueError:
        return text, 1.0


def _passes(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "batch_size": options.batch_size,
        "num_workers": options.num_workers,
        "progress": False if options.quiet else None,
    }


def _first() -> Any:
    from ._processes import process_state

    return process_state().main_process_first()


def _main() -> bool:
    from ._processes import process_state

    return bool(process_state().is_main_process)
