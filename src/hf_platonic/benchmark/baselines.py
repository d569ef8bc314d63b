"""Baselines: what a transfer is compared to besides the target itself, from none of its ideas to all the labels."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..descriptor import TaskDescriptor
from ..encoders.encoder import DualEncoder
from ..encoders.families import bare_model
from ..encoding import encode_probes
from .workbench import TaskData

__all__ = ["add_weights", "linear_probe", "random_like"]


def random_like(descriptor: TaskDescriptor, *, seed: int) -> TaskDescriptor:
    """A descriptor of independent normal entries with the same norm: what a transfer gains by chance.

    Args:
        descriptor: The target's own.
        seed: Of the draw, together with the task's name.

    Returns:
        On the same grid, without sources.
    """
    key = zlib.crc32(f"{seed} {descriptor.name}".encode())
    drawn = torch.randn(descriptor.delta.shape, generator=torch.Generator().manual_seed(key))
    scale = descriptor.norm() / float(torch.linalg.vector_norm(drawn, dtype=torch.float64))
    return replace(descriptor, delta=drawn * scale, sources=(), origin=None)


def linear_probe(encoder: DualEncoder, data: TaskData, **passes: Any) -> Tensor | None:
    """Whether a logistic regression on the base embeddings, trained with labels, gets each test input right.

    Args:
        encoder: The base model.
        data: A classification task with a labelled training split.
        passes: Of `encode_probes`.

    Returns:
        Shape (n,), bool; None where there are no labelled training inputs, or classes have one each.
    """
    if data.train is None or data.kind != "classification":
        return None
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    train, test = (encode_probes(encoder, part.probes, **passes).unit.numpy() for part in (data.train, data.test))
    # scikit-learn's defaults; nothing is chosen.
    model = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000)).fit(train, list(data.train.labels))
    return torch.from_numpy(model.predict(test)) == torch.as_tensor(data.test.labels)


def add_weights(encoder: DualEncoder, delta: Mapping[str, Tensor]) -> bool:
    """Adds a weight-space task vector to a model in place, where every name and shape fits.

    Args:
        encoder: The target, changed in place.
        delta: Fine-tuned minus base weights, by name.

    Returns:
        Whether it fitted; otherwise the model stays as it is.

    Reference:
        Ilharco et al. 2023, arXiv 2212.04089.
    """
    weights = dict(bare_model(encoder.model).state_dict())
    if not delta or any(name not in weights or weights[name].shape != value.shape for name, value in delta.items()):
        return False
    with torch.no_grad():
        for name, value in delta.items():
            weights[name] += value.to(weights[name])
    return True
