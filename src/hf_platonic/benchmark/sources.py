"""Sources: each model's fine-tunes, their descriptors, and what the base model says about everything."""

from __future__ import annotations

import time

from ..encoders.encoder import DualEncoder
from ..encoding import encode_probes
from ..errors import EncoderError
from ..extraction import extract
from ..views import FeatureMemory, View
from .baselines import linear_probe
from .setting import Setting
from .store import pack
from .workbench import TaskData

__all__ = ["measure_sources"]


def measure_sources(setting: Setting, model: str) -> None:
    """Finishes the cells of one model as a source: accuracies before and after each fine-tune, and descriptors.

    Args:
        setting: The run.
        model: Its name.
    """
    suite, store, passes = setting.suite, setting.store, setting.passes
    modality = setting.modality(model)
    first = suite.seeds[0]
    tasks, controls = setting.tasks_of(modality), setting.controls_of(modality)
    open_tasks = [
        task
        for task in tasks
        if not store.has("probe", model, task) or not all(store.has("source", s, model, task) for s in suite.seeds)
    ]
    if not open_tasks and all(store.has("control", model, name) for name in controls):
        return
    base = setting.base(model)
    pooled = setting.pooled(modality) if open_tasks else None
    for name in controls:
        if store.has("control", model, name):
            continue
        start = time.perf_counter()
        data = setting.data_of(first, name)
        _see(setting, base, data)
        view = View.of(base, data.test, **passes)
        zero_shot = pack(view.correct())
        seconds = time.perf_counter() - start
        store.put("control", model, name, n=len(data.test.labels), zero_shot=zero_shot, seconds=seconds)
    for task in open_tasks:
        tuned = setting.bench.tuned(model, task)
        tuned.keep_features(FeatureMemory())
        for seed in suite.seeds:
            data = setting.data_of(seed, task)
            if store.has("source", seed, model, task):
                continue
            start = time.perf_counter()
            _see(setting, base, data)
            descriptor = extract(base, tuned, data.probes, name=task, store_base=True, **passes)
            descriptor.save_pretrained(setting.descriptor_folder(seed, model, task))
            before = View.of(base, data.test, **passes)
            after = View.of(tuned, data.test, **passes)
            store.put(
                *("source", seed, model, task),
                n=len(data.test.labels),
                probes=len(data.probes),
                prompts=len(data.probes.columns),
                norm=round(descriptor.norm(), 6),
                spread=round(descriptor.spread, 6),
                zero_shot=pack(before.correct()),
                fine_tuned=pack(after.correct()),
                seconds=time.perf_counter() - start,
            )
        start = time.perf_counter()
        if pooled is not None:
            across = extract(base, tuned, pooled, name=task, **passes)
            across.save_pretrained(setting.pooled_folder(model, task))
        correct = linear_probe(base, data, **passes)
        probe = None if correct is None else pack(correct)
        store.put("probe", model, task, n=len(data.test.labels), correct=probe, seconds=time.perf_counter() - start)
    if base.features is not None:
        base.features.save(setting.features(model))
    setting.bench.forget(model)


def _see(setting: Setting, base: DualEncoder, data: TaskData) -> None:
    """Runs the base model on probes and test set, reading at each place that a method edits."""
    for site, tower in setting.places:
        try:
            encoder = base.at(site=site, tower=tower)
        except EncoderError:  # the method that wants this place will say so
            continue
        for probes in (data.probes, data.test.probes):
            encode_probes(encoder, probes, **setting.passes)
