from __future__ import annotations

import pytest
import torch
from test_extraction import PROMPTS, pair
from tiny import tiny_encoder, tiny_images

from hf_platonic.encoders.encoder import DualEncoder
from hf_platonic.encoding import encode_columns, encode_probes
from hf_platonic.errors import PlatonicError
from hf_platonic.evaluation import (
    EvaluationSet,
    accuracy,
    evaluate,
    normalized_accuracy,
    retention,
    zero_shot_accuracy,
)
from hf_platonic.extraction import extract
from hf_platonic.probes import ProbeSet
from hf_platonic.transfers import transfer


def labelled(encoder: DualEncoder, n: int = 12, seed: int = 4) -> EvaluationSet:
    """Inputs labelled with what the encoder itself answers."""
    probes = ProbeSet(tiny_images(n, seed=seed), prompts=PROMPTS)
    answers = encode_probes(encoder, probes).unit @ encode_columns(encoder, probes.columns).T
    return EvaluationSet(probes, answers.argmax(dim=1).tolist())


def test_accuracy_of_known_cases() -> None:
    eye = torch.eye(3)
    assert accuracy(eye, eye, [0, 1, 2]) == 1.0
    assert accuracy(eye, eye, [1, 2, 0]) == 0.0
    assert accuracy(eye, eye, [0, 1, 0]) == pytest.approx(2 / 3)


def test_zero_shot_accuracy_counts_the_encoders_answers() -> None:
    base, tuned = pair()
    data = labelled(base)
    assert zero_shot_accuracy(base, data, batch_size=5) == 1.0
    expected = accuracy(
        encode_probes(tuned, data.probes).unit, encode_columns(tuned, data.probes.columns), data.labels
    )
    assert zero_shot_accuracy(tuned, data) == expected


def test_report_of_an_edit_with_controls_and_references() -> None:
    base, tuned = pair("siglip")
    task = labelled(tuned)
    control = labelled(base, seed=5)
    descriptor = extract(base, tuned, ProbeSet(tiny_images(30, seed=6), prompts=PROMPTS))
    zero_shot = zero_shot_accuracy(base, task)
    transfer(descriptor, base, strength=1.0)
    report = evaluate(base, {"t": task}, control={"c": control}, own={"t": 1.0}, fine_tuned={"t": 1.0})
    assert report.before == {"t": zero_shot}
    assert report.control_before == {"c": 1.0}
    assert report.after == {"t": zero_shot_accuracy(base, task)}
    assert report.mean_gain == pytest.approx(report.after["t"] - zero_shot)
    assert report.control_change == pytest.approx(report.control_after["c"] - 1.0)
    assert report.normalized_accuracy == report.after["t"]
    assert report.retention == pytest.approx(report.gain["t"] / (1.0 - zero_shot))
    assert report.to_dict()["mean_gain"] == report.mean_gain
    given = evaluate(base, {"t": task}, base=tiny_encoder("siglip"), control={"c": control})
    assert (given.before, given.after, given.control_after) == (report.before, report.after, report.control_after)
    assert given.retention is None


def test_retention_sums_before_dividing() -> None:
    zero_shot = {"a": 0.2, "b": 0.5}
    assert retention({"a": 0.4, "b": 0.5}, {"a": 0.6, "b": 0.5}, zero_shot) == pytest.approx(0.5)
    assert retention({"a": 0.1, "b": 0.5}, {"a": 0.6, "b": 0.5}, zero_shot) == pytest.approx(-0.25)
    with pytest.raises(PlatonicError, match="summed gain of 0"):
        retention(zero_shot, zero_shot, zero_shot)


def test_normalized_accuracy_is_a_mean_of_ratios() -> None:
    assert normalized_accuracy({"a": 0.5, "b": 0.9}, {"a": 1.0, "b": 0.9}) == pytest.approx(0.75)
    with pytest.raises(PlatonicError, match="above 0 for 'a', got 0"):
        normalized_accuracy({"a": 0.5}, {"a": 0})


def test_refuses_what_cannot_be_judged() -> None:
    base, _ = pair()
    data = labelled(base)
    with pytest.raises(PlatonicError, match="at least one task"):
        evaluate(base, {}, base=base)
    with pytest.raises(PlatonicError, match="Expected `base=`"):
        evaluate(base, {"t": data})
    with pytest.raises(PlatonicError, match=r"in `own`, got none for \['t'\]"):
        evaluate(base, {"t": data}, base=base, own={})
    with pytest.raises(PlatonicError, match=r"one label per input \(12\), got 11"):
        EvaluationSet(data.probes, data.labels[1:])
    with pytest.raises(PlatonicError, match=r"labels in \[0, 3\), got 3 for input 1"):
        EvaluationSet(data.probes, [0, 3, *data.labels[2:]])
