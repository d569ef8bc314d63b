"""Gain with transferred descriptors over the gain with own ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from hf_platonic.evaluation import retention

_DESCRIPTION = """
Gain in accuracy with other models' task descriptors over the gain with the target's own, summed over tasks first.
"""

_INPUTS = """
Args:
    predictions: For each task, accuracy with a transferred descriptor, in [0, 1].
    references: For each task, accuracy with the target's own descriptor.
    zero_shot: For each task, accuracy before any edit.

Returns:
    retention: 1 where nothing is lost; may pass 1 or be negative.

Example:
    >>> load_metric("retention").compute(predictions=[0.4], references=[0.6], zero_shot=[0.2])
    {'retention': 0.5}
"""

_CITATION = """
Park and Cho 2026, Platonic Task Arithmetic, arXiv 2610.00929
"""


class Retention(evaluate.Metric):  # type: ignore[misc]
    """Gain with transferred descriptors over the gain with own ones."""

    def _info(self) -> Any:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
            ),
        )

    def _compute(
        self, predictions: Sequence[float], references: Sequence[float], zero_shot: Sequence[float]
    ) -> dict[str, float]:
        if len(zero_shot) != len(references):
            raise ValueError(
                f"Expected `zero_shot` with one accuracy per task ({len(references)}), got {len(zero_shot)}."
            )
        return {"retention": retention(_by_task(predictions), _by_task(references), _by_task(zero_shot))}


def _by_task(values: Sequence[float]) -> dict[str, float]:
    return {str(task): value for task, value in enumerate(values)}
