"""What one forward pass of a probe tower says: unit embeddings, and the rows that an operator multiplies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .._checks import finite_rows
from .._pooling import Feature, pool
from ..errors import EncoderError, ProbeError
from .families import EditSite, Family, call

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["ProbeFeatures", "ProbePass", "group_means", "run_probes"]


@dataclass(frozen=True, eq=False)
class ProbeFeatures:
    """What one forward pass says about b probes.

    Attributes:
        unit: Unit embeddings, shape (b, d), float32.
        design: What an operator multiplies, shape (b, p), float32: `unit` itself for output sites, `[u, 1] / |z|` for
            input sites, with `u` the input of the edited layer and `z` the embedding before normalisation (no 1 where
            the layer has no bias), and `[u, f, 1] / |z|` where inner features `f` are read.
    """

    unit: Tensor
    design: Tensor


@dataclass(frozen=True, eq=False)
class ProbePass:
    """What was seen of b probes on their way through the tower.

    Attributes:
        raw: What the family's getter returned, shape (b, d), float32.
        calls: The watched layer's input and output, each time it ran, float32.
        features: The site's features side by side, shape (b, sum of sizes), float32; None where it has none.
    """

    raw: Tensor
    calls: tuple[tuple[Tensor, Tensor], ...] = ()
    features: Tensor | None = None

    def joined(self, sizes: Sequence[int], *, inner: bool) -> ProbePass:
        """Means over the parts of each clip; of embeddings before any normalisation, so that edits stay exact.

        Args:
            sizes: Parts of each clip.
            inner: Whether the watched layer's output is the embedding, which the getter may have normalised since.
        """
        ((u, z),) = self.calls
        u, z = group_means(u, sizes), group_means(z, sizes)
        features = None if self.features is None else group_means(self.features, sizes)
        return ProbePass(z if inner else group_means(self.raw, sizes), ((u, z),), features)

    def unit(self, *, offset: int = 0) -> tuple[Tensor, Tensor]:
        """Unit embeddings (b, d) and the norms (b, 1) they had.

        Raises:
            ProbeError: If an embedding is NaN, infinite or zero; `index` says which, counted from `offset`.
        """
        finite_rows(self.raw, "embedding", offset=offset)
        norm = self.raw.norm(dim=1, keepdim=True)
        if not bool(norm.all()):
            index = offset + int((norm[:, 0] == 0).nonzero()[0])
            raise ProbeError(
                f"Expected an embedding with a direction for every probe, got zero for probe {index}. "
                "Look at that input and at the model's weights.",
                index=index,
            )
        return self.raw / norm, norm

    def design(self, layer: nn.Module, site: EditSite, norm: Tensor, *, inner: bool) -> Tensor:
        """The design rows of an input site or one that reads features, shape (b, p).

        Args:
            layer: The linear layer that was watched.
            site: Where it is.
            norm: Of the getter's embeddings, shape (b, 1).
            inner: As for `joined`.

        Raises:
            EncoderError: If the layer didn't run once with one row for each probe.
        """
        if len(self.calls) != 1 or self.calls[0][0].shape[0] != len(norm):
            raise EncoderError(
                f"Expected `{site.module}` to run once with one row for each of {len(norm)} probes, got shapes "
                f"{[tuple(u.shape) for u, _ in self.calls]}. This variant of the model can't be edited at that layer."
            )
        ((u, z),) = self.calls
        if inner:
            norm = z.norm(dim=-1, keepdim=True)  # the getter may have normalised since
        if u.ndim == 3:  # a pooling head hands on (b, 1, p)
            u = u[:, 0]
        ones = site.kind == "features" or getattr(layer, "bias", None) is not None
        parts = [u, *([] if self.features is None else [self.features]), *([torch.ones_like(norm)] if ones else [])]
        return torch.cat(parts, dim=1) / norm


def run_probes(bare: nn.Module, family: Family, inputs: Mapping[str, Tensor], site: EditSite | None) -> ProbePass:
    """One forward pass of the probe tower.

    Args:
        bare: The transformers model, on the inputs' device.
        family: Its row.
        inputs: Keyword arguments of the row's getter.
        site: The layer to watch, and the features to read beside it; None watches none.

    Raises:
        EncoderError: If a module that features are read from didn't run once, or with other sizes.
    """
    calls: list[tuple[Tensor, Tensor]] = []
    seen: dict[Feature, list[Tensor]] = {feature: [] for feature in site.features} if site else {}
    hooks = []
    if site is not None:
        # On the outermost layer at the site: that's where a nested adapter would act, too.
        layer = bare.get_submodule(site.module)
        hooks = [layer.register_forward_hook(lambda _, args, z: calls.append((args[0].float(), z.float())))]
        hooks += [
            bare.get_submodule(feature.module).register_forward_hook(
                lambda _, __, output, feature=feature: seen[feature].append(pool(output, feature.pooling).float())
            )
            for feature in site.features
        ]
    try:
        raw = call(bare, family.probe_getter, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    for feature, rows in seen.items():
        if [tuple(row.shape) for row in rows] != [(len(raw), feature.size)]:
            raise EncoderError(
                f"Expected `{feature.module}` to run once with {feature.size} features for each of {len(raw)} inputs, "
                f"got shapes {[tuple(row.shape) for row in rows]}. Another variant of the model may be loaded."
            )
    features = torch.cat([rows[0].to(raw.device) for rows in seen.values()], dim=1) if seen else None
    return ProbePass(raw, tuple(calls), features)


def group_means(rows: Tensor, sizes: Sequence[int]) -> Tensor:
    """Means over consecutive groups of rows.

    Args:
        rows: Shape (sum of sizes, ...).
        sizes: Rows in each of b groups, at least 1.

    Returns:
        Shape (b, ...).
    """
    return torch.stack([group.mean(dim=0) for group in torch.split(rows, list(sizes))])
