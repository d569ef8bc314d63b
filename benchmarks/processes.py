"""What more processes bring, what they exchange, and that memory doesn't grow with the number of probes.

    python benchmarks/processes.py [--json FILE] [--only NAME]

Names: speed (two processes with one thread each against one; needs two free cores), memory (extraction of 200,000
synthetic probes against 2,000 by a tiny model, rows kept in shards), constants (what docs/cluster.md reckons with).
About eight minutes on two cores.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _figures import arguments, peak_mebibytes, report, seconds
from PIL import Image
from torch.nn.functional import normalize

from hf_platonic import DualEncoder, ProbeSet, extract, playground
from hf_platonic._processes import process_state, sum_over_processes
from hf_platonic.grid import probe_fingerprint
from hf_platonic.probe_sources import Rows
from hf_platonic.shards import Shards
from hf_platonic.solve import GridSolver, ProbeSums

ROUNDS = 5
SPEED_PROBES = 1_000
FEW, MANY = 2_000, 200_000
P, M = 768, 1_000  # CLIP-L's embedding, and ImageNet's number of classes
WORDS = {"class_names": ["circle", "star", "square", "heart"], "templates": ("a {}",)}


class Synthetic:
    """Pictures made when asked for: they take no memory and no disk."""

    def __getitem__(self, index: int) -> Image.Image:
        noise = np.random.default_rng(index).integers(0, 256, (16, 16, 3), dtype=np.uint8)
        return Image.fromarray(noise)


def synthetic(n: int) -> ProbeSet:
    return ProbeSet(Rows(Synthetic(), range(n), "image"), **WORDS)


def shipped_pair() -> tuple[DualEncoder, DualEncoder]:
    path = playground.model_path("clip-wide")
    adapter = playground.adapter_path("clip-wide", playground.IMAGE_TASKS[0])
    return DualEncoder.from_pretrained(path), DualEncoder.from_pretrained(path, adapter=adapter)


def tiny_pair() -> tuple[DualEncoder, DualEncoder]:
    """Two one-layer CLIPs with random weights, and a shipped processor at 16 pixels."""
    from transformers import AutoProcessor, CLIPConfig, CLIPModel

    processor = AutoProcessor.from_pretrained(playground.model_path("clip-wide"), backend="pil")
    processor.image_processor.size = {"shortest_edge": 16}
    processor.image_processor.crop_size = {"height": 16, "width": 16}
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    tokens = {f"{end}_token_id": getattr(processor.tokenizer, f"{end}_token_id") for end in ("bos", "eos")}
    text = {**tower, **tokens, "vocab_size": len(processor.tokenizer)}
    vision = {**tower, "image_size": 16, "patch_size": 8}
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    torch.manual_seed(0)
    first, second = (DualEncoder(CLIPModel(config).eval(), processor) for _ in range(2))
    return first, second


def speed() -> dict[str, float]:
    """Probes per second of this process and the others that were launched with it."""
    base, tuned = shipped_pair()
    probes = synthetic(SPEED_PROBES)
    extract(base, tuned, probes, progress=False)
    rates = []
    for _ in range(3):
        process_state().wait_for_everyone()
        rates.append(SPEED_PROBES / seconds(lambda: extract(base, tuned, synthetic(SPEED_PROBES), progress=False)))
    return {"probes_per_second": statistics.median(rates)}


def memory(n: int) -> dict[str, float]:
    """Peak memory of a process that extracts so many probes into shards."""
    base, tuned = tiny_pair()
    with tempfile.TemporaryDirectory() as folder:
        extract(base, tuned, synthetic(n), batch_size=100, checkpoint=folder, progress=False)
    return {"mebibytes": peak_mebibytes()}


def exchanged() -> dict[str, float]:
    """Time of one reduction of the sums that a solve exchanges."""
    sums = torch.randn(P, P + M, dtype=torch.float64)
    sum_over_processes(sums)
    found = []
    for _ in range(9):
        process_state().wait_for_everyone()
        found.append(seconds(lambda: sum_over_processes(sums)))
    return {"seconds": statistics.median(found), "bytes": float(sums.nbytes)}


def constants() -> dict[str, float]:
    """Costs a probe, on one core and this machine's disk, at p = 768 and m = 1,000."""
    generator = torch.Generator().manual_seed(0)
    rows = normalize(torch.randn(2048, P, generator=generator), dim=-1)
    delta = 0.01 * torch.randn(2048, M, generator=generator)
    prompts = normalize(torch.randn(M, P, generator=generator), dim=-1)
    sums = ProbeSums.zeros(P, M)
    summing = min(seconds(lambda: sums.update(rows, [delta])) for _ in range(3)) / len(rows)
    solving = seconds(lambda: GridSolver.from_sums(sums, prompts).solve_cross(sums.cross))

    known = ["00112233445566778899aabbccddeeff"] * 100_000
    printing = seconds(lambda: probe_fingerprint("image", known)) / len(known)

    size, count = 512, 128
    with tempfile.TemporaryDirectory() as name:
        shards = Shards(Path(name), size * count, size)
        hashes = torch.zeros(size, 16, dtype=torch.uint8)
        part: dict[str, Any] = {"delta": delta[:size], "content_hashes": hashes, "squares": torch.zeros(16).double()}
        runs = [range(i * size, (i + 1) * size) for i in range(count)]
        writing = seconds(lambda: [shards.write(run, part) for run in runs])
        joining = seconds(shards.whole)
    megabytes = size * count * M * 4 / 1e6
    probes = synthetic(100_000)
    packed = bytes(1_600_000), bytes([1]) * 100_000
    noting = seconds(lambda: probes.known_hashes.unpack(range(100_000), *packed)) / 100_000
    return {
        "sums_seconds_per_probe": summing,
        "solve_seconds": solving,
        "fingerprint_seconds_per_probe": printing,
        "noting_hashes_seconds_per_probe": noting,
        "shards_written_megabytes_per_second": megabytes / writing,
        "shards_joined_megabytes_per_second": megabytes / joining,
    }


def launched(processes: int, kind: str) -> dict[str, float]:
    """Figures of this script on so many processes with one thread each; the main one prints them last."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(processes), "--standalone"]
    command = [sys.executable, *(launcher if processes > 1 else []), sys.argv[0], "--kind", kind]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(run.stdout.strip().splitlines()[-1])


KINDS = {
    "speed": speed,
    "memory-few": lambda: memory(FEW),
    "memory-many": lambda: memory(MANY),
    "exchange": exchanged,
    "constants": constants,
}


def measure(name: str) -> dict[str, float]:
    """The figures of one name, from processes of their own."""
    if name == "speed":
        rates = [(launched(1, "speed"), launched(2, "speed")) for _ in range(ROUNDS)]
        one, two = ([pair[side]["probes_per_second"] for pair in rates] for side in (0, 1))
        return {
            "two_processes_over_one": statistics.median(b / a for a, b in zip(one, two, strict=True)),
            "probes_per_second_one_process": statistics.median(one),
        }
    if name == "memory":
        few = launched(1, "memory-few")["mebibytes"]
        start = time.perf_counter()
        many = launched(1, "memory-many")["mebibytes"]
        return {
            "peak_memory_200k_over_2k_probes": many / few,
            "peak_mebibytes_2k_probes": few,
            "minutes_for_200k_probes": (time.perf_counter() - start) / 60,
        }
    exchange = launched(2, "exchange")
    return {
        **launched(1, "constants"),
        "reduced_bytes": exchange["bytes"],
        "reduction_seconds_two_processes": exchange["seconds"],
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=("speed", "memory", "constants"))
    parser.add_argument("--kind", choices=KINDS, help="one measurement, in this process")
    options = parser.parse_args()
    if options.kind:
        found = KINDS[options.kind]()
        if process_state().is_main_process:
            print(json.dumps(found))
        return
    figures: dict[str, float] = {}
    for name in ("speed", "memory", "constants") if options.only is None else (options.only,):
        figures.update(measure(name))
    report(figures, options.json)


if __name__ == "__main__":
    main()
