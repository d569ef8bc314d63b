"""Use a published task: pull a descriptor that somebody pushed, and have a better model.

    python examples/use.py your-name/handwritten-digits

About ten seconds on two cores. Prints the model's accuracy on handwritten digits before and after, and saves it as an
ordinary checkpoint in the folder `better`, or the one named second.
"""

from __future__ import annotations

import sys

from hf_platonic import DualEncoder, EvaluationSet, ProbeSet, TaskDescriptor, evaluate, playground, transfer


def main(repo_id: str, folder: str = "better") -> None:
    descriptor = TaskDescriptor.from_pretrained(repo_id)
    target = DualEncoder.from_pretrained(playground.model_path("convnext-bert"))
    model = transfer(descriptor, target, strength=1.0)

    test = playground.load_task("handwritten_digits").split("test")
    data = EvaluationSet(
        ProbeSet(test.inputs, class_names=descriptor.grid.class_names, templates=descriptor.grid.templates),
        test.labels,
    )
    report = evaluate(target, {"digits": data})
    print(f"{report.before['digits']:.3f} -> {report.after['digits']:.3f}")
    model.merge_and_unload().save_pretrained(folder)
    target.processor.save_pretrained(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
