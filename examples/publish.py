"""Publish a task: push what a fine-tune does to the Hub, for models that don't exist yet.

    hf auth login
    python examples/publish.py your-name/handwritten-digits

About ten seconds on two cores. Prints the descriptor's norm and the commit's page.
"""

from __future__ import annotations

import sys

from hf_platonic import DualEncoder, ProbeSet, extract, playground

TASK = "handwritten_digits"


def main(repo_id: str) -> None:
    task = playground.load_task(TASK)
    probes = ProbeSet(task.split("probes").inputs, class_names=task.class_names, templates=task.templates[:1])
    path = playground.model_path("siglip")
    tuned = DualEncoder.from_pretrained(path, adapter=playground.adapter_path("siglip", TASK))
    descriptor = extract(DualEncoder.from_pretrained(path), tuned, probes, name=TASK)
    print(f"norm {descriptor.norm():.3f}")
    # These probes were made in memory, so they travel along; a set from ProbeSet.from_hub travels by reference.
    done = descriptor.push_to_hub(repo_id, include_probes=True, license="apache-2.0")
    print(f"pushed {done.repo} at {done.revision}: {done.url}")


if __name__ == "__main__":
    main(*sys.argv[1:])
