"""A transferred edit as a head start: train its two thin factors further with transformers' Trainer.

    python examples/train_further.py

About fifteen seconds on two cores. Prints accuracy on the test split: zero-shot, with the transferred edit, and after
training the edit on four labelled examples a class; then the same training from a fresh, empty edit.
"""

from __future__ import annotations

import tempfile

import torch
from peft import get_peft_model
from transformers import PrinterCallback, Trainer, TrainingArguments

from hf_platonic import (
    DualEncoder,
    EvaluationSet,
    PlatonicConfig,
    ProbeSet,
    extract,
    initialize_platonic_weights,
    playground,
    zero_shot_accuracy,
)

TASK, SOURCE, TARGET, SHOTS = "handwritten_digits", "siglip", "clip-wide", 4


class ZeroShotTrainer(Trainer):
    """Cross-entropy between the model's logits over the class prompts and the labels."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The loss of one batch, and the model's outputs if asked for."""
        labels = inputs.pop("labels")
        outputs = model(**inputs, **self.prompts)
        loss = torch.nn.functional.cross_entropy(outputs.logits_per_image, labels)
        return (loss, outputs) if return_outputs else loss


def main() -> None:
    task = playground.load_task(TASK)
    words = {"class_names": task.class_names, "templates": task.templates[:1]}
    source = playground.model_path(SOURCE)
    descriptor = extract(
        DualEncoder.from_pretrained(source),
        DualEncoder.from_pretrained(source, adapter=playground.adapter_path(SOURCE, TASK)),
        ProbeSet(task.split("probes").inputs, **words),
    )
    test, train = task.split("test"), task.split("train")
    held_out = EvaluationSet(ProbeSet(test.inputs, **words), test.labels)
    few = [i for c in range(len(task.class_names)) for i in [i for i, y in enumerate(train.labels) if y == c][:SHOTS]]

    for start in ("transferred", "empty"):
        target = DualEncoder.from_pretrained(playground.model_path(TARGET))
        print(f"zero-shot {zero_shot_accuracy(target, held_out):.3f}", end=" ")
        model = get_peft_model(target.model, PlatonicConfig(r=len(task.class_names)))
        if start == "transferred":
            initialize_platonic_weights(model, descriptor, target.processor)
        print(f"-> {start} {zero_shot_accuracy(target, held_out):.3f}", end=" ")

        pixels = target.preprocess([train.inputs[i] for i in few])["pixel_values"]
        rows = [{"pixel_values": p, "labels": train.labels[i]} for p, i in zip(pixels, few, strict=True)]
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder,
                max_steps=60,
                learning_rate=3e-3,
                per_device_train_batch_size=len(rows),
                remove_unused_columns=False,  # the labels are the loss's, not the model's
                report_to=[],
                save_strategy="no",
                disable_tqdm=True,
                logging_strategy="no",
                seed=0,
                use_cpu=not torch.cuda.is_available(),
            )
            trainer = ZeroShotTrainer(model, arguments, train_dataset=rows)
            prompts = [words["templates"][0].replace("{}", name) for name in task.class_names]
            trainer.prompts = dict(target.processor.tokenizer(prompts, padding=True, return_tensors="pt"))
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        print(f"-> trained on {SHOTS} a class {zero_shot_accuracy(target, held_out):.3f}")


if __name__ == "__main__":
    main()
