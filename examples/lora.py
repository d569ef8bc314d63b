"""Carry a fine-tune into another family's layers: a LoRA trained on unlabelled probes, which PEFT alone loads.

    python examples/lora.py

About ten seconds on two cores. SigLIP learned handwriting; a ConvNeXt + BERT model gets it by the closed form, which
edits its last layer, and by a LoRA that starts there and learns the rest inside the tower, in 40 steps (the paper's
recipe, without arguments, starts from nothing and takes more). Prints its accuracy on handwritten digits before, and
after each; no labels are used but for these figures.
"""

from __future__ import annotations

import tempfile

from peft import PeftModel
from transformers import AutoModel

from hf_platonic import (
    DualEncoder,
    EvaluationSet,
    MatchingArguments,
    ProbeSet,
    extract,
    playground,
    transfer,
    zero_shot_accuracy,
)

TASK = "handwritten_digits"
TARGET = "convnext-bert"


def main() -> None:
    task = playground.load_task(TASK)
    words = {"class_names": task.class_names, "templates": task.templates[:1]}
    test = task.split("test")
    held_out = EvaluationSet(ProbeSet(test.inputs, **words), test.labels)

    path = playground.model_path("siglip")
    base = DualEncoder.from_pretrained(path)
    tuned = DualEncoder.from_pretrained(path, adapter=playground.adapter_path("siglip", TASK))
    descriptor = extract(base, tuned, ProbeSet(task.split("probes").inputs, **words), name=TASK)

    solved = DualEncoder.from_pretrained(playground.model_path(TARGET))
    print(f"{TASK}: {zero_shot_accuracy(solved, held_out):.3f}", end=" ")
    transfer(descriptor, solved, strength=1.0)
    print(f"-> {zero_shot_accuracy(solved, held_out):.3f} by the closed form", end=", ")

    target = DualEncoder.from_pretrained(playground.model_path(TARGET))
    settings = MatchingArguments(warm_start="closed_form", max_steps=40)
    model = transfer(descriptor, target, method="lora", training_args=settings)
    print(f"{zero_shot_accuracy(target, held_out):.3f} by a LoRA from there", end=", ")

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, save_embedding_layers=False)
        fresh = AutoModel.from_pretrained(playground.model_path(TARGET), dtype="float32")
        loaded = PeftModel.from_pretrained(fresh, folder)
    again = DualEncoder(loaded.merge_and_unload(), target.processor)
    print(f"{zero_shot_accuracy(again, held_out):.3f} saved, loaded by PEFT and merged")


if __name__ == "__main__":
    main()
