"""The same for sounds: one CLAP's fine-tune, given to a CLAP of another width.

    python examples/audio.py

About half a minute on two cores. Prints the target's accuracy on each audio task before and after.
"""

from __future__ import annotations

from hf_platonic import DualEncoder, EvaluationSet, ProbeSet, evaluate, extract, playground, transfer

SOURCE, TARGET = playground.model_names("audio")


def main() -> None:
    for name in playground.AUDIO_TASKS:
        task = playground.load_task(name)
        words = {"class_names": task.class_names, "templates": task.templates[:1]}
        path = playground.model_path(SOURCE)
        tuned = DualEncoder.from_pretrained(path, adapter=playground.adapter_path(SOURCE, name))
        descriptor = extract(
            DualEncoder.from_pretrained(path), tuned, ProbeSet(task.split("probes").inputs, **words), name=name
        )
        target = DualEncoder.from_pretrained(playground.model_path(TARGET))
        transfer(descriptor, target, strength=1.0)
        test = task.split("test")
        report = evaluate(target, {name: EvaluationSet(ProbeSet(test.inputs, **words), test.labels)})
        print(f"{name}: {report.before[name]:.3f} -> {report.after[name]:.3f}")


if __name__ == "__main__":
    main()
