from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_images

from hf_platonic.affinities import row_centred, spread
from hf_platonic.descriptor import TaskDescriptor
from hf_platonic.errors import PlatonicError, PromptError
from hf_platonic.objectives import wanted_change
from hf_platonic.probes import ProbeSet
from hf_platonic.sources import Source

NAMES = ("cat", "dog", "bird")
PROBES = ProbeSet(tiny_images(5), class_names=NAMES, templates=("a {}",))
LOGITS = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


def test_neither_temperature_nor_offset_nor_container_matters() -> None:
    found = TaskDescriptor.from_scores(LOGITS, PROBES, name="teacher")
    assert found.delta.dtype == torch.float32
    assert found.spread == 1.0
    assert spread(found.delta) == pytest.approx(1.0)
    for scores in (7.5 * LOGITS + torch.arange(5)[:, None], LOGITS.double().numpy(), LOGITS.tolist()):
        torch.testing.assert_close(TaskDescriptor.from_scores(scores, PROBES).delta, found.delta, rtol=1e-5, atol=1e-6)
    assert torch.equal(found.delta.argmax(dim=1), LOGITS.argmax(dim=1))


def test_the_target_is_asked_for_the_teachers_scores_in_its_own_scale() -> None:
    affinity = 0.05 * torch.randn(5, 3, generator=torch.Generator().manual_seed(1)) + 0.2
    found = TaskDescriptor.from_scores(LOGITS, PROBES)
    for factor in (1.0, 2.0):
        change = wanted_change([factor * found], affinity, objective="endpoint", calibration="spread")
        end = row_centred(affinity) + change
        torch.testing.assert_close(end, factor * spread(affinity) * found.delta, rtol=1e-5, atol=1e-6)


def test_columns_are_found_by_name() -> None:
    wide = torch.cat([LOGITS[:, [2, 0]], torch.zeros(5, 1), LOGITS[:, [1]]], dim=1)
    found = TaskDescriptor.from_scores(wide, PROBES, class_names=["bird", "cat", "car", "dog"])
    assert torch.equal(found.delta, TaskDescriptor.from_scores(LOGITS, PROBES).delta)


def test_is_saved_and_loaded_like_any_other(tmp_path: Path) -> None:
    found = TaskDescriptor.from_scores(LOGITS, PROBES, name="teacher")
    found.save_pretrained(tmp_path)
    loaded = TaskDescriptor.from_pretrained(tmp_path)
    assert torch.equal(loaded.delta, found.delta)
    assert loaded.base_affinity is not None
    assert (loaded.spread, loaded.name, loaded.sources) == (1.0, "teacher", found.sources)


def test_teachers_are_told_apart_and_cancel_like_fine_tunes() -> None:
    one, other = (TaskDescriptor.from_scores(scores, PROBES) for scores in (LOGITS, LOGITS.flip(0)))
    assert [source.coefficient for source in (2 * one - other).sources] == [2.0, -1.0]
    assert (one + other - other).sources == one.sources


def test_a_source_is_a_fine_tune_or_a_teacher() -> None:
    with pytest.raises(PlatonicError, match="a fine-tune with its base or a teacher's scores, got parts of both"):
        Source(None, None)


@pytest.mark.parametrize(
    ("scores", "names", "error", "message"),
    [
        (LOGITS[:4], None, PlatonicError, r"scores of shape \(5, 3\), .* got \(4, 3\)"),
        (LOGITS, ["cat", "dog", "car"], PromptError, r"got none for \['bird'\]"),
        (np.zeros((5, 4)), [*NAMES, "cat"], PromptError, r"several for \['cat'\]"),
        (torch.full((5, 3), float("nan")), None, PlatonicError, "finite scores"),
        (torch.ones(5, 3), None, PlatonicError, "scores that tell classes apart"),
    ],
)
def test_refuses(scores: Any, names: list[str] | None, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TaskDescriptor.from_scores(scores, PROBES, class_names=names)
