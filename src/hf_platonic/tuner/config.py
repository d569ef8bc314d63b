"""The configuration of one adapter, and the entry of this method in PEFT's closed list of methods."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from peft import PeftConfig
from peft.utils import PeftType

from .._checks import finite
from .._pooling import features_of
from ..errors import PlatonicError

__all__ = ["PLATONIC", "PlatonicConfig"]


def _member(name: str) -> PeftType:
    """The member of `PeftType` called `name`, which is added unless it is there.

    PEFT has no way in for methods from outside: it looks their names up in this enum, which Python closes after its
    class body. All four places are needed: attribute access has gone past the member map since Python 3.12, and
    iteration, calls and pickling each read another one.
    """
    if name in PeftType.__members__:
        return PeftType[name]
    member = str.__new__(PeftType, name)
    member._name_ = member._value_ = name
    member.__objclass__ = PeftType
    member._sort_order_ = len(PeftType._member_names_)
    type.__setattr__(PeftType, name, member)
    PeftType._member_map_[name] = member
    PeftType._member_names_.append(name)
    PeftType._value2member_map_[name] = member
    return member


PLATONIC: PeftType = _member("PLATONIC")


@dataclass
class PlatonicConfig(PeftConfig):  # type: ignore[misc, unused-ignore]
    """One operator of rank `r` per edited linear layer, and the strength it is applied with.

    A layer `y = W u + b` becomes `y + s (y @ left) @ right` at an output site and `y + s ([u, 1] @ left) @ right` at
    an input site (without the one where the layer has no bias), with `left` (p, r), `right` (r, d) and strength `s`.
    At site "features" it becomes `y + s ([u, f, 1] @ left) @ right`, `f` what is read from inner modules.

    Args:
        r: Columns of `left`, rows of `right`; at least 1.
        strength: `s`, finite, of either sign; saved with the adapter.
        target_modules: Names of the layers to edit: a list (a name, or the end of one) or one regular expression.
            None: the layer that writes the model's image or audio embedding.
        exclude_modules: Names to leave out, in the same two forms.
        site: Behind the layer's output, at its input, or beside it, from inner "features". None: what the model's
            family needs, where `target_modules` is None as well; "output" otherwise.
        features: For site "features": what is read, in order, each as `[module, pooling, size]`; those of
            `DualEncoder(model, processor).at(site="features").site.features`.
        init_weights: True starts at no change (`left` random, `right` zero), False with both random.
        base_shape: Per edited layer `[out_features, in_features]`; written when the adapter is put on a model.
        base_sketch: Per edited layer a few seeded random projections of its weight and bias; written likewise. They
            tell another base from the same one in another precision. Set to None to put the adapter on another
            base on purpose.
        provenance: How the adapter came about, as plain JSON.

    Raises:
        PlatonicError: If a value is out of its range, or `task_type` is set.
    """

    r: int = field(default=8, metadata={"help": "Rank of the operator."})
    strength: float = field(default=1.0, metadata={"help": "Signed factor of the operator."})
    target_modules: list[str] | set[str] | str | None = field(
        default=None, metadata={"help": "Linear layers to edit. None: the layer that writes the model's embedding."}
    )
    exclude_modules: list[str] | set[str] | str | None = field(
        default=None, metadata={"help": "Names of layers to leave out."}
    )
    site: Literal["output", "input", "features"] | None = field(
        default=None, metadata={"help": "Edit behind the layer's output or at its input. None: by the model's family."}
    )
    features: Sequence[Any] | None = field(
        default=None, metadata={"help": 'Inner features read at site "features", as [module, pooling, size].'}
    )
    init_weights: bool = field(default=True, metadata={"help": "Start at no change (True) or at random (False)."})
    base_shape: dict[str, list[int]] | None = field(
        default=None, metadata={"help": "Sizes of the edited layers of the base the adapter was made for."}
    )
    base_sketch: dict[str, list[float]] | None = field(
        default=None, metadata={"help": "Random projections of the edited layers the adapter was made for."}
    )
    provenance: dict[str, Any] | None = field(default=None, metadata={"help": "How the adapter came about."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PLATONIC
        if self.task_type is not None:
            raise PlatonicError(
                f"Expected `task_type` None, got {self.task_type!r}: PEFT would call the model with arguments that "
                "dual encoders don't take. Leave `task_type` out."
            )
        if isinstance(self.r, bool) or not isinstance(self.r, int) or self.r < 1:
            raise PlatonicError(f"Expected `r` to be an integer of at least 1, got {self.r!r}. Pass the rank.")
        self.strength = finite(self.strength, "strength")
        if self.site not in (None, "output", "input", "features"):
            raise PlatonicError(f'Expected `site` to be "output", "input", "features" or None, got {self.site!r}.')
        if (self.site == "features") != bool(self.features):
            raise PlatonicError(
                f'Expected `features` at site "features" and nowhere else, got {self.features!r} at {self.site!r}. '
                'Pass site="features", features=DualEncoder(model, processor).at(site="features").site.features.'
            )
        if self.features is not None:
            self.features = [list(feature) for feature in features_of(self.features)]
        if self.target_modules == "all-linear":
            raise PlatonicError(
                'Expected `target_modules` to name the layers to edit, got "all-linear": an operator belongs to the '
                "layer that writes the embedding. Leave `target_modules` out, or train a LoRA."
            )
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            if isinstance(value, (list, tuple)):
                setattr(self, name, set(value))
        try:
            json.dumps([self.provenance, self.base_shape, self.base_sketch], allow_nan=False)
        except (TypeError, ValueError) as error:
            raise PlatonicError(
                f"Expected `provenance`, `base_shape` and `base_sketch` to be plain JSON, got {error}. "
                "Pass strings, finite numbers, lists and dicts."
            ) from None

    def to_dict(self) -> dict[str, Any]:
        """The fields, with sets as sorted lists so that the same adapter is always written as the same JSON."""
        fields: dict[str, Any] = super().to_dict()
        return {key: sorted(value) if isinstance(value, set) else value for key, value in fields.items()}
