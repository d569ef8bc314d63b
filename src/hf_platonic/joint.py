"""The joint solve: several terms on their own grids, and grids to leave alone, as one least-squares problem.

With designs `D_l (n_l, p)`, prompt embeddings `G_l (m_l, d)`, targets `U_l (n_l, m_l)` (zero for a grid that should
stay as it is) and weights `w_l`, the operator `X (p, d)` minimises

    sum_l  w_l / n_l  ( |D_l X G_l' - U_l|^2 + mu_Gl |D_l X|^2 + mu_Fl |X G_l'|^2 + mu_Fl mu_Gl |X|^2 ),

with the ridges of each grid as in `solve`, so that one term gives the closed form exactly. The normal equations are

    sum_l  A_l X B_l = C,   with   A_l = w_l / n_l (D_l'D_l + mu_Fl I),
                                   B_l = G_l'G_l + mu_Gl I,
                                   C   = sum_l  w_l / n_l  D_l'U_l G_l.

They are solved by preconditioned conjugate gradients without ever forming the `pd x pd` system:

1. The rows of X lie in the span of all prompts, its columns in the span of all design rows: both are restricted to
   that, exactly.
2. The prompt side is whitened by `S = sum_l a_l B_l`, with `a_l` the mean eigenvalue of `A_l`. Where the prompts of
   all grids are linearly independent, the whitened `B_l` become projectors onto orthogonal subspaces, and the problem
   falls apart into one ordinary ridge regression per subspace.
3. In a basis that makes all of them as diagonal as one basis can, each basis vector `v` sees the probe-side matrix
   `sum_l (v'B_l v) A_l`. Vectors with like weights share one Cholesky factor of it; that is the preconditioner. It's
   exact where the prompts are independent, and close where they overlap.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._checks import matrix, positive
from .errors import PlatonicError
from .solve import PROBE_RIDGE, PROMPT_RIDGE

__all__ = ["TOLERANCE", "JointSolution", "JointTerm", "joint_solve"]

TOLERANCE = 1e-8
"""Relative residual at which the iteration stops, in the norm of the preconditioner's inverse. Below float32's own."""
_ALIKE = 0.02  # weights that differ by less share a factor
_BUDGET = 2**22  # entries of all factors together, 32 MB: fewer factors cost iterations, more cost memory and time


@dataclass(frozen=True, eq=False)
class JointTerm:
    """One grid of a joint solve.

    Attributes:
        design: `D`, shape (n, p). Terms that share one tensor share its Gram matrix.
        prompts: `G`, shape (m, d), unit rows.
        delta: `U`, shape (n, m); None is zero: what these probes and prompts should stay at.
        weight: `w`, above 0.
        probe_ridge: Of this grid, above 0; None: the solve's. Terms that share a design share the first one's.
    """

    design: Tensor
    prompts: Tensor
    delta: Tensor | None = None
    weight: float = 1.0
    probe_ridge: float | None = None


@dataclass(frozen=True, eq=False)
class JointSolution:
    """Thin factors of the operator, and how the iteration went.

    Attributes:
        left: Shape (p, r), float64.
        right: Shape (r, d), float64, orthonormal rows; r is the rank of all prompts together.
        iterations: Conjugate gradient steps.
        residual: Relative residual reached, in the norm of the preconditioner's inverse.
    """

    left: Tensor
    right: Tensor
    iterations: int
    residual: float


def joint_solve(
    terms: Sequence[JointTerm],
    *,
    probe_ridge: float = PROBE_RIDGE,
    prompt_ridge: float = PROMPT_RIDGE,
    tolerance: float = TOLERANCE,
    max_iterations: int = 2000,
) -> JointSolution:
    """Thin factors of the one operator that serves all terms: a generalised Sylvester equation, see the module's head.

    Args:
        terms: At least one with a delta; all of one `p` and one `d`.
        probe_ridge: Relative ridge on the probe side, above 0, for each grid by its own mean squared singular value.
        prompt_ridge: Relative ridge on the prompt side, above 0.
        tolerance: Relative residual to reach.
        max_iterations: Steps after which the iteration stops with a warning.

    Returns:
        The factors, the steps taken and the residual reached; all arithmetic is float64.

    Raises:
        PlatonicError: If shapes disagree, there are no terms, a weight or ridge isn't a finite number above 0, or the
            probe ridge is too small for float64.

    Warns:
        RuntimeWarning: If the tolerance isn't reached.

    Example:
        >>> eye = torch.eye(2)
        >>> found = joint_solve([JointTerm(eye, eye[:1], eye[:, :1]), JointTerm(eye, eye[1:], 3 * eye[:, 1:])],
        ...                     probe_ridge=1e-9)
        >>> (found.left @ found.right).round(decimals=3)
        tensor([[1., 0.],
                [0., 3.]], dtype=torch.float64)
    """
    _require(terms)
    positive(probe_ridge, "probe_ridge")
    positive(prompt_ridge, "prompt_ridge")
    span = _row_basis(torch.cat([term.prompts for term in terms]).double())
    designs, indices = _unique([term.design for term in terms])
    lift, reduced = _reduced(designs)
    p = reduced[0].shape[1]
    own = [terms[indices.index(j)].probe_ridge for j in range(len(designs))]
    shifted, scales = _probe_sides(designs, reduced, [probe_ridge if r is None else positive(r, "ridge") for r in own])

    prompts = [term.prompts.double() @ span for term in terms]
    ridges = [
        prompt_ridge * float(g.square().sum()) / min(term.prompts.shape)
        for g, term in zip(prompts, terms, strict=True)
    ]
    weights = [term.weight / len(term.design) * scales[j] for term, j in zip(terms, indices, strict=True)]
    whiten = _whitening(prompts, ridges, weights)
    # Per design: the whitened prompts of all its terms below each other, and what their ridges add up to.
    stacked = [
        torch.cat([weights[i] ** 0.5 * prompts[i] @ whiten for i, at in enumerate(indices) if at == j])
        for j in range(len(designs))
    ]
    kappa = [sum(weights[i] * ridges[i] for i, at in enumerate(indices) if at == j) for j in range(len(designs))]
    ridge_gram = whiten.T @ whiten
    ridge_side = torch.stack([k * a for k, a in zip(kappa, shifted, strict=True)]).sum(dim=0)

    def normal(y: Tensor) -> Tensor:
        total = ridge_side @ (y @ ridge_gram)
        for a, h in zip(shifted, stacked, strict=True):
            total += a @ (y @ h.T) @ h
        return total

    right_side = torch.zeros(p, whiten.shape[1], dtype=torch.float64, device=whiten.device)
    for i, term in enumerate(terms):
        if term.delta is not None:
            cross = reduced[indices[i]].T @ (term.delta.double() @ (prompts[i] @ whiten))
            right_side += term.weight / len(term.design) * cross
    profile = torch.stack(
        [h.square().sum(dim=0) + k * ridge_gram.diagonal() for h, k in zip(stacked, kappa, strict=True)]
    )
    factors, groups = _factors(shifted, profile)

    def precondition(r: Tensor) -> Tensor:
        out = torch.empty_like(r)
        for factor, columns in zip(factors, groups, strict=True):
            out[:, columns] = torch.cholesky_solve(r[:, columns], factor)
        return out

    y, iterations, residual = _conjugate_gradients(normal, precondition, right_side, tolerance, max_iterations)
    if residual > tolerance:
        warnings.warn(
            f"The joint solve stopped at a relative residual of {residual:.1e} after {iterations} steps, above "
            f"{tolerance:.1e}. Use a larger probe_ridge, or fewer terms on nearly the same prompts.",
            RuntimeWarning,
            stacklevel=2,
        )
    left = y @ whiten.T
    return JointSolution(left if lift is None else lift @ left, span.T.contiguous(), iterations, residual)


def _require(terms: Sequence[JointTerm]) -> None:
    if not any(term.delta is not None for term in terms):
        raise PlatonicError("Expected at least one term with a delta, got none: nothing would be moved.")
    p, d = terms[0].design.shape[-1], terms[0].prompts.shape[-1]
    for term in terms:
        matrix(term.design, "design", (None, p))
        matrix(term.prompts, "prompts", (None, d))
        if term.delta is not None:
            matrix(term.delta, "delta", (len(term.design), len(term.prompts)))
        positive(term.weight, "weight")


def _row_basis(rows: Tensor) -> Tensor:
    """Orthonormal columns (d, r) that span the rows."""
    _, s, vh = torch.linalg.svd(rows, full_matrices=False)
    basis: Tensor = vh[s > s[0] * max(rows.shape) * torch.finfo(s.dtype).eps].T
    return basis


def _unique(designs: Sequence[Tensor]) -> tuple[list[Tensor], list[int]]:
    """The different tensors, and for each given one which of them it is."""
    found: list[Tensor] = []
    indices = []
    for design in designs:
        index = next((j for j, known in enumerate(found) if known is design), len(found))
        if index == len(found):
            found.append(design)
        indices.append(index)
    return found, indices


def _reduced(designs: Sequence[Tensor]) -> tuple[Tensor | None, list[Tensor]]:
    """The designs in float64; where they have more columns than all have rows, in a basis of their rows' span."""
    full = [design.double() for design in designs]
    if full[0].shape[1] <= sum(map(len, full)):
        return None, full
    lift, upper = torch.linalg.qr(torch.cat(full).T)
    return lift, list(upper.T.split([len(rows) for rows in full]))


def _probe_sides(
    designs: Sequence[Tensor], reduced: Sequence[Tensor], probe_ridges: Sequence[float]
) -> tuple[list[Tensor], list[float]]:
    """Of each design `D'D + mu_F I`, divided by its mean eigenvalue, and that mean."""
    shifted, scales = [], []
    for design, rows, probe_ridge in zip(designs, reduced, probe_ridges, strict=True):
        gram = rows.T @ rows
        trace = float(gram.diagonal().sum())
        if not 0 < trace < float("inf"):
            raise PlatonicError(
                f"Expected a design with a positive finite sum of squares, got {trace}. "
                "The embeddings are all zero or not finite; look at the encoder's output."
            )
        mu = probe_ridge * trace / min(design.shape)
        scale = trace / len(gram) + mu
        gram.diagonal().add_(mu)
        shifted.append(gram / scale)
        scales.append(scale)
    return shifted, scales


def _whitening(prompts: Sequence[Tensor], ridges: Sequence[float], weights: Sequence[float]) -> Tensor:
    """`W (r, r)` with `W'(sum_l a_l B_l)W = I`, in a basis that makes every `W'B_l W` as diagonal as one can."""
    r = prompts[0].shape[1]
    eye = torch.eye(r, dtype=torch.float64, device=prompts[0].device)
    sides = [w * (g.T @ g + mu * eye) for g, mu, w in zip(prompts, ridges, weights, strict=True)]
    values, vectors = torch.linalg.eigh(torch.stack(sides).sum(dim=0))
    # The floor only matters for prompt ridges near rounding; any invertible W gives the same solution.
    floor = float(values[-1]) * r * torch.finfo(values.dtype).eps
    root = vectors * values.clamp(min=floor).rsqrt()
    # Commuting matrices share the eigenvectors of a combination with different coefficients.
    combined = torch.stack([(i + 1) * (root.T @ side @ root) for i, side in enumerate(sides)]).sum(dim=0)
    whiten: Tensor = root @ torch.linalg.eigh(combined).eigenvectors
    return whiten


def _factors(shifted: Sequence[Tensor], profile: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Cholesky factors of `sum_j profile[j, v] A_j`, one per group of columns v with like weights, and the groups."""
    limit = max(2 * len(shifted), _BUDGET // len(shifted[0]) ** 2)
    leaders: list[Tensor] = []
    members: list[list[int]] = []
    for column, weights in enumerate(profile.T):
        distances = [float((weights - leader).abs().max()) for leader in leaders]
        nearest = min(range(len(leaders)), key=distances.__getitem__) if leaders else -1
        if nearest >= 0 and (distances[nearest] < _ALIKE or len(leaders) == limit):
            members[nearest].append(column)
        else:
            leaders.append(weights)
            members.append([column])
    groups = [torch.tensor(columns, device=profile.device) for columns in members]
    factors = []
    for columns in groups:
        mean = profile[:, columns].mean(dim=1)
        side = torch.stack([w * a for w, a in zip(mean, shifted, strict=True)]).sum(dim=0)
        factor, info = torch.linalg.cholesky_ex(side)
        if int(info) != 0:
            raise PlatonicError(
                "Expected a `probe_ridge` that makes the joint system regular in float64, got one too small for these "
                "designs. Use a larger one."
            )
        factors.append(factor)
    return factors, groups


def _conjugate_gradients(
    normal: Callable[[Tensor], Tensor],
    precondition: Callable[[Tensor], Tensor],
    right_side: Tensor,
    tolerance: float,
    max_iterations: int,
) -> tuple[Tensor, int, float]:
    """Solution of `normal(y) = right_side`, the steps taken and the relative residual reached."""
    y = torch.zeros_like(right_side)
    residual = right_side.clone()
    ready = precondition(residual)
    direction = ready.clone()
    square = start = float((residual * ready).sum())
    steps = 0
    while square > tolerance**2 * start and steps < max_iterations:
        image = normal(direction)
        step = square / float((direction * image).sum())
        y += step * direction
        residual -= step * image
        ready = precondition(residual)
        former, square = square, float((residual * ready).sum())
        direction = ready + (square / former) * direction
        steps += 1
    return y, steps, (square / start) ** 0.5 if start > 0 else 0.0
