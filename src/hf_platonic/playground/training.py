"""How the playground's models were made: contrastive pre-training on captions, then low-rank fine-tunes.

Everything here runs on one thread and is seeded. Pre-training knows which factors a caption names, so a caption's
positives are all the inputs of the batch that it fits, not only its own: the softmax loss spreads its target over
them, the sigmoid loss marks each. Linear read-outs of every factor from the embedding help early on; their weight
falls to zero and they are thrown away.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from .architectures import (
    BLUEPRINTS,
    SAMPLING_RATE,
    TEXT_LENGTH,
    Blueprint,
    build_model,
    build_processor,
    build_tokenizer,
)

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedModel, ProcessorMixin

logger = logging.getLogger(__name__)

BATCH = {"image": 256, "audio": 128}
"""Pre-training batch by modality."""

SUBSET = {"image": 32_000, "audio": 9_000}
"""Corpus items that each model sees: its own draw from the shared corpus."""


@dataclass(frozen=True)
class Recipe:
    """Settings of a fine-tune, fixed beforehand on held-out parts of training splits."""

    learning_rate: float
    epochs: int
    batch: int = 48
    largest_scale: float = 30.0


RECIPES = {"image": Recipe(6e-3, 12), "audio": Recipe(6e-3, 12)}
"""Fine-tuning settings by modality."""


@dataclass(frozen=True)
class Corpus:
    """Captioned inputs.

    Attributes:
        inputs: uint8 pictures (n, 40, 40, 3), or float32 sounds (n, samples).
        factors: Index of each factor's value, (n, k) int16, -1 where the factor is absent.
        captions: Several captions for each input, n lists of equal length.
        named: Which factors each caption names, (n, captions, k) bool.
    """

    inputs: np.ndarray
    factors: np.ndarray
    captions: list[list[str]]
    named: np.ndarray


def features(model: PreTrainedModel, inputs: torch.Tensor) -> torch.Tensor:
    """Return unit embeddings (n, d) of processed images (n, 3, h, w) or mel features (n, 1, frames, mels)."""
    if inputs.shape[1] == 1:
        output = model.get_audio_features(input_features=inputs)
    else:
        output = model.get_image_features(pixel_values=inputs)
    return F.normalize(output if torch.is_tensor(output) else output.pooler_output, dim=-1)


def tokenize(name: str, processor: ProcessorMixin, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the padded token tensors that the text tower of model `name` was trained on."""
    blueprint = BLUEPRINTS[name]
    if blueprint.lower_case:
        texts = [text.lower() for text in texts]
    tokens = processor.tokenizer(
        list(texts), padding="max_length", max_length=TEXT_LENGTH, truncation=True, return_tensors="pt"
    )
    # The sigmoid families attend to their padding and pool at its end.
    keys = ("input_ids",) if blueprint.sigmoid else ("input_ids", "attention_mask")
    return {key: tokens[key] for key in keys}


def text_features(model: PreTrainedModel, tokens: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return unit embeddings (m, d) of token tensors."""
    output = model.get_text_features(**tokens)
    return F.normalize(output if torch.is_tensor(output) else output.pooler_output, dim=-1)


def process(processor: ProcessorMixin, inputs: Sequence[Any], *, chunk: int = 500) -> torch.Tensor:
    """Return the model inputs of a list of PIL images or of sound dictionaries, float32."""
    parts = []
    for start in range(0, len(inputs), chunk):
        batch = inputs[start : start + chunk]
        if isinstance(batch[0], dict):
            sounds = [item["array"] for item in batch]
            out = processor.feature_extractor(sounds, sampling_rate=SAMPLING_RATE, return_tensors="pt")[
                "input_features"
            ]
        else:
            out = processor.image_processor(list(batch), return_tensors="pt")["pixel_values"]
        parts.append(out.float())
    return torch.cat(parts)


@torch.no_grad()
def embed(model: PreTrainedModel, inputs: torch.Tensor, *, chunk: int = 256) -> torch.Tensor:
    """Return unit embeddings (n, d) in evaluation mode, chunk by chunk."""
    model.eval()
    return torch.cat([features(model, part.float()) for part in torch.split(inputs, chunk)])


@torch.no_grad()
def class_embeddings(
    name: str, model: PreTrainedModel, processor: ProcessorMixin, class_names: Sequence[str], templates: Sequence[str]
) -> torch.Tensor:
    """Return one unit embedding per class (m, d): the normalised mean over the templates."""
    model.eval()
    per_template = [
        text_features(model, tokenize(name, processor, [template.format(c) for c in class_names]))
        for template in templates
    ]
    return F.normalize(torch.stack(per_template).mean(0), dim=-1)


def accuracy(inputs: torch.Tensor, classes: torch.Tensor, labels: Sequence[int]) -> float:
    """Return the share in [0, 1] of unit embeddings whose nearest class embedding carries their label."""
    return float((inputs @ classes.T).argmax(1).eq(torch.as_tensor(labels)).float().mean())


def _positives(factors: torch.Tensor, named: torch.Tensor) -> torch.Tensor:
    """Return (n, n) bool: does input i (row) fit the caption of input j (column)?"""
    differs = factors[:, None, :] != factors[None, :, :]
    return ~(differs & named[None, :, :]).any(-1)


def _contrastive_loss(model: PreTrainedModel, cosines: torch.Tensor, positives: torch.Tensor) -> torch.Tensor:
    """Return the loss of a batch; rows are inputs, columns captions."""
    if hasattr(model, "logit_bias"):
        logits = cosines * model.logit_scale.exp() + model.logit_bias
        # Per positive pair, so that the weight of the read-outs means the same for both losses.
        return -F.logsigmoid(torch.where(positives, logits, -logits)).sum() / positives.sum()
    both = []
    scales = [model.logit_scale_a, model.logit_scale_t] if hasattr(model, "logit_scale_a") else [model.logit_scale]
    target = positives.float()
    for scale, side, goal in ((scales[0], cosines, target), (scales[-1], cosines.T, target.T)):
        log_share = F.log_softmax(side * scale.exp(), dim=1)
        both.append(-(goal / goal.sum(1, keepdim=True) * log_share).sum(1).mean())
    return (both[0] + both[1]) / 2


class _ReadOuts(torch.nn.Module):
    """Cross-entropy of each factor, read linearly from the unit embedding."""

    def __init__(self, width: int, factors: torch.Tensor) -> None:
        super().__init__()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(width, int(column.max()) + 1) for column in factors.T)

    def forward(self, embeddings: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        losses = [
            F.cross_entropy(head(10 * embeddings), column.long(), ignore_index=-1)
            for head, column in zip(self.heads, factors.T, strict=True)
        ]
        return torch.stack(losses)


def pretrain(name: str, corpus: Corpus, folder: Path, *, steps: int | None = None) -> dict[str, float]:
    """Train one model on its part of the corpus and save model and processor in float16.

    Args:
        name: Key of `BLUEPRINTS`.
        corpus: Captioned inputs of the model's modality.
        folder: Where to save, an ordinary `from_pretrained` folder.
        steps: Number of steps; the blueprint's own when None.

    Returns:
        Parameters, steps, final loss, and seconds in all and per step.
    """
    started = time.perf_counter()
    blueprint = BLUEPRINTS[name]
    steps = steps or blueprint.steps
    generator = torch.Generator().manual_seed(blueprint.seed)
    model, processor = _fresh(blueprint, corpus)
    chosen = torch.randperm(len(corpus.inputs), generator=generator)[: SUBSET[blueprint.modality]]
    inputs = _prepare(corpus, processor, chosen)
    factors = torch.from_numpy(corpus.factors)[chosen]
    named = torch.from_numpy(corpus.named)[chosen]
    variants = named.shape[1]
    tokens = tokenize(name, processor, [caption for i in chosen.tolist() for caption in corpus.captions[i]])
    logger.info("%s: %d inputs ready after %.0f s", name, len(inputs), time.perf_counter() - started)

    torch.manual_seed(blueprint.seed + 1000)
    read_outs = _ReadOuts(blueprint.embedding, factors)
    temperature = [p for key, p in model.named_parameters() if key.startswith("logit_")]
    weights = [p for key, p in model.named_parameters() if not key.startswith("logit_")]
    optimizer = torch.optim.AdamW(
        [
            {"params": weights, "weight_decay": 0.05},
            {"params": temperature, "weight_decay": 0.0},
            {"params": read_outs.parameters(), "weight_decay": 0.0},
        ],
        lr=blueprint.learning_rate,
    )
    rates = [blueprint.learning_rate, 5e-3, 5e-3]
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rates, steps, pct_start=0.1)
    model.train()
    batch, order, seen = BATCH[blueprint.modality], torch.empty(0, dtype=torch.long), 0
    training_started, recent = time.perf_counter(), []
    for step in range(steps):
        if len(order) - seen < batch:
            order, seen = torch.randperm(len(inputs), generator=generator), 0
        rows = order[seen : seen + batch]
        seen += batch
        variant = torch.randint(variants, (batch,), generator=generator)
        embeddings = features(model, inputs[rows].float())
        texts = text_features(model, {key: value[rows * variants + variant] for key, value in tokens.items()})
        contrastive = _contrastive_loss(model, embeddings @ texts.T, _positives(factors[rows], named[rows, variant]))
        read_out = read_outs(embeddings, factors[rows])
        loss = contrastive + (1 - step / steps) * read_out.sum()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        recent.append(contrastive.item())
        if (step + 1) % 100 == 0:
            pace = (time.perf_counter() - training_started) / (step + 1)
            entropies = " ".join(f"{value:.2f}" for value in read_out.tolist())
            logger.info(
                "%s: step %d of %d, loss %.3f, factors %s, %.3f s a step",
                *(name, step + 1, steps, np.mean(recent[-100:]), entropies, pace),
            )
    training_seconds = time.perf_counter() - training_started
    model.eval().half().save_pretrained(folder)
    processor.save_pretrained(folder)
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "steps": steps,
        "final_loss": float(np.mean(recent[-100:])),
        "seconds": time.perf_counter() - started,
        "seconds_per_step": training_seconds / steps,
    }


def _fresh(blueprint: Blueprint, corpus: Corpus) -> tuple[PreTrainedModel, ProcessorMixin]:
    tokenizer = build_tokenizer(blueprint.family, sorted({c for group in corpus.captions[:4000] for c in group}))
    torch.manual_seed(blueprint.seed)
    return build_model(blueprint, tokenizer), build_processor(blueprint, tokenizer)


def _prepare(corpus: Corpus, processor: ProcessorMixin, chosen: torch.Tensor) -> torch.Tensor:
    """Return the processed inputs of the chosen corpus rows in float16, to halve their memory."""
    from PIL import Image

    parts = []
    for rows in torch.split(chosen, 500):
        if corpus.inputs.ndim == 4:
            items: list[Any] = [Image.fromarray(corpus.inputs[i]) for i in rows.tolist()]
        else:
            items = [{"array": corpus.inputs[i], "sampling_rate": SAMPLING_RATE} for i in rows.tolist()]
        parts.append(process(processor, items).half())
    return torch.cat(parts)


def finetune(
    name: str,
    base: Path,
    folder: Path,
    inputs: torch.Tensor,
    labels: Sequence[int],
    classes: tuple[Sequence[str], Sequence[str]],
) -> None:
    """Fine-tune a saved model on one task with LoRA and save the adapter in float16.

    Cross-entropy over the class prompts at the model's own temperature; the text tower, the projections and the
    pooling heads stay as they are, and nothing is ever in training mode, so that batch statistics stay as they are
    too.

    Args:
        name: Key of `BLUEPRINTS`.
        base: The model's folder.
        folder: Where to save, an ordinary PEFT folder.
        inputs: Processed training inputs.
        labels: Their classes.
        classes: Class names, and templates.
    """
    from peft import LoraConfig, get_peft_model

    recipe = RECIPES[BLUEPRINTS[name].modality]
    torch.manual_seed(BLUEPRINTS[name].seed)
    model, processor = load(base)
    text = class_embeddings(name, model, processor, *classes)
    config = LoraConfig(
        r=4,
        lora_alpha=8,
        lora_dropout=0.0,
        target_modules=BLUEPRINTS[name].lora_targets,
    )
    # The temperature of the inputs' side; a cap keeps the sharpest models from memorising.
    temperature = model.logit_scale_a if hasattr(model, "logit_scale_a") else model.logit_scale
    scale = temperature.exp().clamp(max=recipe.largest_scale).detach()
    tuned = get_peft_model(model, config)
    tuned.eval()
    # PEFT notes the folder that the base came from; folders differ between machines.
    config.base_model_name_or_path = f"hf_platonic/playground/{name}"
    trainable = [p for p in tuned.parameters() if p.requires_grad]
    steps = recipe.epochs * (len(inputs) // recipe.batch)
    optimizer = torch.optim.AdamW(trainable, lr=recipe.learning_rate, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, steps, pct_start=0.1)
    targets = torch.as_tensor(labels)
    generator = torch.Generator().manual_seed(BLUEPRINTS[name].seed)
    for _ in range(recipe.epochs):
        order = torch.randperm(len(inputs), generator=generator)
        for rows in torch.split(order[: len(order) // recipe.batch * recipe.batch], recipe.batch):
            loss = F.cross_entropy(scale * features(tuned.get_base_model(), inputs[rows]) @ text.T, targets[rows])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    # No look-up of the base by its name, which PEFT would make to compare vocabularies.
    tuned.half().save_pretrained(folder, save_embedding_layers=False)
    # PEFT writes a card of blanks.
    (folder / "README.md").unlink(missing_ok=True)


def load(folder: Path, adapter: Path | None = None) -> tuple[PreTrainedModel, ProcessorMixin]:
    """Return a saved model in float32, with its adapter active when one is given, and its processor."""
    from peft import PeftModel
    from transformers import AutoModel, AutoProcessor

    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter).get_base_model().eval()
    return model, AutoProcessor.from_pretrained(folder)
