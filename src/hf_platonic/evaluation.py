"""Evaluation: zero-shot accuracy before and after an edit, on its tasks and on what it should leave alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ._checks import instance, matrix
from ._processes import sum_over_processes
from .affinities import affinity
from .encoders.encoder import DualEncoder
from .encoding import Varied, encode_columns, passes
from .errors import PlatonicError
from .probes import ProbeSet

__all__ = [
    "EvaluationReport",
    "EvaluationSet",
    "accuracy",
    "evaluate",
    "normalized_accuracy",
    "retention",
    "zero_shot_accuracy",
]


@dataclass(frozen=True, eq=False)
class EvaluationSet:
    """Inputs with class prompts, and the labels that only an evaluation may see.

    Attributes:
        probes: The inputs and the m classes with their templates.
        labels: One class index per input, in [0, m).
    """

    probes: ProbeSet
    labels: Sequence[int]

    def __post_init__(self) -> None:
        instance(self.probes, "probes", ProbeSet, "It comes first, the labels second.")
        classes = len(self.probes.class_names)
        if len(self.labels) != len(self.probes):
            raise PlatonicError(f"Expected one label per input ({len(self.probes)}), got {len(self.labels)}.")
        for index, label in enumerate(self.labels):
            if isinstance(label, str) or not 0 <= int(label) < classes:
                raise PlatonicError(
                    f"Expected labels in [0, {classes}), got {label!r} for input {index}. Labels count the "
                    "classes in the order of `class_names`."
                )


@dataclass(frozen=True)
class EvaluationReport:
    """What an edit did, per set and in the mean; accuracies are shares in [0, 1], gains differences of shares.

    Attributes:
        before: Accuracy of the unedited model, by task.
        after: Accuracy of the edited one, by task.
        control_before: Accuracy of the unedited model, by control set.
        control_after: Accuracy of the edited one, by control set.
        retention: Summed gain over the summed gain of the target's own descriptor, where that was given.
        normalized_accuracy: Mean ratio of edited to fine-tuned accuracy, where that was given.
    """

    before: dict[str, float]
    after: dict[str, float]
    control_before: dict[str, float]
    control_after: dict[str, float]
    retention: float | None = None
    normalized_accuracy: float | None = None

    @property
    def gain(self) -> dict[str, float]:
        """Accuracy after less accuracy before, by task."""
        return {name: self.after[name] - self.before[name] for name in self.before}

    @property
    def mean_gain(self) -> float:
        """The mean of `gain`."""
        return _mean(self.gain.values())

    @property
    def control_change(self) -> float:
        """Mean change of the accuracy on the control sets; 0 without any."""
        return _mean(self.control_after[name] - self.control_before[name] for name in self.control_before)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the means included."""
        return {**asdict(self), "gain": self.gain, "mean_gain": self.mean_gain, "control_change": self.control_change}


def accuracy(unit: Tensor, prompts: Tensor, labels: Sequence[int]) -> float:
    """Share of probes whose nearest prompt is their class.

    Args:
        unit: Shape (n, d), unit rows.
        prompts: Shape (m, d), unit rows.
        labels: n class indices.

    Returns:
        In [0, 1].

    Example:
        >>> accuracy(torch.eye(2), torch.eye(2), [0, 0])
        0.5
    """
    matrix(unit, "unit", (len(labels), None))
    return float((affinity(unit, prompts).argmax(dim=1) == torch.as_tensor(labels)).double().mean())


def zero_shot_accuracy(
    encoder: DualEncoder,
    data: EvaluationSet,
    *,
    batch_size: int = 32,
    num_workers: int = 0,
    progress: bool | None = None,
) -> float:
    """Zero-shot accuracy: the nearest class prompt wins; several templates are averaged to one prompt a class.

    On several processes each takes a share, and only the count of right answers is exchanged.

    Args:
        encoder: The model, edited or not.
        data: Inputs, prompts and labels.
        batch_size: Inputs a forward pass.
        num_workers: Processes that decode while the model computes.
        progress: Whether to show a bar, on the main process; None: where stderr is a terminal.

    Returns:
        Share of correct answers in [0, 1].
    """
    columns = encode_columns(encoder, data.probes.columns)
    right = torch.zeros((), dtype=torch.float64)
    varied = Varied()
    for batch, (features,) in passes(
        [encoder],
        data.probes,
        batch_size=batch_size,
        num_workers=num_workers,
        progress=progress,
        description="evaluate",
    ):
        varied.update(features.unit)
        labels = torch.tensor([int(data.labels[index]) for index in batch])
        right += (affinity(features.unit.cpu(), columns).argmax(dim=1) == labels).sum()
    varied.require()
    return float(sum_over_processes(right)) / len(data.probes)


def evaluate(
    edited: DualEncoder,
    tasks: Mapping[str, EvaluationSet],
    *,
    base: DualEncoder | None = None,
    control: Mapping[str, EvaluationSet] | None = None,
    own: Mapping[str, float] | None = None,
    fine_tuned: Mapping[str, float] | None = None,
    batch_size: int = 32,
    num_workers: int = 0,
    progress: bool | None = None,
) -> EvaluationReport:
    """What an edit did: accuracy on its tasks and on control sets, before and after.

    Addition is judged on all tasks that were added; negation on the negated task, which should fall, and on a control
    set, which should stay.

    Args:
        edited: The edited model. Where it is a PEFT model and no `base` is given, its adapters are switched off for
            the accuracies before.
        tasks: By name, the sets the edit is about.
        base: The unedited model.
        control: By name, sets the edit should leave alone.
        own: By task, accuracy with the target's own descriptor; gives the retention.
        fine_tuned: By task, accuracy of the fine-tuned target; gives the normalised accuracy.
        batch_size: Inputs a forward pass.
        num_workers: Processes that decode while the model computes.
        progress: Whether to show bars, on the main process; None: where stderr is a terminal.

    Returns:
        The report.

    Raises:
        PlatonicError: If there are no tasks, there is no way to see the unedited model, or `own` or `fine_tuned`
            lacks a task.

    Reference:
        Ilharco et al. 2023, arXiv 2212.04089 (addition, negation, control); Park and Cho 2026, arXiv 2610.00929
        (retention).
    """
    from contextlib import nullcontext

    from peft import PeftModel

    instance(edited, "edited", DualEncoder, "Pass the encoder whose model was edited, then the tasks.")
    for kind, sets in (("tasks", tasks), ("control", control or {})):
        instance(sets, kind, Mapping, 'Pass {"name": EvaluationSet(probes, labels)}.')
        for name, data in sets.items():
            instance(data, f"{kind}[{name!r}]", EvaluationSet, "Make one with `EvaluationSet(probes, labels)`.")
    if not tasks:
        raise PlatonicError("Expected at least one task to evaluate, got none.")
    if base is None and not isinstance(edited.model, PeftModel):
        raise PlatonicError(
            "Expected `base=` for an edited model that isn't a PEFT model: its weights don't tell what they "
            "were before."
        )
    for name, given in (("own", own), ("fine_tuned", fine_tuned)):
        missing = [] if given is None else sorted(set(tasks) - set(given))
        if missing:
            raise PlatonicError(f"Expected an accuracy for every task in `{name}`, got none for {missing}.")
    everything = {("task", name): data for name, data in tasks.items()}
    everything.update({("control", name): data for name, data in (control or {}).items()})
    options: dict[str, Any] = {"batch_size": batch_size, "num_workers": num_workers, "progress": progress}
    switch: Any = edited.model.disable_adapter if base is None else nullcontext
    with switch():
        before = {key: zero_shot_accuracy(base or edited, data, **options) for key, data in everything.items()}
    after = {key: zero_shot_accuracy(edited, data, **options) for key, data in everything.items()}

    def of(kind: str, scores: dict[tuple[str, str], float]) -> dict[str, float]:
        return {name: score for (which, name), score in scores.items() if which == kind}

    task_before, task_after = of("task", before), of("task", after)
    return EvaluationReport(
        task_before,
        task_after,
        of("control", before),
        of("control", after),
        retention=None if own is None else retention(task_after, own, task_before),
        normalized_accuracy=None if fine_tuned is None else normalized_accuracy(task_after, fine_tuned),
    )


def retention(transferred: Mapping[str, float], own: Mapping[str, float], zero_shot: Mapping[str, float]) -> float:
    """Gain with another model's descriptors over the gain with the target's own, summed over tasks before dividing.

    Args:
        transferred: Accuracy by task with transferred descriptors, in [0, 1].
        own: Accuracy by task with the target's own descriptors.
        zero_shot: Accuracy by task before any edit.

    Returns:
        1 where nothing is lost; may pass 1 or be negative.

    Raises:
        PlatonicError: If the own descriptors gain nothing in sum, which leaves nothing to retain.

    Example:
        >>> retention({"a": 0.4}, {"a": 0.6}, {"a": 0.2})
        0.5
    """
    own_gain = sum(own[name] - zero_shot[name] for name in transferred)
    if own_gain == 0:
        raise PlatonicError("Expected own descriptors that gain something, got a summed gain of 0: no retention.")
    return round(sum(transferred[name] - zero_shot[name] for name in transferred) / own_gain, 12)


def normalized_accuracy(edited: Mapping[str, float], fine_tuned: Mapping[str, float]) -> float:
    """Mean over tasks of edited accuracy over that task's own fine-tuned accuracy.

    Args:
        edited: Accuracy by task of the edited model, in [0, 1].
        fine_tuned: Accuracy by task of the fine-tuned one, above 0.

    Returns:
        1 where the edit reaches the fine-tunes; may pass 1.

    Raises:
        PlatonicError: If a fine-tuned accuracy is 0.

    Reference:
        Ilharco et al. 2023, arXiv 2212.04089.

    Example:
        >>> normalized_accuracy({"a": 0.4, "b": 0.9}, {"a": 0.8, "b": 0.9})
        0.75
    """
    for name in edited:
        if not fine_tuned[name] > 0:
            raise PlatonicError(f"Expected a fine-tuned accuracy above 0 for {name!r}, got {fine_tuned[name]}.")
    return _mean(edited[name] / fine_tuned[name] for name in edited)


def _mean(values: Any) -> float:
    found = list(values)
    return sum(found) / len(found) if found else 0.0
