"""Arguments of the wrong kind, or in the wrong order: each is named, with what came and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_transfers import descriptor
from tiny import tiny_encoder

from hf_platonic import (
    EvaluationSet,
    MatchingArguments,
    OperatorBank,
    TaskDescriptor,
    evaluate,
    extract,
    finish_transfer,
    match_affinities,
    select_probes,
    transfer,
)
from hf_platonic.errors import PlatonicError

TERM = descriptor(n=5)
PROBES = TERM.probes
TARGET = tiny_encoder("siglip", seed=2)
LIST: Any = TaskDescriptor

CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "extract, swapped": (extract, (PROBES, TARGET, TARGET), "`base` to be a DualEncoder, got ProbeSet. Load one with"),
    "extract, a path": (extract, (None, "folder", PROBES), "`tuned` to be a DualEncoder, got str"),
    "extract, pictures": (extract, (tiny_encoder(), TARGET, []), "`probes` to be a ProbeSet, got list. Make one with"),
    "transfer, swapped": (transfer, (TARGET, TERM), "TaskDescriptor terms, got DualEncoder. Pass the desc"),
    "transfer, None": (transfer, (None, TARGET), "TaskDescriptor terms, got NoneType"),
    "transfer, a path": (transfer, (TERM, "folder"), "`target` to be a DualEncoder, got str"),
    "transfer, a model": (transfer, (TERM, TARGET.model), "`target` to be a DualEncoder, got SiglipModel"),
    "match, a model": (match_affinities, (TERM, TARGET.model), "`target` to be a DualEncoder, got SiglipModel"),
    "mean, one": (LIST.mean, (TERM,), "a list of at least one descriptor, got TaskDescriptor"),
    "mean, none": (LIST.mean, ([],), "a list of at least one descriptor, got \\[\\]"),
    "mean, a number": (LIST.mean, ([1],), "`descriptors` to be a TaskDescriptor, got int"),
    "consensus, one": (LIST.consensus, (TERM,), "a list of at least one descriptor, got TaskDescriptor"),
    "consensus, a number": (LIST.consensus, ([TERM, 1],), "`descriptors` to be a TaskDescriptor, got int"),
    "cosine": (TERM.cosine, (3,), "`descriptors` to be a TaskDescriptor, got int"),
    "with_probes": (TERM.with_probes, (None,), "`probes` to be a ProbeSet, got NoneType"),
    "scores, text": (LIST.from_scores, ("abc", PROBES), "scores as a tensor, an array or even nested lists, got str"),
    "scores, ragged": (LIST.from_scores, ([[1.0], [1.0, 2.0]], PROBES), "scores as a tensor, .* got list: exp"),
    "scores, pictures": (LIST.from_scores, ([[1.0]], []), "`probes` to be a ProbeSet, got list"),
    "labels, swapped": (EvaluationSet, ([0] * 5, PROBES), "`probes` to be a ProbeSet, got list. It comes first"),
    "labels, text": (EvaluationSet, (PROBES, ["cat"] * 5), "labels in .0, 3., got 'cat' for input 0"),
    "evaluate, swapped": (evaluate, ({}, TARGET), "`edited` to be a DualEncoder, got dict"),
    "evaluate, a set": (evaluate, (TARGET, PROBES), "`tasks` to be a Mapping, got ProbeSet. Pass ..name"),
    "evaluate, probes": (evaluate, (TARGET, {"a": PROBES}), "`tasks..a..` to be a EvaluationSet, got ProbeSet"),
    "bank, a list": (OperatorBank.solve, ([TERM], TARGET), "`descriptors` to be a Mapping, got list"),
    "bank, a number": (OperatorBank.solve, ({"a": 3}, TARGET), "TaskDescriptor terms, got int"),
    "select, swapped": (select_probes, (PROBES, TARGET, 3), "`encoder` to be a DualEncoder, got ProbeSet"),
    "finish, probes": (finish_transfer, (TARGET, TARGET, PROBES), "`examples` to be a EvaluationSet, got ProbeSet"),
}


@pytest.mark.parametrize("name", CASES)
def test_is_named_with_what_came_and_what_to_do(name: str) -> None:
    function, arguments, message = CASES[name]
    with pytest.raises(PlatonicError, match=f"Expected {message}"):
        function(*arguments)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"probes": "folder"}, "`probes` to be a ProbeSet, got str"),
        ({"probes": ["folder"]}, "`probes` to be a ProbeSet, got str"),
        ({"batch_size": 1.5}, "`batch_size` to be a whole number of at least 1, got 1.5"),
        ({"method": "lora", "lora_config": {"r": 2}}, "`lora_config` to be a PeftConfig, got dict"),
    ],
)
def test_options_of_a_transfer_are_named(options: Any, message: str) -> None:
    if "method" in options:
        options = {**options, "training_args": MatchingArguments(max_steps=1)}
    with pytest.raises(PlatonicError, match=f"Expected {message}"):
        transfer(TERM, tiny_encoder("siglip", seed=2), **options)


def test_an_adapter_name_that_is_taken_is_refused_before_peft_is_asked() -> None:
    target = tiny_encoder("siglip", seed=2)
    model = transfer(TERM, target)
    with pytest.raises(PlatonicError, match=r"(?s)a new adapter name, got 'default', which edits .*pass another"):
        transfer(TERM, target)
    assert model.active_adapters == ["default"]
    with pytest.raises(PlatonicError, match="`strengths` to be a dict, got list"):
        model.set_strengths(["default"])
