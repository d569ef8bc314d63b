"""Writes the two tables of docs/cluster.md from what `benchmarks/processes.py` measured.

    python benchmarks/processes.py --json figures.json
    python docs/cluster.py figures.json

What isn't measured there is an assumption, and the table says so.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PAGE = Path(__file__).parent / "cluster.md"
PROBES, PROCESSES, P, M = 10**9, 64, 768, 1_000
RATE = 1_000  # assumed: probes per second and GPU, through both models
LINK = 12.5e9  # assumed: bytes per second of each process's network link
HASH = 17  # bytes a probe and process

Row = tuple[str, str, str]


def measured(figures: dict[str, float]) -> list[Row]:
    """The figures, with what was asked for."""
    sums = f"{figures['reduced_bytes'] / 1e6:.1f} MB, p = {P}, m = {M:,}"
    at_2k = f"{figures['peak_mebibytes_2k_probes']:.0f} MiB at 2,000"
    return [
        ("what", "value", "note"),
        ("---", "---", "---"),
        ("probes a second, two processes over one", f"{figures['two_processes_over_one']:.2f}", "one thread each"),
        ("peak memory, 200,000 probes over 2,000", f"{figures['peak_memory_200k_over_2k_probes']:.3f}", at_2k),
        ("adding up the sums of two processes", f"{1e3 * figures['reduction_seconds_two_processes']:.0f} ms", sums),
        ("sums, a probe", f"{1e6 * figures['sums_seconds_per_probe']:.0f} µs", "one core, float64"),
        ("solve", f"{figures['solve_seconds']:.2f} s", "one core"),
        ("shards written", f"{figures['shards_written_megabytes_per_second']:.0f} MB/s", "with checksums and fsync"),
        ("shards joined", f"{figures['shards_joined_megabytes_per_second']:.0f} MB/s", "the same"),
        ("content hashes taken over, a probe", f"{1e6 * figures['noting_hashes_seconds_per_probe']:.2f} µs", ""),
        ("content hashes fingerprinted, a probe", f"{1e6 * figures['fingerprint_seconds_per_probe']:.2f} µs", ""),
    ]


def reckoned(figures: dict[str, float]) -> list[Row]:
    """Bytes and hours of a billion probes on 64 GPUs."""
    share, hour, matrix = PROBES / PROCESSES, 3600.0, 4.0 * PROBES * M
    sent = 2 * (PROCESSES - 1) / PROCESSES * figures["reduced_bytes"]  # a ring all-reduce sends all about twice
    written, joined = (figures[f"shards_{how}_megabytes_per_second"] * 1e6 for how in ("written", "joined"))
    noting, printing = (
        PROBES * figures[f"{how}_seconds_per_probe"] / hour for how in ("noting_hashes", "fingerprint")
    )
    return [
        (f"n = {PROBES:,}, m = {M:,}, p = {P}", "bytes", "time"),
        ("---", "---", "---"),
        (f"forward passes, assumed {RATE:,} probes a second and GPU", "-", f"{share / RATE / hour:.1f} h"),
        ("rows into shards, meanwhile", f"{matrix / 1e12:.0f} TB", f"{matrix / PROCESSES / written / hour:.1f} h"),
        ("joining the shards, one process", f"{2 * matrix / 1e12:.0f} TB", f"{matrix / joined / hour:.0f} h"),
        ("taking over content hashes, every process", f"{HASH * PROBES / 1e9:.0f} GB each", f"{noting:.1f} h"),
        ("fingerprint, every process", "-", f"{printing:.1f} h"),
        ("sums, on a core (a GPU is faster)", "-", f"{share * figures['sums_seconds_per_probe'] / hour:.1f} h"),
        ("adding them up", f"{sent / 1e6:.0f} MB sent by each", f"{1e3 * sent / LINK:.1f} ms"),
        ("gathering features instead, not done", f"{4.0 * PROBES * P / 1e12:.0f} TB", "-"),
        ("solve", "-", f"{figures['solve_seconds']:.2f} s"),
    ]


def main() -> None:
    """Replaces what stands between the page's markers."""
    figures = json.loads(Path(sys.argv[1]).read_text())
    text = PAGE.read_text(encoding="utf-8")
    for name, rows in (("measured", measured(figures)), ("reckoned", reckoned(figures))):
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        before, rest = text.split(start)
        table = "".join(f"| {' | '.join(row)} |\n" for row in rows)
        text = before + start + table + end + rest.split(end)[1]
    PAGE.write_text(text, encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")


if __name__ == "__main__":
    main()
