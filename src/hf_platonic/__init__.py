"""Carry a fine-tune from one dual encoder to another, on unlabelled probes, in the Hugging Face ecosystem.

Importing the package registers the PEFT method `PLATONIC`; everything else loads when first used.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from .tuner import PlatonicConfig, PlatonicModel

if TYPE_CHECKING:
    from .affinities import affinity, spread
    from .bank import OperatorBank
    from .consensus import Consensus
    from .coresets import select_probes
    from .descriptor import DescriptorSum, TaskDescriptor
    from .encoders import DualEncoder, register_family, supported_families
    from .errors import PlatonicError
    from .evaluation import EvaluationReport, EvaluationSet, evaluate, zero_shot_accuracy
    from .export import export_lora, push_adapter
    from .extraction import extract
    from .few_shot import finish_transfer
    from .joint import JointTerm, joint_solve
    from .matching import MatchingArguments, match_affinities
    from .operator import Operator
    from .probes import ProbeSet
    from .solutions import solve_operators
    from .solve import closed_form
    from .transfers import initialize_platonic_weights, transfer

__version__ = version("hf-platonic")

_HOMES = {
    "Consensus": "consensus",
    "DescriptorSum": "descriptor",
    "DualEncoder": "encoders",
    "EvaluationReport": "evaluation",
    "EvaluationSet": "evaluation",
    "JointTerm": "joint",
    "MatchingArguments": "matching",
    "Operator": "operator",
    "OperatorBank": "bank",
    "PlatonicError": "errors",
    "ProbeSet": "probes",
    "TaskDescriptor": "descriptor",
    "affinity": "affinities",
    "closed_form": "solve",
    "evaluate": "evaluation",
    "export_lora": "export",
    "extract": "extraction",
    "finish_transfer": "few_shot",
    "initialize_platonic_weights": "transfers",
    "joint_solve": "joint",
    "match_affinities": "matching",
    "push_adapter": "export",
    "register_family": "encoders",
    "select_probes": "coresets",
    "solve_operators": "solutions",
    "spread": "affinities",
    "supported_families": "encoders",
    "transfer": "transfers",
    "zero_shot_accuracy": "evaluation",
}

__all__ = [
    "Consensus",
    "DescriptorSum",
    "DualEncoder",
    "EvaluationReport",
    "EvaluationSet",
    "JointTerm",
    "MatchingArguments",
    "Operator",
    "OperatorBank",
    "PlatonicConfig",
    "PlatonicError",
    "PlatonicModel",
    "ProbeSet",
    "TaskDescriptor",
    "__version__",
    "affinity",
    "closed_form",
    "evaluate",
    "export_lora",
    "extract",
    "finish_transfer",
    "initialize_platonic_weights",
    "joint_solve",
    "match_affinities",
    "push_adapter",
    "register_family",
    "select_probes",
    "solve_operators",
    "spread",
    "supported_families",
    "transfer",
    "zero_shot_accuracy",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
