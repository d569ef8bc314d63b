"""Pulling and pushing through the real client, in processes of its own, against a real server on loopback."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hub_server import ALICE, BOB, Client, ClientError, HubServer, client_environment, run_client

import hf_platonic
from hf_platonic._hub import CARD_MARKER, Fetched, explain, fetch_folder, is_local, push_folder
from hf_platonic.errors import DescriptorFormatError, HubError, PlatonicError

CONFIG, WEIGHTS, CARD, PROBES = "config.json", "weights.safetensors", "README.md", "probes/probes.parquet"
OBJECT = {CONFIG: b'{"version": 1}', WEIGHTS: bytes(range(256)) * 2000}
WANTED: dict[str, Any] = {"files": [CONFIG, WEIGHTS]}
# The package's own import takes each client seconds, for PEFT and torch; the Hub's part needs neither.
START = f"""
import sys, time, types
sys.modules["hf_platonic"] = package = types.ModuleType("hf_platonic")
package.__path__, package.__version__ = {hf_platonic.__path__!r}, {hf_platonic.__version__!r}
import huggingface_hub as hub
from hf_platonic._hub import *
"""
HURRY = "wait, time.sleep = time.sleep, lambda seconds: None"  # the client waits 23 s between its own retries


@dataclass(frozen=True)
class Hub:
    """The server, and clients that stay: two users, somebody without a token, and somebody offline."""

    server: HubServer
    alice: Client
    bob: Client
    nobody: Client
    offline: Client


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    folder = tmp_path_factory.mktemp("hub")
    with HubServer(folder / "server") as server:
        who = {"alice": (ALICE, False), "bob": (BOB, False), "nobody": (None, False), "offline": (None, True)}
        clients = {}
        for name, (token, offline) in who.items():
            environment = client_environment(server, folder / name, token, offline)
            clients[name] = Client(environment, folder / f"{name}.log")
        for client in clients.values():
            client.run(START)
        yield Hub(server, **clients)
        for client in clients.values():
            client.close()


@pytest.fixture
def hub(running: Hub) -> Iterator[Hub]:
    yield running
    running.server.faults.clear()
    for client in (running.alice, running.bob, running.nobody, running.offline):
        assert "SecretToken" not in client.errors.read_text()


@pytest.fixture
def repo(hub: Hub, request: pytest.FixtureRequest) -> str:
    """A repo of Alice's with the object in it."""
    name = "alice/" + re.sub("[^a-z0-9]+", "-", request.node.name.lower()).strip("-")
    hub.server.put(name, OBJECT)
    return name


def pull(client: Client, repo: str, **options: Any) -> dict[str, Any]:
    """The result of `fetch_folder` in a client, with the folder's content read here."""
    options = {**WANTED, **{key: str(v) if isinstance(v, Path) else v for key, v in options.items()}}
    found = client.run(
        f"got = fetch_folder({repo!r}, **{options!r})\n"
        "result = {'folder': got.folder, 'repo': got.repo, 'revision': got.revision}"
    )
    folder = Path(found["folder"])
    read = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {**found, "files": read}


def push(client: Client, folder: Path, repo: str, **options: Any) -> dict[str, Any]:
    options = {"commit_message": "Update", **options}
    return client.run(f"result = vars(push_folder({str(folder)!r}, {repo!r}, **{options!r}))")


def saved(folder: Path, files: dict[str, bytes] = OBJECT) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def refusal(kind: str, action: Any, *values: Any, **options: Any) -> ClientError:
    with pytest.raises(ClientError) as caught:
        action(*values, **options)
    assert (caught.value.type, caught.value.kind) == ("HubError", kind), caught.value.trace
    assert "SecretToken" not in caught.value.trace
    return caught.value


# There and back ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("repo_type", ["model", "dataset"])
def test_push_then_pull_by_branch_tag_and_commit(hub: Hub, tmp_path: Path, repo_type: str) -> None:
    name, kind = f"alice/round-{repo_type}", {"repo_type": repo_type}
    first = push(hub.alice, saved(tmp_path / "1"), name, **kind)
    hub.alice.run(f"hub.create_tag({name!r}, tag='v1', repo_type={repo_type!r})")
    newer = {**OBJECT, CONFIG: b'{"version": 2}'}
    second = push(hub.alice, saved(tmp_path / "2", newer), name, revision="next", **kind)
    assert first["repo"] == name
    assert first["url"].endswith(first["revision"])
    assert first["revision"] != second["revision"]
    options = {**kind, "cache_dir": tmp_path / "cache"}
    for revision, pushed, files in [
        (None, first, OBJECT),
        ("main", first, OBJECT),
        ("v1", first, OBJECT),
        ("next", second, newer),
        (first["revision"], first, OBJECT),
        (second["revision"], second, newer),
    ]:
        got = pull(hub.nobody, name, revision=revision, **options)
        assert (got["repo"], got["revision"], got["files"]) == (name, pushed["revision"], files)


def test_only_the_named_files_of_a_subfolder_are_downloaded(hub: Hub, repo: str, tmp_path: Path) -> None:
    hub.server.put(repo, {f"tasks/cars/{name}": content[::-1] for name, content in OBJECT.items()})
    hub.server.put(repo, {"tasks/cars/huge.bin": b"0" * 1000, "pytorch_model.bin": b"1"})
    got = pull(hub.nobody, repo, subfolder="tasks/cars", cache_dir=tmp_path)
    assert got["files"] == {name: content[::-1] for name, content in OBJECT.items()}
    assert got["folder"].endswith("tasks/cars")
    assert not hub.server.requests(f"{repo}.*(huge|pytorch_model)")


def test_all_files_are_of_one_commit_though_the_branch_moves_meanwhile(hub: Hub, repo: str, tmp_path: Path) -> None:
    before = hub.server.put(repo, {})
    hub.server.fail(f"GET /{repo}/resolve/.*weights", hang=1.0)  # the client's limit is 2 s
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(pull, hub.nobody, repo, cache_dir=tmp_path)
        while not hub.server.requests(f"GET /{repo}/resolve/.*weights"):
            time.sleep(0.01)
        hub.server.put(repo, {CONFIG: b"new", WEIGHTS: b"new"})
        got = waiting.result()
    assert (got["revision"], got["files"]) == (before, OBJECT)


def test_optional_files_and_patterns(hub: Hub, repo: str, tmp_path: Path) -> None:
    options = {"files": [CONFIG], "optional": ["*.safetensors", "probes/*", "absent.json"], "cache_dir": tmp_path}
    assert pull(hub.nobody, repo, **options)["files"] == OBJECT
    hub.server.put(repo, {PROBES: b"probes"})
    assert pull(hub.nobody, repo, **options)["files"] == {**OBJECT, PROBES: b"probes"}
    error = refusal("file_not_found", pull, hub.nobody, repo, files=[CONFIG, "shards/*"], cache_dir=tmp_path)
    assert "shards/*" in str(error)


def test_what_is_cached_is_not_asked_for_again(hub: Hub, repo: str, tmp_path: Path) -> None:
    options = {"cache_dir": tmp_path, "optional": ["absent.json"]}
    commit = pull(hub.nobody, repo, **options)["revision"]
    seen = len(hub.server.log)
    pull(hub.nobody, repo, **options)
    assert [request.method for request in hub.server.log[seen:]] == ["HEAD"]
    pull(hub.nobody, repo, revision=commit, **options)
    assert len(hub.server.log) == seen + 1
    pull(hub.nobody, repo, force_download=True, **options)
    assert sum(request.method == "GET" for request in hub.server.log[seen:]) == len(OBJECT)


# Access and absence --------------------------------------------------------------------------------------------------


def test_private_repo(hub: Hub, tmp_path: Path) -> None:
    push(hub.alice, saved(tmp_path / "object"), "alice/secret", private=True)
    assert pull(hub.alice, "alice/secret", cache_dir=tmp_path / "a")["files"] == OBJECT
    assert pull(hub.nobody, "alice/secret", token=ALICE, cache_dir=tmp_path / "b")["files"] == OBJECT
    error = refusal("unauthorized", pull, hub.nobody, "alice/secret", cache_dir=tmp_path / "c")
    assert "hf auth login" in str(error)
    refusal("unauthorized", pull, hub.alice, "alice/secret", token=False, cache_dir=tmp_path / "c")
    refusal("repo_not_found", pull, hub.bob, "alice/secret", cache_dir=tmp_path / "c")
    error = refusal("unauthorized", pull, hub.nobody, "alice/secret", token="hf_" + "x" * 30, cache_dir=tmp_path / "c")
    assert "Invalid credentials" in str(error)


def test_gated_repo(hub: Hub, repo: str, tmp_path: Path) -> None:
    hub.alice.run(f"hub.update_repo_settings({repo!r}, gated='manual')")
    assert pull(hub.alice, repo, cache_dir=tmp_path / "a")["files"] == OBJECT
    for client, status in ((hub.nobody, "401"), (hub.bob, "403")):
        error = refusal("gated", pull, client, repo, cache_dir=tmp_path / "b")
        assert status in str(error)
        assert "Ask for it" in str(error)


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"revision": "nowhere"}, "revision_not_found", "'nowhere'"),
        ({"files": [CONFIG, "other.json"]}, "file_not_found", "no such file"),
        ({"files": ["other.json"]}, "file_not_found", "no such file"),
        ({"subfolder": "elsewhere"}, "file_not_found", "subfolder"),
        ({"repo_type": "dataset"}, "unauthorized", "no such repo"),
    ],
)
def test_what_is_not_there_is_told_apart(
    hub: Hub, repo: str, tmp_path: Path, options: dict[str, Any], kind: str, words: str
) -> None:
    assert words in str(refusal(kind, pull, hub.nobody, repo, cache_dir=tmp_path, **options))
    assert not hub.server.requests(f"GET /{repo}/")


@pytest.mark.parametrize("name", ["./folder/that/is/not/there", "a/b/c", "-user/name", "name..x", "", "user/name.git"])
def test_neither_folder_nor_repo_id(name: str) -> None:
    with pytest.raises(HubError, match="Expected a folder or a repo id") as caught:
        fetch_folder(name, **WANTED)
    assert caught.value.kind == "invalid_id"


def test_local_folder_needs_no_hub(tmp_path: Path) -> None:
    folder = saved(tmp_path / "object")
    assert is_local(folder)
    assert is_local(str(folder))
    assert not is_local("user/name")
    assert not is_local("~nobody-of-that-name/x\0")
    assert fetch_folder(folder, **WANTED) == Fetched(folder)
    assert fetch_folder(str(tmp_path), files=[CONFIG, "*.safetensors"], subfolder="object").folder == folder
    with pytest.raises(DescriptorFormatError, match="Expected 'other.json' in folder"):
        fetch_folder(folder, files=["other.json"])
    with pytest.raises(DescriptorFormatError, match="Expected 'config.json' in folder"):
        fetch_folder(tmp_path / "nothing", **WANTED)
    with pytest.raises(ValueError, match="start with a plain name"):
        fetch_folder(folder, files=["*.json"])


# Offline and failures ------------------------------------------------------------------------------------------------


def test_offline_from_the_cache_without_a_request(hub: Hub, repo: str, tmp_path: Path) -> None:
    hub.alice.run(f"hub.create_tag({repo!r}, tag='v1'); hub.create_branch({repo!r}, branch='next')")
    options = {"cache_dir": tmp_path, "optional": ["absent.json", "probes/*"]}
    refs = [None, "main", "v1", "next"]
    commits = [pull(hub.nobody, repo, revision=ref, **options)["revision"] for ref in refs]
    hub.server.put(repo, {CONFIG: b"moved", PROBES: b"probes"})
    seen = len(hub.server.log)
    hub.server.stop()
    try:
        for ref, commit in [*zip(refs, commits, strict=True), (commits[0], commits[0])]:
            for client, more in ((hub.offline, {}), (hub.nobody, {"local_files_only": True})):
                got = pull(client, repo, revision=ref, **options, **more)
                assert (got["revision"], got["files"]) == (commit, OBJECT)
            got = pull(hub.nobody, repo, revision=ref, **options)  # not told to be offline, but the server is gone
            assert (got["revision"], got["files"]) == (commit, OBJECT)
    finally:
        hub.server.start()
    for missing in ({"revision": "other"}, {"files": [CONFIG, "more.json"]}, {"cache_dir": tmp_path / "empty"}):
        refusal("not_cached", pull, hub.offline, repo, **{**options, **missing})
        refusal("not_cached", pull, hub.nobody, repo, **{**options, **missing, "local_files_only": True})
    error = refusal("offline", push, hub.offline, saved(tmp_path / "object"), repo)
    assert "HF_HUB_OFFLINE is set" in str(error)
    assert len(hub.server.log) == seen
    assert f"Used commit {commits[0]} from the cache" in hub.nobody.errors.read_text()


def test_offline_does_not_skip_optional_files_that_the_repo_has(hub: Hub, repo: str, tmp_path: Path) -> None:
    hub.server.put(repo, {PROBES: b"probes"})
    pull(hub.nobody, repo, cache_dir=tmp_path)
    for optional in ([PROBES], ["probes/*"]):
        refusal("not_cached", pull, hub.offline, repo, optional=optional, cache_dir=tmp_path)


def test_a_connection_that_breaks_once_is_mended_by_the_client(hub: Hub, repo: str, tmp_path: Path) -> None:
    large = {**OBJECT, WEIGHTS: bytes(24 * 2**20)}  # the client keeps pieces of 10 MiB
    hub.server.put(repo, large)
    hub.server.fail("GET .*weights", cut=True)
    assert pull(hub.nobody, repo, cache_dir=tmp_path)["files"] == large
    ranges = [request.headers.get("range") for request in hub.server.requests(f"GET /{repo}/.*weights")]
    assert ranges == [None, f"bytes={10 * 2**20}-"]


@pytest.mark.parametrize("cut", ["weights", "config"])
def test_an_interrupted_pull_leaves_nothing_that_loads(hub: Hub, repo: str, tmp_path: Path, cut: str) -> None:
    hub.server.fail(f"GET .*{cut}", times=50, cut=True)
    hub.nobody.run(HURRY)
    error = refusal("unreachable", pull, hub.nobody, repo, cache_dir=tmp_path)
    hub.nobody.run("time.sleep = wait")
    assert "broke off" in str(error)
    for revision in (None, "main"):
        refusal("not_cached", pull, hub.offline, repo, revision=revision, cache_dir=tmp_path)
    hub.server.faults.clear()
    assert pull(hub.nobody, repo, cache_dir=tmp_path)["files"] == OBJECT
    assert pull(hub.offline, repo, cache_dir=tmp_path)["files"] == OBJECT
    assert not list(tmp_path.rglob("*.incomplete"))


def test_an_interrupted_update_leaves_the_version_before(hub: Hub, repo: str, tmp_path: Path) -> None:
    before = pull(hub.nobody, repo, cache_dir=tmp_path)["revision"]
    hub.server.put(repo, {CONFIG: b"new", WEIGHTS: b"new weights"})
    hub.server.fail("GET .*config", times=50, status=500)
    refusal("server", pull, hub.nobody, repo, cache_dir=tmp_path)
    got = pull(hub.offline, repo, cache_dir=tmp_path)
    assert (got["revision"], got["files"]) == (before, OBJECT)


def test_several_processes_pull_into_one_cache(hub: Hub, repo: str, tmp_path: Path) -> None:
    hub.server.put(repo, {WEIGHTS: bytes(8_000_000)})
    clients = [hub.alice, hub.bob, hub.nobody]
    with ThreadPoolExecutor(len(clients)) as pool:
        several = list(pool.map(lambda client: pull(client, repo, cache_dir=tmp_path), clients))
    assert all(got == several[0] for got in several)
    assert several[0]["files"] == {**OBJECT, WEIGHTS: bytes(8_000_000)}


def test_server_errors_are_tried_again_by_the_client_then_told(hub: Hub, repo: str, tmp_path: Path) -> None:
    hub.nobody.run(HURRY)
    hub.server.fail(f"HEAD /{repo}/", times=3, status=503)
    assert pull(hub.nobody, repo, cache_dir=tmp_path)["files"] == OBJECT
    hub.server.fail(f"HEAD /{repo}/", times=100, status=502)
    seen = len(hub.server.log)
    error = refusal("server", pull, hub.nobody, repo, cache_dir=tmp_path / "empty")
    hub.nobody.run("time.sleep = wait")
    assert "(502)" in str(error)
    assert "status.huggingface.co" in str(error)
    assert 4 < len(hub.server.log) - seen < 10
    assert pull(hub.nobody, repo, cache_dir=tmp_path)["files"] == OBJECT  # known, so no waiting: from the cache


def test_timeout(hub: Hub, repo: str, tmp_path: Path) -> None:
    hub.server.fail(f" /(api/models/)?{repo}", times=100, hang=60)
    hub.nobody.run(HURRY + "; hub.constants.HF_HUB_ETAG_TIMEOUT = 0.1")
    error = refusal("timeout", pull, hub.nobody, repo, cache_dir=tmp_path)
    hub.nobody.run("time.sleep = wait; hub.constants.HF_HUB_ETAG_TIMEOUT = 2")
    assert "HF_HUB_ETAG_TIMEOUT" in str(error)
    refusal("timeout", push, hub.alice, saved(tmp_path / "object"), repo)


def test_nobody_listens(hub: Hub, repo: str, tmp_path: Path) -> None:
    hub.nobody.run(HURRY)
    hub.server.stop()
    try:
        for more in ({}, {"force_download": True}):
            error = refusal("unreachable", pull, hub.nobody, repo, cache_dir=tmp_path, **more)
            assert "HF_ENDPOINT" in str(error)
    finally:
        hub.server.start()
        hub.nobody.run("time.sleep = wait")


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [(403, "", "forbidden"), (403, "GatedRepo", "gated"), (429, "", "rate_limited"), (418, "", "rejected")],
)
def test_other_answers(hub: Hub, repo: str, tmp_path: Path, status: int, code: str, kind: str) -> None:
    hub.server.fail(f"/{repo}/", times=100, status=status, code=code)
    error = refusal(kind, pull, hub.nobody, repo, cache_dir=tmp_path)
    assert f"({status})" in str(error)
    assert "This server was told to fail" in str(error)


# Trust ---------------------------------------------------------------------------------------------------------------

ESCAPES = ["../x", "/etc", "a\\b", "a/../../b", "a/./b", "a//b", "C:/x", "..", ".", "a\0b"]


@pytest.mark.parametrize("path", ESCAPES)
def test_paths_stay_in_the_repo(path: str, tmp_path: Path) -> None:
    for options in (
        {**WANTED, "subfolder": path},
        {"files": [CONFIG, path]},
        {**WANTED, "optional": [path]},
        {**WANTED, "revision": path},
    ):
        with pytest.raises(HubError, match="relative path within the repo") as caught:
            fetch_folder("user/name", cache_dir=tmp_path, local_files_only=True, **options)
        assert caught.value.kind == "unsafe_path"
    for name in ("subfolder", "revision"):
        with pytest.raises(HubError, match="relative path within the repo"):
            push_folder(saved(tmp_path / "object"), "user/name", commit_message="Update", **{name: path})


@pytest.mark.parametrize("subfolder", ["tasks/*", "tasks/[ab]"])
def test_a_subfolder_is_one(subfolder: str, tmp_path: Path) -> None:
    with pytest.raises(HubError, match="Expected one subfolder"):
        fetch_folder("user/name", subfolder=subfolder, **WANTED)
    with pytest.raises(HubError, match="Expected one subfolder"):
        push_folder(saved(tmp_path), "user/name", commit_message="Update", subfolder=subfolder)


def test_a_listing_that_leads_out_of_the_repo_is_refused(hub: Hub, repo: str, tmp_path: Path) -> None:
    hub.server.put(repo, {"probes/../../../../evil.txt": b"evil"})
    error = refusal("unsafe_path", pull, hub.nobody, repo, optional=["probes/*"], cache_dir=tmp_path / "cache")
    assert "evil.txt" in str(error)
    assert not list(tmp_path.rglob("evil*"))


def test_a_link_out_of_the_cache_is_refused(hub: Hub, repo: str, tmp_path: Path) -> None:
    outside = saved(tmp_path / "outside", {"secret": b"secret"}) / "secret"
    got = pull(hub.nobody, repo, cache_dir=tmp_path / "cache")
    weights = Path(got["folder"]) / WEIGHTS
    weights.unlink()
    weights.symlink_to(outside)
    for client in (hub.nobody, hub.offline):
        error = refusal("unsafe_path", pull, client, repo, cache_dir=tmp_path / "cache")
        assert "leads out of it" in str(error)


def test_a_server_that_is_no_hub(hub: Hub, repo: str, tmp_path: Path) -> None:
    real, false = hub.server.api.repos["model", repo], "../../../evil"
    real.commits[false] = real.commits[real.resolve("main")]
    real.refs["refs/heads/main"] = false
    error = refusal("unreachable", pull, hub.nobody, repo, cache_dir=tmp_path)
    assert "Expected a commit hash" in str(error)


@pytest.mark.parametrize("given", [{}, {"token": ALICE}], ids=["environment", "argument"])
def test_tokens_stay_out_of_messages_and_causes(hub: Hub, repo: str, tmp_path: Path, given: dict[str, Any]) -> None:
    client = hub.nobody if given else hub.alice
    for status in (400, 401, 403, 404, 500):
        hub.server.fail(f"(HEAD|GET) .*{repo}", times=1, status=status, message=f"Bearer {ALICE} isn't welcome")
        if status == 500:
            hub.server.fail(f"HEAD .*{repo}", times=100, status=500, message=f"no {ALICE}, no {BOB}")
            client.run(HURRY)
        with pytest.raises(ClientError) as caught:
            pull(client, repo, cache_dir=tmp_path, **given)
        assert caught.value.type == "HubError"
        assert "SecretToken" not in caught.value.trace
        assert "***" in caught.value.trace
    client.run("time.sleep = wait")


@pytest.mark.parametrize(
    "token", ["hf_badSecretToken\n", "hf_badSecretToken\u2026", "badSecretToken words"], ids=["lf", "non-ascii", "two"]
)
def test_a_malformed_token_is_not_echoed(hub: Hub, repo: str, tmp_path: Path, token: str) -> None:
    error = refusal("unauthorized", pull, hub.nobody, repo, token=token, cache_dir=tmp_path)
    assert "valid token" in str(error)


def test_explain_passes_on_what_is_not_the_hubs(tmp_path: Path) -> None:
    for error in (KeyError("x"), PlatonicError("x"), OSError(28, "No space left on device"), RuntimeError("x")):
        with pytest.raises(type(error)) as caught, explain("model 'a/b'"):
            raise error
        assert caught.value is error


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (TimeoutError("too slow"), "timeout"),
        (ConnectionResetError("by peer"), "unreachable"),
        (OSError("Consistency check failed: file should be of size 3 but has size 2"), "unreachable"),
    ],
)
def test_explain_tells_what_transfers_raise(error: OSError, kind: str) -> None:
    wrapped = RuntimeError("Error while uploading 'x' to the Hub.")
    wrapped.__cause__ = error
    for raised in (error, wrapped):
        with pytest.raises(HubError, match="Can't use model 'a/b'") as caught, explain("model 'a/b'"):
            raise raised
        assert caught.value.kind == kind
        assert caught.value.__cause__ is raised


# Pushing -------------------------------------------------------------------------------------------------------------


def test_a_push_is_one_commit_or_none(hub: Hub, repo: str, tmp_path: Path) -> None:
    history = hub.server.api.repos["model", repo].commits
    before = len(history)
    newer = {CONFIG: b"new", WEIGHTS: b"weights that the server has not seen"}
    folder = saved(tmp_path / "object", {**newer, f".{CONFIG}.x.tmp": b"left over by a write that was stopped"})
    for step, fault in [
        ("POST .*/preupload/", {"status": 400}),
        ("PUT /_lfs/", {"status": 403}),
        ("POST .*/commit/", {"status": 400}),
        ("POST .*/commit/", {"status": 500, "times": 100}),
        ("POST .*/commit/", {"hang": 0.1, "times": 100}),
    ]:
        hub.server.fail(step, **fault)
        hub.alice.run(HURRY)
        with pytest.raises(ClientError) as caught:
            push(hub.alice, folder, repo)
        hub.alice.run("time.sleep = wait")
        hub.server.faults.clear()
        assert caught.value.type == "HubError", caught.value.trace
        assert len(history) == before
        assert pull(hub.nobody, repo, cache_dir=tmp_path / "cache")["files"] == OBJECT
    done = push(hub.alice, folder, repo)
    assert len(history) == before + 1
    got = pull(hub.nobody, repo, cache_dir=tmp_path / "cache")
    assert (got["revision"], got["files"]) == (done["revision"], newer)
    assert set(history[done["revision"]]["files"]) == set(newer)


def test_a_first_push_that_fails_leaves_no_repo_that_loads(hub: Hub, tmp_path: Path) -> None:
    hub.server.fail("POST .*/commit/", status=400)
    refusal("rejected", push, hub.alice, saved(tmp_path / "object"), "alice/half")
    refusal("file_not_found", pull, hub.nobody, "alice/half", cache_dir=tmp_path / "cache")


def test_pushing_the_same_again_makes_no_commit(hub: Hub, repo: str, tmp_path: Path) -> None:
    first = push(hub.alice, saved(tmp_path / "object"), repo)
    assert push(hub.alice, tmp_path / "object", repo)["revision"] == first["revision"]


def test_a_handwritten_card_stays(hub: Hub, repo: str, tmp_path: Path) -> None:
    card = f"# Cars\n{CARD_MARKER}\n".encode()
    files = hub.server.api.repos["model", repo]
    for below in ("", "tasks/cars/"):
        options = {"subfolder": below.rstrip("/") or None}
        push(hub.alice, saved(tmp_path / "1", {**OBJECT, CARD: card}), repo, **options)
        done = push(hub.alice, saved(tmp_path / "2", {**OBJECT, CARD: card + b"newer"}), repo, **options)
        stored = files.commits[done["revision"]]["files"][below + CARD]
        assert stored["size"] == len(card + b"newer")
        hub.server.put(repo, {below + CARD: b"# My own words\n"})
        done = push(hub.alice, saved(tmp_path / "3", {CONFIG: b"newest", CARD: card}), repo, **options)
        stored = files.commits[done["revision"]]["files"]
        assert stored[below + CARD]["size"] == len(b"# My own words\n")
        assert stored[below + CONFIG]["size"] == len(b"newest")
        assert CARD not in stored or below or set(stored) == {CARD, CONFIG, WEIGHTS}


def test_delete_patterns_remove_what_an_earlier_push_left(hub: Hub, repo: str, tmp_path: Path) -> None:
    hub.server.put(repo, {f"a/{PROBES}": b"old", f"a/{CONFIG}": b"old", PROBES: b"of another object"})
    done = push(hub.alice, saved(tmp_path / "object"), repo, subfolder="a", delete_patterns=["probes/*"])
    files = hub.server.api.repos["model", repo].commits[done["revision"]]["files"]
    assert set(files) == {CONFIG, WEIGHTS, PROBES, f"a/{CONFIG}", f"a/{WEIGHTS}"}


def test_rights_to_push(hub: Hub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "object", {**OBJECT, CONFIG: b"suggested"})
    assert "create_pr=True" in str(refusal("forbidden", push, hub.bob, folder, repo))
    refusal("unauthorized", push, hub.nobody, folder, repo)
    refusal("forbidden", push, hub.bob, folder, "alice/not-bobs")
    done = push(hub.bob, folder, repo, create_pr=True)
    assert done["pull_request"].endswith("/discussions/1")
    assert pull(hub.nobody, repo, cache_dir=tmp_path / "cache")["files"] == OBJECT
    got = pull(hub.nobody, repo, revision="refs/pr/1", cache_dir=tmp_path / "cache")
    assert (got["revision"], got["files"][CONFIG]) == (done["revision"], b"suggested")
    assert pull(hub.offline, repo, revision="refs/pr/1", cache_dir=tmp_path / "cache") == got


def test_a_public_repo_is_not_taken_for_a_private_one(hub: Hub, repo: str, tmp_path: Path) -> None:
    seen = len(hub.server.log)
    error = refusal("conflict", push, hub.alice, saved(tmp_path / "object"), repo, private=True)
    assert "to be private" in str(error)
    assert all(request.method == "GET" for request in hub.server.log[seen:])


def test_the_users_own_name_may_be_left_out(hub: Hub, tmp_path: Path) -> None:
    assert push(hub.alice, saved(tmp_path / "object"), "short-name")["repo"] == "alice/short-name"


def test_two_pushes_at_once_do_not_mix(hub: Hub, repo: str, tmp_path: Path) -> None:
    folder = saved(tmp_path / "object", {**OBJECT, CONFIG: b"mine"})
    hub.server.fail("POST .*/preupload/", hang=0.5)  # answered late by a closed connection, which the client retries
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(refusal, "conflict", push, hub.alice, folder, repo)
        while not hub.server.requests(f"POST .*{repo}/preupload"):
            time.sleep(0.01)
        theirs = hub.server.put(repo, {CONFIG: b"theirs"})
        assert "Push again" in str(waiting.result())
    assert hub.server.api.repos["model", repo].resolve("main") == theirs


def test_nothing_to_push(tmp_path: Path) -> None:
    with pytest.raises(PlatonicError, match="Expected a folder with files to push"):
        push_folder(tmp_path, "user/name", commit_message="Update")


# The server itself ---------------------------------------------------------------------------------------------------


def test_server_as_a_process_keeps_its_content(tmp_path: Path) -> None:
    with HubServer(tmp_path) as server:
        commit = server.put("alice/kept", OBJECT)
    script = Path(__file__).with_name("hub_server.py")
    command = [sys.executable, str(script), "--port", "0", "--root", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        with urllib.request.urlopen(f"{url}/api/models/alice/kept") as answer:
            assert json.load(answer)["sha"] == commit
        with urllib.request.urlopen(f"{url}/alice/kept/resolve/main/{WEIGHTS}") as answer:
            assert answer.read() == OBJECT[WEIGHTS]
        process.terminate()


def test_server_answers_the_clients_other_calls(hub: Hub, repo: str) -> None:
    result = hub.alice.run(
        f"api, repo = hub.HfApi(), {repo!r}\n"
        f"assert api.whoami()['name'] == 'alice' and api.repo_exists(repo) and api.file_exists(repo, {WEIGHTS!r})\n"
        "api.upload_file(path_or_fileobj=b'x', path_in_repo='a/b.txt', repo_id=repo)\n"
        "api.create_tag(repo, tag='v1')\n"
        f"api.delete_file({CONFIG!r}, repo)\n"
        "paths = [info.path for info in api.get_paths_info(repo, ['a', 'a/b.txt', 'nothing'])]\n"
        "refs = api.list_repo_refs(repo)\n"
        "result = [sorted(api.list_repo_files(repo)), paths, [b.name for b in refs.branches + refs.tags]]\n"
        "api.delete_repo(repo)\n"
        "assert not api.repo_exists(repo)"
    )
    assert result == [["a/b.txt", WEIGHTS], ["a/b.txt", "a"], ["main", "v1"]]


def test_the_whole_package_in_a_fresh_process(hub: Hub, repo: str, tmp_path: Path) -> None:
    code = f"from hf_platonic._hub import fetch_folder; print(fetch_folder({repo!r}, **{WANTED!r}).revision)"
    done = run_client(code, client_environment(hub.server, tmp_path))
    assert done.stdout.split() == [hub.server.api.repos["model", repo].resolve("main")], done.stderr
