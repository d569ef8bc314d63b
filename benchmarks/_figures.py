"""What every benchmark shares: paired timing, peak memory, and figures printed and written by name."""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the option that all benchmarks have."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as JSON")
    return parser


def seconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def ratio(numerator: Callable[[], object], denominator: Callable[[], object], *, rounds: int = 5) -> float:
    """Median over rounds of time(numerator) / time(denominator), taken in turn so that a drifting machine cancels."""
    numerator()
    denominator()
    return statistics.median(seconds(numerator) / seconds(denominator) for _ in range(rounds))


def peak_mebibytes() -> float:
    """Peak resident memory of this process so far."""
    scale = 1024 if sys.platform != "darwin" else 1024**2
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale


def child(*options: str) -> dict[str, float]:
    """Figures of the calling script run in a process of its own, which prints them as its last line."""
    run = subprocess.run([sys.executable, sys.argv[0], *options], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.strip().splitlines()[-1])


def report(figures: dict[str, float], path: Path | None) -> None:
    """Prints the figures and, with a path, writes them."""
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:{width}}  {value:.4g}")
    if path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n")
