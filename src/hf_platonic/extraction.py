"""Extraction: from a base model and its fine-tune to a task descriptor."""

from __future__ import annotations

import math

import torch

from ._processes import gather_rows, own_slice
from .affinities import affinity, row_centred
from .descriptor import Source, TaskDescriptor
from .encoders.encoder import DualEncoder
from .encoding import Varied, encode_columns, passes
from .errors import EncoderError
from .probes import ProbeSet

__all__ = ["extract"]


def extract(
    base: DualEncoder | None,
    tuned: DualEncoder,
    probes: ProbeSet,
    *,
    name: str | None = None,
    store_base: bool = False,
    batch_size: int = 32,
    num_workers: int = 0,
    progress: bool | None = None,
) -> TaskDescriptor:
    """The descriptor of a fine-tune, `U = A(fine-tuned) - A(base)`, on unlabelled probes.

    One pass over the probes: each is decoded once and seen by both models in evaluation mode. Under `torchrun` or
    `accelerate launch` each process takes a contiguous share.

    Args:
        base: The model before the fine-tune. None: `tuned` is a PEFT model, and the base is the same model with its
            adapters switched off, so that one model in memory serves for both.
        tuned: The model after it; the same architecture, either tower changed.
        probes: n unlabelled inputs and m prompts.
        name: The task's name, for messages and tables.
        store_base: Keeps the base affinity too, which doubles the saved file.
        batch_size: Probes a forward pass.
        num_workers: Processes that decode while the models compute.
        progress: Whether to show a bar, on the main process; None: where stderr is a terminal.

    Returns:
        A descriptor with `delta (n, m)`, float32 on the CPU, the probe set at hand.

    Raises:
        EncoderError: If the two models read different modalities or are one and the same object; if `base` is None
            and the base can't be had from `tuned` (no PEFT model, or one that trained biases too).
        ProbeError: If a probe can't be read or embedded; names its index.
        PromptError: If two prompts are the same to a model.

    Reference:
        Park and Cho 2026, arXiv 2610.00929.
    """
    if base is None:
        base = tuned.without_adapters()
    elif base.model is tuned.model:
        raise EncoderError(
            "Expected two models, got one object twice: an edited or adapted model shares its weights with its base. "
            "Load the base a second time with DualEncoder.from_pretrained, or pass None for the base of an adapter."
        )
    if base.modality != tuned.modality:
        raise EncoderError(
            f"Expected a base and a fine-tune of one modality, got {base.modality} ({base.family.name}) and "
            f"{tuned.modality} ({tuned.family.name})."
        )
    prompts = [encode_columns(encoder, probes.columns) for encoder in (base, tuned)]
    n, m = len(probes), len(probes.columns)
    own = len(own_slice(n))
    delta = torch.empty(own, m)
    base_affinity = torch.empty(own, m) if store_base else None
    squares = torch.zeros(1, 1, dtype=torch.float64)
    varied = Varied()
    for start, features in passes(
        [base, tuned], probes, batch_size=batch_size, num_workers=num_workers, progress=progress, description="extract"
    ):
        before, after = (affinity(f.unit.cpu(), g) for f, g in zip(features, prompts, strict=True))
        delta[start : start + len(before)] = after - before
        if base_affinity is not None:
            base_affinity[start : start + len(before)] = before
        squares += row_centred(before.double()).square().sum()
        varied.update(features[0].unit)
    varied.require()
    return TaskDescriptor(
        gather_rows(delta),
        probes.grid,  # after the pass, which has hashed what it decoded
        sources=(Source(base.identity, tuned.identity),),
        spread=math.sqrt(float(gather_rows(squares).sum()) / (n * m)),
        base_affinity=None if base_affinity is None else gather_rows(base_affinity),
        name=name,
        probes=probes,
    )
