"""Runs: a suite from its first fine-tune to its report, on several processes, resumable at every cell."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from .._files import write_json
from .._processes import worker_processes
from ..errors import PlatonicError
from .analysis import measure_likeness
from .results import collect
from .setting import Setting
from .sources import measure_sources
from .suites import Suite
from .sweeps import measure_sweeps
from .targets import measure_costly, measure_target

__all__ = ["RESULTS_NAME", "narrowed", "run_benchmark"]

RESULTS_NAME = "results.json"
_Job = tuple[Callable[[Setting, str], None], str]


def narrowed(
    suite: Suite,
    *,
    seeds: int | None = None,
    tasks: Sequence[str] | None = None,
) -> Suite:
    """The suite on its first seeds and some of its tasks.

    Args:
        suite: As loaded.
        seeds: How many; None takes all. More than the suite names are counted on from its last.
        tasks: Names; None takes all.

    Raises:
        PlatonicError: If there's no such task, or no seed is left.
    """
    if seeds is not None:
        if seeds < 1:
            raise PlatonicError(f"Expected at least one seed, got {seeds}.")
        more = range(suite.seeds[-1] + 1, suite.seeds[-1] + 1 + max(0, seeds - len(suite.seeds)))
        suite = replace(suite, seeds=(*suite.seeds[:seeds], *more))
    if tasks is not None:
        chosen = tuple(spec for spec in suite.tasks if spec.name in {suite.task(name).name for name in tasks})
        names = {spec.name for spec in chosen}
        methods = tuple(
            replace(m, tasks=tuple(name for name in m.tasks if name in names))
            for m in suite.methods
            if not m.tasks or names & set(m.tasks)
        )
        modalities = {spec.modality for spec in chosen}
        suite = replace(
            suite,
            tasks=chosen,
            methods=methods,
            models=tuple(spec for spec in suite.models if spec.modality in modalities),
            controls=tuple(spec for spec in suite.controls if spec.modality in modalities),
        )
    return suite


def run_benchmark(
    suite: Suite,
    out: str | Path,
    *,
    data: Path | None = None,
    models: Path | None = None,
    plugin: Path | None = None,
    processes: int | None = None,
    progress: bool | None = None,
) -> dict[str, Any]:
    """Runs a suite, or what is left of it, and writes `results.json` and `timings.json`.

    Args:
        suite: What to compare.
        out: Folder of the run. Finished cells in it are kept; it must be of the same suite.
        data: Folder with the suite's Parquet folders.
        models: Folder with the suite's models.
        plugin: A Python file to run first in every process, which registers families.
        processes: How many models are measured at once; None: 2 on a CPU of several cores, 1 with an accelerator.
        progress: Whether to show a bar; None: where stderr is a terminal.

    Returns:
        What is in `results.json`.

    Raises:
        PlatonicError: If the folder is another suite's, or something the suite names can't be had.
    """
    accelerated = torch.cuda.is_available()
    setting = Setting(
        suite,
        Path(out),
        data=data,
        models=models,
        plugin=plugin,
        num_workers=min(8, os.cpu_count() or 1) if accelerated else 0,
    )
    setting.store.open(setting.identity)
    setting.store.sweep()
    modalities = list(dict.fromkeys(spec.modality for spec in suite.tasks))
    chosen = [name for modality in modalities for name in setting.models_of(modality)]
    if processes is None:
        processes = 1 if accelerated else min(2, os.cpu_count() or 1)
    if processes < 1:
        raise PlatonicError(f"Expected at least one process, got {processes}.")
    start = time.perf_counter()
    sources: list[_Job] = [(measure_sources, name) for name in chosen]
    edits: list[_Job] = [(measure, name) for name in chosen for measure in (measure_target, measure_sweeps)]
    edits += [(measure_likeness, modality) for modality in modalities]
    edits += [(measure_costly, name) for name in chosen]
    bar = tqdm(total=len(sources) + len(edits), desc=suite.name, unit="job", disable=_hidden(progress))
    try:
        with bar, _workers(setting, processes) as run:
            for jobs in (sources, edits):  # every target needs every source
                for _ in run(jobs):
                    bar.update()
    except BaseException:
        setting.store.sweep()  # after the workers' end
        raise
    results = collect(setting)
    write_json(setting.out / RESULTS_NAME, results)
    write_json(setting.out / "timings.json", _timings(setting, time.perf_counter() - start))
    return results


@contextmanager
def _workers(setting: Setting, processes: int) -> Iterator[Callable[[Sequence[_Job]], Iterable[None]]]:
    """Something that runs jobs, here or in other processes, and says when each is done."""
    if processes == 1:
        with warnings.catch_warnings(), _one_thread():
            _settle(setting)

            def here(jobs: Sequence[_Job]) -> Iterator[None]:
                for function, name in jobs:
                    function(setting, name)
                    yield

            yield here
        return
    with worker_processes(processes, _start, setting) as submit:

        def there(jobs: Sequence[_Job]) -> Iterator[None]:
            for future in as_completed([submit(_do, job) for job in jobs]):
                future.result()
                yield

        yield there


_own: list[Setting] = []
"""The setting of this process, if it is a worker: its jobs share what is loaded."""


def _do(job: _Job) -> None:
    function, name = job
    function(_own[0], name)


def _start(setting: Setting) -> None:
    """What a new process does first."""
    _own.append(setting)
    torch.set_num_threads(1)
    _settle(setting)


def _settle(setting: Setting) -> None:
    """Registers what the plugin has, and keeps other libraries from talking in between."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # transformers 5.24 warns of its own default configuration whenever it logs SigLIP's
    # peft 0.21 asks every model it wraps for a name that transformers 5.24 has deprecated.
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    setting.load_plugin()


@contextmanager
def _one_thread() -> Iterator[None]:
    """The same arithmetic as in the worker processes, which have one thread each."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _timings(setting: Setting, seconds: float) -> dict[str, Any]:
    """Seconds by kind of cell and, of transfers, by method; and of this run."""
    by_kind: dict[str, float] = {}
    by_method: dict[str, float] = {}
    for path in sorted((setting.out / "cells").rglob("*.json")):
        cell = json.loads(path.read_text(encoding="utf-8"))
        by_kind[cell["key"][0]] = by_kind.get(cell["key"][0], 0.0) + cell["seconds"]
        if cell["key"][0] == "transfer":
            by_method[cell["key"][2]] = by_method.get(cell["key"][2], 0.0) + cell["seconds"]
    return {"this_run": seconds, "cells": by_kind, "transfer": by_method}


def _hidden(progress: bool | None) -> bool | None:
    return None if progress is None else not progress
