"""The two kinds of fine-tune that `local_models.py` makes: of the head on kept features, and of the whole tower."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Split", "accuracy", "pooled", "tune_head", "tune_tower"]

HEAD = {"epochs": 12, "batch_size": 64, "learning_rate": 5e-4, "weight_decay": 0.02}
TOWER = {"epochs": 4, "batch_size": 32, "weight_decay": 0.01, "items": 1200, "warmup": 0.1, "clip": 1.0}
TOWER_RATES = (3e-4, 1e-4, 3e-5)
"""The one with the lowest loss on the held-out part of the training split is taken."""
HELD_OUT = 0.1


@dataclass(frozen=True, eq=False)
class Split:
    """What goes into the probe tower, or comes out of it, one row an item; and labels."""

    inputs: Tensor
    labels: Tensor


@torch.no_grad()
def pooled(model: Any, inputs: Tensor) -> Tensor:
    """Pooled features (n, p) of all inputs."""
    return torch.cat([model.pooled_features(batch) for batch in inputs.split(64)])


@torch.no_grad()
def accuracy(model: Any, features: Split, prompts: Tensor) -> float:
    """Share of items whose own class has the nearest prompt, in [0, 1], from pooled features."""
    nearest = model.logits(model.embed_features(features.inputs), prompts).argmax(1)
    return float((nearest == features.labels).float().mean())


def tune_head(base: Any, train: Split, prompts: Tensor, *, seed: int) -> tuple[Any, dict[str, Any]]:
    """The classifier and the residual perceptron, trained on pooled features of the frozen tower.

    Args:
        base: The model, which stays as it is.
        train: Pooled features and labels.
        prompts: Unit embeddings of the classes' prompts.
        seed: Of the order of the batches.

    Returns:
        The fine-tuned model, and what was done.
    """
    model, generator = copy.deepcopy(base), torch.Generator().manual_seed(seed)
    trained = [*model.adapter.parameters(), *model.classifier.parameters()]
    optimizer = torch.optim.AdamW(trained, HEAD["learning_rate"], weight_decay=HEAD["weight_decay"])
    for _ in range(HEAD["epochs"]):
        for rows in torch.randperm(len(train.labels), generator=generator).split(HEAD["batch_size"]):
            logits = model.logits(model.embed_features(train.inputs[rows]), prompts)
            _step(functional.cross_entropy(logits, train.labels[rows]), optimizer)
    return model, {"trained": ["adapter", "classifier"], **HEAD}


def _step(loss: Tensor, optimizer: torch.optim.Optimizer, clip: float | None = None) -> None:
    optimizer.zero_grad()
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], clip)
    optimizer.step()


@torch.no_grad()
def _loss(model: Any, split: Split, prompts: Tensor) -> float:
    """Mean cross-entropy."""
    logits = model.logits(model.embed_features(pooled(model, split.inputs)), prompts)
    return float(functional.cross_entropy(logits, split.labels))


def tune_tower(base: Any, split: Split, prompts: Tensor, *, mirrored: bool, seed: int) -> tuple[Any, dict[str, Any]]:
    """All weights of the probe tower and the classifier, trained at the rate that does best.

    Normalisation layers keep their statistics. A tenth of the training split is held out: the rate and the epoch with
    the lowest loss there are taken, and a rate is given up as soon as the loss is no better than before training.
    """
    order = torch.randperm(len(split.labels), generator=torch.Generator().manual_seed(seed))
    kept = order[: TOWER["items"]]
    cut = round(len(kept) * HELD_OUT)
    held, train = Split(split.inputs[kept[:cut]], split.labels[kept[:cut]]), kept[cut:]
    best = before = _loss(base, held, prompts)
    model, chosen, curves = None, {}, {}
    for rate in TOWER_RATES:
        curve = curves[f"{rate:g}"] = [round(before, 4)]
        for epoch, candidate in enumerate(_epochs(base, split, train, prompts, rate, mirrored, seed)):
            loss = _loss(candidate, held, prompts)
            curve.append(round(loss, 4))
            if not loss < before:
                break
            if loss < best:
                best, model = loss, copy.deepcopy(candidate)
                chosen = {"learning_rate": rate, "kept_epoch": epoch + 1}
    if model is None:
        raise SystemExit(f"Expected one of the rates {TOWER_RATES} to lower the loss, got none. Try smaller ones.")
    return model, {"trained": ["probe_model", "classifier"], **TOWER, **chosen, "held_out_losses": curves}


def _epochs(
    base: Any,
    split: Split,
    train: Tensor,
    prompts: Tensor,
    rate: float,
    mirrored: bool,
    seed: int,
) -> Iterator[Any]:
    """The model after each epoch; linear warm-up, then a cosine to zero."""
    model, generator = copy.deepcopy(base), torch.Generator().manual_seed(seed)
    model.probe_model.to(memory_format=torch.channels_last)
    trained = [*model.probe_model.parameters(), *model.classifier.parameters()]
    optimizer = torch.optim.AdamW(trained, rate, weight_decay=TOWER["weight_decay"])
    steps = TOWER["epochs"] * -(-len(train) // TOWER["batch_size"])
    warm = max(1, round(TOWER["warmup"] * steps))
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warm, total_iters=warm),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warm),
        ],
        [warm],
    )
    for _ in range(TOWER["epochs"]):
        for rows in torch.randperm(len(train), generator=generator).split(TOWER["batch_size"]):
            inputs, labels = split.inputs[train[rows]], split.labels[train[rows]]
            if mirrored:
                flip = torch.rand(len(rows), 1, 1, 1, generator=generator) < 0.5
                inputs = torch.where(flip, inputs.flip(3), inputs)
            embeddings = model.embed_features(model.pooled_features(inputs))
            loss = functional.cross_entropy(model.logits(embeddings, prompts), labels)
            _step(loss, optimizer, TOWER["clip"])
            schedule.step()
        yield model
