"""An operator: the thin matrix that moves a target's embeddings, and how it is folded into one linear layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ._checks import finite, matrix
from .errors import PlatonicError

__all__ = ["NOT_MERGEABLE", "Operator", "SiteKind"]

SiteKind = Literal["output", "input", "features"]

NOT_MERGEABLE = (
    'Expected an edit at site "output" or "input", got one at "features": it reads inner layers of the tower, which '
    "no weight of the last layer sees, so it can't be merged or written as a LoRA. It is exact as a live adapter: "
    "keep it with `save_pretrained` and `PeftModel.from_pretrained`. For an edit that merges, transfer with "
    'site="input".'
)


@dataclass(frozen=True, eq=False)
class Operator:
    """`X = left @ right`, which moves unit embeddings `V` to `normalize(V + s D X)`.

    At an output site the design `D` is `V` itself and `X` is `d x d`; at an input site `D = [u, 1] / |z|`, with `u`
    the input of the edited linear layer and `z` the raw embedding; where features `f` of inner layers are read,
    `D = [u, f, 1] / |z|`. Operators of one site add and scale like matrices, exactly.

    Attributes:
        left: Shape (p, r).
        right: Shape (r, d).
        site: Where the edited layer takes it: behind its output, at its input, or beside it, from inner features.
    """

    left: Tensor
    right: Tensor
    site: SiteKind = "output"

    def __post_init__(self) -> None:
        matrix(self.left, "left", (None, None))
        matrix(self.right, "right", (self.left.shape[1], None))
        if self.site == "output" and self.left.shape[0] != self.right.shape[1]:
            raise PlatonicError(f"Expected a square operator at an output site, got {self.shape}.")

    @property
    def shape(self) -> tuple[int, int]:
        """`(p, d)`: columns of the design, size of the embedding."""
        return self.left.shape[0], self.right.shape[1]

    @property
    def rank(self) -> int:
        """Columns of the left factor; the matrix rank is at most this."""
        return self.left.shape[1]

    def dense(self) -> Tensor:
        """`left @ right`, shape (p, d), in the factors' dtype."""
        return self.left @ self.right

    def to(self, dtype: torch.dtype) -> Operator:
        """The operator with factors of another dtype."""
        return replace(self, left=self.left.to(dtype), right=self.right.to(dtype))

    def __mul__(self, coefficient: float) -> Operator:
        return replace(self, left=self.left * finite(coefficient, "coefficient"))

    __rmul__ = __mul__

    def __neg__(self) -> Operator:
        return self * -1.0

    def __add__(self, other: Operator) -> Operator:
        if not isinstance(other, Operator):
            return NotImplemented
        if self.site != other.site or self.shape != other.shape:
            raise PlatonicError(
                f"Expected operators of one site, got {self.site} {self.shape} and {other.site} {other.shape}. "
                "Solve both for the same target."
            )
        if self.right is other.right or torch.equal(self.right, other.right):
            return replace(self, left=self.left + other.left)
        if self.left is other.left or torch.equal(self.left, other.left):
            return replace(self, right=self.right + other.right)
        return replace(
            self, left=torch.cat([self.left, other.left], dim=1), right=torch.cat([self.right, other.right], dim=0)
        )

    def __sub__(self, other: Operator) -> Operator:
        return self + -other

    @property
    def transposed(self) -> Operator:
        """The operator that does to the prompts what this one does to the probes, at output sites.

        `V X T' = V (T X')'`: before normalisation, the affinity of edited probes with prompts is that of probes with
        prompts edited by the transpose. It's also the minimiser of the solve with the roles of the two swapped.
        """
        return replace(self, left=self.right.T.contiguous(), right=self.left.T.contiguous())

    def compressed(self) -> Operator:
        """The same operator at the smallest exact width: `r <= min(p, d)`, by QR on both sides and one small SVD."""
        if self.rank <= min(self.shape):
            return self
        q_left, r_left = torch.linalg.qr(self.left.double())
        q_right, r_right = torch.linalg.qr(self.right.double().T)
        u, s, vh = torch.linalg.svd(r_left @ r_right.T, full_matrices=False)
        left, right = q_left @ (u * s.sqrt()), (s.sqrt()[:, None] * vh) @ q_right.T
        return replace(self, left=left.to(self.left.dtype), right=right.to(self.right.dtype))

    def apply(self, unit: Tensor, design: Tensor, *, strength: float = 1.0) -> Tensor:
        """Edited unit embeddings `normalize(V + s D X)`.

        Args:
            unit: `V`, shape (n, d), unit rows.
            design: `D`, shape (n, p).
            strength: `s`, signed and finite.

        Returns:
            Shape (n, d), unit rows, the dtype of `unit`.
        """
        matrix(design, "design", (len(unit), self.shape[0]))
        matrix(unit, "unit", (None, self.shape[1]))
        step = (design.to(self.left) @ self.left) @ self.right
        moved = unit.to(self.left) + finite(strength, "strength") * step
        return torch.nn.functional.normalize(moved, dim=-1).to(unit.dtype)

    def fold(self, weight: Tensor, bias: Tensor | None, *, strength: float = 1.0) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the edited linear layer, for one that computes `h @ weight.T + bias`.

        Args:
            weight: Shape (d_out, d_in), torch's layout.
            bias: Shape (d_out,) or None.
            strength: `s`, signed and finite.

        Returns:
            New tensors in the dtypes given; the sum is taken in float64.

        Raises:
            PlatonicError: If the operator doesn't fit the layer, or reads inner features, which no weight of it sees.
        """
        if self.site == "features":
            raise PlatonicError(NOT_MERGEABLE)
        s = finite(strength, "strength")
        w, b = weight.double(), None if bias is None else bias.double()
        left, right = self.left.double(), self.right.double()
        if self.site == "output":
            matrix(weight, "weight", (self.shape[1], None))
            w = w + s * right.T @ (left.T @ w)
            b = None if b is None else b + s * right.T @ (left.T @ b)
        else:
            matrix(weight, "weight", (self.shape[1], self.shape[0] - (b is not None)))
            w = w + s * (left[: weight.shape[1]] @ right).T
            b = None if b is None else b + s * left[-1] @ right
        return w.to(weight.dtype), None if b is None or bias is None else b.to(bias.dtype)

    def update(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """What `fold` adds at strength 1, in factors: the weight gets `up @ down`, the bias `offset`.

        Args:
            weight: Shape (d_out, d_in), torch's layout.
            bias: Shape (d_out,) or None.

        Returns:
            `down (r, d_in)`, `up (d_out, r)` and `offset (d_out,)`, None without a bias; float64.
        """
        left, right = self.left.double(), self.right.double()
        if self.site == "output":
            offset = None if bias is None else (bias.double() @ left) @ right
            return left.T @ weight.double(), right.T, offset
        return left[: weight.shape[1]].T, right.T, None if bias is None else left[-1] @ right
