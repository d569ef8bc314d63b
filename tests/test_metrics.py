"""Recall for captions, and the measures as `evaluate` modules."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from hub_server import PYTHON
from sklearn.metrics import top_k_accuracy_score

from hf_platonic.errors import PlatonicError
from hf_platonic.metrics import metric_names, metric_path
from hf_platonic.retrieval import caption_recall, recall_at_k

CODE = """
import json, sys
import evaluate
from hf_platonic.metrics import load_metric, metric_path
found = {
    "accuracy": load_metric("zero_shot_accuracy").compute(predictions=[0, 1, 1], references=[0, 1, 2]),
    "normalized": load_metric("normalized_accuracy").compute(predictions=[0.4, 0.9], references=[0.8, 0.9]),
    "retention": load_metric("retention").compute(
        predictions=[0.4, 0.3], references=[0.6, 0.3], zero_shot=[0.2, 0.3]),
    "recall": load_metric("recall_at_k").compute(predictions=[[0, 1], [2, 1]], references=[0, 1], k=2),
    "file": evaluate.load(str(metric_path("recall_at_k") / "recall_at_k.py")).compute(
        predictions=[[0, 1], [2, 1]], references=[0, 1]),
}
batches = load_metric("normalized_accuracy")
batches.add_batch(predictions=[0.4], references=[0.8])
batches.add(prediction=0.9, reference=0.9)
found["batches"] = batches.compute()
try:
    load_metric("retention").compute(predictions=[0.4], references=[0.6], zero_shot=[])
except ValueError as error:
    found["mistake"] = str(error)
json.dump(found, sys.stdout)
"""


def test_metrics_load_offline_and_agree_with_the_library(tmp_path: Path) -> None:
    offline = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
    done = subprocess.run(
        [*PYTHON, "-c", CODE], env={**os.environ, **offline}, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "accuracy": {"zero_shot_accuracy": pytest.approx(2 / 3)},
        "normalized": {"normalized_accuracy": 0.75},
        "batches": {"normalized_accuracy": 0.75},
        "retention": {"retention": 0.5},
        "recall": {"recall_at_2": 1.0},
        "file": {"recall_at_1": 0.5},
        "mistake": "Expected `zero_shot` with one accuracy per task (1), got 0.",
    }


def test_metric_names_and_paths() -> None:
    assert metric_names() == ("normalized_accuracy", "recall_at_k", "retention", "zero_shot_accuracy")
    assert all((metric_path(name) / f"{name}.py").is_file() for name in metric_names())
    with pytest.raises(PlatonicError, match="Expected a metric out of .*, got 'bleu'"):
        metric_path("bleu")


def test_recall_equals_scikit_learns() -> None:
    generator = torch.Generator().manual_seed(0)
    unit, prompts = (torch.nn.functional.normalize(torch.randn(40, 6, generator=generator)) for _ in range(2))
    prompts = torch.nn.functional.normalize(prompts + unit)
    found = caption_recall(unit, prompts, ks=(1, 5))
    for direction, scores in (("to_caption", unit @ prompts.T), ("to_probe", prompts @ unit.T)):
        for k in (1, 5):
            wanted = top_k_accuracy_score(range(40), scores.numpy(), k=k)
            assert found[direction][k] == pytest.approx(wanted)
    assert caption_recall(unit, prompts, ks=[40])["to_probe"][40] == 1


@pytest.mark.parametrize(("ranked", "own", "k"), [([], [], 1), ([[0]], [0, 1], 1), ([[0]], [0], 0)])
def test_recall_needs_queries_with_one_own_item_each(ranked: list[list[int]], own: list[int], k: int) -> None:
    with pytest.raises(PlatonicError, match="Expected k of at least 1 and one own item for each query"):
        recall_at_k(ranked, own, k)
