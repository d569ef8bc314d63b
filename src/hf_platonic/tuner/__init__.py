"""The PEFT method: importing this module makes PEFT know `PLATONIC` adapters."""

from __future__ import annotations

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING
from peft.utils import register_peft_method

from .config import PLATONIC, PlatonicConfig
from .fingerprint import factors_digest
from .layer import Linear, PlatonicLayer
from .model import PlatonicModel

__all__ = ["PLATONIC", "Linear", "PlatonicConfig", "PlatonicLayer", "PlatonicModel", "factors_digest"]


def _register() -> None:
    """Enter the method in PEFT's tables, once, or anew after a reload of this module.

    Raises:
        ImportError: If PEFT or another package already has a method of that name.
    """
    known = PEFT_TYPE_TO_CONFIG_MAPPING.get(PLATONIC)
    if known is PlatonicConfig:
        return
    if known is not None:
        if known.__module__ != PlatonicConfig.__module__:
            raise ImportError(
                f"Expected no PEFT method named PLATONIC besides hf_platonic's, got {known.__module__}."
                f"{known.__qualname__}. Import one of the two packages only, or upgrade with: "
                "pip install -U hf-platonic peft"
            )
        for table in (PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_PREFIX_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING):
            table.pop(PLATONIC, None)
    register_peft_method(name="platonic", config_cls=PlatonicConfig, model_cls=PlatonicModel)


_register()
