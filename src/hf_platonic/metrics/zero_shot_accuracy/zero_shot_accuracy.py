"""Share of inputs whose nearest class prompt is the right one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from hf_platonic.retrieval import recall_at_k

_DESCRIPTION = """
Share of inputs whose nearest class prompt is that of their class.
"""

_INPUTS = """
Args:
    predictions: For each input, the index of its nearest prompt.
    references: For each input, the index of its class.

Returns:
    zero_shot_accuracy: a share in [0, 1].

Example:
    >>> load_metric("zero_shot_accuracy").compute(predictions=[0, 1, 1], references=[0, 1, 2])
    {'zero_shot_accuracy': 0.6666666666666666}
"""

_CITATION = """
Ilharco et al. 2023, Editing Models with Task Arithmetic, arXiv 2212.04089
"""


class ZeroShotAccuracy(evaluate.Metric):  # type: ignore[misc]
    """Share of inputs whose nearest class prompt is the right one."""

    def _info(self) -> Any:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Value("int64"), "references": datasets.Value("int64")}
            ),
        )

    def _compute(self, predictions: Sequence[int], references: Sequence[int]) -> dict[str, float]:
        return {"zero_shot_accuracy": recall_at_k([[found] for found in predictions], references)}
