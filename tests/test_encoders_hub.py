"""Loading by repo id from a real (if small) Hub server on loopback.

The Hub's clients read their endpoint when imported, so the checks run in their own process: this file as a script.
"""

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = {name: hashlib.sha1(name.encode()).hexdigest() for name in ("me/model", "me/adapter", "me/data")}


class Hub(BaseHTTPRequestHandler):
    """Serves folders `<root>/<repo>` read-only, each as a repo with one commit."""

    protocol_version = "HTTP/1.1"
    root: Path

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        parts = self.path.split("?")[0].strip("/").split("/")
        api = parts[0] == "api"
        if api:
            parts = parts[1:]
        if parts[0] in ("models", "datasets"):
            parts = parts[1:]
        repo, rest = "/".join(parts[:2]), parts[2:]
        if repo not in COMMIT:
            return self.answer(404, b"", {"X-Error-Code": "RepoNotFound"})
        revision = rest[1] if len(rest) > 1 else "main"
        if revision not in ("main", COMMIT[repo]):
            return self.answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
        files = {p.relative_to(self.root / repo).as_posix(): p for p in (self.root / repo).rglob("*") if p.is_file()}
        if api and (not rest or rest[0] == "revision"):
            listed = [{"rfilename": name} for name in files]
            return self.json({"id": repo, "sha": COMMIT[repo], "siblings": listed, "private": False, "tags": []})
        if api and rest[0] == "tree":
            under = "/".join(rest[2:])
            return self.json(
                [
                    {"type": "file", "path": name, "size": path.stat().st_size, "oid": "0" * 40}
                    for name, path in files.items()
                    if name.startswith(under)
                ]
            )
        name = "/".join(rest[2:])
        if api or rest[0] != "resolve" or name not in files:
            return self.answer(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT[repo]})
        data = files[name].read_bytes()
        return self.answer(200, data, {"X-Repo-Commit": COMMIT[repo], "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})

    def json(self, value):
        self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, status, body, headers):
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)


def test_loading_by_repo_id_pins_commits(tmp_path):
    from tiny import tiny_encoder

    dropped = {"HF_HUB_OFFLINE", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy"}
    env = {key: value for key, value in os.environ.items() if key not in dropped}
    env["PYTHONHASHSEED"] = "77"
    env |= {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    # Printed at the very end; the same model here, in another process, has the same digests.
    theirs, ours = json.loads(done.stdout.splitlines()[-1]), tiny_encoder("siglip2").identity.to_dict()
    for digest in ("config_digest", "preprocessing_digest"):
        assert theirs[digest] == ours[digest]


def main() -> None:
    Hub.root = Path(tempfile.mkdtemp())
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.environ |= {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_address[1]}", "HF_HUB_DISABLE_XET": "1"}

    import datasets
    import pytest
    import torch
    from peft import LoraConfig, get_peft_model
    from tiny import tiny_images, tiny_parts

    from hf_platonic.encoders import DualEncoder
    from hf_platonic.errors import EncoderError, GridMismatchError, ProbeError
    from hf_platonic.probes import Grid, ProbeSet

    model, processor = tiny_parts("siglip2")
    model.save_pretrained(Hub.root / "me/model")
    processor.save_pretrained(Hub.root / "me/model")
    tuned = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    tuned.save_pretrained(Hub.root / "me/adapter/sub", save_embedding_layers=False)
    (Hub.root / "me/data").mkdir()
    rows = {"image": tiny_images(10), "label": list(range(10))}
    datasets.Dataset.from_dict(rows).to_parquet(Hub.root / "me/data/train.parquet")

    # Encoders: the commits are recorded, the adapter is applied, mistakes are named.
    loaded = DualEncoder.from_pretrained("me/model", adapter="me/adapter", subfolder="sub")
    who = loaded.identity
    assert (who.repo, who.revision) == ("me/model", COMMIT["me/model"])
    assert (who.adapter, who.adapter_revision) == ("me/adapter", COMMIT["me/adapter"])
    images = tiny_images(3)
    assert torch.equal(loaded.encode_probes(images).unit, DualEncoder(tuned, processor).encode_probes(images).unit)
    cached = DualEncoder.from_pretrained(
        "me/model", revision=COMMIT["me/model"], adapter="me/adapter", subfolder="sub", local_files_only=True
    )
    assert cached.identity == who
    for arguments in ({"revision": "v9"}, {"adapter": "me/none"}, {"adapter": "me/adapter", "adapter_revision": "v9"}):
        with pytest.raises(EncoderError, match="Check the spelling and the revision"):
            DualEncoder.from_pretrained("me/model", **arguments)
    with pytest.raises(EncoderError, match="model 'me/none'"):
        DualEncoder.from_pretrained("me/none")

    # Probes: by reference to a commit, and back, with every row compared.
    probes = ProbeSet.from_hub("me/data", split="train", class_names=["a", "b"], templates=["x {}"], n=4, seed=1)
    grid = probes.grid
    assert grid.reference is not None
    assert grid.reference["revision"] == COMMIT["me/data"]
    expected = ProbeSet(tiny_images(10), prompts=["q"]).select(grid.reference["indices"])
    assert probes.content_hashes == expected.content_hashes
    again = ProbeSet.from_reference(Grid.from_dict(json.loads(json.dumps(grid.to_dict()))))
    assert again.grid == grid
    assert again.grid.reference == grid.reference
    chosen = probes.select([2, 0]).grid
    assert ProbeSet.from_reference(chosen).grid == chosen
    other = {**grid.reference, "content_hashes": [*grid.reference["content_hashes"][:2], "0" * 32, "0" * 32]}
    with pytest.raises(GridMismatchError, match="for probe 2 of me/data@"):
        ProbeSet.from_reference(other, prompts=["q"])
    for arguments in ({"split": "test"}, {"split": "train", "name": "none"}, {"split": "train", "revision": "f" * 40}):
        with pytest.raises(ProbeError, match="Can't load split"):
            ProbeSet.from_hub("me/data", prompts=["q"], **arguments)
    for repo, revision in (("me/none", None), ("me/data", "v9")):
        with pytest.raises(ProbeError, match="Can't find the data set"):
            ProbeSet.from_hub(repo, split="train", revision=revision, prompts=["q"])
    sys.stdout.write(json.dumps(who.to_dict()) + "\n")


if __name__ == "__main__":
    main()
