"""A transferred edit as the start for a few labelled examples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from ._checks import finite, instance, matrix, positive
from ._pooling import features_of
from .affinities import spread
from .encoders.encoder import DualEncoder
from .encoding import encode_columns, encode_probes
from .errors import EncoderError, PlatonicError
from .evaluation import EvaluationSet
from .operator import Operator
from .readings import unedited
from .scaling import scaled
from .tuner import PlatonicModel, factors_digest

if TYPE_CHECKING:
    from peft import PeftModel

    from .probes import ProbeSet

__all__ = ["PENALTY", "finish", "finish_transfer"]

PENALTY = 0.01
"""Of moving away from the start, see `finish`; fixed on the audio tasks of the playground."""
_CONTRAST = 3.0  # root mean square of a row's logits, about that of published models' own temperatures
_STEPS = 100


def finish(
    start: Operator,
    unit: Tensor,
    design: Tensor,
    prompts: Tensor,
    labels: Sequence[int],
    *,
    strength: float = 1.0,
    unlabelled: Tensor | None = None,
    penalty: float = PENALTY,
) -> Operator:
    """The operator near `start` that tells a few labelled examples apart.

    Minimises over `E`, by L-BFGS from `E = 0` in float64, with `k` the number of examples,

        mean cross-entropy of  t normalize(V + s D (X + E)) G'  with the labels  +  penalty / 2  |E~|^2 / scale,

    where `E = E~ Q`, `Q` are orthonormal rows that span the prompts, and `E~` acts on standardised features at site
    "features" (on the design itself elsewhere), in whose span by the examples it lies. `scale` is one over the mean
    squared norm of the examples' rows, and `t` makes the examples' own cosines 3 apart, in root mean square.

    Args:
        start: `X`, the transferred operator; one of zeros starts at zero-shot.
        unit: The examples' unit embeddings `V`, shape (k, d).
        design: Their design `D`, shape (k, p).
        prompts: Unit embeddings of the classes `G`, shape (m, d).
        labels: k class indices.
        strength: `s`, not 0, at which the result is applied, as the start is.
        unlabelled: Design rows to standardise by, at site "features", shape (n, p); None takes the examples'.
        penalty: Above 0.

    Returns:
        `X + E`, float32, at the start's site.

    Raises:
        PlatonicError: If shapes or labels don't fit, `strength` is 0 or `penalty` isn't above 0.
    """
    positive(penalty, "penalty")
    matrix(unit, "unit", (None, start.shape[1]))
    matrix(design, "design", (len(unit), start.shape[0]))
    matrix(prompts, "prompts", (None, start.shape[1]))
    s = finite(strength, "strength")
    if s == 0 or len(labels) != len(unit) or not all(0 <= label < len(prompts) for label in labels):
        raise PlatonicError(
            f"Expected a strength that isn't 0 and {len(unit)} labels from 0 to {len(prompts) - 1}, got strength "
            f"{s:g} and labels {list(labels)[:8]}."
        )
    _, scaling = scaled([design if unlabelled is None else unlabelled], start.site)
    rows = (design if scaling is None else scaling.apply(design)).double()
    v, columns, y = unit.double(), prompts.double(), torch.tensor(list(labels), device=unit.device)
    basis = torch.linalg.qr(columns.T)[0].T
    temperature = _CONTRAST / spread(v @ columns.T)
    before = v + s * (design.double() @ start.left.double()) @ start.right.double()
    gram = rows @ rows.T
    gram = gram / gram.diagonal().mean()
    weights = torch.zeros(len(rows), len(basis), dtype=torch.float64, device=rows.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        moved = gram @ weights
        cosines = functional.normalize(before + moved @ basis, dim=1) @ columns.T
        value = (
            functional.cross_entropy(temperature * cosines, y) + penalty / 2 * temperature**2 * (weights * moved).sum()
        )
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    step = rows.T @ weights.detach() / (s * rows.square().sum(dim=1).mean())
    left = step if scaling is None else scaling.fold(step)
    return start + Operator(left.to(start.left), basis.to(start.right), start.site)


def finish_transfer(
    model: PeftModel,
    target: DualEncoder,
    examples: EvaluationSet,
    *,
    adapter_name: str = "default",
    unlabelled: ProbeSet | None = None,
    penalty: float = PENALTY,
    batch_size: int = 32,
) -> None:
    """Trains a transferred adapter further on a few labelled examples; its strength stays.

    The adapter's `provenance` says so under `finished`, and no longer what was verified and forecast before.

    Args:
        model: From `transfer`, edited in the probe tower.
        target: The encoder that was edited.
        examples: 1 to 16 a class are what this is made for; labels index the classes of their probe set.
        adapter_name: The adapter.
        unlabelled: Probes to standardise features by: those of the descriptor. None takes the examples.
        penalty: As in `finish`.
        batch_size: Inputs a forward pass.

    Raises:
        EncoderError: If the model isn't a `PLATONIC` PEFT model.
        PlatonicError: If there is no such adapter, it edits another layer, or as `finish`.
    """
    instance(target, "target", DualEncoder, "Pass the encoder that was edited.")
    instance(examples, "examples", EvaluationSet, "Make one with `EvaluationSet(probes, labels)`.")
    tuner = getattr(model, "base_model", model)
    if not isinstance(tuner, PlatonicModel):
        raise EncoderError(
            f"Expected a PEFT model of type PLATONIC, got {type(tuner).__name__}. Make one with `transfer`."
        )
    start = tuner.get_operator(adapter_name)
    config = tuner.peft_config[adapter_name]
    read = features_of(config.features or ())
    view = target.at(site=start.site, features=read) if read else target.at(site=start.site)
    if set(config.target_modules) != {view.site.module}:
        raise PlatonicError(
            f"Expected an adapter on {view.site.module}, which writes the probes' embedding, got one on "
            f"{sorted(config.target_modules)}. Transfer to the probe tower."
        )
    columns = encode_columns(target, examples.probes.columns)
    options: dict[str, Any] = {"batch_size": batch_size, "progress": False}
    with unedited(DualEncoder(model, target.processor)):
        seen = encode_probes(view, examples.probes, **options)
        others = None if unlabelled is None else encode_probes(view, unlabelled, **options).design
    found = finish(
        start,
        seen.unit,
        seen.design,
        columns,
        examples.labels,
        strength=config.strength,
        unlabelled=others,
        penalty=penalty,
    ).compressed()
    tuner.load_factors(adapter_name, found.left, found.right)
    # What was verified and forecast was the edit as it was transferred.
    made = {k: v for k, v in (config.provenance or {}).items() if k not in ("verified", "forecast")}
    step = {
        "examples": len(examples.labels),
        "classes": len(set(examples.labels)),
        "penalty": penalty,
        "unlabelled": None if unlabelled is None else unlabelled.grid.fingerprint,
    }
    config.provenance = {
        **made,
        "finished": [*made.get("finished", []), step],
        "factors": factors_digest(found.left, found.right),
    }
