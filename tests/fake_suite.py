"""A tiny fake of the suite `vision8`: stand-ins of its models and data sets, served by a Hub on loopback.

Repos, configurations, splits, columns and label names are the suite's own; the labels are in another order, as they
may be on the Hub. Run the client with the server's `client_environment`.
"""

from __future__ import annotations

import io
import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as tf
import yaml
from datasets import ClassLabel, Dataset, Features, Image, Value
from hub_server import HubServer
from tiny import VISION, clip_tokenizer, gemma_tokenizer, image_processor, text, unigram_tokenizer

from hf_platonic.benchmark.suites import Suite, TaskSpec, load_suite

LIMIT = 160  # the longest prompt of the suite, in bytes, and some more


def publish(server: HubServer, suite: Suite) -> None:
    """Puts a stand-in for each model and data set of the suite on the server."""
    for seed, model in enumerate(suite.models):
        server.put(
            model.path,
            model_files(
                "siglip2" if "siglip2" in model.path else "siglip" if "siglip" in model.path else "clip", seed
            ),
        )
    for seed, task in enumerate(suite.tasks + suite.controls):
        server.put(task.data.path, data_files(task, seed), kind="dataset")


def write_suite(path: Path) -> Suite:
    """The suite with what the stand-ins need changed: fewer steps, no models of libraries that may be missing."""
    whole = load_suite("vision8")
    changes: dict[str, Any] = {
        "name": "fake",
        "extends": "vision8",
        "models": [
            {"name": m.name, "modality": m.modality, "path": m.path}
            for m in whole.models
            if m.loader == "transformers"
        ],
        "fine_tunes": {
            "kind": "lora",
            "recipes": [{"learning_rate": 0.01, "batch_size": 16, "weight_decay": 0.01, "epochs": 2}],
        },
    }
    path.write_text(yaml.safe_dump(changes, sort_keys=False))
    return load_suite(path)


def model_files(family: str, seed: int) -> dict[str, bytes]:
    tokenizer = {"clip": lambda: clip_tokenizer(LIMIT), "siglip": unigram_tokenizer, "siglip2": gemma_tokenizer}[
        family
    ]()
    tokenizer.model_max_length = LIMIT
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if family == "clip":
            words = text(tokenizer, max_position_embeddings=LIMIT)
            model: Any = tf.CLIPModel(tf.CLIPConfig(text_config=words, vision_config=VISION, projection_dim=16))
            processor: Any = tf.CLIPProcessor(image_processor(), tokenizer)
        else:
            words = text(tokenizer, hidden_size=20, projection_size=20, max_position_embeddings=LIMIT)
            model = tf.SiglipModel(tf.SiglipConfig(text_config=words, vision_config=VISION))
            processor = tf.SiglipProcessor(image_processor("Siglip"), tokenizer)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        processor.save_pretrained(folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def data_files(task: TaskSpec, seed: int, rows: int = 40) -> dict[str, bytes]:
    """Parquet files of each split and a card that says which is which."""
    names = [label.replace(" ", "_") for label in task.labels]
    random.Random(seed).shuffle(names)
    column = task.data.input_column or "image"
    features = Features({"row": Value("int32"), column: Image(), task.data.label_column: ClassLabel(names=names)})
    splits = dict.fromkeys(name for name in (task.data.train, task.data.test) if name is not None)
    config = task.data.config or "default"
    files = {}
    for split in splits:
        rng = np.random.default_rng([seed, len(split)])
        labels = rng.integers(0, min(6, len(names)), rows)  # a few classes, each with some rows
        shades = rng.integers(0, 256, (len(names), 3))
        pixels = rng.normal(0, 20, (rows, 20, 24, 3)) + shades[labels][:, None, None]
        pictures = [{"bytes": _png(np.clip(p, 0, 255).astype(np.uint8)), "path": None} for p in pixels]
        table = {"row": list(range(rows)), column: pictures, task.data.label_column: labels.tolist()}
        buffer = io.BytesIO()
        Dataset.from_dict(table, features=features).to_parquet(buffer)
        files[f"{config}/{split}-00000-of-00001.parquet"] = buffer.getvalue()
    splits["unasked"] = None  # damaged, and nobody's business
    files[f"{config}/unasked-00000-of-00001.parquet"] = b"PAR1"
    card = {
        "configs": [
            {
                "config_name": config,
                "data_files": [{"split": split, "path": f"{config}/{split}-*"} for split in splits],
            }
        ]
    }
    return {**files, "README.md": f"---\n{yaml.safe_dump(card)}---\n".encode()}


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image as Pillow

    buffer = io.BytesIO()
    Pillow.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()
