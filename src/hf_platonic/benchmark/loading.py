"""Items and labels of a task, from the playground, the Hub or a folder of Parquet files.

Rows stay where they are until they're looked at; labels are brought into the suite's order by their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from .. import playground, probe_sources
from ..errors import PlatonicError
from ..probes import ProbeSet
from .suites import TaskSpec

__all__ = ["Items", "aligned_labels", "load_items", "playground_probes"]

_HOLDOUT_SEED = 42  # as the paper's


@dataclass(frozen=True, eq=False)
class Items:
    """Rows of one split, with what is known of each.

    Attributes:
        source: Anything with `source[row]`.
        labels: Index into the class names for each row; None where there are none to be had.
        captions: For retrieval, each row's own.
        reference: Data set, commit, split and column, where the rows are on the Hub.
        rows: The numbers of the rows in that split.
        folds: Each row's fold, where the data set is cut into folds.
    """

    source: Any
    labels: tuple[int, ...] | None
    captions: tuple[str, ...] | None = None
    reference: dict[str, Any] | None = None
    rows: tuple[int, ...] | None = None
    folds: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.source)

    def take(self, positions: Sequence[int]) -> Items:
        """Some of the rows, in this order."""
        if hasattr(self.source, "modality"):
            source: Any = probe_sources.Rows(self.source, positions, self.source.modality)
        else:
            source = [self.source[i] for i in positions]

        def picked(values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
            return None if values is None else tuple(values[i] for i in positions)

        return Items(
            source, picked(self.labels), picked(self.captions), self.reference, picked(self.rows), picked(self.folds)
        )

    def probes(self, spec: TaskSpec) -> ProbeSet:
        """The rows with the task's prompts, or their own captions."""
        reference = None if self.reference is None else {**self.reference, "indices": list(self.rows or ())}
        if self.captions is not None:
            return ProbeSet(self.source, prompts=self.captions, reference=reference)
        return ProbeSet(self.source, class_names=spec.class_names, templates=spec.templates[:1], reference=reference)


def load_items(spec: TaskSpec, data: Path | None, cache: Path | None) -> tuple[Items | None, Items]:
    """The training and the test items of a task; a control has test items alone.

    Args:
        spec: The task.
        data: Folder with the Parquet folders.
        cache: Folder for what is downloaded or converted; None: that of `datasets`.

    Raises:
        PlatonicError: If there's no such folder, or the columns or label names aren't those that the suite names.
        ProbeError: If a data set on the Hub can't be had.
    """
    if spec.data.source == "playground":
        return _playground(spec)
    read = _hub_split if spec.data.source == "hub" else _parquet_split
    test = read(spec, spec.data.test, data, cache)
    if spec.data.train is None:
        return None, test
    if spec.data.train != spec.data.test:
        return read(spec, spec.data.train, data, cache), test
    if spec.data.fold_column is not None:
        held = np.isin(np.asarray(test.folds), spec.data.test_folds)
    else:
        order = np.random.default_rng(_HOLDOUT_SEED).permutation(len(test))
        held = np.zeros(len(test), bool)
        held[order[round(len(test) * (1 - (spec.data.holdout or 0.0))) :]] = True
    return test.take(np.flatnonzero(~held).tolist()), test.take(np.flatnonzero(held).tolist())


def _playground(spec: TaskSpec) -> tuple[Items | None, Items]:
    """The playground's own splits; for training, `train` and then the unlabelled `probes` split."""
    name = spec.data.path
    if spec.kind == "retrieval":
        split = playground.load_captioned(name).split(spec.test_size)
        return None, Items(split.inputs, tuple(range(len(split))), split.captions)
    if name not in playground.IMAGE_TASKS + playground.AUDIO_TASKS:
        test = playground.load_control(name).split("test", spec.test_size)
        return None, Items(test.inputs, test.labels)
    task = playground.load_task(name)
    train, test = task.split("train", spec.train_size), task.split("test", spec.test_size)
    return Items(train.inputs, train.labels), Items(test.inputs, test.labels)


def playground_probes(spec: TaskSpec) -> Items:
    """The playground's unlabelled split of a task, as it is shipped."""
    split = playground.load_task(spec.data.path).split("probes")
    return Items(split.inputs, None)


def _hub_split(spec: TaskSpec, split: str, data: Path | None, cache: Path | None) -> Items:
    """One split of a data set on the Hub, at the commit that its revision is now."""
    where = None if cache is None else str(cache / "datasets")
    commit = _commit(spec.data.path, spec.data.revision)
    dataset = probe_sources.load_split(spec.data.path, spec.data.config, split, commit, None, where)
    reference = {"repo": spec.data.path, "revision": commit, "name": spec.data.config, "split": split}
    return _items(spec, dataset, reference)


@lru_cache(maxsize=64)
def _commit(repo: str, revision: str | None) -> str:
    """Asked once a process, so that two splits can't come from different commits."""
    return probe_sources.commit_of(repo, revision, None)


def _parquet_split(spec: TaskSpec, split: str, data: Path | None, cache: Path | None) -> Items:
    """One file of a folder of Parquet files."""
    from datasets import load_dataset

    if data is None:
        raise PlatonicError(
            f"Expected a folder with {spec.data.path!r} for task {spec.name!r}, got none. Pass `data`."
        )
    path = data / spec.data.path / f"{split}.parquet"
    if not path.is_file():
        raise PlatonicError(f"Expected the {split} split of {spec.name!r} in {path}, found no such file.")
    where = None if cache is None else str(cache / "datasets")
    dataset = load_dataset("parquet", data_files={split: str(path)}, split=split, cache_dir=where)
    return _items(spec, dataset, None)


def _items(spec: TaskSpec, dataset: Any, reference: dict[str, Any] | None) -> Items:
    rows, column, numbers = probe_sources.dataset_rows(dataset, spec.data.input_column, None, None, 0)
    where = f"data set {spec.data.path!r} of task {spec.name!r}"
    needed = [name for name in (spec.data.label_column, spec.data.fold_column) if name is not None]
    missing = [name for name in needed if name not in dataset.column_names]
    if missing:
        raise PlatonicError(
            f"Expected columns {missing} in {where}, got {sorted(dataset.column_names)}. The data set changed: name "
            "its columns in the suite, or give the revision that has these."
        )
    plain = dataset.with_format(None).select_columns(needed)
    if rows.modality != spec.modality:
        raise PlatonicError(f"Expected {spec.modality} probes in {where}, got {rows.modality}. Name its input column.")
    values = plain[spec.data.label_column][:]
    captions = tuple(str(value) for value in values) if spec.kind == "retrieval" else None
    if captions is not None:
        labels = tuple(range(len(captions)))
    else:
        labels = aligned_labels(spec, values, getattr(plain.features[spec.data.label_column], "names", None), where)
    folds = None if spec.data.fold_column is None else tuple(plain[spec.data.fold_column][:])
    if reference is not None:
        reference = {**reference, "column": column}
    return Items(rows, labels, captions, reference, tuple(numbers), folds)


def aligned_labels(
    spec: TaskSpec, values: Sequence[int | str], names: Sequence[str] | None, where: str
) -> tuple[int, ...]:
    """Each row's class in the suite's order, found by the name that the data set gives its label.

    Args:
        spec: The task.
        values: The label column: indices into `names`, or the names themselves.
        names: The data set's names in its own order; None where the column holds names.
        where: For messages.

    Raises:
        PlatonicError: If a name on either side has no counterpart, or the labels have no names.
    """
    if names is None:
        if not all(isinstance(value, str) for value in values):
            raise PlatonicError(
                f"Expected label names in column {spec.data.label_column!r} of {where}, got numbers without names. "
                "Which class a number is can't be checked: name a column that has the names."
            )
        names = sorted({str(value) for value in values})
        known: dict[Any, str] = {name: name for name in names}
        absent: list[str] = []  # a small split needn't have every class
    else:
        known = dict(enumerate(names))
        absent = sorted(set(map(_plain, spec.labels)) - set(map(_plain, names)))
    position = {_plain(label): index for index, label in enumerate(spec.labels)}
    strange = [name for name in names if _plain(name) not in position]
    if strange or absent:
        raise PlatonicError(
            f"Expected the {len(spec.labels)} label names of the suite in {where}. Without a counterpart there: "
            f"{absent[:10]}; without one in the suite: {strange[:10]}. Labels are matched by name: correct the "
            "suite's `classes`, or give the revision they're from."
        )
    return tuple(position[_plain(known[value])] for value in values)


def _plain(name: str) -> str:
    """A label's name without what data sets differ in: case, underscores, double spaces."""
    return " ".join(name.casefold().replace("_", " ").split())
