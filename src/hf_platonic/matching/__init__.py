"""Matching: a low-rank adapter in the probe tower is trained until the target's affinities change as the terms say."""

from __future__ import annotations

from .adapters import default_lora_config
from .arguments import MatchingArguments
from .objective import ProbeTower, matching_losses
from .training import Matching, match_affinities

__all__ = [
    "Matching",
    "MatchingArguments",
    "ProbeTower",
    "default_lora_config",
    "match_affinities",
    "matching_losses",
]
