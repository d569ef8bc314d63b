"""Where probes come from and are kept: a `datasets.Dataset`, the Hub, or a folder with a Parquet file."""

from __future__ import annotations

import io
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ._files import read_json, write_atomic, write_json
from ._processes import gather_objects, process_state
from .encoders.media import modality_of
from .errors import DescriptorFormatError, GridMismatchError, ProbeError

__all__ = [
    "Rows",
    "checked_rows",
    "commit_of",
    "dataset_rows",
    "drawn_rows",
    "load_split",
    "one_modality",
    "read_config",
    "read_rows",
    "verify_hashes",
    "write_folder",
    "write_reference",
]

SCHEMA_VERSION = 1
CONFIG_NAME = "probes_config.json"
ROWS_NAME = "probes.parquet"


class Rows(Sequence[Any]):
    """Some rows of a source that is read lazily, and whose items are all of one modality.

    Args:
        source: Anything with `source[row]`: a data set, an Arrow column, a list.
        rows: The rows, in order.
        modality: "image" or "audio".
        column: Key within a row, if rows are records.
    """

    def __init__(self, source: Any, rows: Sequence[int], modality: str, column: str | None = None) -> None:
        self._source, self._rows, self.modality, self._column = source, rows, modality, column

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        value = self._source[int(self._rows[index])]
        if self._column is not None:
            value = value[self._column]
        return value.as_py() if hasattr(value, "as_py") else value


def one_modality(inputs: Any) -> str:
    """The modality that all inputs have; lazy rows know theirs.

    Raises:
        ProbeError: If there are several, or one that can't be told; names the probe.
    """
    if isinstance(inputs, Rows):
        return inputs.modality
    first = ""
    for index, probe in enumerate(inputs):
        try:
            found = modality_of(probe)
        except ProbeError as error:
            raise ProbeError(f"Can't read probe {index}. {error}", index=index) from error.__cause__
        first = first or found
        if found != first:
            raise ProbeError(
                f"Expected probes of one modality, got {found} for probe {index} after {first}. Make two sets.",
                index=index,
            )
    return first


def verify_hashes(found: Sequence[str], expected: Sequence[str], source: str) -> None:
    """Nothing, where the content is what it was.

    Raises:
        GridMismatchError: Naming the first probe that differs.
    """
    if len(found) != len(expected):
        raise GridMismatchError(f"Expected {len(expected)} probes from {source}, got {len(found)}.")
    for index, (got, wanted) in enumerate(zip(found, expected, strict=True)):
        if got != wanted:
            raise GridMismatchError(
                f"Expected content hash {wanted} for probe {index} of {source}, got {got}. The data changed, or it "
                "was decoded by another library version; use the version the grid was made with, or extract again."
            )


def checked_rows(indices: Iterable[int], size: int) -> list[int]:
    """The indices as a list, once there are some and all are in [0, size).

    Raises:
        ProbeError: If not.
    """
    rows = [int(i) for i in indices]
    bad = [i for i in rows if not 0 <= i < size]
    if bad or not rows:
        raise ProbeError(
            f"Expected row numbers from 0 to {size - 1}, got {bad[0] if bad else 'none'}. "
            "Negative numbers and empty selections aren't taken.",
            index=bad[0] if bad else None,
        )
    return rows


def drawn_rows(size: int, indices: Iterable[int] | None, n: int | None, seed: int) -> list[int]:
    """The rows that `indices` names, or `n` drawn uniformly and sorted, or all.

    Raises:
        ProbeError: If both are given, or they don't fit `size`.
    """
    if indices is not None and n is not None:
        raise ProbeError("Expected `indices` or `n`, got both. `n` draws rows; `indices` names them.")
    if n is None:
        return checked_rows(range(size) if indices is None else indices, size)
    if not 1 <= n <= size:
        raise ProbeError(f"Expected `n` from 1 to {size}, the rows there are, got {n}.")
    return sorted(int(i) for i in np.random.default_rng(seed).choice(size, n, replace=False))


def dataset_rows(
    dataset: Any, column: str | None, indices: Iterable[int] | None, n: int | None, seed: int
) -> tuple[Rows, str, list[int]]:
    """Lazy rows of one split, with the column's name and the row numbers.

    Raises:
        ProbeError: If it isn't one split, there's no such column, or the rows don't fit.
    """
    if isinstance(dataset, dict):
        raise ProbeError(f"Expected one split, got {sorted(dataset)}. Pick one, e.g. dataset[{sorted(dataset)[0]!r}].")
    if not hasattr(dataset, "features") or not hasattr(dataset, "select_columns"):
        raise ProbeError(f"Expected one split as a datasets.Dataset, got {type(dataset).__name__}.")
    folder = None
    if not hasattr(dataset, "__len__"):
        dataset, column, folder = _local_copy(dataset, column)
    try:
        column, modality = _column(dataset.with_format(None), column)
        numbers = drawn_rows(len(dataset), indices, n, seed)
    except ProbeError:
        if folder is not None:
            _remove(folder, os.getpid())
        raise
    source = _undecoded(dataset.with_format(None).select_columns([column]), column)
    rows = Rows(source, numbers, modality, column)
    if folder is not None:
        weakref.finalize(rows, _remove, folder, os.getpid())
    return rows, column, numbers


def _local_copy(stream: Any, column: str | None) -> tuple[Any, str, str]:
    """A streaming data set's inputs as a data set on a temporary file, undecoded; its column and its folder.

    One process a node reads the stream, to its end, and the others there map the file: the passes need rows by number
    and several times. Memory doesn't grow with their count.
    """
    import pyarrow as pa
    from datasets import Dataset
    from datasets.table import embed_table_storage

    if stream.features is None:
        raise ProbeError(
            "Expected a streaming data set that knows its features, got one without. Name them where it's made, e.g. "
            "IterableDataset.from_generator(..., features=Features({'image': Image()}))."
        )
    column = _typed_column(stream.features, column)
    undecoded = _undecoded(stream.select_columns([column]), column)
    state = process_state()
    folder = Path(tempfile.gettempdir()) / f"hf-platonic-{gather_objects(secrets.token_hex(8))[0]}"
    path = folder / "stream.arrow"
    if state.is_local_main_process:
        folder.mkdir(mode=0o700)
        schema = undecoded.features.arrow_schema
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as writer:
            for table in undecoded.with_format("arrow").iter(batch_size=64):
                writer.write_table(embed_table_storage(table.cast(schema)))  # files beside the data come in, too
    state.wait_for_everyone()
    return Dataset.from_file(str(path)), column, str(folder)


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner and process_state().is_local_main_process:  # not a worker's copy of the object
        shutil.rmtree(folder, ignore_errors=True)


def commit_of(repo: str, revision: str | None, token: str | bool | None) -> str:
    """The commit hash of a data set's revision on the Hub; a full hash is taken as it is, without a request.

    Raises:
        ProbeError: If the Hub doesn't know it, or can't be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if revision is not None and len(revision) == 40 and not set(revision) - set("0123456789abcdef"):
        return revision
    try:
        return str(HfApi(token=token).dataset_info(repo, revision=revision).sha)
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        at = f" at {revision!r}" if revision else ""
        raise ProbeError(
            f"Can't find the data set {repo!r}{at} on the Hub: {type(error).__name__}. Check the name and revision, "
            "pass `token=` for a private one, and offline give the full commit hash as `revision`. For a local folder "
            "use ProbeSet.from_dataset(load_dataset(...))."
        ) from error


def load_split(
    repo: str,
    name: str | None,
    split: str,
    commit: str,
    token: str | bool | None,
    cache_dir: str | os.PathLike[str] | None,
    *,
    streaming: bool = False,
) -> Any:
    """One split of a data set at a commit, loaded or as a stream; files of other splits aren't downloaded.

    Raises:
        ProbeError: If it can't be loaded; the cause is kept.
    """
    from datasets import load_dataset, load_dataset_builder

    where = None if cache_dir is None else os.fspath(cache_dir)
    options: dict[str, Any] = {"revision": commit, "token": token, "cache_dir": where}
    try:
        if streaming:
            return load_dataset(repo, name, split=split, streaming=True, **options)
        builder = load_dataset_builder(repo, name, **options)
        files = builder.config.data_files or {}
        # datasets 5.2 fetches every split of a configuration, whichever is asked for.
        if split in files and len(files) > 1:
            inside = f"hf://datasets/{repo}@{commit}/"
            chosen = [str(file).removeprefix(inside) for file in files[split]]
            options |= {"data_files": {split: chosen}, "features": builder.info.features}
            return load_dataset(repo, split=split, verification_mode="no_checks", **options)
        return load_dataset(repo, name, split=split, **options)
    except (OSError, ValueError) as error:
        raise ProbeError(
            f"Can't load split {split!r} of data set {repo!r} (configuration {name!r}, commit {commit}): {error}"
        ) from error


def write_folder(folder: str | os.PathLike[str], modality: str, probes: Iterable[Any], config: dict[str, Any]) -> None:
    """Write decoded probes and a configuration, each file whole or not at all.

    Args:
        folder: Made if missing; files of an earlier set in it are replaced.
        modality: "image" or "audio".
        probes: RGB images or `Audio`.
        config: Plain JSON values; the schema version is added.
    """
    import pyarrow.parquet as pq

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)

    def write_rows(path: Path) -> None:
        # Small row groups: a reader that wants some probes needn't load all.
        # Plain pages: PNG doesn't shrink further, and a reader can tell from the file's size what it will need.
        pq.write_table(_table(modality, probes), path, row_group_size=64, compression="NONE", use_dictionary=False)
        # Without its configuration a folder holds no set: stopped after this, there's none rather than a mixture.
        (target / CONFIG_NAME).unlink(missing_ok=True)

    write_atomic(target / ROWS_NAME, write_rows)
    write_json(target / CONFIG_NAME, _versioned(config))


def write_reference(folder: str | os.PathLike[str], config: dict[str, Any]) -> None:
    """Write a configuration alone, for probes that stay where they are.

    Args:
        folder: Made if missing; probes of an earlier set in it are removed.
        config: Plain JSON values; the schema version is added.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    (target / ROWS_NAME).unlink(missing_ok=True)
    write_json(target / CONFIG_NAME, _versioned(config))


def _versioned(config: dict[str, Any]) -> dict[str, Any]:
    from . import __version__

    return {"schema_version": SCHEMA_VERSION, "library_version": __version__, **config}


def read_config(folder: Path) -> dict[str, Any]:
    """The configuration that `write_folder` or `write_reference` wrote.

    Raises:
        DescriptorFormatError: If it's missing, damaged, or of a newer schema.
    """
    remedy = "Write a probe set with ProbeSet.save_pretrained, or copy the folder again."
    return read_json(folder / CONFIG_NAME, schema=SCHEMA_VERSION, remedy=remedy)


def read_rows(folder: Path, modality: str, n: int) -> Any:
    """The Arrow column with the probes that `write_folder` wrote.

    Raises:
        DescriptorFormatError: If the file is missing or damaged, or would take more memory than its own size: the file
            is looked over before anything is loaded.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = folder / ROWS_NAME
    try:
        with pq.ParquetFile(path, memory_map=True) as file:
            metadata = file.metadata
            if metadata.num_rows != n:
                raise DescriptorFormatError(f"Expected {n} probes in {path}, got {metadata.num_rows}. Copy it again.")
            chunks = [
                metadata.row_group(group).column(column)
                for group in range(metadata.num_row_groups)
                for column in range(metadata.row_group(group).num_columns)
            ]
            total = sum(chunk.total_uncompressed_size for chunk in chunks)
            if any(chunk.compression != "UNCOMPRESSED" or chunk.has_dictionary_page for chunk in chunks):
                raise DescriptorFormatError(
                    f"Expected plain, uncompressed pages in {path}, got others. Write it with save_pretrained."
                )
            if not 0 <= total <= path.stat().st_size:
                raise DescriptorFormatError(
                    f"Expected probes that fit {path}, got {total} bytes of them. Copy it again."
                )
            return file.read(columns=[modality]).column(modality)
    except (OSError, KeyError, pa.ArrowException) as error:
        raise DescriptorFormatError(
            f"Expected probes in {path}, got {type(error).__name__}: {error}. Copy or download the folder again."
        ) from error


def _column(dataset: Any, column: str | None) -> tuple[str, str]:
    """Name and modality of the column with the inputs."""
    features = dataset.features or {}
    column = _typed_column(features, column)
    if not len(dataset):
        raise ProbeError("Expected a data set with rows, got an empty one.")
    return column, _modality(features[column]) or modality_of(dataset[0][column])


def _modality(feature: Any) -> str | None:
    return {"Image": "image", "Audio": "audio"}.get(type(feature).__name__)


def _typed_column(features: Any, column: str | None) -> str:
    """The column that is named, or the one of an image or audio type, or the one of that name."""
    if column is None:
        typed = [key for key, feature in features.items() if _modality(feature)]
        found = typed or [key for key in ("image", "audio") if key in features]
        if len(found) != 1:
            raise ProbeError(
                f"Expected one column of images or audio, got {found or 'none'} among {sorted(features)}. "
                "Name it with `column=`."
            )
        column = found[0]
    if column not in features:
        raise ProbeError(f"Expected `column` to be one of {sorted(features)}, got {column!r}.")
    return str(column)


def _undecoded(dataset: Any, column: str) -> Any:
    """The data set with encoded bytes or paths in place of decoded objects, so that this package decodes them.

    Decoders differ in orientation, mode and rounding; content hashes need one. Where the data set itself asks for a
    conversion (an image mode, an audio rate), its own decoder stays.
    """
    from datasets import Audio as AudioFeature
    from datasets import Image as ImageFeature

    feature = dataset.features[column]
    if isinstance(feature, ImageFeature) and feature.mode is None:
        return dataset.cast_column(column, ImageFeature(decode=False))
    # `datasets` decodes audio with torchcodec only, which is often missing.
    if isinstance(feature, AudioFeature) and (feature.sampling_rate is None or find_spec("torchcodec") is None):
        return dataset.cast_column(column, AudioFeature(decode=False))
    if isinstance(feature, dict) and "array" in feature:
        return dataset.with_format("numpy")  # a clip as a list of Python floats is slow, and no more exact
    return dataset


def _table(modality: str, probes: Iterable[Any]) -> Any:
    """The probes as an Arrow table that `datasets` (and the Hub's viewer) reads, too."""
    import pyarrow as pa
    from datasets import Features, Image, List, Value

    if modality == "image":
        rows: list[Any] = [{"bytes": _png(image), "path": None} for image in probes]
        features = Features({"image": Image()})
    else:
        # Not datasets.Audio: it stores an encoded file, through torchcodec, and rounds float32 samples.
        rows = [{"array": clip.array, "sampling_rate": clip.sampling_rate} for clip in probes]
        features = Features({"audio": {"array": List(Value("float32")), "sampling_rate": Value("int32")}})
    return pa.Table.from_pydict({modality: rows}, schema=features.arrow_schema)


def _png(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
