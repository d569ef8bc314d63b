"""Every family, measured on a tiny random model of it; and the library's pipelines on what comes out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_checks import PIPELINES, PLACES, check, support_row, task_of
from tiny import FAMILIES, SOURCES, tiny_clips, tiny_encoder, tiny_images, tiny_parts
from transformers import pipeline

from hf_platonic.encoders import families as table
from hf_platonic.transfers import transfer

PLACES_OF = {family: {"output", "input", "features", "text"} for family in FAMILIES}
PLACES_OF |= {family: {"input", "features", "text"} for family in ("siglip", "siglip2", "siglip2_naflex")}
PLACES_OF |= {"align": {"text"}, "tipsv2": set(), "xclip": set()}
TABLE = (Path(__file__).parent.parent / "docs" / "families.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("family", [*FAMILIES, *SOURCES])
def test_a_family_is_read_and_edited_exactly(family: str) -> None:
    found = check(family)
    if family != "xclip":
        assert found.same_order
        assert found.order is not None
        assert found.order < 1e-4
    assert found.batch < 2e-6
    assert found.permuted < 2e-6
    assert set(found.edits) == PLACES_OF[family]
    for made in found.edits.values():
        assert made.moved > 1e-3
        assert made.live < 1e-5
        assert made.merged < 1e-5
        assert made.reloaded < 1e-6
        assert made.restored
        assert made.other_tower < 1e-6
    assert support_row(family, found) in TABLE, "out of date: python docs/families.py"


def test_the_worked_example_of_an_own_family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "_FAMILIES", dict(table._FAMILIES))
    (code,) = re.findall(r"```python\n(.*?)```", TABLE, flags=re.DOTALL)
    model, processor = tiny_parts()
    names: dict[str, Any] = {"config": model.config.to_dict(), "processor": processor}
    del names["config"]["model_type"]
    exec(code, names)
    encoder = names["encoder"]
    assert encoder.site.module == "last"
    verified = transfer(task_of("siglip"), encoder).peft_config["default"].provenance["verified"]
    assert max(verified["live"], verified["merged"]) < 1e-5


def scores(model: Any, processor: Any, kind: str) -> list[float]:
    """A pipeline's scores of three labels, in the order of the labels, for each of two probes."""
    labels = ["cat", "snow", "bird"]
    if kind == "audio":
        run = pipeline(
            "zero-shot-audio-classification",
            model=model,
            tokenizer=processor.tokenizer,
            feature_extractor=processor.feature_extractor,
        )
        found = [run(clip.array.astype(np.float64), candidate_labels=labels) for clip in tiny_clips(2)]
    else:
        run = pipeline(
            "zero-shot-image-classification",
            model=model,
            tokenizer=processor.tokenizer,
            image_processor=processor.image_processor,
        )
        found = [run(image, candidate_labels=labels) for image in tiny_images(2)]
    return [dict((entry["label"], entry["score"]) for entry in one)[label] for one in found for label in labels]


@pytest.mark.parametrize(
    ("family", "place"),
    [(family, place) for family in PIPELINES for place in ("probe", "text") if (family, place) != ("align", "probe")],
)
def test_pipelines_run_on_the_adapted_and_on_the_merged_model(family: str, place: str) -> None:
    kind = "audio" if family.startswith("clap") else "image"
    task, options = task_of(family), {} if place == "probe" else PLACES["text"]
    base = tiny_encoder(family, seed=2)
    before = scores(base.model, base.processor, kind)
    live = transfer(task, base, strength=3.0, **options).get_base_model()
    adapted = scores(live, base.processor, kind)
    plain = transfer(task, tiny_encoder(family, seed=2), strength=3.0, **options).merge_and_unload()
    merged = scores(plain, base.processor, kind)
    np.testing.assert_allclose(adapted, merged, rtol=0, atol=2e-5)
    assert np.abs(np.subtract(adapted, before)).max() > 1e-4
