"""The closed form: a descriptor becomes an operator on the target's embeddings by one ridge solve.

With the target's design `D (n, p)` (its unit probe embeddings, or what stands for them at an input site), its unit
prompt embeddings `G (m, d)` and a descriptor `U (n, m)`, the operator `X (p, d)` minimises

    |D X G' - U|^2  +  mu_G |D X|^2  +  mu_F |X G'|^2  +  mu_F mu_G |X|^2,

    mu_F = probe_ridge  * mean(sigma(D)^2)    over the min(n, p) singular values of D,
    mu_G = prompt_ridge * mean(sigma(G)^2)    over the min(m, d) singular values of G.

The minimiser separates into one ridge regression per side,

    X = (D'D + mu_F I)^-1  D'U  (GG' + mu_G I)^-1 G,

so it has rank at most m and is kept as two thin factors. Only `D'D`, `D'U` and `G` are needed: sums over probes,
which stream, add across processes and need no memory for n. All arithmetic is float64.

The factors are written in an orthonormal basis of the prompts' span: with `G = C Q'` (thin QR, `Q'Q = I`),
`(GG' + mu_G I)^-1 G = C (C'C + mu_G I)^-1 Q'`. Prompts are often nearly parallel; in their own basis the factors
would be large, cancel each other and lose digits once stored in float32.

Reference: Park and Cho, "Platonic Task Arithmetic", 2026, arXiv 2610.00929. The paper solves through two thin SVDs;
the Gram form here has the same minimiser.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._checks import matrix, positive
from .errors import PlatonicError

__all__ = ["PROBE_RIDGE", "PROMPT_RIDGE", "GridSolver", "ProbeSums", "RidgeInverse", "closed_form"]

PROBE_RIDGE = 1e-2
"""The paper's ridge on the probe side, relative to the mean squared singular value of the design."""
PROMPT_RIDGE = 1e-6
"""The paper's ridge on the prompt side, relative to the mean squared singular value of the prompt embeddings."""

_CHUNK = 2048  # rows in float64 at a time: bounds memory whatever n is


@dataclass(frozen=True)
class RidgeInverse:
    """`(K + mu I)^-1` for a symmetric positive semidefinite `K (k, k)`, factorised once and applied many times.

    Attributes:
        mu: The absolute ridge, `ridge * trace(K) / rank`.
        factor: Lower Cholesky factor of `K + mu I`, or its eigenvectors where Cholesky failed. float64, (k, k).
        eigenvalues: None with Cholesky; otherwise the eigenvalues of `K + mu I`, those lost to rounding set to inf.
    """

    mu: float
    factor: Tensor
    eigenvalues: Tensor | None = None

    @classmethod
    def of(cls, gram: Tensor, ridge: float, *, rank: int) -> RidgeInverse:
        """The inverse for Gram matrix `gram` under a relative ridge.

        Args:
            gram: Shape (k, k), float64, symmetric positive semidefinite.
            ridge: Relative to the mean squared singular value of the matrix behind the Gram; above 0.
            rank: The number of singular values that mean runs over, `min(rows, columns)`.

        Returns:
            A factorisation; Cholesky, or eigenpairs (with a warning) where `K + mu I` is singular in float64.

        Raises:
            PlatonicError: If the ridge isn't a finite number above 0 or the Gram is zero or not finite.
        """
        scale = float(gram.diagonal().sum()) / rank
        if not scale > 0 or scale == float("inf"):
            raise PlatonicError(
                f"Expected a design with a positive finite mean squared singular value, got {scale}. "
                "The embeddings are all zero or not finite; look at the encoder's output."
            )
        mu = positive(ridge, "ridge") * scale
        shifted = gram + mu * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
        factor, info = torch.linalg.cholesky_ex(shifted)
        if int(info) == 0:
            return cls(mu, factor)
        values, vectors = torch.linalg.eigh(shifted)
        floor = float(values[-1]) * len(values) * torch.finfo(values.dtype).eps
        kept = values > floor
        warnings.warn(
            f"The regularised Gram matrix is singular in float64: numerical rank {int(kept.sum())} of {len(values)} "
            f"at ridge {ridge:g}; its null space is left out. Use a larger ridge, or remove near-duplicate rows.",
            RuntimeWarning,
            stacklevel=2,
        )
        return cls(mu, vectors, torch.where(kept, values, torch.full_like(values, float("inf"))))

    def apply(self, rows: Tensor) -> Tensor:
        """`(K + mu I)^-1 rows` for `rows (k, q)`, float64."""
        if self.eigenvalues is None:
            return torch.cholesky_solve(rows, self.factor)
        return self.factor @ ((self.factor.T @ rows) / self.eigenvalues[:, None])


@dataclass
class ProbeSums:
    """The sums over probes that a solve needs: `D'D (p, p)`, `D'U (p, q)` and n.

    They are additive: over chunks (`update`), and over processes (`merge`). Peak memory doesn't depend on n.

    Attributes:
        gram: `D'D`, float64.
        cross: `D'U`, float64; q columns for all descriptors side by side.
        n: Probes summed so far.
    """

    gram: Tensor
    cross: Tensor
    n: int = 0

    @classmethod
    def zeros(cls, p: int, q: int, *, device: torch.device | str | None = None) -> ProbeSums:
        """Sums over no probes, for a design of width `p` and `q` descriptor columns."""
        return cls(
            torch.zeros(p, p, dtype=torch.float64, device=device),
            torch.zeros(p, q, dtype=torch.float64, device=device),
        )

    def update(self, design: Tensor, deltas: Sequence[Tensor]) -> None:
        """Adds a run of probes.

        Args:
            design: Shape (b, p), any float dtype.
            deltas: Descriptor rows of the same probes, each of shape (b, m_i), with `sum(m_i) = q`.

        Raises:
            PlatonicError: If the shapes don't agree with the sums.
        """
        matrix(design, "design", (None, len(self.gram)))
        for delta in deltas:
            matrix(delta, "delta", (len(design), None))
        if sum(delta.shape[1] for delta in deltas) != self.cross.shape[1]:
            raise PlatonicError(
                f"Expected {self.cross.shape[1]} descriptor columns in all, got {[d.shape[1] for d in deltas]}."
            )
        for start in range(0, len(design), _CHUNK):
            rows = design[start : start + _CHUNK].to(self.gram)
            self.gram.addmm_(rows.T, rows)
            column = 0
            for delta in deltas:
                part = self.cross[:, column : column + delta.shape[1]]
                part.addmm_(rows.T, delta[start : start + _CHUNK].to(self.gram))
                column += delta.shape[1]
        self.n += len(design)

    def merge(self, other: ProbeSums) -> ProbeSums:
        """The sums over both runs of probes."""
        return ProbeSums(self.gram + other.gram, self.cross + other.cross, self.n + other.n)


@dataclass(frozen=True)
class GridSolver:
    """Everything of a solve that depends on the grid and the target alone: one factorisation for any number of tasks.

    Attributes:
        design_inverse: `(D'D + mu_F I)^-1`, or `(DD' + mu_F I)^-1` in the dual form.
        prompt_map: `C (C'C + mu_G I)^-1`, float64, shape (m, r), r = min(m, d).
        basis: `Q'`, float64, shape (r, d), orthonormal rows: the right factor of every operator of this grid.
        design: `D`, float64, only in the dual form (n < p).
    """

    design_inverse: RidgeInverse
    prompt_map: Tensor
    basis: Tensor
    design: Tensor | None = None

    @classmethod
    def of(
        cls,
        design: Tensor,
        prompts: Tensor,
        *,
        probe_ridge: float = PROBE_RIDGE,
        prompt_ridge: float = PROMPT_RIDGE,
    ) -> GridSolver:
        """A solver from the whole design; the dual form where there are fewer probes than columns (n < p).

        Args:
            design: Shape (n, p), any float dtype.
            prompts: Shape (m, d), unit rows.
            probe_ridge: Above 0, relative (see the module's head).
            prompt_ridge: Above 0, relative.

        Returns:
            The solver for this grid.
        """
        matrix(design, "design", (None, None))
        n, p = design.shape
        if n >= p:
            sums = ProbeSums.zeros(p, 0, device=design.device)
            sums.update(design, [])
            return cls.from_sums(sums, prompts, probe_ridge=probe_ridge, prompt_ridge=prompt_ridge)
        rows = design.double()
        inverse = RidgeInverse.of(rows @ rows.T, probe_ridge, rank=n)
        return cls(inverse, *_prompt_side(prompts, prompt_ridge), rows)

    @classmethod
    def from_sums(
        cls,
        sums: ProbeSums,
        prompts: Tensor,
        *,
        probe_ridge: float = PROBE_RIDGE,
        prompt_ridge: float = PROMPT_RIDGE,
    ) -> GridSolver:
        """A solver from streamed sums; same arguments and result as `of`."""
        if sums.n == 0:
            raise PlatonicError(
                "Expected sums over at least one probe, got none. Call `update` with the design first."
            )
        inverse = RidgeInverse.of(sums.gram, probe_ridge, rank=min(sums.n, len(sums.gram)))
        return cls(inverse, *_prompt_side(prompts, prompt_ridge))

    def solve(self, deltas: Sequence[Tensor], design: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Thin factors of one operator per descriptor, from one pass over the design.

        Args:
            deltas: Descriptors `U` of this grid, each of shape (n, m).
            design: The design the solver was made from, shape (n, p).

        Returns:
            For each, `left (p, r)` and `right (r, d)`, float64, `X = left @ right`, r = min(m, d); `right` is one
            tensor for all.

        Raises:
            PlatonicError: If the shapes don't agree.
        """
        for delta in deltas:
            matrix(delta, "delta", (len(design), len(self.prompt_map)))
        if self.design is not None:
            matrix(design, "design", tuple(self.design.shape))
            inner = [self.design_inverse.apply(delta.double() @ self.prompt_map) for delta in deltas]
            return [(self.design.T @ rows, self.basis) for rows in inner]
        shape = design.shape[1], len(self.prompt_map)
        crosses = [torch.zeros(shape, dtype=torch.float64, device=design.device) for _ in deltas]
        for start in range(0, len(design), _CHUNK):
            rows = design[start : start + _CHUNK].double()
            for cross, delta in zip(crosses, deltas, strict=True):
                cross.addmm_(rows.T, delta[start : start + _CHUNK].double())
        return [self.solve_cross(cross) for cross in crosses]

    def solve_cross(self, cross: Tensor) -> tuple[Tensor, Tensor]:
        """Thin factors from `D'U (p, m)`, for solvers made from sums or in the primal form; as `solve`."""
        if self.design is not None:
            raise PlatonicError("Expected a solver in the primal form, got the dual one (n < p). Use `solve` instead.")
        matrix(cross, "cross", (len(self.design_inverse.factor), len(self.prompt_map)))
        return self.design_inverse.apply(cross.double() @ self.prompt_map), self.basis


def _prompt_side(prompts: Tensor, prompt_ridge: float) -> tuple[Tensor, Tensor]:
    """`C (C'C + mu_G I)^-1` and `Q'` of the prompts `G = C Q'`."""
    matrix(prompts, "prompts", (None, None))
    basis, upper = torch.linalg.qr(prompts.double().T)  # G' = Q C'
    inverse = RidgeInverse.of(upper @ upper.T, prompt_ridge, rank=min(prompts.shape))
    return inverse.apply(upper).T, basis.T


def closed_form(
    design: Tensor,
    prompts: Tensor,
    delta: Tensor,
    *,
    probe_ridge: float = PROBE_RIDGE,
    prompt_ridge: float = PROMPT_RIDGE,
) -> tuple[Tensor, Tensor]:
    """Thin factors of the operator `X = (D'D + mu_F I)^-1 D'U (GG' + mu_G I)^-1 G` (two-sided ridge regression).

    Equal to `sklearn.linear_model.Ridge` without intercept on each side in turn, and to the two thin SVDs of the
    paper with filters `s / (s^2 + mu)`.

    Args:
        design: `D`, shape (n, p), any float dtype; the target's unit probe embeddings at an output site.
        prompts: `G`, shape (m, d), unit rows.
        delta: `U`, shape (n, m), cosine differences in [-2, 2].
        probe_ridge: Relative ridge on the probe side, above 0.
        prompt_ridge: Relative ridge on the prompt side, above 0.

    Returns:
        `left (p, r)` and `right (r, d)`, float64, r = min(m, d), with `X = left @ right` and orthonormal rows of
        `right`.

    Raises:
        PlatonicError: If shapes disagree, a ridge isn't a finite number above 0, or the design is all zero.

    Example:
        >>> eye = torch.eye(2)
        >>> left, right = closed_form(eye, eye, torch.tensor([[1.0, 0.0], [0.0, 2.0]]), probe_ridge=1.0)
        >>> (left @ right).round(decimals=3)
        tensor([[0.5000, 0.0000],
                [0.0000, 1.0000]], dtype=torch.float64)

    Reference:
        Park and Cho 2026, arXiv 2610.00929.
    """
    solver = GridSolver.of(design, prompts, probe_ridge=probe_ridge, prompt_ridge=prompt_ridge)
    return solver.solve([delta], design)[0]
