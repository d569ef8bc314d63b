"""Carry a fine-tune to another family: SigLIP learned handwriting, a ConvNeXt + BERT model gets it.

    python examples/transfer.py

About ten seconds on two cores. Prints the target's accuracy on handwritten digits before and after; no labels are
used but for those two figures.
"""

from __future__ import annotations

import tempfile

from hf_platonic import DualEncoder, EvaluationSet, ProbeSet, TaskDescriptor, evaluate, extract, playground, transfer

TASK = "handwritten_digits"


def main() -> None:
    task = playground.load_task(TASK)
    words = {"class_names": task.class_names, "templates": task.templates[:1]}
    probes = ProbeSet(task.split("probes").inputs, **words)

    # The team that fine-tuned: what did the fine-tune change, on inputs nobody labelled?
    path = playground.model_path("siglip")
    base = DualEncoder.from_pretrained(path)
    tuned = DualEncoder.from_pretrained(path, adapter=playground.adapter_path("siglip", TASK))
    descriptor = extract(base, tuned, probes, name=TASK)

    with tempfile.TemporaryDirectory() as folder:
        descriptor.save_pretrained(folder, include_probes=True)

        # The team with another model: write that change into it.
        received = TaskDescriptor.from_pretrained(folder)
        target = DualEncoder.from_pretrained(playground.model_path("convnext-bert"))
        transfer(received, target, strength=1.0)

    test = task.split("test")
    report = evaluate(target, {TASK: EvaluationSet(ProbeSet(test.inputs, **words), test.labels)})
    print(f"{TASK}: {report.before[TASK]:.3f} -> {report.after[TASK]:.3f}")


if __name__ == "__main__":
    main()
