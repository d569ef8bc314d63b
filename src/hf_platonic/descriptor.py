"""Universal Task Descriptors: what a fine-tune does, as a matrix that belongs to no architecture."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from ._checks import finite, instance, matrix
from ._files import read_json, write_json
from ._hub import Pushed, fetch_folder
from ._publish import inherited_license, push_saved
from ._tensors import DTYPES, blocks, load_tensors, save_tensors
from .affinities import spread
from .cards import Results, descriptor_card, hub_repo
from .errors import DescriptorFormatError, GridMismatchError, PlatonicError
from .grid import Grid, require_same_grid
from .probes import ProbeSet
from .sources import Source, joined_sources

__all__ = ["SCHEMA_VERSION", "DescriptorSum", "TaskDescriptor", "require_descriptors"]

SCHEMA_VERSION = 1
TENSORS_NAME = "descriptor.safetensors"
CONFIG_NAME = "descriptor_config.json"
PROBES_NAME = "probes"


@dataclass(frozen=True, eq=False)
class TaskDescriptor:
    """`U = A(fine-tuned) - A(base)` on one grid: the change of the cosines between probes and prompts.

    Descriptors of one grid add, subtract and scale like matrices; of several grids they form a `DescriptorSum`.

    Attributes:
        delta: `U`, shape (n, m), float32, on the CPU; each entry in [-2, 2] as extracted.
        grid: The ordered probes and prompts it was taken on.
        sources: The fine-tunes and teachers it came from, with their coefficients and what else was done to them.
        spread: Root mean square of the row-centred base affinity, for calibration; at least 0. Of a sum, the mean
            over its parts weighted by the size of their coefficients.
        base_affinity: `A(base)`, shape (n, m), float32, where it was kept.
        predictions: The fine-tune's class index for each probe, shape (n,), int32: what a receiver chooses settings
            by and forecasts its gain with. Multiples keep it; sums of several descriptors have none.
        name: What to call the task in messages, tables and cards.
        probes: The probe set itself while at hand; saved only when asked for.
        origin: Repo id and commit hash, of a descriptor pulled from the Hub as it is.

    Reference:
        Park and Cho 2026, arXiv 2610.00929, "Universal Task Descriptor".
    """

    delta: Tensor
    grid: Grid
    sources: tuple[Source, ...] = ()
    spread: float = 0.0
    base_affinity: Tensor | None = None
    name: str | None = None
    probes: ProbeSet | None = field(default=None, repr=False)
    origin: tuple[str, str] | None = None
    predictions: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        shape = (self.grid.n, self.grid.m)
        matrix(self.delta, "delta", shape)
        if not all(bool(block.isfinite().all()) for block in blocks(self.delta)):
            raise PlatonicError("Expected a finite descriptor, got NaN or infinity. Extract it again in float32.")
        if self.base_affinity is not None:
            matrix(self.base_affinity, "base_affinity", shape)
        if self.predictions is not None:
            if tuple(self.predictions.shape) != (self.grid.n,) or self.predictions.dtype is not torch.int32:
                raise PlatonicError(
                    f"Expected `predictions` of shape ({self.grid.n},) in int32, got {tuple(self.predictions.shape)} "
                    f"in {self.predictions.dtype}."
                )
            if not all(bool(((b >= 0) & (b < self.grid.m)).all()) for b in blocks(self.predictions)):
                raise PlatonicError(f"Expected `predictions` in [0, {self.grid.m}), the classes' indices.")
        finite(self.spread, "spread")

    def __repr__(self) -> str:
        name = "" if self.name is None else f"{self.name!r}, "
        grid = f"n={self.grid.n}, m={self.grid.m}, grid={self.grid.fingerprint[:12]}"
        return f"TaskDescriptor({name}{grid}, norm={self.norm():.4g})"

    @property
    def prompts(self) -> tuple[str, ...]:
        """The m prompts, in the order of the columns."""
        return self.grid.prompts

    # Arithmetic -----------------------------------------------------------------------------------------------------

    def __mul__(self, coefficient: float) -> TaskDescriptor:
        c = finite(coefficient, "coefficient")
        if c == 1.0:  # as it is, mapped from disk perhaps
            return self
        sources = tuple(replace(s, coefficient=s.coefficient * c) for s in self.sources)
        return replace(self, delta=self.delta * c, sources=sources, origin=None)

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> TaskDescriptor:
        d = finite(divisor, "divisor")
        if d == 0.0:
            raise PlatonicError("Expected a divisor other than 0.")
        return self * (1.0 / d)

    def __neg__(self) -> TaskDescriptor:
        return self * -1.0

    def __add__(self, other: TaskDescriptor | DescriptorSum) -> Descriptor:
        if isinstance(other, DescriptorSum):
            return DescriptorSum.of([self, *other])
        if not isinstance(other, TaskDescriptor):
            return NotImplemented
        if self.grid.fingerprint != other.grid.fingerprint:
            return DescriptorSum.of([self, other])
        return self._same_grid_sum(other)

    def __radd__(self, other: object) -> TaskDescriptor:
        if other == 0:  # what the built-in sum() starts from
            return self
        return NotImplemented

    def __sub__(self, other: TaskDescriptor | DescriptorSum) -> Descriptor:
        return self + -other

    def _same_grid_sum(self, other: TaskDescriptor) -> TaskDescriptor:
        a, b = (sum(abs(s.coefficient) for s in d.sources) for d in (self, other))
        mean = (a * self.spread + b * other.spread) / (a + b) if a + b > 0 else self.spread
        same_base = (
            self.base_affinity is not None
            and other.base_affinity is not None
            and torch.equal(self.base_affinity, other.base_affinity)
        )
        return TaskDescriptor(
            self.delta + other.delta,
            self.grid,
            sources=joined_sources(self.sources, other.sources),
            spread=self.spread if self.spread == other.spread else mean,
            base_affinity=self.base_affinity if same_base else None,
            name=self.name if self.name == other.name else None,
            probes=self.probes if self.probes is not None else other.probes,
        )

    @staticmethod
    def mean(descriptors: Sequence[TaskDescriptor]) -> TaskDescriptor:
        """The mean of descriptors on one grid.

        Raises:
            PlatonicError: If there are none, or one isn't a descriptor.
            GridMismatchError: If they lie on several grids.
        """
        require_descriptors(descriptors)
        first = descriptors[0]
        for other in descriptors[1:]:
            require_same_grid(first.grid, other.grid)
            first = first._same_grid_sum(other)
        return first / len(descriptors)

    @staticmethod
    def consensus(descriptors: Sequence[TaskDescriptor]) -> TaskDescriptor:
        """The mean of one task's descriptors from several sources, weighted by agreement; see `Consensus.of`."""
        from .consensus import Consensus

        return Consensus.of(descriptors).descriptor

    @staticmethod
    def from_scores(
        scores: Any, probes: ProbeSet, *, class_names: Sequence[str] | None = None, name: str | None = None
    ) -> TaskDescriptor:
        """The descriptor of anything that scores probes against class names; see `teachers.from_scores`."""
        from .teachers import from_scores

        return from_scores(scores, probes, class_names=class_names, name=name)

    def select(self, indices: Iterable[int]) -> TaskDescriptor:
        """The descriptor on some of its probes, in this order, as if extracted on these alone.

        The spread is that of the selected rows where the base affinity is kept, else that of all.

        Raises:
            PlatonicError: If the probes aren't at hand.
            ProbeError: If there are none, or one is out of range.
        """
        if self.probes is None:
            raise PlatonicError("Expected a descriptor with its probes at hand. Set them with `with_probes`.")
        rows = list(indices)
        probes = self.probes.select(rows)
        base = None if self.base_affinity is None else self.base_affinity[rows]
        return replace(
            self,
            delta=self.delta[rows],
            grid=probes.grid,
            base_affinity=base,
            spread=self.spread if base is None else spread(base),
            probes=probes,
            origin=None,
            predictions=None if self.predictions is None else self.predictions[rows],
        )

    def norm(self) -> float:
        """Frobenius norm of the matrix."""
        return math.sqrt(sum(float(block.double().square().sum()) for block in blocks(self.delta)))

    def cosine(self, other: TaskDescriptor) -> float:
        """Cosine between two descriptors of one grid as vectors, in [-1, 1]; 0 where one of them is zero.

        Raises:
            GridMismatchError: If they lie on different grids.
        """
        require_descriptors([other])
        require_same_grid(self.grid, other.grid)
        norms = self.norm() * other.norm()
        pairs = zip(blocks(self.delta), blocks(other.delta), strict=True)
        return sum(float((a.double() * b.double()).sum()) for a, b in pairs) / norms if norms > 0 else 0.0

    # Files ----------------------------------------------------------------------------------------------------------

    def save_pretrained(
        self, save_directory: str | Path, *, dtype: torch.dtype = torch.float32, include_probes: bool = False
    ) -> None:
        """Writes the descriptor to a folder: `descriptor.safetensors` and `descriptor_config.json`.

        The matrix is written in pieces; it may be larger than memory.

        Args:
            save_directory: Made if it isn't there. Other files in it are left alone.
            dtype: float32 (bit-equal on return), float16 or bfloat16 (half the size).
            include_probes: Also writes the probes themselves, as Parquet under `probes/`.

        Raises:
            PlatonicError: If the dtype isn't one of the three, or probes are wanted and not at hand.
        """
        if dtype not in DTYPES.values():
            raise PlatonicError(f"Expected dtype float32, float16 or bfloat16, got {dtype}.")
        if include_probes and self.probes is None:
            raise PlatonicError(
                "Expected the probe set to save with the descriptor, but it isn't at hand. Set it with "
                "`descriptor.with_probes(probes)`, or save with include_probes=False."
            )
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {"delta": self.delta}
        if self.base_affinity is not None:
            tensors["base_affinity"] = self.base_affinity
        if self.predictions is not None:
            tensors["predictions"] = self.predictions
        if include_probes and self.probes is not None:
            self.probes.save_pretrained(folder / PROBES_NAME)
        digest = save_tensors(folder / TENSORS_NAME, tensors, dtype=dtype)
        write_json(
            folder / CONFIG_NAME, {**self._config(), "dtype": str(dtype).removeprefix("torch."), "digest": digest}
        )

    def _config(self) -> dict[str, Any]:
        from . import __version__

        return {
            "schema_version": SCHEMA_VERSION,
            "library_version": __version__,
            "name": self.name,
            "grid": self.grid.to_dict(),
            "sources": [source.to_dict() for source in self.sources],
            "spread": self.spread,
            "base_affinity": self.base_affinity is not None,
            "predictions": self.predictions is not None,
        }

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        token: str | bool | None = None,
        create_pr: bool = False,
        include_probes: bool = False,
        dtype: torch.dtype = torch.float32,
        license: str | None = None,
        results: Results | None = None,
    ) -> Pushed:
        """Pushes the descriptor to a model repo, with a card, as one commit.

        Args:
            repo_id: Made if it isn't there.
            private: Of a new repo; None takes the owner's default.
            revision: Branch, made if missing.
            commit_message: Of the commit.
            token: To write with.
            create_pr: Opens a pull request instead of committing.
            include_probes: Also pushes the probes by value.
            dtype: float32, float16 or bfloat16.
            license: Licence id for the card; None takes the one that all source models state.
            results: Accuracies for the card, an `EvaluationReport`.

        Returns:
            The commit: `repo`, `revision`, `url`.

        Raises:
            HubError: If the Hub refuses or can't be reached; `kind` says which.
            PlatonicError: As `save_pretrained`.
        """
        bases = [repo for source in self.sources if (repo := hub_repo(source.base)) is not None]
        card = descriptor_card(
            repo_id=repo_id,
            name=self.name,
            grid=self.grid,
            sources=self.sources,
            spread=self.spread,
            norm=self.norm(),
            base_affinity=self.base_affinity is not None,
            self_contained=include_probes,
            license=inherited_license(bases, token=token) if license is None else license,
            results=results,
        )
        return push_saved(
            lambda folder: self.save_pretrained(folder, dtype=dtype, include_probes=include_probes),
            card,
            repo_id,
            private=private,
            revision=revision,
            commit_message=commit_message or f"Upload task descriptor{f' {self.name}' if self.name else ''}",
            token=token,
            create_pr=create_pr,
            delete_patterns=[f"{PROBES_NAME}/*"],
        )

    @classmethod
    def from_pretrained(
        cls,
        repo_or_path: str | os.PathLike[str],
        *,
        subfolder: str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
        local_files_only: bool = False,
        force_download: bool = False,
    ) -> TaskDescriptor:
        """The descriptor saved in a folder or pushed to the Hub.

        Nothing is unpickled and no code is run. Shapes and dtypes are checked against the config before the file
        is mapped. Probes that travel by value come along; those by reference are loaded when a transfer needs them.

        Args:
            repo_or_path: A folder that `save_pretrained` wrote, or a repo id.
            subfolder: Within it.
            revision: Branch, tag or commit.
            token: For private repos.
            cache_dir: Of the Hub client.
            local_files_only: Only what is in the cache, without a request.
            force_download: Downloads again.

        Returns:
            A descriptor with float32 matrices on the CPU. Saved in float32, they are views of the mapped file, so that
            a matrix larger than memory can be solved; half precision is converted in memory.

        Raises:
            DescriptorFormatError: If a file is missing, truncated, oversized or foreign, shapes or dtypes disagree,
                the two files are of different saves, or the schema is newer than this library.
            HubError: If it can't be had from the Hub; `kind` says why.
        """
        fetched = fetch_folder(
            repo_or_path,
            subfolder=subfolder,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            force_download=force_download,
            files=[CONFIG_NAME, TENSORS_NAME],
            optional=[f"{PROBES_NAME}/*"],
        )
        folder = fetched.folder
        config = read_json(
            folder / CONFIG_NAME, schema=SCHEMA_VERSION, remedy="Pass the folder that `save_pretrained` wrote."
        )
        try:
            grid = Grid.from_dict(config["grid"])
            sources = tuple(Source.from_dict(values) for values in config["sources"])
            known = finite(config["spread"], "spread")
            shapes: dict[str, tuple[int, ...]] = {"delta": (grid.n, grid.m)}
            shapes |= {"base_affinity": (grid.n, grid.m)} if config["base_affinity"] else {}
            shapes |= {"predictions": (grid.n,)} if config.get("predictions") else {}
            dtype, digest, name = str(config["dtype"]), str(config["digest"]), config["name"]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DescriptorFormatError(
                f"Expected a whole descriptor config in {folder / CONFIG_NAME}, got one that doesn't parse: "
                f"{type(error).__name__}: {error}. Save or download the descriptor again."
            ) from error
        tensors = load_tensors(
            folder / TENSORS_NAME,
            shapes,
            dtype=dtype,
            digest=digest,
            config=CONFIG_NAME,
            integers=["predictions"],
        )
        probes = ProbeSet.from_pretrained(folder / PROBES_NAME) if (folder / PROBES_NAME).is_dir() else None
        if probes is not None:
            require_same_grid(grid, probes.grid)
        try:
            return cls(
                tensors["delta"].float(),
                grid,
                sources=sources,
                spread=known,
                base_affinity=tensors["base_affinity"].float() if "base_affinity" in tensors else None,
                name=None if name is None else str(name),
                probes=probes,
                origin=None if fetched.repo is None else (fetched.repo, str(fetched.revision)),
                predictions=tensors.get("predictions"),
            )
        except GridMismatchError:
            raise
        except PlatonicError as error:
            raise DescriptorFormatError(f"The descriptor in {folder} can't be used: {error}") from error

    def with_probes(self, probes: ProbeSet) -> TaskDescriptor:
        """The descriptor with its probe set at hand.

        Raises:
            GridMismatchError: If the probe set isn't the one of its grid.
        """
        instance(probes, "probes", ProbeSet, "Make one with `ProbeSet(inputs, class_names=...)`.")
        require_same_grid(self.grid, probes.grid)
        return replace(self, probes=probes)


def require_descriptors(values: Sequence[TaskDescriptor]) -> None:
    """Nothing, where it's a list of at least one descriptor."""
    if isinstance(values, TaskDescriptor) or not values:
        raise PlatonicError(f"Expected a list of at least one descriptor, got {values!r:.100}.")
    for value in values:
        instance(value, "descriptors", TaskDescriptor, "Extract or load one first.")


@dataclass(frozen=True, eq=False)
class DescriptorSum:
    """Descriptors of several grids, one term a grid; what a transfer takes to write several tasks at once.

    Attributes:
        terms: One descriptor a grid, coefficients already multiplied in.
    """

    terms: tuple[TaskDescriptor, ...]

    @classmethod
    def of(cls, descriptors: Sequence[TaskDescriptor]) -> DescriptorSum:
        """The sum of descriptors; those on one grid are added."""
        by_grid: dict[str, TaskDescriptor] = {}
        for descriptor in descriptors:
            key = descriptor.grid.fingerprint
            by_grid[key] = by_grid[key]._same_grid_sum(descriptor) if key in by_grid else descriptor
        return cls(tuple(by_grid.values()))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"'DescriptorSum' has no attribute {name!r}: it's several descriptors, one a grid. Use each of its "
                "`terms`, which are saved, pushed and looked at one by one; `transfer` takes them together."
            )

    def __len__(self) -> int:
        return len(self.terms)

    def __iter__(self) -> Iterator[TaskDescriptor]:
        return iter(self.terms)

    def __add__(self, other: TaskDescriptor | DescriptorSum) -> DescriptorSum:
        if isinstance(other, TaskDescriptor):
            return DescriptorSum.of([*self, other])
        return DescriptorSum.of([*self, *other]) if isinstance(other, DescriptorSum) else NotImplemented

    def __radd__(self, other: object) -> DescriptorSum:
        return self if other == 0 else NotImplemented

    def __mul__(self, coefficient: float) -> DescriptorSum:
        return DescriptorSum(tuple(term * coefficient for term in self.terms))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> DescriptorSum:
        return DescriptorSum(tuple(term / divisor for term in self.terms))

    def __neg__(self) -> DescriptorSum:
        return self * -1.0

    def __sub__(self, other: TaskDescriptor | DescriptorSum) -> DescriptorSum:
        return self + -other


Descriptor = TaskDescriptor | DescriptorSum
