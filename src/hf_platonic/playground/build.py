"""Build the playground's weights from nothing: `python -m hf_platonic.playground.build`.

Three stages, each of which skips what is already there: `corpus` renders captioned pictures and sounds, `pretrain`
trains the eight models on them, `finetune` trains one LoRA per model and task and measures accuracies on the test
splits. Everything is seeded, runs on one thread per job, and is written to a temporary folder that is renamed when
complete, so an interrupted build goes on where it stopped.

The shipped weights took about an hour with two jobs on two cores that other work shared: 7 to 18 minutes a model and
10 to 70 seconds an adapter. `build_report.json` beside them has seconds, sizes, losses and
accuracies (but for the loss and the time of convnext-bert, whose run was interrupted). Other versions of torch or
other processors need not give the same bits.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from . import AUDIO_TASKS, IMAGE_TASKS, MODELS, controls, load_control, load_task, scenes, sounds
from .architectures import BLUEPRINTS
from .tasks import Modality, Task, corpus_items

logger = logging.getLogger(__name__)

CORPUS_SIZE: dict[Modality, int] = {"image": 48_000, "audio": 14_000}
"""Captioned items in all; every model sees its own part."""

CAPTIONS = 6
"""Captions for each item."""

DEFAULT_OUT = Path(__file__).parent / "weights"
REPORT = "build_report.json"


@contextmanager
def _atomic_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary neighbour of `folder` that takes its place when the block ends well."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        for path in temporary.iterdir():
            path.chmod(0o644)
        os.replace(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def build_corpus(modality: Modality, work: Path) -> Path:
    """Render and caption the corpus of a modality unless the work folder has it; return its folder."""
    folder = work / f"corpus-{modality}-{CORPUS_SIZE[modality]}"
    if folder.exists():
        return folder
    started = time.perf_counter()
    module = scenes if modality == "image" else sounds
    names = list(module.FACTORS)
    n = CORPUS_SIZE[modality]
    inputs: list[np.ndarray] = []
    captions: list[list[str]] = []
    factors = np.full((n, len(names)), -1, dtype=np.int16)
    named = np.zeros((n, CAPTIONS, len(names)), dtype=bool)
    for i, (item, values, rng) in zip(range(n), corpus_items(modality, seed=20_261), strict=False):
        inputs.append(np.asarray(scenes.to_image(values)) if modality == "image" else values)
        factors[i] = [module.FACTORS[k].index(item[k]) if k in item else -1 for k in names]
        described = [module.describe(item, rng) for _ in range(CAPTIONS)]
        captions.append([caption for caption, _ in described])
        named[i] = [[k in said for k in names] for _, said in described]
    with _atomic_folder(folder) as temporary:
        np.savez(temporary / "arrays.npz", inputs=np.stack(inputs), factors=factors, named=named)
        (temporary / "captions.json").write_text(json.dumps(captions), encoding="utf-8")
    logger.info("%s corpus: %d items in %.0f s", modality, n, time.perf_counter() - started)
    return folder


def pretrain_model(name: str, out: Path, work: Path) -> dict[str, Any]:
    """Pre-train one model into `out/models/name`; return what the report says of it, empty if it was there."""
    folder = out / "models" / name
    if folder.exists():
        return {}
    from .training import Corpus, pretrain

    corpus_folder = build_corpus(BLUEPRINTS[name].modality, work)
    with np.load(corpus_folder / "arrays.npz") as arrays:
        captions = json.loads((corpus_folder / "captions.json").read_text(encoding="utf-8"))
        corpus = Corpus(arrays["inputs"], arrays["factors"], captions, arrays["named"])
    with _atomic_folder(folder) as temporary:
        return pretrain(name, corpus, temporary)


def finetune_model(name: str, out: Path, tasks: Sequence[str]) -> dict[str, Any]:
    """Make the missing adapters of one model and measure all its tasks and controls; return the report's entries."""
    from .training import accuracy, class_embeddings, embed, finetune, load, process

    base = out / "models" / name
    model, processor = load(base)

    def measure(task: Task, adapter: Path | None = None) -> float:
        test = task.split("test")
        classes = class_embeddings(name, model, processor, task.class_names, task.templates[:1])
        edited = load(base, adapter)[0] if adapter else model
        return round(accuracy(embed(edited, process(processor, test.inputs)), classes, test.labels or ()), 4)

    entries: dict[str, Any] = {"tasks": {}, "controls": {}}
    for control in controls(BLUEPRINTS[name].modality):
        entries["controls"][control] = measure(load_control(control))
    for task_name in tasks:
        task, folder = load_task(task_name), out / "adapters" / name / task_name
        entry: dict[str, Any] = {}
        if not folder.exists():
            started = time.perf_counter()
            train = task.split("train")
            with _atomic_folder(folder) as temporary:
                inputs = process(processor, train.inputs)
                finetune(name, base, temporary, inputs, train.labels or (), (task.class_names, task.templates[:1]))
            entry["seconds"] = round(time.perf_counter() - started, 1)
        entry |= {"zero_shot": measure(task), "fine_tuned": measure(task, folder)}
        entries["tasks"][task_name] = entry
        logger.info("%s: %s: %s", name, task_name, entry)
    return entries


def _initialise_worker() -> None:
    import torch
    from transformers.utils import logging as transformers_logging

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()


def _run(jobs: int, calls: Sequence[tuple[str, Callable[..., dict[str, Any]], tuple[Any, ...]]], report: Path) -> None:
    """Run calls in `jobs` processes and merge each result into the report's entry of that model."""
    import multiprocessing

    # Threads of the linear algebra under numpy would fight for the cores that the jobs share.
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_initialise_worker) as pool:
        futures = {pool.submit(function, *arguments): name for name, function, arguments in calls}
        for future in as_completed(futures):
            _update_report(report, futures[future], future.result())


def _update_report(path: Path, name: str, entries: dict[str, Any]) -> None:
    import peft
    import torch
    import transformers

    report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"models": {}}
    report["environment"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "threads_per_job": 1,
    }
    mine = report["models"].setdefault(name, {})
    _merge(mine, entries)
    report["models"] = {model: report["models"][model] for model in MODELS if model in report["models"]}
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _merge(old: dict[str, Any], new: dict[str, Any]) -> None:
    for key, value in new.items():
        if isinstance(value, dict):
            _merge(old.setdefault(key, {}), value)
        else:
            old[key] = round(value, 4)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line and build.

    Args:
        arguments: The command line; that of the process when None.
    """
    parser = argparse.ArgumentParser(
        prog="python -m hf_platonic.playground.build", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of models, adapters and report")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "hf_platonic_playground")
    parser.add_argument(
        "--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME", help="models, in build order"
    )
    parser.add_argument("--stage", choices=("corpus", "pretrain", "finetune", "all"), default="all")
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    for folder in (options.out, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    report = options.out / REPORT
    for modality in ("image", "audio"):
        if any(BLUEPRINTS[name].modality == modality for name in options.only):
            build_corpus(modality, options.work)
    if options.stage in ("pretrain", "all"):
        _run(
            options.jobs, [(name, pretrain_model, (name, options.out, options.work)) for name in options.only], report
        )
    if options.stage in ("finetune", "all"):
        tasks = {"image": IMAGE_TASKS, "audio": AUDIO_TASKS}
        calls = [
            (name, finetune_model, (name, options.out, tasks[BLUEPRINTS[name].modality])) for name in options.only
        ]
        _run(options.jobs, calls, report)


if __name__ == "__main__":
    main()
