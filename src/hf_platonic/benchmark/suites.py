"""Suites as data: which models, tasks, controls and ways to transfer a benchmark compares.

A suite is a YAML file. The shipped ones are read by name, others by path; docs/suites.md describes the format.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..errors import PlatonicError
from ._records import record

__all__ = [
    "Data",
    "FineTunes",
    "MethodSpec",
    "ModelSpec",
    "Recipe",
    "SourceKind",
    "Suite",
    "TaskSpec",
    "load_suite",
    "suite_names",
]

Modality = Literal["image", "audio"]
Part = Literal["transfer", "pairs", "all", "negation"]
SourceKind = Literal["one", "others", "own"]
"""Whose descriptor moves: one other model's, all other models' together, or the target's own."""

_SHIPPED = Path(__file__).parent / "suites"


@dataclass(frozen=True)
class MethodSpec:
    """One way to transfer.

    Attributes:
        name: Shown in tables.
        sources: Whose descriptors move.
        own: Whether the target's own descriptor is run besides, as the ceiling.
        realisation: How it is written into the target: the closed form, or LoRA trained to it.
        options: Keyword arguments of `solutions.solve_transfer`, or of the LoRA realisation, as they are.
        cases: All source and target pairs, or each target from the next model only and for the first seed only, for
            what is costly.
        tasks: Names of the tasks it is run on, for what is costly; empty: all.
        parts: What it is run for: transfers of one task, pairs of tasks added, all tasks added at once, one negated.
        seeds: How many of the suite's first seeds it is run for, for what is costly; None: all.
    """

    name: str
    sources: SourceKind = "one"
    own: bool = True
    realisation: Literal["closed_form", "lora"] = "closed_form"
    options: Mapping[str, Any] = field(default_factory=dict)
    cases: Literal["all", "cycle"] = "all"
    tasks: tuple[str, ...] = ()
    parts: tuple[Part, ...] = ("transfer", "pairs", "all", "negation")
    seeds: int | None = None

    def __post_init__(self) -> None:
        if self.seeds is not None and self.seeds < 1:
            raise PlatonicError(f"Expected at least one seed for method {self.name!r}, got {self.seeds}.")

    def takes(self, suite_seeds: Sequence[int], seed: int) -> bool:
        """Whether it is run for a seed of the suite's."""
        return seed in (suite_seeds if self.seeds is None else suite_seeds[: self.seeds])


@dataclass(frozen=True)
class ModelSpec:
    """One pre-trained dual encoder.

    Attributes:
        name: Short, for tables and file names.
        modality: What its probes are.
        path: Hub id, "hf-hub:" id of open_clip, folder under the models' folder, or the playground's name.
        loader: Which library reads it.
        revision: Branch, tag or commit; None is the main branch.
        embedding_dim: Length of its embeddings.
        parameters_millions: Both towers together, in millions.
        gflops: Of the probe tower for one input, forward, in 10^9 floating-point operations.
        licence: As its page states it.
        verified: Whether the facts here were read from a published source.
    """

    name: str
    modality: Modality
    path: str
    loader: Literal["transformers", "open_clip", "playground"] = "transformers"
    revision: str | None = None
    embedding_dim: int | None = None
    parameters_millions: float | None = None
    gflops: float | None = None
    licence: str | None = None
    verified: bool = True


@dataclass(frozen=True)
class Data:
    """Where a task's items lie.

    Attributes:
        source: The playground, a data set on the Hub, or a folder with `train.parquet` and `test.parquet`.
        path: Task of the playground, data set id, or folder under the data folder.
        config: Configuration of the data set.
        revision: Branch, tag or commit; resolved to a commit when loaded.
        train: Split that probes and fine-tunes take; None for controls.
        test: Split for accuracies. The same as `train` where a part is held out.
        holdout: Share in (0, 1) of the one split that is held out as the test set, by a permutation of seed 42.
        fold_column: Column with fold numbers, where folds take the place of splits.
        test_folds: Folds that are the test set.
        input_column: With the images or sounds.
        label_column: With the labels.
        size_mb: Download size in 10^6 bytes.
    """

    source: Literal["playground", "hub", "parquet"]
    path: str
    config: str | None = None
    revision: str | None = None
    train: str | None = "train"
    test: str = "test"
    holdout: float | None = None
    fold_column: str | None = None
    test_folds: tuple[int, ...] = ()
    input_column: str | None = None
    label_column: str = "label"
    size_mb: float | None = None

    def __post_init__(self) -> None:
        parted = (self.holdout is not None) + (self.fold_column is not None)
        if parted != (self.train == self.test) or not 0 < (self.holdout or 0.5) < 1:
            raise PlatonicError(
                f"Expected for {self.path!r} either different splits, or one split with a `holdout` in (0, 1) or a "
                f"`fold_column`, got train = {self.train!r}, test = {self.test!r}, holdout = {self.holdout!r} and "
                f"fold_column = {self.fold_column!r}."
            )


@dataclass(frozen=True)
class TaskSpec:
    """One task or control.

    Attributes:
        name: Short, for tables and file names.
        modality: What its inputs are.
        data: Where they lie.
        kind: "classification", or "retrieval", where every input has a caption of its own as prompt.
        class_names: In plain English, as they stand in prompts; empty for retrieval.
        labels: The same classes as the data set calls them; they are looked up by name.
        templates: Of the prompts; grids have the first.
        standard_templates: How many templates the usual list for this data set has.
        probes_per_class: Probes to draw, for each class.
        probes: Probes to draw in all, instead.
        per_class: Test items of each class that are taken; None takes all.
        train_size: Items of the training split.
        test_size: Items of the test split.
        licence: As the data set's page states it.
        verified: Whether the facts here were read from a published source.
        note: What a reader should know.
    """

    name: str
    modality: Modality
    data: Data
    kind: Literal["classification", "retrieval"] = "classification"
    class_names: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    templates: tuple[str, ...] = ("a photo of a {}.",)
    standard_templates: int | None = None
    probes_per_class: int | None = None
    probes: int | None = None
    per_class: int | None = None
    train_size: int | None = None
    test_size: int | None = None
    licence: str | None = None
    verified: bool = True
    note: str | None = None

    def __post_init__(self) -> None:
        if len(self.labels) != len(self.class_names) or bool(self.class_names) != (self.kind == "classification"):
            raise PlatonicError(
                f"Expected classes for task {self.name!r} if it is a classification, one label each, got kind "
                f"{self.kind!r}, {len(self.class_names)} classes and {len(self.labels)} labels. Give `classes`."
            )

    @property
    def probe_count(self) -> int:
        """Probes to draw; a split that has fewer gives all."""
        return self.probes or (self.probes_per_class or 0) * len(self.class_names)


@dataclass(frozen=True)
class Recipe:
    """How a source is fine-tuned with LoRA.

    Attributes:
        learning_rate: Of AdamW, constant.
        batch_size: Items a step.
        weight_decay: Of AdamW.
        epochs: Passes over the training split.
        r: Rank.
        lora_alpha: The update is scaled by `lora_alpha / r`.
        target_modules: Last part of the names of the probe tower's linear layers that get one.
        models: Names of the models it is for; empty: all.
        tasks: Names of the tasks it is for; empty: all.
    """

    learning_rate: float
    batch_size: int
    weight_decay: float
    epochs: int
    r: int = 4
    lora_alpha: int = 8
    target_modules: tuple[str, ...] = ("q_proj", "v_proj", "query", "value", "qkv")
    models: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()


@dataclass(frozen=True)
class FineTunes:
    """Where the fine-tunes come from.

    Attributes:
        kind: The playground's adapters, checkpoints that are there, or LoRA trained by the recipes.
        pattern: Folder of a checkpoint, with `{models}`, `{model}` and `{task}`.
        recipes: The first that fits a model and a task is taken.
    """

    kind: Literal["playground", "checkpoints", "lora"]
    pattern: str | None = None
    recipes: tuple[Recipe, ...] = ()

    def recipe(self, model: str, task: str) -> Recipe:
        """The recipe for a model and a task.

        Raises:
            PlatonicError: If none fits.
        """
        for recipe in self.recipes:
            if (not recipe.models or model in recipe.models) and (not recipe.tasks or task in recipe.tasks):
                return recipe
        raise PlatonicError(
            f"Expected a recipe for {model!r} on {task!r}, got none that fits among {len(self.recipes)}. "
            "Add one without `models` and `tasks` at the end of the suite's recipes."
        )


@dataclass(frozen=True)
class Suite:
    """Everything a benchmark compares.

    Attributes:
        name: Of the suite.
        description: What it is for.
        models: The models; descriptors move between those of one modality.
        tasks: What is fine-tuned, added and negated.
        controls: What an edit should leave alone.
        methods: The ways to transfer.
        fine_tunes: Where fine-tunes come from.
        seeds: Which probes are drawn; one run each.
    """

    name: str
    description: str
    models: tuple[ModelSpec, ...]
    tasks: tuple[TaskSpec, ...]
    controls: tuple[TaskSpec, ...]
    methods: tuple[MethodSpec, ...]
    fine_tunes: FineTunes
    seeds: tuple[int, ...] = (42,)

    def __post_init__(self) -> None:
        for what, entries in (("model", self.models), ("task", self.tasks + self.controls), ("method", self.methods)):
            names = [entry.name for entry in entries]
            repeated = sorted({name for name in names if names.count(name) > 1})
            if repeated or not names:
                raise PlatonicError(
                    f"Expected different {what} names in suite {self.name!r}, got {repeated or 'none at all'}. "
                    "Rename one, or add one."
                )

        bare = [task.name for task in self.tasks if task.probe_count < 1]
        if bare:
            raise PlatonicError(
                f"Expected `probes` or `probes_per_class` above 0 for every task of suite {self.name!r}, got neither "
                f"for {bare}. Give one."
            )
        known = {task.name for task in self.tasks}
        for method in self.methods:
            if not known.issuperset(method.tasks):
                raise PlatonicError(
                    f"Expected tasks of suite {self.name!r} for method {method.name!r}, got "
                    f"{sorted(set(method.tasks) - known)}. Correct or remove them."
                )

    def model(self, name: str) -> ModelSpec:
        """The model of that name; `PlatonicError` if there's none."""
        return _named(self.models, name, "model", self.name)

    def task(self, name: str) -> TaskSpec:
        """The task of that name; `PlatonicError` if there's none."""
        return _named(self.tasks, name, "task", self.name)

    def control(self, name: str) -> TaskSpec:
        """The control of that name; `PlatonicError` if there's none."""
        return _named(self.controls, name, "control", self.name)


_Entry = TypeVar("_Entry", ModelSpec, TaskSpec)


def suite_names() -> tuple[str, ...]:
    """Names of the shipped suites."""
    return tuple(sorted(path.stem for path in _SHIPPED.glob("*.yaml")))


def load_suite(name_or_path: str | os.PathLike[str]) -> Suite:
    """A suite by the name of a shipped one, or from a YAML file.

    Raises:
        PlatonicError: If there's no such suite, or the file has an unknown key or a value of another kind; the message
            names the file, the key and what was expected.
    """
    path = _path_of(os.fspath(name_or_path))
    return record(Suite, _content(path), path.name)


def _path_of(name: str) -> Path:
    path = _SHIPPED / f"{name}.yaml" if name in suite_names() else Path(name)
    if not path.is_file():
        raise PlatonicError(
            f"Expected a suite out of {', '.join(suite_names())} or a YAML file, got {name!r}. Check the name."
        )
    return path


def _content(path: Path) -> Any:
    """What a suite's file says, with what it takes over from another and the classes of its tasks spelled out."""
    content = _read(path)
    if not isinstance(content, dict):
        return content
    for key in ("tasks", "controls"):
        entries = content.get(key)
        if isinstance(entries, list):
            content[key] = [_task(entry, path) if isinstance(entry, dict) else entry for entry in entries]
    parent = content.pop("extends", None)
    return content if parent is None else {**_content(_path_of(str(parent))), **content}


def _read(path: Path) -> Any:
    import yaml

    if not path.is_file():
        raise PlatonicError(f"Expected {path.name} beside the suite that names it, found no such file.")
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PlatonicError(
            f"Expected YAML in {path.name}, got something else ({error}). Correct the file."
        ) from error


def _task(entry: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """A task's entry with its classes spelled out: of the playground, or from a list, a mapping or a file of them."""
    from .. import playground

    task = dict(entry)
    data = task.get("data")
    if isinstance(data, dict) and data.get("source") == "playground" and task.get("kind") != "retrieval":
        name = str(data.get("path"))
        known = playground.load_task(name) if name in _playground_tasks() else playground.load_control(name)
        task = {
            "modality": known.modality,
            "classes": list(known.class_names),
            "templates": list(known.templates[:1]),
            "note": known.description,
            **task,
        }
    classes = task.pop("classes", None)
    if isinstance(classes, str):
        classes = _read(path.parent / "classes" / f"{classes}.yaml")
    if isinstance(classes, dict):
        task.update(labels=[str(key) for key in classes], class_names=list(classes.values()))
    elif classes is not None:
        task.update(labels=classes, class_names=classes)
    return task


def _playground_tasks() -> tuple[str, ...]:
    from .. import playground

    return playground.IMAGE_TASKS + playground.AUDIO_TASKS


def _named(entries: tuple[_Entry, ...], name: str, what: str, suite: str) -> _Entry:
    found = {entry.name: entry for entry in entries}
    if name not in found:
        raise PlatonicError(f"Expected a {what} of suite {suite!r} out of {sorted(found)}, got {name!r}.")
    return found[name]
