"""Cards: what a repo says of itself, rendered from the templates of this package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from textwrap import fill
from typing import Any, Literal, Protocol

from ._hub import CARD_MARKER
from .encoders.identity import EncoderIdentity
from .grid import Grid
from .sources import Source

__all__ = ["Results", "adapter_card", "bank_card", "descriptor_card", "hub_repo", "made_of", "probes_card"]

_CITATION = """```bibtex
@article{park2026platonic,
  title   = {Platonic Task Arithmetic},
  author  = {Park and Cho},
  journal = {arXiv preprint arXiv:2610.00929},
  year    = {2026}
}
```"""


class Results(Protocol):
    """Accuracies by task before and after an edit; an `EvaluationReport` is one."""

    @property
    def before(self) -> Mapping[str, float]: ...  # noqa: D102
    @property
    def after(self) -> Mapping[str, float]: ...  # noqa: D102
    @property
    def control_before(self) -> Mapping[str, float]: ...  # noqa: D102
    @property
    def control_after(self) -> Mapping[str, float]: ...  # noqa: D102


def hub_repo(identity: EncoderIdentity | None) -> str | None:
    """The repo id of a model that came from the Hub; None for local ones, whose names mean nothing elsewhere."""
    return identity.repo if identity is not None and identity.revision is not None else None


def descriptor_card(
    *,
    repo_id: str,
    name: str | None,
    grid: Grid,
    sources: Sequence[Source],
    spread: float,
    norm: float,
    base_affinity: bool,
    self_contained: bool,
    license: str | None = None,
    results: Results | None = None,
) -> str:
    """The card of a task descriptor.

    Args:
        repo_id: Where it will be.
        name: The task.
        grid: Its grid.
        sources: What went into it.
        spread: Base spread.
        norm: Frobenius norm of the matrix.
        base_affinity: Whether the base affinity is stored.
        self_contained: Whether the probes are in the repo.
        license: Licence id for the metadata.
        results: Accuracies with the descriptor, for the model index.

    Returns:
        Markdown with a YAML head.
    """
    bases = list(dict.fromkeys(repo for source in sources if (repo := hub_repo(source.base)) is not None))
    taught = any(source.teacher is not None for source in sources)
    at_hand = self_contained or grid.reference is not None
    given = {
        "probes=probes": not at_hand,
        'objective="endpoint"': taught and base_affinity,
        'calibration="spread"': taught and not base_affinity,
    }
    return _render(
        "descriptor.md",
        metadata={
            "library_name": "hf_platonic",
            "tags": ["task-descriptor", "platonic", grid.modality],
            "base_model": bases or None,
            "base_model_relation": "finetune" if bases else None,
            "datasets": _datasets(grid),
            "license": license,
        },
        results=results,
        modality=grid.modality,
        repo_id=repo_id,
        name=name,
        grid=grid,
        origin=fill(_origin(grid, sources), 119, break_long_words=False, break_on_hyphens=False),
        options="".join(f", {option}" for option, needed in given.items() if needed),
        at_hand=at_hand,
        takes_away=bool(sources) and all(source.coefficient < 0 for source in sources),
        sources=_table(sources),
        as_extracted=len(sources) == 1 and not taught and not sources[0].changes,
        spread=spread,
        norm=norm,
        base_affinity=base_affinity,
        self_contained=self_contained,
    )


def adapter_card(
    *,
    repo_id: str,
    kind: Literal["platonic", "lora"],
    modality: str,
    layers: Sequence[str],
    rank: int,
    strength: float | None,
    provenance: Mapping[str, Any] | None,
    base_repo: str | None,
    base_revision: str | None,
    base_class: str | None = None,
    open_clip: bool = False,
    license: str | None = None,
    results: Results | None = None,
) -> str:
    """The card of an operator head, of its plain LoRA form, or of a trained LoRA.

    Args:
        repo_id: Where it will be.
        kind: "platonic" or "lora".
        modality: "image" or "audio".
        layers: Edited layers, with their sites.
        rank: Width of the factors.
        strength: Of an operator head; None for a LoRA, whose factors carry it.
        provenance: What `transfer` and what came after it recorded.
        base_repo: Hub id of the base, or None.
        base_revision: Its commit hash, or None.
        base_class: The base's class in transformers; None: a model that `DualEncoder` alone loads.
        open_clip: Whether it's one of open_clip's.
        license: Licence id for the metadata.
        results: Accuracies with the edit, for the model index.

    Returns:
        Markdown with a YAML head.
    """
    made = dict(provenance or {})
    parts = list(made_of(made))
    terms = [(term, factor) for part, factor in parts for term in part.get("terms", []) if isinstance(term, dict)]
    rows = [
        f"| {term.get('name') or 'unnamed'} | `{term.get('grid')}` | {_described(source)} "
        f"| {source.coefficient * factor:g} |"
        for term, factor in terms
        for source in map(Source.from_dict, term.get("sources", []))
    ]
    rows += [
        f"| {term.get('name') or 'unnamed'} | `{term.get('grid')}` | not recorded | {factor:g} |"
        for term, factor in terms
        if not term.get("sources")
    ]
    head = ["| term | grid | source | coefficient |", "|---|---|---|---|"]
    title = ", ".join(dict.fromkeys(str(term["name"]) for term, _ in terms if term.get("name")))
    trained = made.get("method") == "lora"
    return _render(
        "adapter.md",
        metadata={
            "library_name": "peft",
            "tags": [*(["platonic-operator", "platonic"] if kind == "platonic" else ["lora", "platonic"]), modality],
            "base_model": base_repo,
            "base_model_relation": "adapter" if base_repo else None,
            "pipeline_tag": f"zero-shot-{modality}-classification",
            "license": license,
        },
        results=results,
        modality=modality,
        repo_id=repo_id,
        kind=kind,
        trained=trained,
        title=("Operator head" if kind == "platonic" else "LoRA") + (f": {title}" if title else ""),
        layers=", ".join(f"`{layer}`" for layer in layers[:8]) + (f", … ({len(layers)})" if len(layers) > 8 else ""),
        rank=rank,
        strength=_strength(made, strength),
        made=[*_solver(parts), *_afterwards([part for part, _ in parts] + [made] * ("sum" in made))],
        terms="\n".join([*head, *rows]) if rows else "",
        base_repo=base_repo,
        base_revision=base_revision,
        base_class=base_class,
        loaded=f"{'hf-hub:' if open_clip else ''}{base_repo or 'the/base-model'}",
    )


def bank_card(
    *,
    repo_id: str,
    entries: Sequence[Mapping[str, Any]],
    module: str,
    site: str,
    modality: str,
    base: EncoderIdentity | None,
    license: str | None = None,
) -> str:
    """The card of an operator bank; `entries` have `key`, `folder`, `rank` and `provenance`."""
    repo = hub_repo(base)
    return _render(
        "bank.md",
        metadata={
            "library_name": "peft",
            "tags": ["platonic-operator", "operator-bank", "platonic", modality],
            "base_model": repo,
            "base_model_relation": "adapter" if repo else None,
            "pipeline_tag": f"zero-shot-{modality}-classification",
            "license": license,
        },
        results=None,
        modality=modality,
        repo_id=repo_id,
        endpoints=any(entry["provenance"].get("objective") == "endpoint" for entry in entries),
        entries=[{**entry, "shown": repr(entry["key"]), "terms": _terms(entry["provenance"])} for entry in entries],
        module=module,
        site=site,
        base_repo=repo,
        base_revision=None if base is None else base.revision,
    )


def probes_card(*, repo_id: str, grid: Grid, by_reference: bool, license: str | None = None) -> str:
    """The card of a probe set, a dataset repo."""
    return _render(
        "probes.md",
        metadata={
            "tags": ["probe-set", "platonic", grid.modality],
            "source_datasets": _datasets(grid),
            "license": license,
        },
        results=None,
        modality=grid.modality,
        repo_id=repo_id,
        grid=grid,
        by_reference=by_reference,
    )


def _render(
    template: str, *, metadata: Mapping[str, Any], results: Results | None, modality: str, **fields: Any
) -> str:
    from huggingface_hub import EvalResult, ModelCardData
    from jinja2 import Environment, StrictUndefined

    index = {}
    if results is not None:
        task = f"zero-shot-{modality}-classification"
        index = {
            "model_name": fields["repo_id"].split("/")[-1],
            "eval_results": [
                EvalResult(
                    task_type=task,
                    dataset_type=name,
                    dataset_name=name,
                    metric_type="accuracy",
                    metric_value=round(value, 6),
                    metric_name="zero-shot accuracy",
                )
                for name, value in {**results.after, **results.control_after}.items()
            ],
        }
    data = ModelCardData(**{key: value for key, value in metadata.items() if value is not None}, **index)
    licensed = metadata.get("license") is not None
    environment = Environment(undefined=StrictUndefined, trim_blocks=False, keep_trailing_newline=True)
    text = environment.from_string((files(__package__) / "templates" / template).read_text(encoding="utf-8"))
    return text.render(
        **fields,
        modality=modality,
        card_data=data.to_yaml(),
        marker=CARD_MARKER,
        citation=_CITATION,
        results=_results_table(results),
        license_note="" if licensed else "No licence is stated here: the licences of the models and data above apply.",
    )


def _results_table(results: Results | None) -> str:
    if results is None:
        return ""
    rows = ["## Evaluation", "", "Zero-shot accuracy.", "", "| set | before | after |", "|---|---|---|"]
    for before, after, kind in (
        (results.before, results.after, ""),
        (results.control_before, results.control_after, " (control)"),
    ):
        rows += [f"| {name}{kind} | {before[name]:.3f} | {after[name]:.3f} |" for name in before]
    return "\n".join([*rows, ""])


def _origin(grid: Grid, sources: Sequence[Source]) -> str:
    """What the matrix is, in one or two sentences."""
    size = f"{grid.n} unlabelled {grid.modality} probes and {grid.m} class prompts"
    if not sources:
        return (
            f"By how much the cosines between {size} should change, as a matrix that belongs to no architecture. What "
            "it was made of isn't recorded."
        )
    tuned = "the change of the cosines, `A(fine-tuned) - A(base)`"
    said = "its scores, each probe's mean taken off, at a root mean square of 1"
    taught = [source.teacher is not None for source in sources]
    kinds = [tuned] if not any(taught) else [said] if all(taught) else [f"of a fine-tune {tuned}, of a teacher {said}"]
    then = ", after what the table says was done to it" if any(source.changes for source in sources) else ""
    if len(sources) > 1:
        return (
            f"A signed sum of what was learned elsewhere, as a matrix that belongs to no architecture, for {size}: "
            f"`U = sum_i c_i U_i` over the sources below, with their coefficients `c_i`; `U_i` is {kinds[0]}{then}."
        )
    head = f"What a {'teacher says' if taught[0] else 'fine-tune does'}, as a matrix that belongs to no architecture"
    c = sources[0].coefficient
    return f"{head}: for {size}, {'' if c == 1 else f'{c:g} times '}{kinds[0]}{then}."


def _table(sources: Sequence[Source]) -> str:
    if not sources:
        return "Not recorded."
    changed = any(source.changes for source in sources)
    head = ["base", "fine-tune", "coefficient", *(["what was done to it"] if changed else [])]
    rows = [
        [
            "none" if source.base is None else _named(source.base),
            f"a teacher's scores `{source.teacher}`" if source.tuned is None else _named(source.tuned, adapter=True),
            f"{source.coefficient:g}",
            *(["; ".join(source.changes) or "nothing"] if changed else []),
        ]
        for source in sources
    ]
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def _described(source: Source) -> str:
    """A source in one cell of a table."""
    what = f"a teacher's scores `{source.teacher}`" if source.tuned is None else _named(source.tuned, adapter=True)
    return "; ".join([what, *source.changes])


def _terms(provenance: Mapping[str, Any]) -> str:
    """The terms and sources of a bank's entry in one cell of a table."""
    found = []
    for term in provenance.get("terms", []):
        sources = [f"{s.coefficient:+g} x {_described(s)}" for s in map(Source.from_dict, term.get("sources", []))]
        found.append(f"{term.get('name') or 'unnamed'}: {', '.join(sources) or 'not recorded'}")
    return "; ".join(found) or "not recorded"


def made_of(made: Mapping[str, Any], factor: float = 1.0) -> Iterator[tuple[Mapping[str, Any], float]]:
    """What was solved or trained by itself, each with its factor in a sum of adapters."""
    if "sum" not in made:
        yield made, factor
    for part in made.get("sum", []):
        yield from made_of(part.get("provenance") or {}, factor * part["weight"] * part["strength"])


def _strength(made: Mapping[str, Any], strength: float | None) -> str:
    if strength is not None:
        return f"{strength:g}"
    return f"{made['strength']:g}, part of the weights" if "strength" in made else "part of the weights"


def _solver(parts: Sequence[tuple[Mapping[str, Any], float]]) -> list[tuple[str, str]]:
    """Rows for the table of how an adapter was made, from what its parts recorded."""
    rows = [("sum of adapters", f"{len(parts)}, exact")] if len(parts) > 1 else []
    found: dict[str, list[str]] = {}
    for part, _ in parts:
        for label, value in _settings(part):
            found.setdefault(label, []).append(value)
    return rows + [(label, " / ".join(dict.fromkeys(values))) for label, values in found.items()]


def _settings(made: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    known = {"closed_form": "closed form, one solve on unlabelled probes", "lora": "training on unlabelled probes"}
    yield "solver", known.get(str(made.get("method")), "not recorded")
    if "method" in made:
        combine = f", terms together: {made['combine']}" if "combine" in made else ""
        asked, scale = made.get("objective", "change"), made.get("calibration", "none")
        yield "asked for", f"{asked}, calibration: {scale}{combine}"
    if "preserve" in made:
        kept = made["preserve"]["grids"]
        yield "left alone", "each term's probes with others' prompts" if kept == "default" else f"{len(kept)} grids"
    if "probe_ridge" in made:
        # A number, or the word by which one was chosen for each grid.
        chosen = [f"{ridge:g}" for ridge in made.get("chosen_probe_ridges", [])]
        by = made["probe_ridge"]
        ridge = f"{', '.join(chosen)} by {by}" if isinstance(by, str) else f"{by:g}"
        yield "ridges, relative", f"probes {ridge}, prompts {made['prompt_ridge']:g}"
    if "strength_by" in made:
        yield "strength chosen by", str(made["strength_by"])
    if "prompts" in made:
        yield "prompts", "the receiver's own words"
    if "steps" in made:
        arguments = made["arguments"]
        start = ", from the closed form" if arguments.get("warm_start") else ""
        yield "steps", f"{made['steps']} of {arguments['batch_size']} probes at {arguments['learning_rate']:g}{start}"


def _afterwards(parts: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    """Rows for what happened to an adapter, or its parts, after it was solved."""
    for finish in (finish for made in parts for finish in made.get("finished", [])):
        yield (
            "then",
            f"trained further on {finish['examples']} labelled examples of {finish['classes']} classes "
            f"(`finish_transfer`, penalty {finish['penalty']:g})",
        )
    if any(made.get("changed") for made in parts):
        yield "then", "its weights were changed in a way that isn't recorded, by further training perhaps"


def _named(identity: EncoderIdentity, *, adapter: bool = False) -> str:
    repo, revision = identity.repo, identity.revision
    text = f"`{repo or identity.model_type}`" + (f" at `{revision}`" if revision else "")
    if adapter and identity.adapter:
        text += f" with `{identity.adapter}`" + (
            f" at `{identity.adapter_revision}`" if identity.adapter_revision else ""
        )
    return text


def _datasets(grid: Grid) -> list[str] | None:
    repo = (grid.reference or {}).get("repo")
    return [repo] if isinstance(repo, str) else None
