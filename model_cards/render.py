"""Renders one card of each kind from the playground, as a push would.

    python model_cards/render.py

About half a minute on two cores. Writes the Markdown files beside it; nothing is pushed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hf_platonic import DualEncoder, EvaluationSet, OperatorBank, ProbeSet, evaluate, extract, playground, transfer
from hf_platonic.cards import adapter_card, bank_card, descriptor_card, probes_card

HERE = Path(__file__).parent
TASK, SOURCE, TARGET = "handwritten_digits", "siglip", "convnext-bert"


def cards() -> dict[str, str]:
    """Text by file name."""
    task = playground.load_task(TASK)
    words = {"class_names": task.class_names, "templates": task.templates[:1]}
    probes = ProbeSet(task.split("probes").inputs, **words)
    path = playground.model_path(SOURCE)
    tuned = DualEncoder.from_pretrained(path, adapter=playground.adapter_path(SOURCE, TASK))
    descriptor = extract(DualEncoder.from_pretrained(path), tuned, probes, name=TASK)
    target = DualEncoder.from_pretrained(playground.model_path(TARGET))
    bank = OperatorBank.solve({(SOURCE, TASK): descriptor}, target)
    model = transfer(descriptor, target, strength=1.0)
    test = task.split("test")
    control = playground.load_control(playground.controls("image")[0])
    held = control.split("test")
    report = evaluate(
        target,
        {TASK: EvaluationSet(ProbeSet(test.inputs, **words), test.labels)},
        control={
            control.name: EvaluationSet(
                ProbeSet(held.inputs, class_names=control.class_names, templates=control.templates[:1]), held.labels
            )
        },
    )
    config = model.peft_config["default"]
    made: dict[str, Any] = dict(
        modality="image",
        layers=[f"{layer} ({config.site})" for layer in sorted(config.target_modules)],
        rank=config.r,
        provenance=json.loads(json.dumps(config.provenance)),
        base_repo=None,
        base_revision=None,
        base_class=type(model.get_base_model()).__name__,
        license="apache-2.0",
        results=report,
    )
    folded = {**made, "provenance": {**made["provenance"], "strength": config.strength}}
    return {
        "task-descriptor.md": descriptor_card(
            repo_id="your-name/digits",
            name=TASK,
            grid=descriptor.grid,
            sources=descriptor.sources,
            spread=descriptor.spread,
            norm=descriptor.norm(),
            base_affinity=False,
            self_contained=True,
            license="apache-2.0",
            results=report,
        ),
        "operator-head.md": adapter_card(
            repo_id="your-name/digits-head", kind="platonic", strength=config.strength, **made
        ),
        "lora.md": adapter_card(repo_id="your-name/digits-lora", kind="lora", strength=None, **folded),
        "operator-bank.md": bank_card(
            repo_id="your-name/bank",
            entries=[
                {"key": k, "folder": "/".join(k), "rank": o.rank, "provenance": bank.provenance[k]}
                for k, o in bank.operators.items()
            ],
            module=bank.site.module,
            site=bank.site.kind,
            modality=bank.modality,
            base=bank.target,
            license="apache-2.0",
        ),
        "probe-set.md": probes_card(
            repo_id="your-name/digits-probes", grid=probes.grid, by_reference=False, license="apache-2.0"
        ),
    }


def playground_card() -> str:
    """The card of the shipped models, with the figures of their build."""
    report = json.loads((playground.model_path("siglip").parents[1] / "build_report.json").read_text())
    rows = []
    for name, made in report["models"].items():
        tasks = made["tasks"].values()
        means = [sum(task[key] for task in tasks) / len(tasks) for key in ("zero_shot", "fine_tuned")]
        kind = json.loads((playground.model_path(name) / "config.json").read_text())["architectures"][0]
        rows.append(f"| {name} | `{kind}` | {made['parameters']:,} | {means[0]:.3f} | {means[1]:.3f} |")
    return PLAYGROUND.format(
        rows="\n".join(rows),
        image=", ".join(playground.IMAGE_TASKS),
        audio=", ".join(playground.AUDIO_TASKS),
        controls=", ".join(playground.controls("image") + playground.controls("audio")),
    )


PLAYGROUND = """# The playground's models

Eight small pre-trained dual encoders and a LoRA fine-tune of each on each of its tasks, so that everything in this
package can be tried and tested without network. They ship in `hf_platonic.playground` under Apache-2.0.

| model | class | parameters | zero-shot | fine-tuned |
|---|---|---|---|---|
{rows}

Accuracies are means over the model's tasks, on test splits of 400 items (597 for handwriting), from the build's own
report.

## Data

Captioned pictures (scenes of coloured shapes, printed and drawn digits and letters) and sounds (tones of several
timbres, pitches, motions and rhythms), all rendered by the package from seeds. Image tasks: {image}. Audio tasks:
{audio}. Controls: {controls}. Each task is shifted from the corpus (negatives, mist, coloured light, noise, echo, …);
`handwritten_digits` is scikit-learn's scanned handwriting (UCI, BSD-licensed package data), which no model saw in
pre-training. Splits are seeded and disjoint; probes have no labels.

## Training

`python -m hf_platonic.playground.build` makes everything again; it says how long it took. Pre-training is contrastive
with each family's own loss (softmax or sigmoid); a caption's positives are all inputs of the batch that it fits, and
linear read-outs of the rendered factors help at the start. Fine-tunes are LoRAs of rank 4, alpha 8, on query and value
projections (ConvNeXt: its point-wise layers), cross-entropy over the class prompts, text tower frozen; their settings
were chosen on held-out parts of training splits.

## Use and limits

For demonstrations and tests. They know nothing but this small world: don't use them for real pictures or sounds.
"""


if __name__ == "__main__":
    for name, text in {**cards(), "playground.md": playground_card()}.items():
        (HERE / name).write_text(text, encoding="utf-8")
