"""Operators for one target: one factorisation per grid serves any number of descriptors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ._checks import instance
from ._files import read_json, write_json
from ._hub import Pushed, fetch_folder
from ._pooling import features_of
from ._publish import inherited_license, push_saved
from ._tensors import load_tensors, save_tensors
from .cards import bank_card, hub_repo
from .descriptor import TaskDescriptor
from .encoders.encoder import DualEncoder
from .encoders.families import EditSite, SiteKind, Tower, bare_model
from .encoders.identity import EncoderIdentity
from .errors import DescriptorFormatError, PlatonicError
from .operator import Operator
from .solutions import solve_operators
from .solve import PROBE_RIDGE, PROMPT_RIDGE
from .terms import provenance_of
from .tuner import PlatonicConfig
from .tuner.base import record_base

__all__ = ["OperatorBank"]

Key = Any  # a name or a tuple of names; Mapping is invariant in its keys, so no narrower type takes a plain dict

SCHEMA_VERSION = 1
CONFIG_NAME = "bank_config.json"
ADAPTER_NAME = "adapter_model.safetensors"
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,95}")


@dataclass(frozen=True, eq=False)
class OperatorBank:
    """One operator per entry for one target; any composition is a signed sum of entries.

    Attributes:
        operators: By key: a name, or a tuple of names such as `(source, task)`. Of a loaded bank, read when first
            used.
        site: The edit site in the target.
        target: Which model it is for.
        modality: "image" or "audio".
        base: What tells the target's edited layer from others, as `PlatonicConfig` has it.
        provenance: Per key, how the entry came about.
    """

    operators: Mapping[Key, Operator]
    site: EditSite
    target: EncoderIdentity
    modality: str
    base: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[Key, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def solve(
        cls,
        descriptors: Mapping[Key, TaskDescriptor],
        target: DualEncoder,
        *,
        probe_ridge: float = PROBE_RIDGE,
        prompt_ridge: float = PROMPT_RIDGE,
        site: SiteKind | None = None,
        tower: Tower | None = None,
        **options: Any,
    ) -> OperatorBank:
        """The bank of the descriptors for a target.

        Args:
            descriptors: By key.
            target: The model that receives them.
            probe_ridge: Relative ridge on the probe side, above 0.
            prompt_ridge: Relative ridge on the prompt side, above 0.
            site: As in `solve_operators`.
            tower: As in `solve_operators`.
            **options: Further options of `solve_operators`. Entries solved for endpoints answer as their fine-tunes,
                one at a time; sums of them don't mean anything.

        Returns:
            The bank.

        Raises:
            PlatonicError: If a key isn't a name or a tuple of names that can be folders; else as `solve_operators`.
        """
        instance(descriptors, "descriptors", Mapping, 'Pass {("source", "task"): descriptor}.')
        for key in descriptors:
            _folder(key)
        target = target.at(site=site, tower=tower)
        solved = solve_operators(
            list(descriptors.values()), target, probe_ridge=probe_ridge, prompt_ridge=prompt_ridge, **options
        )
        chosen = {name: options[name] for name in ("objective", "calibration", "prompts") if name in options}
        provenance = {
            key: provenance_of([descriptor], target, probe_ridge=probe_ridge, prompt_ridge=prompt_ridge, **chosen)
            for key, descriptor in descriptors.items()
        }
        operators = dict(zip(descriptors, solved, strict=True))
        record = PlatonicConfig()
        record_base(record, target.site.module, bare_model(target.model).get_submodule(target.site.module))
        base = {"base_shape": record.base_shape, "base_sketch": record.base_sketch}
        return cls(operators, target.site, target.identity, target.modality, base, provenance)

    def compose(self, coefficients: Mapping[Key, float]) -> Operator:
        """The signed sum of entries, exact.

        Args:
            coefficients: One signed coefficient per key.

        Raises:
            PlatonicError: If there are none, or a key isn't in the bank.
        """
        unknown = [key for key in coefficients if key not in self.operators]
        if unknown or not coefficients:
            raise PlatonicError(f"Expected keys of the bank ({list(self.operators)}), got {list(coefficients)}.")
        parts = [self.operators[key] * c for key, c in coefficients.items()]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Writes the bank: `bank_config.json`, and a folder per entry that is a PEFT adapter of its own.

        Args:
            save_directory: Made if it isn't there.
        """
        from . import __version__

        folder = Path(save_directory)
        entries = []
        for key, operator in self.operators.items():
            inside = folder / _folder(key)
            inside.mkdir(parents=True, exist_ok=True)
            prefix = f"base_model.model.{self.site.module}.platonic_"
            config = PlatonicConfig(
                r=operator.rank,
                site=operator.site,
                target_modules=[self.site.module],
                features=self.site.features or None,
                base_model_name_or_path=self.target.repo,
                revision=self.target.revision,
                inference_mode=True,
                provenance=dict(self.provenance.get(key, {})),
                **self.base,
            )
            digest = save_tensors(
                inside / ADAPTER_NAME, {f"{prefix}left": operator.left, f"{prefix}right": operator.right}
            )
            write_json(inside / "adapter_config.json", config.to_dict())
            entries.append(
                {
                    "key": key if isinstance(key, str) else list(key),
                    "shape": list(operator.shape),
                    "rank": operator.rank,
                    "digest": digest,
                    "provenance": dict(self.provenance.get(key, {})),
                }
            )
        content = {
            "schema_version": SCHEMA_VERSION,
            "library_version": __version__,
            "site": {key: value for key, value in asdict(self.site).items() if key != "features" or value},
            "target": self.target.to_dict(),
            "modality": self.modality,
            "base": dict(self.base),
            "entries": entries,
        }
        write_json(folder / CONFIG_NAME, content)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        commit_message: str | None = None,
        token: str | bool | None = None,
        create_pr: bool = False,
        license: str | None = None,
    ) -> Pushed:
        """Pushes the bank to a model repo, a subfolder an entry, with a card, as one commit.

        Args:
            repo_id: Made if it isn't there.
            private: Of a new repo; None takes the owner's default.
            revision: Branch, made if missing.
            commit_message: Of the commit.
            token: To write with.
            create_pr: Opens a pull request instead of committing.
            license: Licence id for the card; None takes the one the target states.

        Returns:
            The commit: `repo`, `revision`, `url`.

        Raises:
            HubError: If the Hub refuses or can't be reached; `kind` says which.
        """
        base = hub_repo(self.target)
        if license is None and base is not None:
            license = inherited_license([base], token=token)
        card = bank_card(
            repo_id=repo_id,
            entries=[
                {"key": k, "folder": _folder(k), "rank": o.rank, "provenance": self.provenance.get(k, {})}
                for k, o in self.operators.items()
            ],
            module=self.site.module,
            site=self.site.kind,
            modality=self.modality,
            base=self.target,
            license=license,
        )
        return push_saved(
            self.save_pretrained,
            card,
            repo_id,
            private=private,
            revision=revision,
            commit_message=commit_message or f"Upload operator bank of {len(self.operators)} entries",
            token=token,
            create_pr=create_pr,
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
    ) -> OperatorBank:
        """The bank saved in a folder or pushed to the Hub; each entry is fetched and read when first used.

        Args:
            repo_or_path: A folder that `save_pretrained` wrote, or a repo id.
            subfolder: Within it.
            revision: Branch, tag or commit; entries are of the same commit, whenever they are used.
            token: For private repos.
            cache_dir: Of the Hub client.
            local_files_only: Only what is in the cache, without a request.
            force_download: Downloads again.

        Raises:
            DescriptorFormatError: If the config is missing, doesn't parse or is newer than this library; on use, if
                an entry's file is missing, truncated, oversized, foreign or of another save.
            HubError: If it can't be had from the Hub; `kind` says why.
        """
        options: dict[str, Any] = {
            "token": token,
            "cache_dir": cache_dir,
            "local_files_only": local_files_only,
            "force_download": force_download,
        }
        fetched = fetch_folder(repo_or_path, subfolder=subfolder, revision=revision, files=[CONFIG_NAME], **options)
        folder = fetched.folder
        config = read_json(
            folder / CONFIG_NAME, schema=SCHEMA_VERSION, remedy="Pass the folder that `save_pretrained` wrote."
        )

        def entry_folder(name: str) -> Path:
            inside = f"{subfolder}/{name}" if subfolder else name
            return fetch_folder(
                repo_or_path, subfolder=inside, revision=fetched.revision, files=[ADAPTER_NAME], **options
            ).folder

        try:
            place = config["site"]
            read = features_of(place.get("features", ()))
            site = EditSite(str(place["module"]), place["kind"], place.get("tower", "probe"), read)
            if site.kind not in ("output", "input", "features") or site.tower not in ("probe", "text"):
                raise ValueError(f"site {site}")
            target = EncoderIdentity.from_dict(config["target"])
            entries = {_key(entry["key"]): _Entry.of(entry) for entry in config["entries"]}
            provenance = {_key(entry["key"]): dict(entry["provenance"]) for entry in config["entries"]}
            base, modality = dict(config["base"]), str(config["modality"])
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise DescriptorFormatError(
                f"Expected a whole bank config in {folder / CONFIG_NAME}, got one that doesn't parse: "
                f"{type(error).__name__}: {error}. Save or download the bank again."
            ) from error
        return cls(_SavedOperators(entry_folder, site, entries), site, target, modality, base, provenance)


@dataclass(frozen=True)
class _Entry:
    shape: tuple[int, int]
    rank: int
    digest: str

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> _Entry:
        p, d = values["shape"]
        sizes = [p, d, values["rank"]]
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            raise ValueError(f"sizes {sizes}")
        return cls((p, d), values["rank"], str(values["digest"]))


class _SavedOperators(Mapping[Key, Operator]):
    """Operators that are read from their files when first asked for."""

    def __init__(self, folder_of: Callable[[str], Path], site: EditSite, entries: Mapping[Key, _Entry]) -> None:
        self.folder_of, self.site, self.entries = folder_of, site, dict(entries)
        self.read: dict[Key, Operator] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[Key]:
        return iter(self.entries)

    def __getitem__(self, key: Key) -> Operator:
        if key not in self.read:
            entry = self.entries[key]
            prefix = f"base_model.model.{self.site.module}.platonic_"
            shapes = {f"{prefix}left": (entry.shape[0], entry.rank), f"{prefix}right": (entry.rank, entry.shape[1])}
            path = self.folder_of(_folder(key)) / ADAPTER_NAME
            found = load_tensors(path, shapes, dtype="float32", digest=entry.digest, config=CONFIG_NAME)
            self.read[key] = Operator(found[f"{prefix}left"], found[f"{prefix}right"], self.site.kind)
        return self.read[key]


def _key(value: Any) -> Key:
    key: Key = tuple(value) if isinstance(value, list) else value
    _folder(key)
    return key


def _folder(key: Key) -> str:
    """The entry's folder, relative to the bank's."""
    parts = (key,) if isinstance(key, str) else key
    if not isinstance(parts, tuple) or not parts or not all(isinstance(p, str) and _NAME.fullmatch(p) for p in parts):
        raise PlatonicError(
            f"Expected a key that is a name, or a tuple of names, of up to 96 letters, digits, '.', '_' and '-', got "
            f"{key!r:.200}. Its parts become folders."
        )
    return "/".join(parts)
