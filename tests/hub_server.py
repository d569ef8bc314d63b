"""A Hub on loopback that the real `huggingface_hub` client talks to: repos, tokens, commits, LFS, faults on demand.

In a test: `with HubServer(tmp_path / "hub") as server: ...`. By hand, until interrupted:

    python tests/hub_server.py --port 0 --root DIR

It covers what the client asks of models and data sets: create, delete and settings, branches, tags, pull requests,
commits with large files, listings, downloads with ranges. Content lies in DIR, addressed by its hash, so a server
started again on the same folder has the same repos. Xet isn't covered: clients set HF_HUB_DISABLE_XET=1.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import uuid
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from hub_api import HubApi, Refusal

ALICE, BOB = "hf_aliceSecretToken0123456789", "hf_bobSecretToken0123456789"


@dataclass
class Fault:
    """What to do to the next `times` requests whose "METHOD path" matches a pattern, instead of answering well."""

    matching: str
    times: int
    status: int = 0
    code: str = ""
    message: str = "This server was told to fail."
    hang: float = 0.0
    cut: bool = False


@dataclass(frozen=True)
class Request:
    """One request as logged: never the token, only whether there was one."""

    method: str
    path: str
    token: bool
    headers: dict[str, str]

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class HubServer:
    """The server: `url` is its address, `log` what it was asked, `fail` makes it fail."""

    def __init__(self, root: Path, *, port: int = 0, users: dict[str, str] | None = None) -> None:
        self.log: list[Request] = []
        self.faults: list[Fault] = []
        self.stopping = threading.Event()
        self.http: ThreadingHTTPServer | None = None
        self.start(port)
        self.api = HubApi(root, self.url, {ALICE: "alice", BOB: "bob"} if users is None else users)

    def __enter__(self) -> HubServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def start(self, port: int | None = None) -> None:
        """Listens; after `stop`, at the same address."""
        address = ("127.0.0.1", self.port if port is None else port)
        self.http = ThreadingHTTPServer(address, type("BoundHandler", (Handler,), {"hub": self}))
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.stopping.clear()
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Refuses connections from now on; requests that hang end."""
        self.stopping.set()
        if self.http is not None:
            self.http.shutdown()
            self.http.server_close()
            self.http = None

    # For tests ------------------------------------------------------------------------------------------------------

    def fail(self, matching: str = "", *, times: int = 1, **what: Any) -> None:
        """Makes the next `times` matching requests fail: status=503, code="GatedRepo", hang=30 (s) or cut=True."""
        with self.api.lock:
            self.faults.append(Fault(matching, times, **what))

    def requests(self, pattern: str = "") -> list[Request]:
        """The logged requests whose "METHOD path" contains a match of the pattern."""
        return [request for request in self.log if re.search(pattern, str(request))]

    def put(self, repo_id: str, files: dict[str, bytes], *, kind: str = "model", branch: str = "main") -> str:
        """Commits files without a client, the repo and branch made if missing; the commit's hash."""
        with self.api.lock:
            repo = self.api.repos.get((kind, repo_id)) or self.api.create(kind, repo_id)
            return self.api.put(repo, files, branch)

    # Inside ---------------------------------------------------------------------------------------------------------

    def fault_for(self, request: Request) -> Fault | None:
        with self.api.lock:
            self.log.append(request)
            fault = next((f for f in self.faults if f.times > 0 and re.search(f.matching, str(request))), None)
            if fault is not None:
                fault.times -= 1
            return fault


class Handler(BaseHTTPRequestHandler):
    """HTTP around `HubApi.answer`: bodies, ranges, faults and the log."""

    hub: HubServer
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *values: Any) -> None:
        pass

    def handle(self) -> None:
        try:
            super().handle()
        except ConnectionError:  # a client that gave up
            self.close_connection = True

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def do_GET(self) -> None:
        body, token = self.body(), self.headers.get("Authorization")
        if self.hub.stopping.is_set():  # a connection from before
            self.close_connection = True
            return
        visible = {key.lower(): value for key, value in self.headers.items() if key.lower() != "authorization"}
        fault = self.hub.fault_for(Request(self.command, self.path, token is not None, visible)) or Fault("", 0)
        if fault.hang:
            self.hub.stopping.wait(fault.hang)
            self.close_connection = True
            return
        status, headers = 200, {"Content-Type": "application/json", "X-Request-Id": uuid.uuid4().hex}
        try:
            if fault.status:
                raise Refusal(fault.status, fault.message, fault.code)
            content = self.hub.api.answer(self.command, self.path, token and token.removeprefix("Bearer "), body)
        except Refusal as refusal:
            status, headers = refusal.status, headers | refusal.headers
            content = {"error": refusal.message, **refusal.content}
        if isinstance(content, tuple):
            headers, content = headers | content[0], content[1]
            if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                first, last = int(wanted[1]), int(wanted[2] or len(content) - 1)
                headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
                status, content = 206, content[first : last + 1]
        else:
            content = json.dumps(content).encode()
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(key, value)
        self.end_headers()
        if fault.cut:
            content, self.close_connection = content[: len(content) // 2], True
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET


def client_environment(
    server: HubServer | str, home: Path, token: str | None = None, offline: bool = False
) -> dict[str, str]:
    """The environment of a client process whose Hub is the server and whose cache and login lie in `home`."""
    kept = {key: value for key, value in os.environ.items() if not re.match(r"(HF_|HUGGING|.*_proxy$)", key, re.I)}
    quiet = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    short = {"HF_HUB_ETAG_TIMEOUT": "2", "HF_HUB_DOWNLOAD_TIMEOUT": "2", "OMP_NUM_THREADS": "1"}
    hub = {"HF_ENDPOINT": server if isinstance(server, str) else server.url, "HF_HOME": str(home)}
    login = {"HF_TOKEN": token} if token else {}
    return {**kept, **quiet, **short, **hub, **login, "HF_HUB_OFFLINE": "1" if offline else "0"}


# huggingface_hub 2.4 uploads large files through a deprecated argument of its HTTP library, and peft 0.21 asks every
# model for a deprecated name.
IGNORED = ("Use 'content=:DeprecationWarning", "`is_gradient_checkpointing` is deprecated:FutureWarning")
PYTHON = [sys.executable, "-W", "error", *(option for text in IGNORED for option in ("-W", f"ignore:{text}"))]


def run_client(code: str, environment: dict[str, str], *, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a fresh process, since the client reads its environment at import; warnings are errors."""
    return subprocess.run(
        [*PYTHON, "-c", code], env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )


class ClientError(Exception):
    """What code in a client process raised: the type's name, `kind` where it has one, and the whole traceback."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(answer["error"])
        self.type, self.kind, self.trace = answer["type"], answer["kind"], answer["trace"]


class Client:
    """A client process that stays, for several pieces of code: importing costs seconds.

    Code runs in one namespace; what it calls `result` comes back as JSON. Its log is in the file `errors`.
    """

    LOOP = """
import json, sys, traceback
answers, sys.stdout, names = sys.stdout, sys.stderr, {}
for line in sys.stdin:
    names["result"] = None
    try:
        exec(json.loads(line), names)
        answer = {"result": names["result"]}
    except Exception as e:
        told = {"error": str(e), "type": type(e).__name__, "kind": getattr(e, "kind", None)}
        answer = {**told, "trace": traceback.format_exc()}
    print(json.dumps(answer, default=str), file=answers, flush=True)
"""

    def __init__(self, environment: dict[str, str], errors: Path) -> None:
        self.errors, self.lock = errors, threading.Lock()
        with errors.open("w") as log:
            self.process = subprocess.Popen(
                [*PYTHON, "-c", self.LOOP],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def run(self, code: str) -> Any:
        """The code's `result`.

        Raises:
            ClientError: If it raised.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with self.lock:
            self.process.stdin.write(json.dumps(code) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        assert line, f"The client process ended: {self.errors.read_text()}"
        answer = json.loads(line)
        if "error" in answer:
            raise ClientError(answer)
        return answer["result"]

    def close(self) -> None:
        self.process.kill()
        with self.process:  # closes the pipes and waits
            pass


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="A Hub on loopback, for tests.")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--root", type=Path, required=True, help="folder with the content; made if missing")
    arguments = parser.parse_args()
    with HubServer(arguments.root, port=arguments.port) as running:
        sys.stdout.write(f"{running.url}\n")
        sys.stdout.flush()
        threading.Event().wait()
