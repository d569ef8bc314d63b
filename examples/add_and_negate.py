"""Add two tasks to a model and take one away again, as with numbers.

    python examples/add_and_negate.py

About fifteen seconds on two cores. Prints accuracies on two tasks and on a control set for the base model, with both
tasks added, with one subtracted again, and with one task negated.
"""

from __future__ import annotations

from hf_platonic import DualEncoder, EvaluationSet, ProbeSet, extract, playground, transfer, zero_shot_accuracy

SOURCE, TARGET = "siglip", "clip-wide"
FIRST, SECOND = "colours", "positions"
CONTROL = playground.controls("image")[0]


def words(task: playground.Task) -> dict[str, tuple[str, ...]]:
    return {"class_names": task.class_names, "templates": task.templates[:1]}


def main() -> None:
    tasks = {name: playground.load_task(name) for name in (FIRST, SECOND)}
    base = DualEncoder.from_pretrained(playground.model_path(SOURCE))
    found = {}
    for name, task in tasks.items():
        adapter = playground.adapter_path(SOURCE, name)
        tuned = DualEncoder.from_pretrained(playground.model_path(SOURCE), adapter=adapter)
        found[name] = extract(base, tuned, ProbeSet(task.split("probes").inputs, **words(task)), name=name)

    tests = {}
    for name, task in {**tasks, CONTROL: playground.load_control(CONTROL)}.items():
        split = task.split("test")
        tests[name] = EvaluationSet(ProbeSet(split.inputs, **words(task)), split.labels)

    both = found[FIRST] + found[SECOND]
    edits = {"base": None, "both added": both, "one subtracted": both - found[SECOND], "one negated": -found[FIRST]}
    print(f"{'':16}" + "".join(f"{name:>22}" for name in tests))
    for title, terms in edits.items():
        target = DualEncoder.from_pretrained(playground.model_path(TARGET))
        if terms is not None:
            transfer(terms, target)  # at the paper's strengths: .5 where something is added, 1 for pure negation
        print(f"{title:16}" + "".join(f"{zero_shot_accuracy(target, test):>22.3f}" for test in tests.values()))


if __name__ == "__main__":
    main()
