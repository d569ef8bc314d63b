"""The README's figure from the demo's JSON.

hf-platonic demo --json out.json
python docs/figure.py out.json docs/transfer.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SERIES = (
    ("before", "#c9ced6"),
    ("another family's descriptor", "#3b7dd8"),
    ("own descriptor", "#8fb8ee"),
    ("fine-tuned", "#2b2f36"),
)
BAR, GAP, HEIGHT, LEFT, TOP = 16, 26, 220, 44, 46


def bars(report: dict[str, Any]) -> list[tuple[str, list[float]]]:
    """Per model, its four accuracies."""
    found = []
    for part in (report, report["audio"]):
        for model, before in part["zero_shot"]["per_model"].items():
            gains = [part[key]["per_model"][model] for key in ("transfer_gain", "own_gain")]
            found.append((model, [before, *(before + g for g in gains), part["fine_tuned"]["per_model"][model]]))
    return found


def draw(report: dict[str, Any]) -> str:
    """The figure as SVG."""
    groups = bars(report)
    step = len(SERIES) * BAR + GAP
    width = LEFT + len(groups) * step + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {TOP + HEIGHT + 34}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    parts.append(f'<text x="8" y="{TOP - 12}" fill="#555">accuracy</text>')
    x = LEFT
    for name, colour in SERIES:
        parts.append(f'<rect x="{x}" y="10" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{x + 17}" y="20">{name}</text>')
        x += 40 + 7 * len(name)
    for tenth in range(0, 11, 2):
        y = TOP + HEIGHT * (1 - tenth / 10)
        parts.append(f'<line x1="{LEFT}" x2="{width - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e3e6ea"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#555">{tenth / 10:.1f}</text>')
    for index, (model, values) in enumerate(groups):
        start = LEFT + index * step + GAP / 2
        for i, (value, (_, colour)) in enumerate(zip(values, SERIES, strict=True)):
            size = HEIGHT * value
            parts.append(
                f'<rect x="{start + i * BAR:.1f}" y="{TOP + HEIGHT - size:.1f}" width="{BAR - 2}" '
                f'height="{size:.1f}" fill="{colour}"><title>{model}: {value:.3f}</title></rect>'
            )
        middle = start + len(SERIES) * BAR / 2
        parts.append(f'<text x="{middle:.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle">{model}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    source, goal = map(Path, sys.argv[1:])
    goal.write_text(draw(json.loads(source.read_text())))
