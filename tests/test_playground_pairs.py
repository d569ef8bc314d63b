"""The playground's eight models as sources and targets of one another; each adapter's base is its model without it."""

from __future__ import annotations

import pytest
import torch

from hf_platonic import DualEncoder, ProbeSet, extract, playground, transfer
from hf_platonic.encoding import encode_columns, encode_probes

TASKS = {"image": playground.IMAGE_TASKS[0], "audio": playground.AUDIO_TASKS[0]}


def load(name: str, *, task: str | None = None) -> DualEncoder:
    adapter = None if task is None else playground.adapter_path(name, task)
    return DualEncoder.from_pretrained(playground.model_path(name), adapter=adapter)


@pytest.mark.parametrize("source", playground.model_names())
def test_every_model_gives_to_every_other(source: str) -> None:
    modality = playground.BLUEPRINTS[source].modality
    task = playground.load_task(TASKS[modality])
    probes = ProbeSet(task.split("probes").inputs[:48], class_names=task.class_names, templates=task.templates[:1])
    descriptor = extract(None, load(source, task=task.name), probes)
    assert float(descriptor.delta.abs().max()) > 1e-2
    for name in playground.model_names(modality):
        if name == source:
            continue
        target = load(name)
        columns = encode_columns(target, probes.columns)
        before = encode_probes(target, probes).unit @ columns.T
        model = transfer(descriptor, target, strength=1.0)
        verified = model.peft_config["default"].provenance["verified"]
        assert max(verified["live"], verified["merged"]) < 1e-4
        moved = encode_probes(target, probes).unit @ columns.T - before
        # The change goes where the source's went, from which it differs by what this model can't say.
        assert float(torch.nn.functional.cosine_similarity(moved.flatten(), descriptor.delta.flatten(), dim=0)) > 0.3


def test_a_base_loaded_apart_gives_the_same_descriptor() -> None:
    task = playground.load_task(TASKS["image"])
    probes = ProbeSet(task.split("probes").inputs[:16], class_names=task.class_names, templates=task.templates[:1])
    tuned = load("siglip2", task=task.name)
    one, two = extract(None, tuned, probes), extract(load("siglip2"), tuned, probes)
    torch.testing.assert_close(one.delta, two.delta, rtol=0, atol=1e-5)
    assert one.sources == two.sources
