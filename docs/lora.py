"""Writes the tables of docs/lora.md from what the benchmarks measured.

python benchmarks/lora_playground.py --probes 400 --json few.json
python benchmarks/lora_playground.py --probes 1200 --own --json many.json
python benchmarks/lora.py --json steps.json
python docs/lora.py few.json many.json steps.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

PAGE = Path(__file__).with_suffix(".md")
START, END = "<!-- measured -->\n", "<!-- /measured -->"
WAYS = {"lora": "LoRA", "s = 1": "closed form, s = 1", "s = 0.5": "closed form, s = 0.5"}
GAINS = {"own": "own descriptor", "transferred": "the next model's", "pair": "two tasks, the next model's"}


def table(rows: list[tuple[str, ...]]) -> str:
    """Markdown; the first row is the header."""
    lines = [rows[0], ("---",) * len(rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)


def main(few: dict[str, float], many: dict[str, float], steps: dict[str, float]) -> str:
    """All tables."""

    def cell(figures: dict[str, float], name: str, form: str = "+.3f") -> str:
        return format(figures[name], form) if name in figures else ""

    header = ("gain in accuracy", *(f"{way}, {n} probes" for n in ("400", "1,200") for way in WAYS.values()))
    rows = [header]
    for kind, words in GAINS.items():
        rows.append((words, *(cell(f, f"{kind} gain, {way}") for f in (few, many) for way in WAYS)))
    rows.append(("retention", *(cell(f, f"retention, {way}", ".2f") for f in (few, many) for way in WAYS)))
    for kind, words in GAINS.items():
        name = f"change on the controls, {words}"
        rows.append((name, *(cell(f, f"{kind} control change, {way}") for f in (few, many) for way in WAYS)))
    ahead = [f"{f['own cases where lora gains more than s = 1']:.0f} of {f['own cases']:.0f}" for f in (few, many)]
    lines = [
        table(rows),
        f"\nThe LoRA gains more than the closed form at s = 1 in {ahead[0]} own cases with 400 probes, and in "
        f"{ahead[1]} with 1,200. Zero-shot accuracy is {few['zero-shot accuracy']:.3f}. Of one adapter a target, "
        f"{few['loads with plain PEFT']:.0f} of 6 load with PEFT alone to 1e-5.\n\n",
        table(
            [
                ("a step of the training over a bare forward and backward pass", "ratio"),
                *((name.partition(":")[0], f"{value:.3f}") for name, value in steps.items()),
            ]
        ),
    ]
    return "".join(lines)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, rest = text.split(START)
    found = main(*(json.loads(Path(name).read_text()) for name in sys.argv[1:4]))
    PAGE.write_text(before + START + found + END + rest.split(END)[1], encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
