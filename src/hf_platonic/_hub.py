"""Pulling folders from the Hub and pushing them to it, through `huggingface_hub`'s own client.

One commit is pulled whole or not at all, only the files that are named, and never a path outside the cache.
"""

from __future__ import annotations

import fnmatch
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ._hub_errors import REMEDIES, explain
from .errors import DescriptorFormatError, HubError, PlatonicError

if TYPE_CHECKING:
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import DatasetInfo, ModelInfo

__all__ = ["CARD_MARKER", "Fetched", "Pushed", "RepoType", "explain", "fetch_folder", "is_local", "push_folder"]

CARD_MARKER = "<!-- hf_platonic: generated card -->"
"""A card that has this line may be replaced by the next push; any other is somebody's own and stays."""

RepoType = Literal["model", "dataset"]
_LIBRARY = "hf_platonic"
_COMMIT = re.compile("[0-9a-f]{40}")
_ABSENT = Path()
_PASSING = ("timeout", "unreachable", "server")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fetched:
    """A folder whose wanted files are there.

    Attributes:
        folder: Where they are, `subfolder` included.
        repo: The repo they came from, or None for a local folder.
        revision: The commit hash they're of, or None for a local folder.
    """

    folder: Path
    repo: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class Pushed:
    """What a push made.

    Attributes:
        repo: Full id.
        revision: Hash of the commit.
        url: Page of the commit.
        pull_request: Page of the pull request, where one was asked for.
    """

    repo: str
    revision: str
    url: str
    pull_request: str | None = None


def is_local(repo_or_path: str | os.PathLike[str]) -> bool:
    """Whether a folder is meant, not a repo: any path object, or the name of a folder that exists."""
    return not isinstance(repo_or_path, str) or os.path.isdir(os.path.expanduser(repo_or_path))


def fetch_folder(
    repo_or_path: str | os.PathLike[str],
    *,
    files: Sequence[str],
    optional: Sequence[str] = (),
    subfolder: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    force_download: bool = False,
    repo_type: RepoType = "model",
) -> Fetched:
    """The folder with the named files of one commit, from the Hub, the cache or the disk.

    A local folder is used as it is. Otherwise the revision is resolved once and every file is of that commit. What
    the cache has whole isn't asked for again: a full commit hash then needs no request, a branch or tag one. If the
    Hub can't be reached, the copy that the cache has of that revision is used, with a logged warning.

    Args:
        repo_or_path: Folder, or repo id.
        files: Names or patterns (`fnmatch`) below `subfolder` that must be there; the first is a plain name.
        optional: Names or patterns that may be missing in the repo. Offline, too, one that the repo has isn't skipped.
        subfolder: Folder within the repo.
        revision: Branch, tag or commit; main by default.
        token: A token, True for the saved one, False for none; by default the saved one, if any.
        cache_dir: By default the client's.
        local_files_only: Ask the cache only, as with HF_HUB_OFFLINE=1: no request is made.
        force_download: Download again what the cache has.
        repo_type: "model" or "dataset".

    Raises:
        HubError: If it can't be had; `kind` tells why. Also for a path that leads out of the repo or the cache.
        DescriptorFormatError: If a local folder lacks one of `files`.
    """
    from huggingface_hub import is_offline_mode

    below = f"{_inside(subfolder, 'subfolder')}/" if subfolder else ""
    must, may = ([below + _inside(name, "file name") for name in names] for names in (files, optional))
    if not must or _is_pattern(must[0]):
        raise ValueError(f"Expected `files` to start with a plain name, got {list(files)}.")
    if is_local(repo_or_path):
        return Fetched(_whole_local_folder(Path(repo_or_path).expanduser(), below, must))
    if revision is not None:
        _inside(revision, "revision")
    options = {"repo_type": repo_type, "token": token, "cache_dir": cache_dir, "library_name": _LIBRARY}
    what = f"{repo_type} {repo_or_path!r}" + (f" at revision {revision!r}" if revision else "")
    pull = _Pull(_checked_id(str(repo_or_path)), what, must, may, below, options)
    if local_files_only or is_offline_mode():
        return pull.from_cache(revision)
    try:
        with explain(what, token=token):
            commit = pull.commit(revision)
    except HubError as error:
        if error.kind not in _PASSING:
            raise
        if not force_download and (kept := pull.from_cache_if_whole(revision)) is not None:
            logger.warning("%s Used commit %s from the cache.", error, kept.revision)
            return kept
        with explain(what, token=token):
            commit = pull.commit(revision, retry=True)
    with explain(what, token=token):
        return pull.from_hub(commit, revision, force_download)


def push_folder(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    commit_message: str,
    repo_type: RepoType = "model",
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    create_pr: bool = False,
    subfolder: str | None = None,
    delete_patterns: Sequence[str] = (),
) -> Pushed:
    """Writes a folder to a repo in one commit, so that an interrupted push changes nothing that loads.

    The repo and the branch are made if missing. A README.md on the Hub without `CARD_MARKER` stays as it is.

    Args:
        folder: Its files are pushed, but for temporary ones (".*.tmp").
        repo_id: "user/name"; the user may be left out for one's own.
        commit_message: First line of the commit.
        repo_type: "model" or "dataset".
        private: For a new repo; by default what the account says. An existing repo must agree with it.
        revision: Branch; main by default.
        token: As in `fetch_folder`.
        create_pr: Open a pull request instead of writing to the branch.
        subfolder: Where in the repo; its root by default.
        delete_patterns: Files below `subfolder` that match and aren't in the folder are removed by the same commit.

    Raises:
        HubError: If the Hub refuses, fails or can't be reached; `kind` tells why. With "conflict", somebody else
            pushed at the same time and nothing was written.
        PlatonicError: If there's nothing in the folder.
    """
    source = Path(folder)
    if not any(path.is_file() for path in source.rglob("*")):
        raise PlatonicError(f"Expected a folder with files to push, got {str(source)!r}. Save the object there first.")
    below = f"{_inside(subfolder, 'subfolder')}/" if subfolder else ""
    if revision is not None:
        _inside(revision, "revision")
    repo, api = _checked_id(repo_id), _api(token)
    with explain(f"{repo_type} {repo_id!r}" + (f" at revision {revision!r}" if revision else ""), token=token):
        if "/" not in repo:
            repo = f"{api.whoami()['name']}/{repo}"
        head = _ready(api, repo, repo_type, revision, private, create_pr)
        ignored = [".*.tmp", "*/.*.tmp"]
        if (source / "README.md").is_file() and _is_somebodys(api, repo, repo_type, f"{below}README.md", head):
            logger.info("The README.md in %s isn't a generated card; it stays.", repo)
            ignored.append("README.md")
        with warnings.catch_warnings():
            # Probes travel as Parquet beside a descriptor, which is a model repo on purpose.
            warnings.filterwarnings("ignore", message="It seems that you are about to commit a data file")
            # huggingface_hub 2.4 uploads large files through a deprecated argument of its HTTP library.
            warnings.filterwarnings("ignore", message="Use 'content=", category=DeprecationWarning)
            done = api.upload_folder(
                folder_path=source,
                repo_id=repo,
                repo_type=repo_type,
                path_in_repo=below or None,
                commit_message=commit_message,
                revision=revision,
                create_pr=create_pr,
                parent_commit=head.sha,
                ignore_patterns=ignored,
                delete_patterns=list(delete_patterns) or None,
            )
    return Pushed(repo, done.oid, str(done.commit_url), done.pr_url)


@dataclass(frozen=True)
class _Pull:
    """Which files are wanted of which repo: `must` and `may` are names or patterns, `below` included."""

    id: str
    what: str
    must: list[str]
    may: list[str]
    below: str
    options: dict[str, Any]  # what every download of the client takes

    def commit(self, revision: str | None, *, retry: bool = False) -> str:
        """The commit that a revision names.

        Asked for by a file: unlike the client's own look-ups of revisions, this has a time limit and can be retried.
        """
        from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

        if revision is not None and _COMMIT.fullmatch(revision):
            return revision
        found = get_hf_file_metadata(
            hf_hub_url(self.id, self.must[0], repo_type=self.options["repo_type"], revision=revision),
            token=self.options["token"],
            timeout=constants.HF_HUB_ETAG_TIMEOUT,
            library_name=_LIBRARY,
            retry_on_errors=retry,
        ).commit_hash
        if found is None or not _COMMIT.fullmatch(found):
            raise HubError(
                f"Expected a commit hash from {constants.ENDPOINT}, got {found!r}. It doesn't answer like a Hub: "
                "check HF_ENDPOINT and proxies.",
                kind="unreachable",
            )
        return found

    def from_hub(self, commit: str, revision: str | None, force: bool) -> Fetched:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import RemoteEntryNotFoundError

        listing = self._listing(commit) or self._ask_listing(commit) if self._patterns else []
        there: list[str] = []
        absent = set()
        for name, needed in self._names(listing):
            if not force and self._cached(name, commit) == _ABSENT:
                continue
            try:
                hf_hub_download(self.id, name, revision=commit, dry_run=True, **self.options)
                there.append(name)
            except RemoteEntryNotFoundError:
                if needed:
                    raise
                absent.add(name)
        # The first file last: without it, and without the ref below, the cache doesn't show an interrupted pull.
        for name in reversed(there):
            hf_hub_download(self.id, name, revision=commit, force_download=force, **self.options)
        if self._cached_commit(revision) != commit:
            # For the ref, by which the revision is known offline.
            hf_hub_download(self.id, self.must[0], revision=revision, **self.options)
        return self.from_cache(commit, absent)

    def from_cache(self, revision: str | None, absent: Collection[str] = ()) -> Fetched:
        """Without a request; `absent` are files the repo is known to lack.

        Raises:
            HubError: If the cache doesn't have it whole, or a file in it lies elsewhere.
        """
        commit = self._cached_commit(revision)
        if commit is None:
            unknown = self._cached(self.must[0], revision) is None
            raise self._error("not_cached" if unknown else "file_not_found", self.must[0])
        listing = self._listing(commit) if self._patterns else []
        if listing is None:
            raise self._error("not_cached", self._patterns[0])
        paths: dict[str, Path] = {}
        for name, needed in self._names(listing):
            path = self._cached(name, commit) if name not in absent else _ABSENT
            if path is None:
                raise self._error("not_cached", name)
            if path == _ABSENT and needed:
                raise self._error("file_not_found", name)
            if path != _ABSENT:
                paths[name] = path
        snapshot = _root(paths[self.must[0]], self.must[0])
        cache = snapshot.parents[2].resolve()  # snapshot is cache/models--user--name/snapshots/commit
        for name, path in paths.items():
            if not path.resolve().is_relative_to(cache):
                raise HubError(
                    f"Expected {name!r} within the cache {str(cache)!r}, got a link that leads out of it. Delete "
                    f"{str(path)!r} and pull again.",
                    kind="unsafe_path",
                )
        return Fetched(snapshot / self.below, self.id, commit)

    def from_cache_if_whole(self, revision: str | None) -> Fetched | None:
        try:
            return self.from_cache(revision)
        except HubError as error:
            if error.kind != "not_cached":
                raise
            return None

    def _cached(self, name: str, revision: str | None) -> Path | None:
        """A file in the cache, `_ABSENT` if the repo is known to lack it, None if the cache doesn't know."""
        from huggingface_hub import try_to_load_from_cache

        where = {key: self.options[key] for key in ("repo_type", "cache_dir")}
        found = try_to_load_from_cache(self.id, name, revision=revision, **where)
        return Path(found) if isinstance(found, str) else None if found is None else _ABSENT

    def _cached_commit(self, revision: str | None) -> str | None:
        """The commit that the cache knows a revision by, as far as it has the first file of it."""
        if revision is not None and _COMMIT.fullmatch(revision):
            return revision
        found = self._cached(self.must[0], revision)
        commit = "" if found in (None, _ABSENT) else _root(found, self.must[0]).name
        return commit if _COMMIT.fullmatch(commit) else None

    @property
    def _patterns(self) -> list[str]:
        return [name for name in (*self.must, *self.may) if _is_pattern(name)]

    def _listing(self, commit: str) -> list[str] | None:
        """Every file of a commit, if the cache keeps the listing."""
        from huggingface_hub import get_cached_repo_tree
        from huggingface_hub.errors import CachedRepoTreeNotFoundError

        where = {key: self.options[key] for key in ("repo_type", "cache_dir")}
        try:
            return [file.path for file in get_cached_repo_tree(self.id, revision=commit, **where)]
        except CachedRepoTreeNotFoundError:
            return None

    def _ask_listing(self, commit: str) -> list[str]:
        """Every file of a commit, asked for; kept in the cache, to know offline which files a pattern means."""
        from huggingface_hub import snapshot_download
        from huggingface_hub.hf_api import RepoFile

        api = _api(self.options["token"])
        tree = api.list_repo_tree(self.id, recursive=True, revision=commit, repo_type=self.options["repo_type"])
        paths = [entry.path for entry in tree if isinstance(entry, RepoFile)]
        # Only this writes the listing. It can't tell failures apart, hence the request above.
        snapshot_download(self.id, revision=commit, allow_patterns=[self.must[0]], **self.options)
        return paths

    def _names(self, listing: Sequence[str]) -> Iterator[tuple[str, bool]]:
        """Plain names, patterns replaced by what they match, each with whether it must be there."""
        seen: set[str] = set()
        for wanted, needed in [*((name, True) for name in self.must), *((name, False) for name in self.may)]:
            names = [wanted]
            if _is_pattern(wanted):
                names = [_inside(path, "a file's name") for path in fnmatch.filter(listing, wanted)]
                if needed and not names:
                    raise self._error("file_not_found", wanted)
            yield from ((name, needed) for name in names if name not in seen)
            seen.update(names)

    def _error(self, kind: str, name: str) -> HubError:
        return HubError(f"Can't use {self.what}, file {name!r}: {REMEDIES[kind]}", kind=kind)


def _root(path: Path, name: str) -> Path:
    """The folder that a path with this relative name starts from."""
    return path.parents[name.count("/")]


def _api(token: str | bool | None) -> HfApi:
    from huggingface_hub import HfApi

    from . import __version__

    return HfApi(token=token, library_name=_LIBRARY, library_version=__version__)


def _whole_local_folder(folder: Path, below: str, must: Sequence[str]) -> Path:
    for name in must:
        found = any(path.is_file() for path in folder.glob(name)) if _is_pattern(name) else (folder / name).is_file()
        if not found:
            raise DescriptorFormatError(
                f"Expected {name!r} in folder {str(folder)!r}, but it isn't there. Check the path, or save or "
                "download the object again."
            )
    return folder / below


def _ready(
    api: HfApi, repo: str, repo_type: RepoType, revision: str | None, private: bool | None, create_pr: bool
) -> ModelInfo | DatasetInfo:
    """The state of the branch to push to, the repo and the branch made if missing."""
    from huggingface_hub import constants
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    def state(revision: str | None) -> ModelInfo | DatasetInfo:
        look_up = api.model_info if repo_type == "model" else api.dataset_info
        return look_up(repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)

    # Looked at before it's made: making a repo has no time limit in the client, and needs more rights than a push.
    try:
        found = state(None)
    except RepositoryNotFoundError:
        api.create_repo(repo, repo_type=repo_type, private=private, exist_ok=True)
        found = state(None)
    if private is not None and found.private is not None and bool(found.private) != private:
        raise HubError(
            f"Expected {repo_type} {repo!r} to be {'private' if private else 'public'} as asked, but it exists and "
            "isn't. Change it in the repo's settings, or push with private=None.",
            kind="conflict",
        )
    if revision is None:
        return found
    try:
        return state(revision)
    except RevisionNotFoundError:
        if create_pr or revision.startswith("refs/"):
            raise
        api.create_branch(repo, branch=revision, repo_type=repo_type, exist_ok=True)
        return state(revision)


def _is_somebodys(api: HfApi, repo: str, repo_type: RepoType, name: str, head: ModelInfo | DatasetInfo) -> bool:
    """Whether the repo has a card that this package didn't generate."""
    if name not in {file.rfilename for file in head.siblings or ()}:
        return False
    with tempfile.TemporaryDirectory() as folder:
        card = api.hf_hub_download(repo, name, repo_type=repo_type, revision=head.sha, local_dir=folder)
        return CARD_MARKER not in Path(card).read_text(encoding="utf-8", errors="replace")


def _checked_id(repo: str) -> str:
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise HubError(
            f"Expected a folder or a repo id like 'user/name', got {repo!r}: there's no such folder, and it isn't a "
            "repo id. Check the path or the name.",
            kind="invalid_id",
        ) from error
    return repo


def _inside(path: str, what: str) -> str:
    """The relative path itself, if it stays where it starts.

    Raises:
        HubError: Otherwise.
    """
    clean = path.rstrip("/")
    if what == "subfolder" and _is_pattern(clean):
        raise HubError(f"Expected one subfolder, got the pattern {path!r}. Name it in full.", kind="unsafe_path")
    if not clean or "\\" in clean or ":" in clean or "\0" in clean or {"", ".", ".."} & set(clean.split("/")):
        raise HubError(
            f"Expected {what} to be a relative path within the repo, such as 'tasks/cars', got {path!r}.",
            kind="unsafe_path",
        )
    return clean


def _is_pattern(name: str) -> bool:
    return any(character in name for character in "*?[")
