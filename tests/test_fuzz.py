"""Damaged files: only documented errors, no hang, no memory beyond the files' size and a constant."""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ALLOWANCE = 256 * 2**20  # bytes a process may grow by while it reads files of a few kB

ODD = [None, True, -1, 0, 10**15, 1e308, "", "../../etc/passwd", "x" * 1000, [], {}, [[]], {"a": 1}, float("nan")]


def mutate_json(text: bytes, rng: random.Random) -> bytes:
    """One value somewhere in the tree replaced, removed, repeated or swapped for one of another kind."""
    tree = json.loads(text)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            places.append((node, key))
            walk(value)

    walk(tree)
    node, key = rng.choice(places)
    action = rng.randrange(4)
    if action == 0:
        del node[key]
    elif action == 1:
        node[key] = copy.deepcopy(rng.choice(ODD))
    elif action == 2:
        other, name = rng.choice(places)
        node[key] = copy.deepcopy(other[name])
    elif isinstance(node, list):
        node.append(copy.deepcopy(node[key]))
    else:
        node[f"{key}_2"] = node[key]
    return json.dumps(tree).encode()


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Bytes flipped, cut, added or repeated, more often near the start and the end, where formats keep structure."""
    data = bytearray(content)
    for _ in range(rng.choice([1, 1, 2, 8])):
        edge = min(len(data), 400)
        at = rng.choice([rng.randrange(edge), len(data) - 1 - rng.randrange(edge), rng.randrange(len(data))])
        action = rng.randrange(5)
        if action == 0:
            data[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            data[at] = rng.choice([0, 0x7F, 0x80, 0xFF])
        elif action == 2:
            del data[at:]
        elif action == 3:
            data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 9)))
        else:
            data += data[at : at + 64]
        if not data:
            return b""
    return bytes(data)


def mutate_safetensors(content: bytes, rng: random.Random) -> bytes:
    """The header as JSON with one value changed and its length set right or wrong; or plain bytes."""
    if rng.random() < 0.4:
        return mutate_bytes(content, rng)
    size = int.from_bytes(content[:8], "little")
    header = mutate_json(content[8 : 8 + size], rng)
    length = len(header) if rng.random() < 0.8 else rng.choice([0, 1, 2**31, 2**63, size])
    return length.to_bytes(8, "little") + header + content[8 + size :]


def objects(folder: Path) -> dict[str, tuple[Path, Callable[[Path], object]]]:
    """One saved object of each kind, with what reads it whole."""
    import torch
    from tiny import tiny_clips, tiny_images

    from hf_platonic import Operator, OperatorBank, ProbeSet, TaskDescriptor
    from hf_platonic.encoders.families import EditSite
    from hf_platonic.encoders.identity import EncoderIdentity
    from hf_platonic.hub import describe
    from hf_platonic.sources import Source

    who = EncoderIdentity("me/base", "0" * 40, None, None, "clip", "c", "p")
    reference = {"repo": "me/data", "revision": "1" * 40, "name": None, "split": "train", "column": "image"}
    probes = ProbeSet(tiny_images(4), prompts=["a", "b"], reference={**reference, "indices": [0, 1, 2, 3]})
    made = TaskDescriptor(torch.rand(4, 2), probes.grid, (Source(who, who),), 0.1, torch.rand(4, 2), "t", probes)
    made.save_pretrained(folder / "descriptor", include_probes=True)
    ProbeSet(tiny_clips(3), prompts=["a", "b"]).save_pretrained(folder / "probes")
    operators = {("s", "t"): Operator(torch.rand(4, 2), torch.rand(2, 4))}
    OperatorBank(operators, EditSite("visual_projection", "output"), who, "image").save_pretrained(folder / "bank")

    def read_bank(path: Path) -> None:
        bank = OperatorBank.from_pretrained(path)
        for key in bank.operators:
            bank.operators[key]

    return {
        "descriptor": (folder / "descriptor", TaskDescriptor.from_pretrained),
        "probes": (folder / "probes", ProbeSet.from_pretrained),
        "bank": (folder / "bank", read_bank),
        "adapter": (folder / "bank" / "s" / "t", describe),
    }


def fuzz(cases: int, seed: int) -> dict[str, Any]:
    """Runs the cases in this process; how many were refused, accepted, and what went wrong."""
    from hf_platonic.errors import PlatonicError

    rng = random.Random(seed)
    counts = {"refused": 0, "accepted": 0}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        kinds = objects(Path(name) / "whole")
        for source, read in kinds.values():
            read(source)  # warm, so that growth is the cases'
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for case in range(cases):
            kind = rng.choice(sorted(kinds))
            source, read = kinds[kind]
            goal = Path(name) / "case"
            shutil.rmtree(goal, ignore_errors=True)
            shutil.copytree(source, goal)
            victim = rng.choice(sorted(path for path in goal.rglob("*") if path.is_file()))
            content, suffix = victim.read_bytes(), victim.suffix
            mutate = {".json": mutate_json, ".safetensors": mutate_safetensors}.get(suffix, mutate_bytes)
            if suffix == ".json" and rng.random() < 0.2:
                mutate = mutate_bytes
            victim.write_bytes(mutate(content, rng))
            try:
                read(goal)
                counts["accepted"] += 1
            except PlatonicError:
                counts["refused"] += 1
            except Exception as error:
                wrong.append(f"case {case} ({kind}, {victim.name}): {type(error).__name__}: {error}")
        grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return {**counts, "wrong": wrong, "grown": grown}


def run(cases: int, seed: int, limit: float) -> dict[str, Any]:
    code = f"import json, test_fuzz; print(json.dumps(test_fuzz.fuzz({cases}, {seed})))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},  # a set whose hashes are gone would be looked for on the Hub
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def judge(found: dict[str, Any], cases: int) -> None:
    assert found["wrong"] == []
    assert found["refused"] + found["accepted"] == cases
    assert found["refused"] > cases / 2
    assert found["grown"] < ALLOWANCE


def test_damaged_files_are_refused_with_documented_errors() -> None:
    judge(run(200, seed=0, limit=120), 200)


@pytest.mark.slow
def test_many_damaged_files() -> None:
    judge(run(4000, seed=1, limit=1200), 4000)
