"""Cards: what a repo says of itself, rendered from the templates of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any, Literal, Protocol

from ._hub import CARD_MARKER
from .encoders.identity import EncoderIdentity
from .grid import Grid

__all__ = ["Results", "adapter_card", "bank_card", "descriptor_card", "hub_repo", "probes_card"]

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
    sources: Sequence[tuple[EncoderIdentity, EncoderIdentity, float]],
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
        sources: Base, fine-tune and coefficient of each source.
        spread: Base spread.
        norm: Frobenius norm of the matrix.
        base_affinity: Whether the base affinity is stored.
        self_contained: Whether the probes are in the repo.
        license: Licence id for the metadata.
        results: Accuracies with the descriptor, for the model index.

    Returns:
        Markdown with a YAML head.
    """
    bases = list(dict.fromkeys(repo for base, _, _ in sources if (repo := hub_repo(base)) is not None))
    rows = [
        f"| {_named(base)} | {_named(tuned, adapter=True)} | {coefficient:g} |" for base, tuned, coefficient in sources
    ]
    table = "\n".join(["| base | fine-tune | coefficient |", "|---|---|---|", *rows]) if rows else "Not recorded."
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
        sources=table,
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
    subfolder: str | None = None,
    license: str | None = None,
    results: Results | None = None,
) -> str:
    """The card of an operator head or of its plain LoRA form.

    Args:
        repo_id: Where it will be.
        kind: Which of the two.
        modality: "image" or "audio".
        layers: Edited layers, with their sites.
        rank: Width of the factors.
        strength: Of an operator head; None for a LoRA, whose factors carry it.
        provenance: What `transfer` recorded.
        base_repo: Hub id of the base, or None.
        base_revision: Its commit hash, or None.
        subfolder: Of the adapter in the repo.
        license: Licence id for the metadata.
        results: Accuracies with the edit, for the model index.

    Returns:
        Markdown with a YAML head.
    """
    made = dict(provenance or {})
    terms = [term for term in made.get("terms", []) if isinstance(term, dict)]
    rows = [
        f"| {term.get('name') or 'unnamed'} | `{term.get('grid')}` "
        f"| {_named(EncoderIdentity.from_dict(s['tuned']), adapter=True)} | {s['coefficient']:g} |"
        for term in terms
        for s in term.get("sources", [])
    ]
    head = ["| term | grid | source | coefficient |", "|---|---|---|---|"]
    title = ", ".join(str(term.get("name")) for term in terms if term.get("name"))
    ridges = [made.get(key) for key in ("probe_ridge", "prompt_ridge")]
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
        title=("Operator head" if kind == "platonic" else "LoRA") + (f": {title}" if title else ""),
        layers=", ".join(f"`{layer}`" for layer in layers),
        rank=rank,
        strength="folded in" if strength is None else f"{strength:g}",
        method=str(made.get("method", "not recorded")).replace("_", " "),
        ridges=f"probes {ridges[0]:g}, prompts {ridges[1]:g}" if None not in ridges else "not recorded",
        terms="\n".join([*head, *rows]) if rows else "",
        base_repo=base_repo,
        base_revision=base_revision,
        subfolder=subfolder,
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
    """The card of an operator bank; `entries` have `key`, `folder` and `rank`."""
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
        entries=entries,
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
