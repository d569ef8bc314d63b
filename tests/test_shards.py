"""Extraction that is stopped and goes on, and matrices that stay on disk."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from test_extraction import PROMPTS, pair
from tiny import tiny_encoder, tiny_images

from hf_platonic._tensors import Stream, save_tensors, stream_tensors
from hf_platonic.descriptor import TaskDescriptor
from hf_platonic.errors import DescriptorFormatError, PlatonicError
from hf_platonic.extraction import extract
from hf_platonic.grid import Grid, digest
from hf_platonic.probe_sources import Rows
from hf_platonic.probes import ProbeSet
from hf_platonic.shards import Shards
from hf_platonic.solutions import solve_operators
from hf_platonic.solve import ProbeSums

N, BATCH = 70, 2  # shards of 32, 32 and 6 rows
PROGRAM = """
import sys
from test_shards import BATCH, extract, pair, slow_probes
extract(*pair(), slow_probes(), batch_size=BATCH, store_base=True, checkpoint=sys.argv[1])
"""


class Slow(Sequence[Any]):
    """Inputs that take a while each, so that there's time to kill who reads them."""

    def __init__(self, delay: float) -> None:
        self.images, self.delay = tiny_images(N), delay

    def __len__(self) -> int:
        return N

    def __getitem__(self, index: Any) -> Any:
        time.sleep(self.delay)
        return self.images[index]


def slow_probes(delay: float = 0.05) -> ProbeSet:
    return ProbeSet(Rows(Slow(delay), range(N), "image"), prompts=PROMPTS)


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("rows-*.safetensors"))


def test_a_killed_extraction_goes_on_and_gives_the_same_bits(tmp_path: Path) -> None:
    expected = extract(*pair(), ProbeSet(tiny_images(N), prompts=PROMPTS), batch_size=BATCH, store_base=True)
    folder = tmp_path / "rows"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    child = subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)], env=environment)
    deadline = time.monotonic() + 120
    while not shards(folder) and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL
    left = shards(folder)
    assert left == ["rows-000000000000-000000000032.safetensors"]  # some rows, not all
    written = (folder / left[0]).stat().st_mtime_ns
    (folder / ".rows-000000000032.tmp").touch()  # as a kill in the middle of a write leaves it

    decoded: list[int] = []
    probes = slow_probes(0)
    original = ProbeSet.__getitem__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProbeSet, "__getitem__", lambda self, i: decoded.append(i) or original(self, i))
        found = extract(*pair(), probes, batch_size=BATCH, store_base=True, checkpoint=folder)
    assert sorted(set(decoded)) == [0, 1, 31, *range(32, N)]  # what was done is only checked
    assert found.base_affinity is not None
    assert expected.base_affinity is not None
    assert torch.equal(found.delta, expected.delta)
    assert torch.equal(found.base_affinity, expected.base_affinity)
    assert (found.spread, found.grid) == (expected.spread, expected.grid)
    assert shards(folder) == [f"rows-000000000000-{N:012d}.safetensors"]
    assert written < (folder / shards(folder)[0]).stat().st_mtime_ns
    assert not list(folder.glob(".*"))
    again = extract(*pair(), slow_probes(0), batch_size=BATCH, store_base=True, checkpoint=folder)
    assert torch.equal(again.delta, expected.delta)
    assert again.grid == expected.grid


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("begun")
    extract(*pair(), ProbeSet(tiny_images(6), prompts=PROMPTS), batch_size=BATCH, checkpoint=folder)
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": ["a cat", "a dog", "a fish"]}, r"class_names was .*'one bird'\], now .*'a fish'\]"),
        ({"images": 5}, r"got another: n was 6, now 5\. Pass"),
        ({"batch_size": 3}, "batch_size was 2, now 3"),
        ({"store_base": True}, "store_base was False, now True"),
        ({"family": "siglip"}, "base was .*; tuned was "),
        ({"seed": 7}, "probe 0 has other content"),
        ({"tuned": 2.0}, r"the first rows differ by .* from what these models give"),
    ],
)
def test_refuses_to_go_on_with_another_setup(begun: Path, change: dict[str, Any], message: str) -> None:
    base, tuned = pair(change.get("family", "clip"))
    if "tuned" in change:  # another fine-tune, of the same name
        with torch.no_grad():
            tuned.model.visual_projection.weight.mul_(torch.linspace(1.0, change["tuned"], 16)[:, None])
    images = tiny_images(change.get("images", 6), seed=change.get("seed", 0))
    probes = ProbeSet(images, prompts=change.get("prompts", PROMPTS))
    options = {"batch_size": change.get("batch_size", BATCH), "store_base": change.get("store_base", False)}
    with pytest.raises(PlatonicError, match=message):
        extract(base, tuned, probes, checkpoint=begun, **options)


def test_names_a_damaged_shard(tmp_path: Path) -> None:
    probes = ProbeSet(tiny_images(6), prompts=PROMPTS)
    extract(*pair(), probes, batch_size=BATCH, checkpoint=tmp_path)
    path = tmp_path / shards(tmp_path)[0]
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(PlatonicError, match=r"Expected a whole shard in .*Delete it"):
        extract(*pair(), probes, batch_size=BATCH, checkpoint=tmp_path)


class Peak(threading.Thread):
    """The most memory of this process that no file backs, in bytes, beyond what it was at the start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.done, self.first, self.most = threading.Event(), self.now(), 0

    @staticmethod
    def now() -> int:
        found = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
        assert found is not None
        return 1024 * int(found[1])

    def run(self) -> None:
        while not self.done.wait(0.001):
            self.most = max(self.most, self.now() - self.first)

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.done.set()
        self.join()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own memory figures")
def test_a_large_descriptor_is_saved_loaded_and_looked_at_without_being_held(tmp_path: Path) -> None:
    n, names = 400_000, tuple(f"class {i}" for i in range(100))  # 160 MB
    prints = "0" * 32, digest(["0" * 32, list(names), ["{}"]])
    grid = Grid(prints[1], prints[0], n=n, class_names=names, templates=("{}",), modality="image")
    rows = torch.linspace(-1, 1, 100 * 1000).reshape(1000, 100)
    path = tmp_path / "made.safetensors"
    with Peak() as peak:
        stream_tensors(path, {"delta": Stream(torch.float32, (n, 100), (rows for _ in range(n // 1000)))})
        with safe_open(path, framework="pt") as file:
            made = TaskDescriptor(file.get_tensor("delta"), grid)
        made.save_pretrained(tmp_path)
        loaded = TaskDescriptor.from_pretrained(tmp_path)
        assert loaded.norm() == pytest.approx(math.sqrt(n / 1000 * float(rows.double().square().sum())))
        assert loaded.cosine(made) == pytest.approx(1.0)
        assert loaded * 1.0 is loaded
        sums = ProbeSums.zeros(8, 100)
        for start in range(0, n, 1000):
            sums.update(torch.ones(1000, 8), [loaded.delta[start : start + 1000]])
    assert torch.equal(loaded.delta, made.delta)
    assert peak.most < 160e6 / 4


def test_a_streamed_file_is_a_safetensors_file_whatever_is_in_it(tmp_path: Path) -> None:
    path = tmp_path / "mixed.safetensors"
    tensors = {
        "bytes": torch.arange(7, dtype=torch.uint8),
        "wide": torch.linspace(0, 1, 3, dtype=torch.float64),
        "rows": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.zeros(0, 4),
    }
    save_tensors(path, tensors)
    found = load_file(path)
    assert set(found) == set(tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    short = Stream(torch.float32, (4, 3), [torch.zeros(2, 3)])
    with pytest.raises(DescriptorFormatError, match="Expected 48 bytes of `rows` for .*, got 24"):
        stream_tensors(path, {"rows": short})
    assert set(load_file(path)) == set(tensors)


def test_a_mapped_descriptor_solves_as_one_in_memory(tmp_path: Path) -> None:
    probes = ProbeSet(tiny_images(40), prompts=PROMPTS)
    mapped = extract(*pair(), probes, batch_size=BATCH, checkpoint=tmp_path)
    target = tiny_encoder("siglip", seed=2)
    assert len(probes) > target.design_dim
    operators = solve_operators([mapped, extract(*pair(), probes, batch_size=BATCH)], target)
    assert torch.equal(operators[0].dense(), operators[1].dense())


def test_shards_stay_few() -> None:
    assert Shards.layout(10**6, 32) == 512
    assert 10**9 / Shards.layout(10**9, 32) <= 65_536
