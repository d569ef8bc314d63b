"""Data on the command line: which inputs and which prompts, from the Hub, a folder or a file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import probe_sources as sources
from ._processes import process_state
from .errors import ProbeError, PromptError
from .evaluation import EvaluationSet
from .grid import PLAIN
from .probes import ProbeSet

__all__ = ["add_data_options", "evaluation_set", "probe_set"]

_BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def add_data_options(parser: argparse.ArgumentParser, *, required: bool = True, labels: bool = False) -> None:
    """Adds the options that `probe_set` (or, with labels, `evaluation_set`) reads."""
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        required=required,
        metavar="DATA",
        help="data set on the Hub, folder (of images, of Parquet, or a saved probe set), or .parquet/.json/.csv file",
    )
    group.add_argument("--config", help="configuration of the data set")
    group.add_argument("--split", default="test" if labels else "train", help="split (default: %(default)s)")
    group.add_argument("--revision", help="branch, tag or commit of a data set on the Hub")
    group.add_argument("--column", help="column with the inputs; by default the one of an image or audio type")
    group.add_argument("--n", type=int, help="draw so many rows")
    group.add_argument("--seed", type=int, default=42, help="of that draw (default: %(default)s)")
    if labels:
        group.add_argument("--label-column", help="column with the labels; by default the one of a class type")
    else:
        group.add_argument("--streaming", action="store_true", help="read the data set as a stream, without its files")
        group.add_argument("--limit", type=int, help="of a stream: its first so many rows")
    words = parser.add_argument_group("prompts (by default the class names that the data set states)")
    which = words.add_mutually_exclusive_group()
    which.add_argument("--class-names", nargs="+", metavar="NAME")
    which.add_argument("--classes", type=Path, metavar="FILE", help="class names, one a line")
    which.add_argument("--prompts", type=Path, metavar="FILE", help="whole prompts, one a line")
    words.add_argument(
        "--template", action="append", metavar="TEXT", help='e.g. "a photo of a {}."; may be given several times'
    )


def probe_set(options: argparse.Namespace) -> ProbeSet:
    """The probe set that the options name. The main process loads, and downloads, first.

    Raises:
        ProbeError: If it can't be found or read, or the options don't fit each other.
        PromptError: If there are no prompts.
    """
    if options.limit is not None and not options.streaming:
        raise ProbeError("Expected --limit beside --streaming only. Use --n to draw rows of a loaded data set.")
    folder = Path(options.data)
    if (folder / sources.CONFIG_NAME).is_file():
        with process_state().main_process_first():
            probes = ProbeSet.from_pretrained(folder)
        words = _given_words(options)
        return probes.with_prompts(**words) if words else probes
    data, commit = _loaded(options, streaming=options.streaming)
    words = _words(options, data)
    drawn: dict[str, Any] = {"column": options.column, "n": options.n, "seed": options.seed}
    if options.streaming:
        stream = data if options.limit is None else data.take(options.limit)
        return ProbeSet.from_dataset(stream, **drawn, **words)
    if commit is None:
        return ProbeSet.from_dataset(data, **drawn, **words)
    # Through the Hub again, from the cache by now, so that the set can travel by reference.
    where = {"name": options.config, "split": options.split, "revision": commit}
    return ProbeSet.from_hub(options.data, **where, **drawn, **words)


def evaluation_set(options: argparse.Namespace) -> EvaluationSet:
    """The inputs, prompts and labels that the options name. The main process loads, and downloads, first.

    Raises:
        ProbeError: If they can't be found or read, or labels aren't classes.
        PromptError: If there are no prompts.
    """
    data, _ = _loaded(options, streaming=False)
    words = _words(options, data)
    column = options.label_column or _class_column(data) or "label"
    if column not in data.features:
        raise ProbeError(
            f"Expected a column of labels, found none among {sorted(data.features)}. Name it with --label-column."
        )
    if options.n is not None:
        data = data.select(sources.drawn_rows(len(data), None, options.n, options.seed))
    probes = ProbeSet.from_dataset(data, column=options.column, **words)
    positions = {name: position for position, name in enumerate(probes.class_names)}
    labels = data.with_format(None).select_columns([column])[column]
    return EvaluationSet(probes, [_label(value, positions, index) for index, value in enumerate(labels)])


def _label(value: object, positions: dict[str, int], index: int) -> int:
    if isinstance(value, int):
        return value
    if isinstance(value, str) and value in positions:
        return positions[value]
    raise ProbeError(
        f"Expected labels to be class numbers or one of {list(positions)[:5]}…, got {value!r} for row {index}. "
        "Name the right column with --label-column, or the classes with --class-names.",
        index=index,
    )


def _loaded(options: argparse.Namespace, *, streaming: bool) -> tuple[Any, str | None]:
    """One split, and its commit where it's on the Hub."""
    from datasets import load_dataset
    from datasets.exceptions import DatasetGenerationError

    path = Path(options.data)
    with process_state().main_process_first():
        if path.is_file():
            builder = _BUILDERS.get(path.suffix)
            if builder is None:
                raise ProbeError(f"Expected a file of type {', '.join(_BUILDERS)}, got {path}.")
            # A lone file is one split, which `datasets` calls "train".
            try:
                return load_dataset(builder, data_files=str(path), split="train", streaming=streaming), None
            except DatasetGenerationError as error:
                why = error.__cause__ or error
                raise ProbeError(f"Expected a readable {builder} file, got {path}: {why}. Repair it.") from error
        if path.is_dir():
            return load_dataset(str(path), options.config, split=options.split, streaming=streaming), None
        commit = sources.commit_of(options.data, options.revision, None)
        split = sources.load_split(
            options.data, options.config, options.split, commit, None, None, streaming=streaming
        )
        return split, commit


def _words(options: argparse.Namespace, data: Any) -> dict[str, Any]:
    """Class names with templates, or prompts, as `ProbeSet` takes them."""
    given = _given_words(options)
    if given:
        return given
    column = _class_column(data)
    if column is None:
        raise PromptError(
            "Expected class names, and the data set states none. Pass --class-names, --classes FILE or --prompts FILE."
        )
    return {"class_names": list(data.features[column].names), "templates": options.template or PLAIN}


def _given_words(options: argparse.Namespace) -> dict[str, Any]:
    if options.prompts is not None:
        if options.template:
            raise PromptError("Expected --prompts or --template, got both. Templates go with class names.")
        return {"prompts": _lines(options.prompts)}
    names = options.class_names if options.classes is None else _lines(options.classes)
    return {} if names is None else {"class_names": names, "templates": options.template or PLAIN}


def _class_column(data: Any) -> str | None:
    features = data.features or {}
    found = [key for key, feature in features.items() if type(feature).__name__ == "ClassLabel"]
    return found[0] if len(found) == 1 else None


def _lines(path: Path) -> Sequence[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
