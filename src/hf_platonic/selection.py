"""Label-free choice of the probe ridge, and what to expect of an edit before anybody has labels.

**Generalised cross-validation.** The closed form's fit is `H_F U H_G` with the hat matrices of the two sides, whose
eigenvalues are `h_i = e_i / (e_i + mu_F)` and `k_j = g_j / (g_j + mu_G)`. With `tau = sum(h) sum(k) / (n m)`, the
share of degrees of freedom that the fit uses,

    GCV(ridge) = |U - H_F U H_G|^2 / (n m (1 - tau)^2)

estimates its error on new probes from one eigendecomposition for all ridges.

**Agreement.** The fine-tune's own predictions on the probes are labels that cost nothing. An operator solved without
some of the probes is applied to those; the share on which the target then answers as the fine-tune does, less the
share on which it did so before, forecasts the gain in accuracy. Folds take turns, so every probe is held out once.

Reference: Golub, Heath and Wahba, "Generalized cross-validation as a method for choosing a good ridge parameter",
1979, Technometrics 21(2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ._checks import matrix, positive
from .errors import PlatonicError
from .solve import PROMPT_RIDGE

__all__ = ["RIDGES", "Forecast", "GridSpectrum", "Ridge", "Strength", "folds"]

Ridge = float | Literal["gcv", "agreement"]
Strength = float | Literal["agreement"]

RIDGES = tuple(10.0 ** (k / 2) for k in range(-10, 3))
"""The ridges tried, 1e-5 to 10: relative, two per decade."""
_FOLDS = 4


@dataclass(frozen=True, eq=False)
class GridSpectrum:
    """The spectra of a grid's two sides, from which every ridge of every descriptor is scored.

    Attributes:
        design: `D`, shape (n, p), float64.
        values: Its squared singular values that are above rounding, shape (k,).
        vectors: Left singular vectors times singular values are `design @ vectors`, shape (p, k); or the left singular
            vectors themselves, shape (n, k), where there are fewer probes than columns.
        prompts: `G`, shape (m, d), float64.
        prompt_values: Squared singular values, shape (m,) or fewer.
        prompt_vectors: Left singular vectors, shape (m, at most m).
    """

    design: Tensor
    values: Tensor
    vectors: Tensor
    prompts: Tensor
    prompt_values: Tensor
    prompt_vectors: Tensor

    @classmethod
    def of(cls, design: Tensor, prompts: Tensor) -> GridSpectrum:
        """The spectra of a design (n, p) and prompt embeddings (m, d), any float dtype.

        Raises:
            PlatonicError: If one isn't a matrix.
        """
        d = matrix(design, "design", (None, None)).double()
        g = matrix(prompts, "prompts", (None, None)).double()
        values, vectors = torch.linalg.eigh(d @ d.T if d.shape[0] <= d.shape[1] else d.T @ d)
        kept = values > values[-1] * len(values) * torch.finfo(values.dtype).eps
        prompt_values, prompt_vectors = torch.linalg.eigh(g @ g.T)
        return cls(d, values[kept], vectors[:, kept], g, prompt_values.clamp(min=0), prompt_vectors)

    def scores(self, delta: Tensor, ridges: Sequence[float], *, prompt_ridge: float = PROMPT_RIDGE) -> Tensor:
        """The generalised cross-validation score of each probe ridge; smaller is better.

        Args:
            delta: `U`, shape (n, m).
            ridges: Relative to the mean squared singular value of the design, each above 0.
            prompt_ridge: Relative ridge on the prompt side, above 0.

        Returns:
            Shape (len(ridges),), float64: squared error per entry of `U`; inf where the fit leaves no degree of
            freedom.

        Raises:
            PlatonicError: If shapes disagree or a ridge isn't a finite number above 0.
        """
        matrix(delta, "delta", (len(self.design), len(self.prompts)))
        n, m = delta.shape
        u = delta.double()
        if len(self.vectors) == n and n <= self.design.shape[1]:
            rows = self.vectors.T @ u
        else:
            rows = (self.vectors.T @ (self.design.T @ u)) / self.values.sqrt()[:, None]
        energy = (rows @ self.prompt_vectors).square()  # of U in the two sides' singular vectors
        mean = self.prompt_values.sum() / min(self.prompts.shape)
        k = self.prompt_values / (self.prompt_values + positive(prompt_ridge, "prompt_ridge") * mean)
        scale = float(self.design.square().sum()) / min(self.design.shape)
        total = u.square().sum()
        scores = []
        for ridge in ridges:
            h = self.values / (self.values + positive(ridge, "ridge") * scale)
            fit = h[:, None] * k[None, :]
            residual = total - ((2 * fit - fit.square()) * energy).sum()
            left = 1 - float(h.sum() * k.sum()) / (n * m)
            scores.append(float(residual.clamp(min=0)) / (n * m * left**2) if left > 1e-9 else float("inf"))
        return torch.tensor(scores, dtype=torch.float64)

    def best(self, delta: Tensor, *, ridges: Sequence[float] = RIDGES, prompt_ridge: float = PROMPT_RIDGE) -> float:
        """The ridge with the smallest of `scores`; of equal ones the largest.

        Raises:
            PlatonicError: As `scores`; and if there are no ridges to choose from.
        """
        if not len(ridges):
            raise PlatonicError("Expected at least one ridge to choose from, got none.")
        ordered = sorted(ridges, reverse=True)
        return ordered[int(self.scores(delta, ordered, prompt_ridge=prompt_ridge).argmin())]


def folds(n: int, k: int = _FOLDS) -> list[Tensor]:
    """The indices 0..n-1 in k parts, every k-th index in one; fewer parts where there are fewer indices."""
    return [torch.arange(start, n, k) for start in range(min(n, k))]


@dataclass(frozen=True)
class Forecast:
    """What to expect of an edit, from probes that its solve didn't see.

    Attributes:
        before: Share of probes on which the target answers as the fine-tune does, in [0, 1].
        after: The same under the edit.
    """

    before: float
    after: float

    @property
    def gain(self) -> float:
        """`after - before`: the gain in accuracy to expect where the fine-tune is right, in [-1, 1]."""
        return self.after - self.before

    def to_dict(self) -> dict[str, float]:
        """Plain JSON values, the gain included."""
        return {"before": self.before, "after": self.after, "gain": self.gain}
