"""Other prompts after extraction, without probes or fine-tune: where the mathematics allows it.

A fine-tune that leaves the text tower alone moves probe embeddings only, so its descriptor is `U = (V_1 - V_0) G'`
with the prompts' unit embeddings `G (m, d)`. New prompts `G_2 (m_2, d)` that are combinations of the old,
`G_2 = W G`, have

    U_2 = (V_1 - V_0) G_2' = U W',    W = G_2 G' (G G' + mu I)^-1,

exactly but for the ridge `mu`. What of `G_2` lies outside the span of the old prompts is lost: `U` says nothing there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ._checks import matrix, positive
from .affinities import spread
from .descriptor import TaskDescriptor
from .encoders.encoder import DualEncoder
from .encoding import encode_columns
from .errors import PlatonicError, PromptError
from .grid import PLAIN, checked_columns, digest
from .solve import PROMPT_RIDGE

__all__ = ["LEAST_SHARE", "combinations", "with_prompts"]

LEAST_SHARE = 0.5
"""Of what tells the new prompts apart: with less inside the old span, more is lost than kept."""


def with_prompts(
    descriptor: TaskDescriptor,
    encoder: DualEncoder,
    *,
    class_names: Sequence[str] | None = None,
    templates: Sequence[str] = PLAIN,
    prompts: Sequence[str] | None = None,
    prompt_ridge: float = PROMPT_RIDGE,
    least_share: float = LEAST_SHARE,
) -> tuple[TaskDescriptor, float]:
    """The descriptor on the same probes with other prompts, and how much of these the old ones cover.

    Columns that the grid has already are taken as they are. It holds for fine-tunes that left the text tower alone;
    nothing in a descriptor says whether one did.

    Args:
        descriptor: Of a fine-tune, or a combination of such.
        encoder: The fine-tune's base, or another encoder whose text space stands in for it. Only prompts are encoded.
        class_names: The new names, as in `ProbeSet`.
        templates: As in `ProbeSet`.
        prompts: As in `ProbeSet`.
        prompt_ridge: Relative to the mean squared singular value of the old prompts, above 0.
        least_share: Below it the change is refused; in [0, 1].

    Returns:
        The descriptor on the new grid, whose sources say that columns were combined, and the share in [0, 1] of
        `combinations`. The base affinity is mapped likewise
        where it was kept, and gives the spread and, of a single fine-tune, its predictions; else the spread stays that
        of the old prompts and there are no predictions.

    Raises:
        PromptError: If the prompts can't form a grid, or the share is below `least_share`.
        PlatonicError: If the descriptor isn't of fine-tunes alone: a teacher's scores are in no text space. If
            `least_share` or the ridge isn't usable.
    """
    if not descriptor.sources or any(source.teacher is not None for source in descriptor.sources):
        raise PlatonicError(
            "Expected a descriptor of fine-tunes alone, got a teacher's scores or no record of sources: a teacher's "
            "scores have no text space in which to find other prompts. Take its scores for the new classes."
        )
    if not 0 <= least_share <= 1:
        raise PlatonicError(f"Expected `least_share` in [0, 1], got {least_share}. It's a share of squared norm.")
    names, patterns = checked_columns(class_names, templates, prompts)
    grid = replace(
        descriptor.grid,
        class_names=names,
        templates=patterns,
        fingerprint=digest([descriptor.grid.probe_fingerprint, list(names), list(patterns)]),
    )
    before = descriptor.grid.columns
    old, new = encode_columns(encoder, before), encode_columns(encoder, grid.columns)
    weights, shares = combinations(old, new, prompt_ridge=prompt_ridge)
    position = {column: index for index, column in enumerate(before)}
    for row, column in enumerate(grid.columns):
        if column in position:
            weights[row] = torch.eye(len(before), dtype=weights.dtype)[position[column]]
    share = float(shares[-1])
    if not share >= least_share:
        worst = sorted(range(grid.m), key=lambda column: float(shares[column]))[:3]
        listed = ", ".join(f"{names[column]!r} ({float(shares[column]):.2f})" for column in worst)
        raise PromptError(
            f"Expected new prompts of which the old ones cover a share of at least {least_share:g}, got {share:.2f}; "
            f"least covered: {listed}. Extract the descriptor on the new prompts, or on more of them."
        )
    delta, base = _mapped(descriptor.delta, weights), descriptor.base_affinity
    mapped = None if base is None else _mapped(base, weights)
    coefficients = [source.coefficient for source in descriptor.sources]
    predictions = None
    if mapped is not None and len(coefficients) == 1 and coefficients[0] != 0:
        predictions = (mapped + delta / coefficients[0]).argmax(dim=1).int()
    sources = descriptor.sources
    if any(column not in position for column in grid.columns):
        how = f"its {grid.m} columns combined out of {len(before)} other prompts', which cover {share:.2f} of them"
        sources = tuple(source.changed(how) for source in sources)
    changed = TaskDescriptor(
        delta,
        grid,
        sources=sources,
        spread=descriptor.spread if mapped is None else spread(mapped),
        base_affinity=mapped,
        name=descriptor.name,
        probes=None
        if descriptor.probes is None
        else descriptor.probes.with_prompts(class_names=names, templates=patterns),
        predictions=predictions,
    )
    return changed, share


def combinations(old: Tensor, new: Tensor, *, prompt_ridge: float = PROMPT_RIDGE) -> tuple[Tensor, Tensor]:
    """How new prompts combine out of old ones, and how much of them that covers.

    `W = G_2 G' (G G' + mu I)^-1`, ridge regression of the new rows on the old. Covered is the share of squared norm of
    `W G` in `G_2`, less the mean over the new prompts: all prompts point much the same way, and what they share tells
    no classes apart. Of a single new prompt it is the share of the whole.

    Args:
        old: `G`, shape (m, d), unit rows.
        new: `G_2`, shape (m_2, d), unit rows.
        prompt_ridge: Relative to the mean squared singular value of `G`, above 0.

    Returns:
        `W`, shape (m_2, m), and the shares, shape (m_2 + 1,), each prompt's and all together; float64.

    Example:
        >>> old = torch.eye(3)[:2]
        >>> weights, shares = combinations(old, torch.tensor([[0.0, 1.0, 0.0], [0.6, 0.0, 0.8]]))
        >>> weights.round(decimals=3).tolist()
        [[0.0, 1.0], [0.6, 0.0]]
        >>> round(float(shares[-1]), 2)
        0.68
    """
    matrix(new, "new", (None, old.shape[-1]))
    g, h = old.double(), new.double()
    mu = positive(prompt_ridge, "prompt_ridge") * g.square().sum() / min(g.shape)
    weights = torch.linalg.solve(g @ g.T + mu * torch.eye(len(g), dtype=g.dtype), g @ h.T).T
    lost = h - weights @ g
    if len(h) > 1:
        h, lost = h - h.mean(dim=0), lost - lost.mean(dim=0)
    wanted, missing = (torch.cat([x.square().sum(dim=1), x.square().sum().reshape(1)]) for x in (h, lost))
    return weights, (1 - missing / wanted.clamp(min=1e-12)).clamp(0, 1)


def _mapped(columns: Tensor, weights: Tensor) -> Tensor:
    return (columns.double() @ weights.T).float()
