"""Mean over tasks of accuracy over the fine-tuned accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from hf_platonic.evaluation import normalized_accuracy

_DESCRIPTION = """
Mean over tasks of an edited model's accuracy over that of the model fine-tuned on the task; may pass 1.
"""

_INPUTS = """
Args:
    predictions: For each task, the edited model's accuracy in [0, 1].
    references: For each task, the fine-tuned model's accuracy, above 0.

Returns:
    normalized_accuracy: the mean ratio.

Example:
    >>> load_metric("normalized_accuracy").compute(predictions=[0.4, 0.9], references=[0.8, 0.9])
    {'normalized_accuracy': 0.75}
"""

_CITATION = """
Ilharco et al. 2023, Editing Models with Task Arithmetic, arXiv 2212.04089
"""


class NormalizedAccuracy(evaluate.Metric):  # type: ignore[misc]
    """Mean over tasks of accuracy over the fine-tuned accuracy."""

    def _info(self) -> Any:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("float64"), "references": datasets.Value("float64")}
            ),
        )

    def _compute(self, predictions: Sequence[float], references: Sequence[float]) -> dict[str, float]:
        return {"normalized_accuracy": normalized_accuracy(_by_task(predictions), _by_task(references))}


def _by_task(values: Sequence[float]) -> dict[str, float]:
    return {str(task): value for task, value in enumerate(values)}
