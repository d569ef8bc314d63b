"""Teachers: a descriptor from anything that scores probes against class names, whatever it is inside."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from ._checks import instance
from .affinities import row_centred, spread
from .descriptor import TaskDescriptor
from .errors import PlatonicError, PromptError
from .probes import ProbeSet
from .sources import Source

__all__ = ["from_scores"]


def from_scores(
    scores: Any, probes: ProbeSet, *, class_names: Sequence[str] | None = None, name: str | None = None
) -> TaskDescriptor:
    """A descriptor whose endpoint is what a teacher says: for `transfer(..., objective="endpoint")`.

    A teacher's scores have no base to subtract and a scale of their own. Only what tells the classes apart counts:
    with `C` the removal of each row's mean, the descriptor is `S C / rms(S C)`, over a base affinity of zero, with
    spread 1. Calibration then brings it to the target's own spread of cosines, so neither a temperature nor an offset
    of the scores matters. `2 * descriptor` asks for scores twice as far apart.

    Args:
        scores: Shape (n, k), finite, higher for a better match: logits of a linear head, an ensemble's mean, log
            probabilities, shares of human votes. A tensor, an array or nested lists.
        probes: What was scored, in this order, with the m classes of the task.
        class_names: The k names of the score columns; they may be more than the probes' and in another order. None:
            the columns are the probes' classes.
        name: The task's name, for messages and tables.

    Returns:
        A descriptor with `delta (n, m)`, float32, a base affinity of zero, spread 1 and the teacher as its source.

    Raises:
        PromptError: If a class of the probes isn't among `class_names`, or one is repeated there.
        PlatonicError: If the shape doesn't fit, or scores aren't finite or are the same for all classes.

    Example:
        >>> from PIL import Image
        >>> probes = ProbeSet([Image.new("RGB", (8, 8))], prompts=["a cat", "a dog"])
        >>> from_scores([[9.0, 1.0, 3.0]], probes, class_names=["a dog", "a car", "a cat"]).delta
        tensor([[-1.,  1.]])
    """
    instance(probes, "probes", ProbeSet, "Make one with `ProbeSet(inputs, class_names=...)`.")
    try:
        matrix = torch.as_tensor(scores).detach().to("cpu", torch.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise PlatonicError(
            f"Expected scores as a tensor, an array or even nested lists, got {type(scores).__name__}: {error}."
        ) from None
    names = list(probes.class_names if class_names is None else class_names)
    missing = [wanted for wanted in probes.class_names if wanted not in names]
    if missing or len(set(names)) != len(names):
        repeated = sorted({known for known in names if names.count(known) > 1})
        raise PromptError(
            f"Expected one score column for each class of the probes, got none for {missing} and several for "
            f"{repeated}. Name the columns as the probe set's `class_names`, each once."
        )
    if matrix.shape != (len(probes), len(names)):
        raise PlatonicError(
            f"Expected scores of shape {(len(probes), len(names))}, one row a probe and one column a class, got "
            f"{tuple(matrix.shape)}."
        )
    if not bool(matrix.isfinite().all()):
        raise PlatonicError("Expected finite scores, got NaN or infinity. Clip log probabilities from below.")
    matrix = row_centred(matrix[:, [names.index(wanted) for wanted in probes.class_names]])
    size = spread(matrix)
    if not size > 0:
        raise PlatonicError(
            "Expected scores that tell classes apart, got the same score for all classes on every probe."
        )
    delta = (matrix / size).float()
    return TaskDescriptor(
        delta,
        probes.grid,
        sources=(Source(None, None, teacher=hashlib.sha256(delta.numpy().tobytes()).hexdigest()[:12]),),
        spread=1.0,
        base_affinity=torch.zeros_like(delta),
        name=name,
        probes=probes,
        predictions=matrix.argmax(dim=1).int(),
    )
