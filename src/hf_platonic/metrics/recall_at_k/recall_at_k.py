"""Share of queries whose own item is among the first k found."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from hf_platonic.retrieval import recall_at_k

_DESCRIPTION = """
Share of queries whose own item is among the first k found; for captions as prompts, in either direction.
"""

_INPUTS = """
Args:
    predictions: For each query, the indices of the items found, best first.
    references: For each query, the index of the item that belongs to it.
    k: How many of the first count, 1 unless given.

Returns:
    recall_at_K: a share in [0, 1], with the number in place of K.

Example:
    >>> load_metric("recall_at_k").compute(predictions=[[0, 1], [2, 1]], references=[0, 1], k=2)
    {'recall_at_2': 1.0}
"""

_CITATION = """
Park and Cho 2026, Platonic Task Arithmetic, arXiv 2610.00929
"""


class RecallAtK(evaluate.Metric):  # type: ignore[misc]
    """Share of queries whose own item is among the first k found."""

    def _info(self) -> Any:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features(
                {"predictions": datasets.Sequence(datasets.Value("int64")), "references": datasets.Value("int64")}
            ),
        )

    def _compute(
        self, predictions: Sequence[Sequence[int]], references: Sequence[int], k: int = 1
    ) -> dict[str, float]:
        return {f"recall_at_{k}": recall_at_k(predictions, references, k)}
