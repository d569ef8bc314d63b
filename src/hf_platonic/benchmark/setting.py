"""`Setting`: what every part of a run shares, small enough to be sent to another process."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..descriptor import TaskDescriptor
from ..encoders.families import SiteKind, Tower
from ..errors import PlatonicError
from ..probes import ProbeSet
from ..solutions import solve_transfer
from ..transfers import transfer
from ..views import FeatureMemory, RememberingEncoder
from .store import Store
from .suites import MethodSpec, Suite
from .workbench import TaskData, Workbench

__all__ = ["Place", "Setting", "place_of", "unsupported"]

_POOLED = 50  # probes a task on which descriptors of different tasks are compared

Place = tuple[SiteKind | None, Tower | None]
"""Where an edit acts, as `DualEncoder.at` takes it."""


@dataclass(frozen=True)
class Setting:
    """A suite and where a run of it lies.

    Attributes:
        suite: What is compared.
        out: Folder of the run.
        data: As in `Workbench`.
        models: As in `Workbench`.
        plugin: A Python file to run first, which registers families.
        batch_size: Inputs a forward pass.
        num_workers: Processes that decode while a model computes.
    """

    suite: Suite
    out: Path
    data: Path | None = None
    models: Path | None = None
    plugin: Path | None = None
    batch_size: int = 100
    num_workers: int = 0

    @cached_property
    def store(self) -> Store:
        """The run's folder."""
        return Store(self.out)

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the results, as plain JSON."""
        from .. import __version__

        return {"suite": asdict(self.suite), "batch_size": self.batch_size, "library_version": __version__}

    @property
    def passes(self) -> dict[str, Any]:
        """How inputs are run through a model, as keyword arguments."""
        return {"batch_size": self.batch_size, "num_workers": self.num_workers, "progress": False}

    @cached_property
    def bench(self) -> Workbench:
        """The suite's workbench, for the first seed; models and fine-tunes are those of all."""
        cache = self.store.work / "fine-tunes"
        return Workbench(self.suite, seed=self.suite.seeds[0], data=self.data, models=self.models, cache=cache)

    @cached_property
    def _known(self) -> dict[str, dict[int, TaskData]]:
        return {}

    def data_of(self, seed: int, name: str) -> TaskData:
        """The data of a task or control. All that doesn't depend on the seed is one object for all of them."""
        known = self._known.setdefault(name, {})
        if seed not in known:
            bench = copy.copy(self.bench)
            bench.seed = seed
            is_task = name in {spec.name for spec in self.suite.tasks}
            found = bench.task(name) if is_task else bench.control(name)
            for earlier in known.values():  # its inputs are decoded and hashed already
                found = replace(found, test=earlier.test, train=earlier.train)
            known[seed] = found
        return known[seed]

    def modality(self, model: str) -> str:
        """What a model's probes are."""
        return self.suite.model(model).modality

    def models_of(self, modality: str) -> tuple[str, ...]:
        """Names of the models of a modality, in the suite's order."""
        return tuple(spec.name for spec in self.suite.models if spec.modality == modality)

    def tasks_of(self, modality: str) -> tuple[str, ...]:
        """Names of the tasks of a modality."""
        return tuple(spec.name for spec in self.suite.tasks if spec.modality == modality)

    def controls_of(self, modality: str) -> tuple[str, ...]:
        """Names of the controls of a modality."""
        return tuple(spec.name for spec in self.suite.controls if spec.modality == modality)

    def others(self, model: str) -> tuple[str, ...]:
        """The other models of its modality; the next one in the suite's order first, then around."""
        models = self.models_of(self.modality(model))
        at = models.index(model)
        return models[at + 1 :] + models[:at]

    def base(self, model: str) -> RememberingEncoder:
        """A base model that is run on each input once, whatever the number of edits."""
        encoder = self.bench.encoder(model)
        path = self.features(model)
        encoder.keep_features(FeatureMemory.load(path) if path.is_file() else FeatureMemory())
        return encoder

    def features(self, model: str) -> Path:
        """File of what a base model said about inputs."""
        folder = self.store.work / "features"
        folder.mkdir(exist_ok=True)
        return folder / f"{model}.safetensors"

    def descriptor_folder(self, seed: int, model: str, task: str) -> Path:
        """Folder of a source's descriptor."""
        return self.store.work / "descriptors" / str(seed) / f"{model}--{task}"

    def pooled_folder(self, model: str, task: str) -> Path:
        """Folder of a source's descriptor on the probes and prompts of all tasks, where tasks can be compared."""
        return self.store.work / "descriptors" / "pooled" / f"{model}--{task}"

    def pooled(self, modality: str) -> ProbeSet:
        """Some probes of every task of a modality, with the prompts of all of them."""
        found = [self.data_of(self.suite.seeds[0], task).probes for task in self.tasks_of(modality)]
        inputs = [probe for probes in found for probe in probes[:_POOLED]]
        return ProbeSet(inputs, prompts=list(dict.fromkeys(prompt for probes in found for prompt in probes.prompts)))

    def descriptor(self, seed: int, model: str, data: TaskData) -> TaskDescriptor:
        """A source's descriptor, with its probes at hand."""
        return TaskDescriptor.from_pretrained(self.descriptor_folder(seed, model, data.name)).with_probes(data.probes)

    @property
    def places(self) -> tuple[Place, ...]:
        """Every place at which a closed form of the suite acts."""
        found = [place_of(method) for method in self.suite.methods if method.realisation == "closed_form"]
        return tuple(dict.fromkeys([(None, None), *found]))

    def load_plugin(self) -> None:
        """Runs the plugin, once a process.

        Raises:
            PlatonicError: If there's no such file.
        """
        if self.plugin is None:
            return
        spec = importlib.util.spec_from_file_location("hf_platonic_plugin", self.plugin)
        if not self.plugin.is_file() or spec is None or spec.loader is None:
            raise PlatonicError(f"Expected a Python file for --plugin, got {self.plugin}. Check the path.")
        # Dataclasses look their own module up, and transformers makes one of every configuration.
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def place_of(method: MethodSpec) -> Place:
    """The place that a method's options name."""
    return method.options.get("site"), method.options.get("tower")


def unsupported(method: MethodSpec) -> str | None:
    """Why this library can't do a method, or None."""
    call: Callable[..., Any] = solve_transfer if method.realisation == "closed_form" else transfer
    options: Mapping[str, Any] = method.options
    if method.realisation == "lora":
        options = {"method": "lora", **options}
    known = inspect.signature(call).parameters
    missing = sorted(name for name in options if name not in known)
    if missing:
        return f"Expected options that `{call.__name__}` takes, got {', '.join(missing)}. Correct the suite's method."
    return None
