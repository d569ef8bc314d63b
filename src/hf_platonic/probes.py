"""`ProbeSet`: an ordered set of unlabelled inputs with the prompts they are compared to.

A set travels by reference (data set, commit, split, row numbers, content hashes) or by value (`save_pretrained`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

from . import probe_sources as sources
from ._hashes import ContentHashes
from ._hub import Pushed, fetch_folder
from ._publish import push_saved
from .cards import probes_card
from .encoders.media import Audio, content_hash, decoder
from .errors import DescriptorFormatError, GridMismatchError, ProbeError
from .grid import PLAIN, Grid, checked_columns, digest, fill, probe_fingerprint

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset
    from PIL.Image import Image

__all__ = ["Grid", "ProbeSet"]


class ProbeSet(Sequence[Any]):
    """An ordered, unchanging set of unlabelled inputs with the prompts they're compared to.

    Probes are decoded when asked for: `probes[3]` is an RGB image or an `Audio`, `probes[3:5]` a list of them.

    Args:
        inputs: n probes of one modality, in any form `hf_platonic.encoders.media` decodes. They're kept as they are;
            for rows that are read lazily use `from_dataset`.
        class_names: m different names.
        templates: Different patterns, each with "{}" for the name. The first gives `prompts`; where there are several,
            a column is the mean of their embeddings.
        prompts: m whole prompts; short for `class_names=prompts, templates=("{}",)`.
        reference: Where the inputs came from, without their hashes; `from_hub` sets it.

    Raises:
        ProbeError: If there are no inputs, or they're of several modalities or of none.
        PromptError: If there are no class names, both kinds are given, one is empty or repeated, or a template has no
            "{}".

    Example:
        >>> from PIL import Image
        >>> probes = ProbeSet([Image.new("RGB", (8, 8))], class_names=["cat", "dog"], templates=("a photo of a {}.",))
        >>> probes.prompts
        ('a photo of a cat.', 'a photo of a dog.')
        >>> len(probes), probes.modality, probes.grid.m
        (1, 'image', 2)
    """

    def __init__(
        self,
        inputs: Sequence[Any],
        *,
        class_names: Sequence[str] | None = None,
        templates: Sequence[str] = PLAIN,
        prompts: Sequence[str] | None = None,
        reference: Mapping[str, Any] | None = None,
    ) -> None:
        if hasattr(inputs, "features"):
            raise ProbeError(f"Expected a list of probes, got a {type(inputs).__name__}. Use ProbeSet.from_dataset.")
        if isinstance(inputs, (str, bytes, Mapping)) or not hasattr(inputs, "__getitem__") or not len(inputs):
            raise ProbeError(
                f"Expected a non-empty sequence of probes, got {type(inputs).__name__}. "
                "Pass a list of images or clips."
            )
        self._inputs = inputs if isinstance(inputs, sources.Rows) else list(inputs)
        self._class_names, self._templates = checked_columns(class_names, templates, prompts)
        self._reference = dict(reference) if reference is not None else None
        self._hashes = ContentHashes(len(self._inputs))
        self._modality = sources.one_modality(self._inputs)

    @property
    def modality(self) -> str:
        """What the probes are: "image" or "audio"."""
        return self._modality

    @property
    def class_names(self) -> tuple[str, ...]:
        """The m names of the columns."""
        return self._class_names

    @property
    def templates(self) -> tuple[str, ...]:
        """The prompt patterns."""
        return self._templates

    @property
    def prompts(self) -> tuple[str, ...]:
        """The m names in the first template."""
        return tuple(fill(self._templates[0], name) for name in self._class_names)

    @property
    def columns(self) -> tuple[tuple[str, ...], ...]:
        """For each of the m columns, its name in every template."""
        return tuple(tuple(fill(template, name) for template in self._templates) for name in self._class_names)

    @property
    def content_hashes(self) -> tuple[str, ...]:
        """Each probe's `content_hash`; decodes the probes that haven't been looked at yet."""
        return tuple(map(str, self.hashes))

    @property
    def hashes(self) -> ContentHashes:
        """The same in little memory; decodes the probes that haven't been looked at yet."""
        for index in self._hashes.missing():
            self[index]  # noting the hash is part of decoding
        return self._hashes

    @property
    def known_hashes(self) -> ContentHashes:
        """The hashes as far as they are known; what another process decoded is noted here."""
        return self._hashes

    @property
    def grid(self) -> Grid:
        """The grid; decodes the probes that haven't been looked at yet."""
        of_probes = probe_fingerprint(self._modality, map(str, self.hashes))
        return Grid(
            fingerprint=digest([of_probes, list(self._class_names), list(self._templates)]),
            probe_fingerprint=of_probes,
            n=len(self),
            class_names=self._class_names,
            templates=self._templates,
            modality=self._modality,
            reference=None
            if self._reference is None
            else {**self._reference, "content_hashes": list(self.content_hashes)},
        )

    def __len__(self) -> int:
        return len(self._inputs)

    @overload
    def __getitem__(self, index: int) -> Image | Audio: ...
    @overload
    def __getitem__(self, index: slice) -> list[Image | Audio]: ...
    def __getitem__(self, index: int | slice) -> Image | Audio | list[Image | Audio]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"Expected an index below {len(self)}, got {index}.")
        decoded = decoder(self._modality)(self._inputs[position], index=position)
        if self._hashes[position] is None:
            self._hashes[position] = content_hash(decoded)
        return decoded

    def __iter__(self) -> Iterator[Image | Audio]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"ProbeSet({len(self)} {self._modality} probes, {len(self._class_names)} prompts)"

    def select(self, indices: Iterable[int]) -> ProbeSet:
        """The probes at these positions, in this order, with the same prompts.

        Raises:
            ProbeError: If there are none, or one is out of range.
        """
        rows = sources.checked_rows(indices, len(self))
        reference = self._reference
        if reference is not None:
            known = reference["indices"]
            reference = {**reference, "indices": [known[i] for i in rows]}
        picked = ProbeSet(
            sources.Rows(self._inputs, rows, self._modality),
            class_names=self._class_names,
            templates=self._templates,
            reference=reference,
        )
        picked._hashes = self._hashes.picked(rows)
        return picked

    def with_prompts(
        self,
        *,
        class_names: Sequence[str] | None = None,
        templates: Sequence[str] = PLAIN,
        prompts: Sequence[str] | None = None,
    ) -> ProbeSet:
        """The same probes with other prompts; arguments as in the class.

        Raises:
            PromptError: As in the class.
        """
        other = ProbeSet(
            sources.Rows(self._inputs, range(len(self)), self._modality),
            class_names=class_names,
            templates=templates,
            prompts=prompts,
            reference=self._reference,
        )
        other._hashes = self._hashes
        return other

    @classmethod
    def from_dataset(
        cls,
        dataset: Dataset | IterableDataset,
        *,
        column: str | None = None,
        class_names: Sequence[str] | None = None,
        templates: Sequence[str] = PLAIN,
        prompts: Sequence[str] | None = None,
        indices: Iterable[int] | None = None,
        n: int | None = None,
        seed: int = 42,
    ) -> ProbeSet:
        """Probes from rows of a data set, read and decoded when asked for; labels are never looked at.

        Args:
            dataset: One split. A streaming one is read to its end into a temporary file, undecoded, by one process a
                node (`dataset.take(1000)` bounds it); under a launcher all processes have to call this together.
            column: With the inputs; by default the one of an image or audio type, else the one of that name.
            class_names: As in the class.
            templates: As in the class.
            prompts: As in the class.
            indices: The rows, in this order; all by default.
            n: Instead of `indices`: how many rows to draw uniformly, kept in the data set's order.
            seed: Of that draw (`numpy.random.default_rng`).

        Raises:
            ProbeError: If there's no such column or several, both `indices` and `n` are given, or they don't fit.
            PromptError: As in the class.
        """
        rows, _, _ = sources.dataset_rows(dataset, column, indices, n, seed)
        return cls(rows, class_names=class_names, templates=templates, prompts=prompts)

    @classmethod
    def from_hub(
        cls,
        repo: str,
        *,
        name: str | None = None,
        split: str,
        revision: str | None = None,
        column: str | None = None,
        class_names: Sequence[str] | None = None,
        templates: Sequence[str] = PLAIN,
        prompts: Sequence[str] | None = None,
        indices: Iterable[int] | None = None,
        n: int | None = None,
        seed: int = 42,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> ProbeSet:
        """Probes from a data set on the Hub, pinned to a commit, so that the set can travel by reference.

        Args:
            repo: Data set id.
            name: Its configuration.
            split: E.g. "train".
            revision: Branch, tag or commit; resolved to a commit hash. A full hash needs no request.
            column: As in `from_dataset`.
            class_names: As in the class.
            templates: As in the class.
            prompts: As in the class.
            indices: As in `from_dataset`.
            n: As in `from_dataset`.
            seed: As in `from_dataset`.
            token: For private data sets.
            cache_dir: Of `datasets`.

        Raises:
            ProbeError: If the data set can't be found or read, or as in `from_dataset`.
            PromptError: As in the class.
        """
        commit = sources.commit_of(repo, revision, token)
        dataset = sources.load_split(repo, name, split, commit, token, cache_dir)
        rows, column, numbers = sources.dataset_rows(dataset, column, indices, n, seed)
        reference = {"repo": repo, "revision": commit, "name": name, "split": split, "column": column}
        return cls(
            rows,
            class_names=class_names,
            templates=templates,
            prompts=prompts,
            reference={**reference, "indices": numbers},
        )

    @classmethod
    def from_reference(
        cls,
        reference: Grid | Mapping[str, Any],
        *,
        class_names: Sequence[str] | None = None,
        templates: Sequence[str] = PLAIN,
        prompts: Sequence[str] | None = None,
        token: str | bool | None = None,
        cache_dir: str | os.PathLike[str] | None = None,
    ) -> ProbeSet:
        """The very probes that a grid names, loaded from the Hub and compared by content.

        Args:
            reference: A grid, or its `reference` (which has no prompts: pass them).
            class_names: By default the grid's, with its templates.
            templates: As in the class; used with `class_names`.
            prompts: As in the class.
            token: For private data sets.
            cache_dir: Of `datasets`.

        Raises:
            GridMismatchError: If the grid has no reference, or a row's content differs; the first such row is named.
            DescriptorFormatError: If the reference lacks a key.
            ProbeError: As in `from_hub`.
        """
        if isinstance(reference, Grid):
            if class_names is None and prompts is None:
                class_names, templates = reference.class_names, reference.templates
            if reference.reference is None:
                raise GridMismatchError(
                    f"Expected a grid with a reference to a data set, got none for grid {reference.fingerprint}. "
                    "Its probes didn't come from the Hub: load them with ProbeSet.from_pretrained, or build the same "
                    "ProbeSet again."
                )
            reference = reference.reference
        missing = {"repo", "revision", "name", "split", "column", "indices", "content_hashes"} - set(reference)
        if missing:
            raise DescriptorFormatError(
                f"Expected a reference with {sorted(missing)}, got the keys {sorted(reference)}. "
                "Pass a Grid, or the `reference` of one."
            )
        probes = cls.from_hub(
            reference["repo"],
            name=reference["name"],
            split=reference["split"],
            revision=reference["revision"],
            column=reference["column"],
            class_names=class_names,
            templates=templates,
            prompts=prompts,
            indices=reference["indices"],
            token=token,
            cache_dir=cache_dir,
        )
        sources.verify_hashes(
            probes.content_hashes, reference["content_hashes"], f"{reference['repo']}@{reference['revision']}"
        )
        return probes

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *, by: Literal["value", "reference"] = "value"
    ) -> None:
        """Write the set: its content, or where the content is.

        By value, images are stored as PNG and clips as float32 in `probes.parquet`, so what is read back is bit-equal.
        By reference, only `probes_config.json` is written: data set, commit, split, rows and content hashes. Files of
        an earlier set in the folder are replaced; if writing stops halfway, the folder holds no set rather than a
        mixture.

        Args:
            save_directory: Made if missing.
            by: "value" or "reference".

        Raises:
            ProbeError: If a set without a reference should be written by reference.
        """
        config = {"grid": self.grid.to_dict()}
        if by == "reference":
            if self._reference is None:
                raise ProbeError(
                    "Expected a probe set from ProbeSet.from_hub to write by reference, got one that was made "
                    'in memory. Write it with by="value".'
                )
            sources.write_reference(save_directory, config)
        else:
            hashes = {"content_hashes": list(self.content_hashes)}
            sources.write_folder(save_directory, self._modality, self, {**config, **hashes})

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
    ) -> ProbeSet:
        """The set that `save_pretrained` or `push_to_hub` wrote, compared to its stored hashes.

        A set by reference is loaded from its data set, at the commit it names.

        Args:
            repo_or_path: A folder, or the id of a dataset repo.
            subfolder: Within it.
            revision: Branch, tag or commit.
            token: For private repos.
            cache_dir: Of the Hub client.
            local_files_only: Only what is in the cache, without a request.
            force_download: Download again.

        Raises:
            DescriptorFormatError: If a file is missing, damaged, or of a newer schema.
            GridMismatchError: If a row's content differs; the first such row is named.
            HubError: If it can't be had from the Hub.
        """
        fetched = fetch_folder(
            repo_or_path,
            subfolder=subfolder,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            force_download=force_download,
            repo_type="dataset",
            files=[sources.CONFIG_NAME],
            optional=[sources.ROWS_NAME],
        )
        config = sources.read_config(fetched.folder)
        grid = Grid.from_dict(config.get("grid", {}))
        hashes = config.get("content_hashes")
        if hashes is None:
            if grid.reference is None:
                raise DescriptorFormatError(
                    f"Expected content hashes or a reference in {sources.CONFIG_NAME}, got neither content hashes nor "
                    "a reference. The file was edited; copy or download the folder again."
                )
            return cls.from_reference(grid, token=token, cache_dir=cache_dir)
        if not isinstance(hashes, list) or len(hashes) != grid.n:
            raise DescriptorFormatError(
                f"Expected {grid.n} `content_hashes` in {sources.CONFIG_NAME}, got others. "
                "The file was edited; copy or download the folder again."
            )
        column = sources.read_rows(fetched.folder, grid.modality, grid.n)
        reference = {key: value for key, value in (grid.reference or {}).items() if key != "content_hashes"}
        probes = cls(
            sources.Rows(column, range(grid.n), grid.modality),
            class_names=grid.class_names,
            templates=grid.templates,
            reference=reference or None,
        )
        sources.verify_hashes(probes.content_hashes, hashes, sources.ROWS_NAME)
        return probes

    def push_to_hub(
        self,
        repo_id: str,
        *,
        by: Literal["value", "reference"] = "value",
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        token: str | bool | None = None,
        create_pr: bool = False,
        license: str | None = None,
    ) -> Pushed:
        """Push the set to a dataset repo, with a card, as one commit.

        Args:
            repo_id: Made if it isn't there.
            by: "value" (Parquet) or "reference" (rows of another data set).
            private: Of a new repo; None takes the owner's default.
            revision: Branch, made if missing.
            commit_message: Of the commit.
            token: To write with.
            create_pr: Open a pull request instead of committing.
            license: Licence id for the card.

        Returns:
            The commit.

        Raises:
            HubError: If the Hub refuses or can't be reached.
        """
        return push_saved(
            lambda folder: self.save_pretrained(folder, by=by),
            probes_card(repo_id=repo_id, grid=self.grid, by_reference=by == "reference", license=license),
            repo_id,
            repo_type="dataset",
            private=private,
            revision=revision,
            commit_message=commit_message or "Upload probe set",
            token=token,
            create_pr=create_pr,
        )
