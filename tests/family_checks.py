"""What is measured on a tiny model of each family: for `test_families.py`, and for the table of `docs/families.py`."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import Any

import torch
from peft import PeftModel
from test_extraction import pair
from tiny import tiny_encoder, tiny_probes
from torch import Tensor

from hf_platonic.descriptor import TaskDescriptor
from hf_platonic.encoders import DualEncoder, save_open_clip
from hf_platonic.encoders.open_clip_models import OpenClipConfig
from hf_platonic.errors import EncoderError
from hf_platonic.extraction import extract
from hf_platonic.probes import ProbeSet
from hf_platonic.solutions import solve_operators
from hf_platonic.transfers import transfer

PROMPTS = ["a cat", "a dog in the snow", "one bird"]
PLACES: dict[str, dict[str, Any]] = {
    "output": {"site": "output"},
    "input": {"site": "input"},
    "features": {"site": "features"},
    "text": {"tower": "text"},
}

# What transformers' two zero-shot pipelines take; the others act through `forward` and the getters.
PIPELINES = (
    *("clip", "metaclip_2", "altclip", "chinese_clip", "clipseg", "blip"),
    *("siglip", "siglip2", "siglip2_naflex", "clap", "align"),
)


@dataclass
class Edit:
    """One way to edit a family: largest differences of unit embeddings."""

    moved: float
    """Of edited and unedited embeddings: nothing below means anything unless this is large."""
    live: float
    """Of the live adapter and the operator."""
    merged: float
    """Of the merged model and the live adapter; 0 where an edit stays live."""
    reloaded: float
    """Of the merged model, saved and loaded by its plain class, and the merged one; or of the live adapter."""
    restored: bool
    """Whether unmerging gave every bit back."""
    other_tower: float
    """How far the other tower's embeddings moved."""


@dataclass
class Checks:
    """All that is measured of one family."""

    name: str
    cls: str
    layers: dict[str, str]
    order: float | None
    """Of the model's own logits and the cosines, each row centred and scaled; None where `forward` has no such."""
    same_order: bool | None
    batch: float
    """Of embeddings in one batch and one by one, probes and prompts."""
    permuted: float
    """Of a descriptor's rows and columns and those of permuted probes and prompts."""
    edits: dict[str, Edit] = field(default_factory=dict)


def own_logits(encoder: DualEncoder, probes: list[Any]) -> Tensor | None:
    """What the model's own `forward` says, shape (n, m)."""
    if encoder.family.name == "X-CLIP":  # adapts each prompt to the video
        return None
    inputs = {**encoder.preprocess(probes), **encoder._prompt_inputs(encoder._tokenise(PROMPTS))}
    if encoder.family.name.startswith("open_clip"):
        with torch.no_grad():
            own: Tensor = encoder.model.get_logits(inputs["pixel_values"], inputs["input_ids"])[0]
        return own
    itc = encoder.family.name.startswith("BLIP image-text")
    with torch.no_grad():
        output = encoder.model(**inputs, **({"use_itm_head": False} if itc else {}))
    if itc:
        logits: Tensor = output.itm_score
    else:
        logits = output.logits_per_audio if encoder.modality == "audio" else output.logits_per_image
    return logits


def standardised(rows: Tensor) -> Tensor:
    """Rows without their mean and scale, which is all that a softmax's order doesn't see."""
    centred = rows - rows.mean(dim=1, keepdim=True)
    return centred / centred.norm(dim=1, keepdim=True)


def task_of(family: str, *, order: list[int] | None = None, prompts: list[str] = PROMPTS) -> TaskDescriptor:
    """A descriptor made by the family itself."""
    base, tuned = pair(family)
    probes = ProbeSet(tiny_probes(base, 8), prompts=prompts)
    return extract(base, tuned, probes if order is None else probes.select(order))


def embeddings(encoder: DualEncoder, probes: list[Any]) -> dict[str, Tensor]:
    """Of both towers."""
    return {"probe": encoder.encode_probes(probes).unit, "text": encoder.encode_prompts(PROMPTS)}


def distance(one: Tensor, other: Tensor) -> float:
    """The largest difference."""
    return float((one - other).abs().max())


def edit(family: str, task: TaskDescriptor, place: dict[str, Any]) -> Edit | None:
    """One edit, live, merged, reloaded and taken back; None where the family refuses it."""
    target = tiny_encoder(family, seed=2)
    try:
        view = target.at(**place)
    except EncoderError:
        return None
    state = {key: value.clone() for key, value in target.model.state_dict().items()}
    probes = tiny_probes(target, 8)
    (operator,) = solve_operators([task], target, **place)
    tower, other = (view.site.tower, "text" if view.site.tower == "probe" else "probe")
    before = embeddings(target, probes)
    design = view.encode_probes(probes).design if tower == "probe" else before["text"]
    expected = operator.apply(before[tower], design, strength=0.7)

    model = transfer(task, target, strength=0.7, **place)
    live = merged = embeddings(target, probes)
    with tempfile.TemporaryDirectory() as folder:
        if place.get("site") == "features":
            model.save_pretrained(folder, save_embedding_layers=False)
            loaded = PeftModel.from_pretrained(tiny_encoder(family, seed=2).model, folder)
            again = DualEncoder(loaded, target.processor)
        else:
            model.merge_adapter()
            merged = embeddings(target, probes)
            model.unmerge_adapter()
            again = saved_and_loaded(merged_model(family, task, place), target.processor, folder)
        reloaded = embeddings(again, probes)
    restored = model.unload().state_dict()
    return Edit(
        moved=distance(expected, before[tower]),
        live=distance(live[tower], expected),
        merged=distance(merged[tower], live[tower]),
        reloaded=max(distance(reloaded[key], merged[key]) for key in reloaded),
        restored=restored.keys() == state.keys() and all(torch.equal(v, state[k]) for k, v in restored.items()),
        other_tower=distance(live[other], before[other]),
    )


def saved_and_loaded(plain: Any, processor: Any, folder: str) -> DualEncoder:
    """The model from its files, by its plain class."""
    if isinstance(plain.config, OpenClipConfig):
        save_open_clip(plain, folder)
        return DualEncoder.from_pretrained(f"local-dir:{folder}")
    plain.save_pretrained(folder)
    return DualEncoder(type(plain).from_pretrained(folder, dtype=torch.float32), processor)


def merged_model(family: str, task: TaskDescriptor, place: dict[str, Any]) -> Any:
    """The family's plain model with the task written in."""
    model = transfer(task, tiny_encoder(family, seed=2), strength=0.7, **place)
    assert isinstance(model, PeftModel)
    return model.merge_and_unload()


def check(family: str) -> Checks:
    """Everything about one of `tiny.FAMILIES` or `tiny.SOURCES`."""
    encoder = tiny_encoder(family)
    probes = tiny_probes(encoder, 4)
    together = embeddings(encoder, probes)
    alone = torch.cat([encoder.encode_probes([probe]).unit for probe in probes])
    batch = max(
        distance(together["probe"], alone), distance(together["text"], encoder.encode_prompts(PROMPTS, batch_size=1))
    )
    cosines, logits = together["probe"] @ together["text"].T, own_logits(encoder, probes)
    task = task_of(family)
    rows, columns = [5, 2, 7, 0, 1, 6, 3, 4], [2, 0, 1]
    permuted = task_of(family, order=rows, prompts=[PROMPTS[i] for i in columns])
    found = Checks(
        name=encoder.family.name,
        cls=type(encoder.model).__name__,
        layers={},
        order=None if logits is None else distance(standardised(logits), standardised(cosines)),
        same_order=None if logits is None else torch.equal(logits.argsort(dim=1), cosines.argsort(dim=1)),
        batch=batch,
        permuted=distance(permuted.delta, task.delta[rows][:, columns]),
    )
    for name, place in PLACES.items():
        made = edit(family, task, place)
        if made is not None:
            found.edits[name] = made
            found.layers[name] = encoder.at(**place).site.module
    return found


LABELS = {
    "siglip": "SigLIP",
    "siglip2": "SigLIP 2 (fixed resolution)",
    "siglip2_naflex": "SigLIP 2 (NaFlex)",
    "clap": "CLAP",
    "clap_fused": "CLAP (fused)",
    "open_clip": "open_clip: CLIP",
    "open_clip_eva": "open_clip: EVA-CLIP",
    "open_clip_siglip": "open_clip: SigLIP",
    "open_clip_resnet": "open_clip: CLIP's ResNets",
}
HEADER = (
    "| family | class | source | probe tower as target | text tower as target | order of `forward`'s logits | "
    "largest deviation | pipeline |",
    "|---|---|---|---|---|---|---|---|",
)


def support_row(family: str, found: Checks) -> str:
    """One row of the table, as Markdown; a deviation is given as the power of ten it stays below."""
    places = [name for name in ("output", "input") if name in found.edits]
    probe = f"{' or '.join(places)} of `{found.layers[places[0]]}`" if places else "no"
    probe += ", or features" if "features" in found.edits else ""
    text = f"`{found.layers['text']}`" if "text" in found.edits else "no"
    edits = found.edits.values()
    worst = max([found.batch, found.permuted, *(max(e.live, e.merged, e.reloaded, e.other_tower) for e in edits)])
    bound = next(f"1e-{power}" for power in range(5, 0, -1) if worst < 10.0**-power)
    cells = [
        LABELS.get(family, found.name),
        f"`{found.cls}`",
        "yes",
        probe,
        text,
        {True: "the same", False: "another", None: "not comparable"}[found.same_order],
        f"< {bound}",
        "yes" if family in PIPELINES else "-",
    ]
    return f"| {' | '.join(cells)} |"
