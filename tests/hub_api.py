"""What a Hub keeps and what it answers, without HTTP: repositories with history, and the routes of its interface."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

LARGE = (".safetensors", ".parquet", ".bin", ".npz")
DATE = "2026-01-01T00:00:00.000Z"
REPO, GIT = r"(?P<kind>dataset|model)s/(?P<repo>[^/]+/[^/]+)", r"((?P<kind>dataset)s/)?(?P<repo>[^/]+/[^/]+)"
ROUTES: list[tuple[str, re.Pattern[str], Callable[[HubApi, Call], Any]]] = []


@dataclass
class Repo:
    """One repository; `refs` maps a full ref name to a hash, `commits` a hash to its parent, title and files."""

    kind: str
    id: str
    owner: str
    private: bool = False
    gated: bool = False
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, Any]] = field(default_factory=dict)

    def commit(self, ref: str, parent: str | None, title: str, files: dict[str, Any]) -> str:
        sha = hashlib.sha1(uuid.uuid4().bytes).hexdigest()
        self.commits[sha] = {"parent": parent, "title": title, "files": files}
        self.refs[ref] = sha
        return sha

    def resolve(self, revision: str) -> str:
        for ref in (f"refs/heads/{revision}", f"refs/tags/{revision}", revision):
            if ref in self.refs:
                return self.refs[ref]
        if revision in self.commits:
            return revision
        raise Refusal(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def files(self, revision: str) -> dict[str, Any]:
        found: dict[str, Any] = self.commits[self.resolve(revision)]["files"]
        return found


class Refusal(Exception):
    """An answer that isn't a success, with the Hub's own error code."""

    def __init__(
        self, status: int, message: str, code: str = "", *, content: dict[str, Any] | None = None, **headers: str
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.content = status, message, content or {}
        self.headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **headers}


class Storage:
    """Repositories by kind and id. A storage opened again on the same folder has the same ones."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        (self.root / "blobs").mkdir(parents=True, exist_ok=True)
        state = self.root / "state.json"
        stored = json.loads(state.read_text()) if state.exists() else []
        self.repos = {(values["kind"], values["id"]): Repo(**values) for values in stored}

    def save(self) -> None:
        temporary = self.root / "state.tmp"
        temporary.write_text(json.dumps([dataclasses.asdict(repo) for repo in self.repos.values()]))
        os.replace(temporary, self.root / "state.json")

    def blob(self, sha256: str) -> Path:
        return self.root / "blobs" / sha256

    def store(self, content: bytes, *, large: bool) -> dict[str, Any]:
        sha256 = hashlib.sha256(content).hexdigest()
        self.blob(sha256).write_bytes(content)
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return {"sha256": sha256, "oid": oid, "size": len(content), "large": large}

    def create(self, kind: str, repo_id: str, *, private: bool = False) -> Repo:
        repo = self.repos[kind, repo_id] = Repo(kind, repo_id, repo_id.split("/")[0], private)
        repo.commit("refs/heads/main", None, "initial commit", {})
        self.save()
        return repo

    def put(self, repo: Repo, files: dict[str, bytes], branch: str) -> str:
        """Commits files to a branch, made if missing; the commit's hash."""
        ref = f"refs/heads/{branch}"
        parent = repo.refs.get(ref) or repo.resolve("main")
        added = {path: self.store(content, large=path.endswith(LARGE)) for path, content in files.items()}
        sha = repo.commit(ref, parent, "put", {**repo.commits[parent]["files"], **added})
        self.save()
        return sha

    def apply(self, repo: Repo, revision: str, lines: Iterable[bytes], *, pull_request: bool) -> tuple[str, int]:
        """One commit from the client's operations, whole or not at all; its hash and the pull request's number."""
        ref = revision if revision.startswith("refs/") else f"refs/heads/{revision}"
        parent = repo.resolve(ref)
        files, title = dict(repo.files(parent)), ""
        for operation in map(json.loads, lines):
            kind, value = operation["key"], operation["value"]
            if kind == "header":
                title = value["summary"]
                if value.get("parentCommit", parent) != parent:
                    raise Refusal(412, "A commit has happened since. Please refresh and try again.")
            elif kind == "file":
                files[value["path"]] = self.store(base64.b64decode(value["content"]), large=False)
            elif kind == "lfsFile":
                files[value["path"]] = self.store(self.blob(value["oid"]).read_bytes(), large=True)
            elif kind.startswith("deleted"):
                gone = value["path"].rstrip("/")
                files = {p: blob for p, blob in files.items() if p != gone and not p.startswith(f"{gone}/")}
        number = 1 + sum(name.startswith("refs/pr/") for name in repo.refs)
        sha = repo.commit(f"refs/pr/{number}" if pull_request else ref, parent, title, files)
        self.save()
        return sha, number


@dataclass(frozen=True)
class Call:
    """One request as the routes see it; `parts` are the named groups of the path."""

    user: str | None
    parts: dict[str, str]
    query: dict[str, list[str]]
    body: bytes

    @property
    def asked(self) -> dict[str, Any]:
        return json.loads(self.body or b"{}")

    def flag(self, name: str) -> bool:
        return self.query.get(name, [""])[0].lower() in ("1", "true")


def route(methods: str, pattern: str) -> Callable[[Any], Any]:
    """Registers a method of `HubApi` for these HTTP methods and the paths that match."""

    def register(function: Any) -> Any:
        ROUTES.append((methods, re.compile(pattern), function))
        return function

    return register


class HubApi(Storage):
    """The routes that the client of models and data sets uses."""

    def __init__(self, root: Path, url: str, users: dict[str, str]) -> None:
        super().__init__(root)
        self.url, self.users, self.lock = url, users, threading.RLock()

    def answer(self, method: str, target: str, token: str | None, body: bytes) -> Any:
        """The reply to one request: JSON, or headers with bytes."""
        if token is not None and token not in self.users:
            raise Refusal(401, "Invalid credentials in Authorization header")
        split = urlsplit(target)
        for methods, pattern, function in ROUTES:
            if method in methods.split() and (match := pattern.fullmatch(split.path)):
                parts = {key: unquote(value) for key, value in match.groupdict().items() if value is not None}
                with self.lock:
                    return function(self, Call(self.users.get(token or ""), parts, parse_qs(split.query), body))
        raise Refusal(404, f"No such page: {method} {split.path}")

    def _readable(self, call: Call, *, write: bool = False) -> Repo:
        repo = self.repos.get((call.parts.get("kind", "model"), call.parts["repo"]))
        if repo is None or (repo.private and call.user != repo.owner):
            raise Refusal(404 if call.user else 401, "Repository not found", "RepoNotFound")
        if write and call.user != repo.owner and not call.flag("create_pr"):
            raise (
                Refusal(403, f"You don't have the rights to write to {repo.id}")
                if call.user
                else Refusal(401, "Log in.")
            )
        return repo

    # The Hub's interface --------------------------------------------------------------------------------------------

    @route("GET", "/api/whoami-v2")
    def who_am_i(self, call: Call) -> Any:
        if call.user is None:
            raise Refusal(401, "Invalid username or password.")
        return {"name": call.user, "type": "user", "orgs": [], "auth": {"accessToken": {"role": "write"}}}

    @route("POST", "/api/validate-yaml")
    def validate_card(self, call: Call) -> Any:
        return {"errors": [], "warnings": []}

    @route("POST DELETE", "/api/repos/(?P<action>create|delete)")
    def create_or_delete(self, call: Call) -> Any:
        kind, owner = call.asked.get("type") or "model", call.asked.get("organization") or call.user
        repo_id = f"{owner}/{call.asked['name'].split('/')[-1]}"
        if call.user != owner or call.user is None:
            raise Refusal(403 if call.user else 401, f"You don't have the rights to this under the namespace {owner}")
        if call.parts["action"] == "delete":
            if self.repos.pop((kind, repo_id), None) is None:
                raise Refusal(404, "Repository not found", "RepoNotFound")
        elif (kind, repo_id) in self.repos:
            # The real Hub's answer, too, says where the repo is; the client reads it after `exist_ok`.
            page = self._page(self.repos[kind, repo_id])
            raise Refusal(409, f"You already created this {kind} repo", content={"url": page, "name": repo_id})
        else:
            self.create(kind, repo_id, private=call.asked.get("visibility") == "private")
        self.save()
        return {
            "url": self._page(self.repos.get((kind, repo_id)) or Repo(kind, repo_id, owner)),
            "name": repo_id,
        }

    def _page(self, repo: Repo) -> str:
        return f"{self.url}/{'datasets/' if repo.kind == 'dataset' else ''}{repo.id}"

    @route("PUT", f"/api/{REPO}/settings")
    def settings(self, call: Call) -> Any:
        repo = self._readable(call, write=True)
        repo.private = call.asked.get("visibility", "private" if repo.private else "public") == "private"
        repo.gated = bool(call.asked.get("gated", repo.gated))
        self.save()
        return {}

    @route("GET", f"/api/{REPO}(/revision/(?P<revision>[^/]+))?")
    def info(self, call: Call) -> Any:
        repo = self._readable(call)
        sha = repo.resolve(call.parts.get("revision", "main"))
        files = [{"rfilename": path, **_entry(path, blob)} for path, blob in sorted(repo.files(sha).items())]
        names = {"_id": "0" * 24, "id": repo.id, "modelId": repo.id, "author": repo.owner, "sha": sha}
        dates = {"lastModified": DATE, "createdAt": DATE, "downloads": 0, "likes": 0, "tags": []}
        card = repo.files(sha).get("README.md")
        dates["cardData"] = _head(self.blob(card["sha256"]).read_text()) if card else {}
        access = {"private": repo.private, "gated": "manual" if repo.gated else False, "disabled": False}
        return {**names, **dates, **access, "siblings": files}

    @route("GET", f"/api/{REPO}/refs")
    def list_refs(self, call: Call) -> Any:
        found: dict[str, list[Any]] = {"heads": [], "tags": [], "pr": []}
        for ref, sha in self._readable(call).refs.items():
            _, group, name = ref.split("/", 2)
            found[group].append({"name": name, "ref": ref, "targetCommit": sha})
        return {"branches": found["heads"], "tags": found["tags"], "pullRequests": found["pr"], "converts": []}

    @route("POST DELETE", f"/api/{REPO}/(?P<group>branch|tag)/(?P<name>[^/]+)")
    def branch_or_tag(self, call: Call) -> Any:
        repo, branch, name = self._readable(call, write=True), call.parts["group"] == "branch", call.parts["name"]
        start = call.asked.get("startingPoint", "main") if branch else name
        ref = f"refs/heads/{name}" if branch else f"refs/tags/{call.asked['tag']}"
        if ref in repo.refs:
            raise Refusal(409, f"The reference {ref} exists already")
        repo.refs[ref] = repo.resolve(start)
        self.save()
        return {}

    @route("GET", f"/api/{REPO}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?")
    def tree(self, call: Call) -> Any:
        repo, prefix = self._readable(call), f"{call.parts['folder']}/" if "folder" in call.parts else ""
        files = repo.files(call.parts["revision"])
        below = {path: path.removeprefix(prefix).split("/") for path in files if path.startswith(prefix)}
        if prefix and not below:
            raise Refusal(404, f"{prefix} does not exist", "EntryNotFound")
        deepest = 99 if call.flag("recursive") else 1
        folders = {prefix + "/".join(p[:i]) for p in below.values() for i in range(1, min(len(p), deepest + 1))}
        shown = [path for path, names in below.items() if len(names) <= deepest]
        return [*map(_folder, sorted(folders)), *(_entry(path, files[path]) for path in sorted(shown))]

    @route("POST", f"/api/{REPO}/paths-info/(?P<revision>[^/]+)")
    def paths_info(self, call: Call) -> Any:
        repo = self._readable(call)
        files = repo.files(call.parts["revision"])
        asked = (call.asked if call.body.startswith(b"{") else parse_qs(call.body.decode()))["paths"]
        folders = [path for path in asked if any(name.startswith(f"{path}/") for name in files)]
        return [*(_entry(path, files[path]) for path in asked if path in files), *map(_folder, folders)]

    @route("POST", f"/api/{REPO}/preupload/(?P<revision>[^/]+)")
    def preupload(self, call: Call) -> Any:
        repo, found = self._readable(call, write=True), []
        files = repo.files(call.parts["revision"])
        for asked in call.asked["files"]:
            old, large = files.get(asked["path"]), asked["path"].endswith(LARGE) or asked["size"] > 10_000_000
            oid = old and (old["sha256"] if old["large"] else old["oid"])
            mode = "lfs" if large else "regular"
            found.append({"path": asked["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": found}

    @route("POST", rf"/{GIT}\.git/info/lfs/objects/batch")
    def large_files(self, call: Call) -> Any:
        if self._readable(call) and call.user is None:
            raise Refusal(401, "Log in.")
        objects = [{"oid": asked["oid"], "size": asked["size"]} for asked in call.asked["objects"]]
        for wanted in objects:
            if not self.blob(wanted["oid"]).exists():
                action = {"href": f"{self.url}/_lfs/{wanted['oid']}"}
                wanted["actions"] = {"upload": action, "verify": action}
        return {"transfer": "basic", "objects": objects}

    @route("PUT POST", "/_lfs/(?P<oid>[0-9a-f]{64})")
    def upload(self, call: Call) -> Any:
        blob = self.blob(call.parts["oid"])
        if not call.body.startswith(b'{"oid"'):  # otherwise the client asks whether its upload arrived
            if hashlib.sha256(call.body).hexdigest() != call.parts["oid"]:
                raise Refusal(400, "The content doesn't have this hash.")
            blob.write_bytes(call.body)
        elif not blob.exists():
            raise Refusal(404, "This content was never uploaded.")
        return {}

    @route("POST", f"/api/{REPO}/commit/(?P<revision>[^/]+)")
    def commit(self, call: Call) -> Any:
        repo, revision = self._readable(call, write=True), call.parts["revision"]
        if call.user is None:
            raise Refusal(401, "Log in.")
        sha, number = self.apply(repo, revision, call.body.splitlines(), pull_request=call.flag("create_pr"))
        page = {"pullRequestUrl": f"{self._page(repo)}/discussions/{number}"} if call.flag("create_pr") else {}
        return {"success": True, "commitOid": sha, "commitUrl": f"{self._page(repo)}/commit/{sha}", **page}

    @route("GET HEAD", f"/{GIT}/resolve/(?P<revision>[^/]+)/(?P<path>.+)")
    def download(self, call: Call) -> Any:
        repo = self._readable(call)
        if repo.gated and call.user != repo.owner:
            raise Refusal(403 if call.user else 401, f"Access to {repo.kind} {repo.id} is restricted.", "GatedRepo")
        sha = repo.resolve(call.parts["revision"])
        blob = repo.files(sha).get(call.parts["path"])
        if blob is None:
            raise Refusal(404, "Entry not found", "EntryNotFound", **{"X-Repo-Commit": sha})
        tag = f'"{blob["sha256"] if blob["large"] else blob["oid"]}"'
        linked = {"X-Linked-Etag": tag, "X-Linked-Size": str(blob["size"])} if blob["large"] else {}
        headers = {"X-Repo-Commit": sha, "ETag": tag, "Content-Type": "application/octet-stream", **linked}
        return headers, self.blob(blob["sha256"]).read_bytes()


def _head(card: str) -> Any:
    """The YAML head of a card."""
    found = re.match(r"---\n(.*?)\n---", card, re.S)
    return yaml.safe_load(found[1]) if found else {}


def _entry(path: str, blob: dict[str, Any]) -> dict[str, Any]:
    shown = {"type": "file", "path": path, "size": blob["size"], "oid": blob["oid"], "blobId": blob["oid"]}
    large = {"oid": blob["sha256"], "sha256": blob["sha256"], "size": blob["size"], "pointerSize": 134}
    return {**shown, "lfs": large} if blob["large"] else shown


def _folder(path: str) -> dict[str, Any]:
    return {"type": "directory", "path": path, "oid": "0" * 40, "size": 0}
