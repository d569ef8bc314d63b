"""`Workbench`: makes what a suite names: probes, test sets, models and their fine-tunes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import playground
from ..encoders.families import bare_model
from ..errors import PlatonicError
from ..evaluation import EvaluationSet
from ..grid import digest
from ..probes import ProbeSet
from ..views import Memory, RememberingEncoder
from .finetuning import fine_tune
from .loading import Items, load_items, playground_probes
from .suites import ModelSpec, Suite, TaskSpec

__all__ = ["TaskData", "Workbench"]


@dataclass(frozen=True, eq=False)
class TaskData:
    """What a benchmark may know of a task or control.

    Attributes:
        name: Of the task.
        modality: "image" or "audio".
        kind: "classification" or "retrieval".
        probes: Unlabelled, from the training split, drawn by the seed; of a control, the half that isn't tested.
        test: For accuracies alone.
        train: The labelled training split, for fine-tunes and for baselines that say that they use labels; None for
            controls.
    """

    name: str
    modality: str
    kind: str
    probes: ProbeSet
    test: EvaluationSet
    train: EvaluationSet | None


class Workbench:
    """Makes what a suite names, for one seed.

    Args:
        suite: The suite.
        seed: Decides which probes are drawn. Of the playground, from the training and the unlabelled split
            together; seed 0 takes the latter as it is.
        data: Folder with the Parquet folders of a suite that has such.
        models: Folder with the models of a suite that names folders.
        cache: Folder for trained fine-tunes and converted data sets. Needed where fine-tunes are trained.
    """

    def __init__(
        self,
        suite: Suite,
        *,
        seed: int = 0,
        data: Path | None = None,
        models: Path | None = None,
        cache: Path | None = None,
    ) -> None:
        self.suite, self.seed = suite, seed
        self._data, self._models, self._cache = data, models, cache
        self._items: dict[str, tuple[Items | None, Items]] = {}
        self._memories: dict[str, Memory] = {}

    def task(self, name: str) -> TaskData:
        """The data of a task.

        Raises:
            PlatonicError: If the suite has no such task, or its data aren't as the suite says.
        """
        spec = self.suite.task(name)
        train, test = self._load(spec)
        if train is None:
            raise PlatonicError(f"Expected a training split for task {name!r}, got none. Make it a control.")
        return TaskData(
            spec.name,
            spec.modality,
            spec.kind,
            self._drawn(spec, train).probes(spec),
            _evaluation(_limited(spec, test), spec),
            _evaluation(train, spec),
        )

    def control(self, name: str) -> TaskData:
        """The data of a control: every second item unlabelled, the others for accuracies.

        Raises:
            PlatonicError: If the suite has no such control, or its data aren't as the suite says.
        """
        spec = self.suite.control(name)
        items = self._load(spec)[1]
        chosen = np.arange(len(items))
        if spec.per_class is not None:
            chosen = _first_of_each(items.labels or (), 2 * spec.per_class)
        halves = [items.take([int(i) for i in half]) for half in _halves(items, chosen)]
        return TaskData(
            spec.name, spec.modality, spec.kind, halves[0].probes(spec), _evaluation(halves[1], spec), None
        )

    def encoder(self, model: str) -> RememberingEncoder:
        """A base model, loaded anew at each call.

        Raises:
            EncoderError: If it can't be loaded.
        """
        return self._encoder(self.suite.model(model))

    def tuned(self, model: str, task: str) -> RememberingEncoder:
        """A model's fine-tune on a task, loaded anew at each call; trained first where the suite says so.

        Raises:
            EncoderError: If it can't be loaded.
            PlatonicError: If there's nowhere to keep what is trained.
        """
        spec, task_spec = self.suite.model(model), self.suite.task(task)
        return self._encoder(spec, **self._fine_tune(spec, task_spec))

    def weight_delta(self, model: str, task: str) -> dict[str, Tensor] | None:
        """Fine-tuned minus base weights by name, of the weights that changed; None if the two don't fit each other."""
        base = dict(bare_model(self.encoder(model).model).state_dict())
        tuned_model: Any = self.tuned(model, task).model
        if hasattr(tuned_model, "merge_and_unload"):
            tuned_model = tuned_model.merge_and_unload()
        tuned = dict(tuned_model.state_dict())
        if {name: value.shape for name, value in base.items()} != {n: value.shape for n, value in tuned.items()}:
            return None
        return {
            name: tuned[name] - value
            for name, value in base.items()
            if value.is_floating_point() and not torch.equal(tuned[name], value)
        }

    def forget(self, model: str | None = None) -> None:
        """Drops the preprocessed inputs kept for a model, or for all."""
        for name in [model] if model is not None else list(self._memories):
            self._memories.pop(name, None)

    def _load(self, spec: TaskSpec) -> tuple[Items | None, Items]:
        if spec.name not in self._items:
            self._items[spec.name] = load_items(spec, self._data, self._cache)
        return self._items[spec.name]

    def _drawn(self, spec: TaskSpec, train: Items) -> Items:
        """Uniformly, without a quota for classes."""
        if spec.data.source == "playground":
            unlabelled = playground_probes(spec)
            if self.seed == 0:
                return unlabelled
            train = Items([*train.source, *unlabelled.source], None)
        count = min(spec.probe_count, len(train))
        rows = np.random.default_rng(self.seed).choice(len(train), count, replace=False)
        return train.take(sorted(rows.tolist()))

    def _encoder(self, spec: ModelSpec, **fine_tune: Any) -> RememberingEncoder:
        path: str | Path = spec.path
        if spec.loader == "playground":
            path = playground.model_path(spec.path)
        elif self._models is not None and (self._models / spec.path).is_dir():
            path = self._models / spec.path
        options = {"revision": spec.revision, **fine_tune}
        encoder = RememberingEncoder.from_pretrained(path, **options)
        # Full-size inputs of whole data sets would fill the memory; the small ones are worth keeping.
        if not any(task.data.source == "hub" for task in self.suite.tasks):
            encoder.memory = self._memories.setdefault(spec.name, {})
        return encoder

    def _fine_tune(self, spec: ModelSpec, task: TaskSpec) -> dict[str, Any]:
        """Where a fine-tune is, as a keyword argument of `DualEncoder.from_pretrained`."""
        source = self.suite.fine_tunes
        if source.kind == "playground":
            return {"adapter": playground.adapter_path(spec.path, task.data.path)}
        if source.kind == "lora":
            return {"adapter": self._trained(spec, task)}
        folder = Path((source.pattern or "").format(models=self._models, model=spec.path, task=task.name))
        if not folder.is_dir():
            raise PlatonicError(
                f"Expected the fine-tune of {spec.name!r} on {task.name!r} in {folder}, found no such folder. Pass "
                "the models' folder, or correct the suite's `pattern`."
            )
        return {"adapter" if (folder / "adapter_config.json").is_file() else "weights": folder}

    def _trained(self, spec: ModelSpec, task: TaskSpec) -> Path:
        """The folder of a LoRA by the suite's recipe, trained now if it isn't there."""
        recipe = self.suite.fine_tunes.recipe(spec.name, task.name)
        if self._cache is None:
            raise PlatonicError(
                f"Expected a folder for the fine-tune of {spec.name!r} on {task.name!r}, got none. Pass `cache`."
            )
        about = {
            "model": [spec.path, spec.revision],
            "data": [asdict(task.data), task.train_size],
            "classes": task.class_names,
            "template": task.templates[0],
            "recipe": {k: v for k, v in asdict(recipe).items() if k not in ("models", "tasks")},
        }
        folder = self._cache / "fine-tunes" / f"{spec.name}--{task.name}--{digest(about)[:12]}"
        if not folder.is_dir():
            train = self._load(task)[0]
            if train is None:
                raise PlatonicError(f"Expected a training split for task {task.name!r}, got none.")
            fine_tune(self._encoder(spec), _evaluation(train, task), recipe, folder)
        return folder


def _evaluation(items: Items, spec: TaskSpec) -> EvaluationSet:
    if items.labels is None:
        raise PlatonicError(f"Expected labels for {spec.name!r}, got none.")
    labels = tuple(range(len(items))) if items.captions is not None else items.labels
    return EvaluationSet(items.probes(spec), labels)


def _limited(spec: TaskSpec, test: Items) -> Items:
    if spec.per_class is None:
        return test
    return test.take(_first_of_each(test.labels or (), spec.per_class).tolist())


def _first_of_each(labels: Sequence[int], count: int) -> np.ndarray[Any, Any]:
    """Positions of the first so many items of each class, in order."""
    found = np.asarray(labels)
    return np.sort(np.concatenate([np.flatnonzero(found == label)[:count] for label in np.unique(found)]))


def _halves(items: Items, chosen: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """The chosen positions in two halves; within each class every second item, so that both halves have all."""
    if items.labels is None or items.captions is not None:
        return [chosen[1::2], chosen[::2]]
    labels = np.asarray(items.labels)[chosen]
    rank = np.zeros(len(chosen), int)
    for label in np.unique(labels):
        of_class = np.flatnonzero(labels == label)
        rank[of_class] = np.arange(len(of_class))
    return [chosen[rank % 2 == 1], chosen[rank % 2 == 0]]
