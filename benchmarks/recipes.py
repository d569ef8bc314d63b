"""What `recipe="auto"` costs over `recipe="paper"` for one term, from the call of `transfer` to the edited model.

    python benchmarks/recipes.py [--json FILE] [--only NAME]

Names: playground-400 and playground-1200 (the shipped wide CLIP and so many probes of a shipped task), where forward
passes cost next to nothing and the ratio is that of the solves; vit-b-32 (CLIP ViT-B/32 with random weights, 600
probes). Each name runs in a process of its own; about five minutes on one core.

Figures: `<name>: auto over paper`, the median over rounds of the ratio, taken in turn.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from _figures import arguments, child, ratio, report
from lora import target_of
from PIL import Image

from hf_platonic import DualEncoder, ProbeSet, TaskDescriptor, extract, playground, transfer

NAMES = ("playground-400", "playground-1200", "vit-b-32")
TASK = playground.IMAGE_TASKS[0]


def shipped(count: int) -> TaskDescriptor:
    """The descriptor of the shipped SigLIP's fine-tune on so many unlabelled inputs of its task."""
    task = playground.load_task(TASK)
    inputs = [*task.split("probes").inputs, *task.split("train").inputs][:count]
    path = playground.model_path("siglip")
    return extract(
        DualEncoder.from_pretrained(path),
        DualEncoder.from_pretrained(path, adapter=playground.adapter_path("siglip", TASK)),
        ProbeSet(inputs, class_names=task.class_names, templates=task.templates[:1]),
        store_base=True,
        batch_size=100,
        progress=False,
    )


def made_up(count: int) -> TaskDescriptor:
    """Random scores of random pictures."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (count, 64, 64, 3), dtype=torch.uint8, generator=generator).numpy()
    words = playground.load_control("objects")
    probes = ProbeSet(
        [Image.fromarray(p) for p in pixels], class_names=words.class_names, templates=words.templates[:1]
    )
    return TaskDescriptor.from_scores(torch.randn(count, len(words.class_names), generator=generator), probes)


def measure(name: str) -> float:
    """The ratio for one model."""
    small = name.startswith("playground")
    term = shipped(int(name.rpartition("-")[2])) if small else made_up(600)
    target = target_of("playground" if small else name)

    def edit(recipe: Any) -> None:
        model = transfer(term, target, recipe=recipe, batch_size=100, progress=False)
        target.model = model.unload()

    return ratio(lambda: edit("auto"), lambda: edit("paper"), rounds=7 if small else 2)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--only", choices=NAMES)
    parser.add_argument("--here", action="store_true", help="with --only: in this process")
    options = parser.parse_args()
    if options.here:
        torch.set_num_threads(1)
        print(json.dumps({"ratio": measure(options.only)}))
        return
    names = NAMES if options.only is None else (options.only,)
    report({f"{n}: auto over paper": child("--here", "--only", n)["ratio"] for n in names}, options.json)


if __name__ == "__main__":
    main()
