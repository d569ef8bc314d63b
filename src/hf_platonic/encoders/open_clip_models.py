"""open_clip's models, behind the extra `open-clip`: the rows of their families, and what makes them look like others.

A tower of open_clip may end in `x @ parameter`, or ask for the class of its last layer; neither stands a PEFT layer in
that place. So the last affine of each tower is made a linear layer named `projection`, run by a forward hook. State
dicts keep open_clip's own keys and shapes: checkpoints and task vectors go in and out as they are.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import EncoderError
from .families import EditSite, Family, register_family

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OpenClipConfig", "OpenClipProcessor", "import_open_clip", "open_clip_parts", "save_open_clip"]

_LAYER = "projection"


def _image(model: Any, pixel_values: Tensor) -> Tensor:
    embedding: Tensor = model.encode_image(pixel_values)
    return embedding


def _text(model: Any, input_ids: Tensor) -> Tensor:
    embedding: Tensor = model.encode_text(input_ids)
    return embedding


for _name, _model_type, _site in (
    ("open_clip: CLIP and EVA-CLIP", "open_clip", EditSite(f"visual.{_LAYER}", "output")),
    # As in SigLIP's own class, the tower ends in `a + mlp(norm(a))`.
    ("open_clip: SigLIP", "open_clip_siglip", EditSite("attn_pool.mlp.fc2", "input")),
    # The attention pooling of CLIP's ResNets reads its last layer's weights itself.
    ("open_clip: other image towers", "open_clip_other", None),
):
    register_family(
        Family(
            _name,
            (_model_type,),
            "image",
            _site,
            probe_getter=_image,
            prompt_getter=_text,
            padding="max_length",
            text_mask=False,
            text_site=f"text.{_LAYER}",
        )
    )


@dataclass(frozen=True)
class OpenClipConfig:
    """What transformers' configurations say, for an open_clip model.

    Attributes:
        model_type: Which row of the table it belongs to.
        model_cfg: open_clip's own description of the architecture, QuickGELU or not included.
    """

    model_type: str
    model_cfg: dict[str, Any]

    @property
    def text_config(self) -> SimpleNamespace:
        """As much of the text tower as encoding needs to know."""
        return SimpleNamespace(max_position_embeddings=int(self.model_cfg["text_cfg"].get("context_length", 77)))

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"model_type": self.model_type, "model_cfg": self.model_cfg}


class OpenClipTokenizer:
    """One of open_clip's tokenizers with as much of transformers' interface as encoding needs.

    Rows are cleaned, cut with the end token kept and padded to the full length by open_clip itself.
    """

    def __init__(self, tokenizer: Any) -> None:
        # Some trained with words dropped at random; prompts that fit are the same without.
        tokenizer.reduction_fn = None
        self.tokenizer = tokenizer
        inner = getattr(tokenizer, "tokenizer", None)
        self._inner = inner
        self.pad_token_id = int(inner.pad_token_id or 0) if inner is not None else 0
        self.model_max_length = int(tokenizer.context_length)

    def __call__(
        self, texts: str | Sequence[str], *, truncation: bool, padding: bool, max_length: int | None = None
    ) -> dict[str, Any]:
        """`input_ids`: full rows for a list; one text's whole ids, or one more than fit, without truncation."""
        if not truncation:
            return {"input_ids": self._whole(str(texts))}
        return {"input_ids": self.tokenizer(list(texts), context_length=max_length).tolist()}

    def get_vocab(self) -> dict[str, int]:
        """Token ids by token."""
        return dict(self.tokenizer.encoder if self._inner is None else self._inner.get_vocab())

    def _whole(self, text: str) -> list[int]:
        # Twice the room tells whether the end was cut, whatever a tokenizer adds around the text.
        row: list[int] = self.tokenizer([text], context_length=2 * self.model_max_length)[0].tolist()
        while row and row[-1] == self.pad_token_id:
            row.pop()
        return row


class OpenClipImages:
    """open_clip's own transform for evaluation, which resizes pictures with Pillow.

    Args:
        config: `preprocess_cfg` of the model's image tower.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        transform = import_open_clip().transform
        size = (config["size"], config["size"]) if isinstance(config["size"], int) else tuple(config["size"])
        config = {**config, "size": size}
        self._config = {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}
        self._transform = transform.image_transform_v2(transform.PreprocessCfg(**config), is_train=False)
        self.size = {"shortest_edge": min(size)} if config.get("resize_mode", "shortest") == "shortest" else {}

    def __call__(self, *, images: Sequence[Any], **_: Any) -> dict[str, Tensor]:
        """`pixel_values` of RGB pictures, shape (b, 3, height, width), float32."""
        return {"pixel_values": torch.stack([self._transform(image) for image in images])}

    def to_dict(self) -> dict[str, Any]:
        """What the digest of the preprocessing covers."""
        return self._config


class OpenClipProcessor:
    """An open_clip model's `image_processor` and `tokenizer`.

    Args:
        tokenizer: From `open_clip.get_tokenizer`.
        preprocess_cfg: Of the model's image tower.
    """

    def __init__(self, tokenizer: Any, preprocess_cfg: Mapping[str, Any]) -> None:
        self.tokenizer = OpenClipTokenizer(tokenizer)
        self.image_processor = OpenClipImages(preprocess_cfg)


def import_open_clip() -> Any:
    """The package `open_clip`.

    Raises:
        ImportError: If it isn't installed, or its torchvision belongs to another build of torch.
    """
    try:
        import open_clip
    except ModuleNotFoundError as error:
        raise ImportError(
            f"Expected the package open_clip for this model, got {error}. pip install hf-platonic[open-clip]"
        ) from error
    except (ImportError, RuntimeError) as error:
        raise ImportError(
            f"Expected open_clip to be importable, got {type(error).__name__}: {error}. It needs a torchvision of the "
            "same build as torch (both for the CPU, or both for one version of CUDA): install the two from one index, "
            "with pip install hf-platonic[open-clip]"
        ) from error
    return open_clip


def open_clip_parts(model: Any, tokenizer: Any, model_cfg: Mapping[str, Any]) -> tuple[nn.Module, OpenClipProcessor]:
    """An open_clip model and its processor, for `DualEncoder(*open_clip_parts(...))`.

    Args:
        model: From `open_clip.create_model(..., force_custom_text=True)`; it's changed in place. It goes on giving the
            same embeddings and the same state dict.
        tokenizer: From `open_clip.get_tokenizer`.
        model_cfg: The architecture, as `open_clip.get_model_config` gives it, QuickGELU as the model has it.

    Raises:
        EncoderError: If the model is of a class with other towers.
        ImportError: If open_clip can't be imported.
    """
    open_clip = import_open_clip()
    outputs = [getattr(getattr(model, tower, None), "output_tokens", False) for tower in ("visual", "text")]
    if type(model) is not open_clip.CustomTextCLIP or any(outputs):
        raise EncoderError(
            f"Expected an open_clip model of class CustomTextCLIP with pooled embeddings, got {type(model).__name__}. "
            "Make a CLIP with open_clip.create_model(..., force_custom_text=True); CoCa isn't supported."
        )
    model_type, path = _image_end(model.visual)
    if path is not None:
        _expose(model.visual, path)
    path = _text_end(model.text)
    if path is not None:
        _expose(model.text, path)
    quick = bool(model_cfg.get("quick_gelu", False))
    model.config = OpenClipConfig(model_type, {**model_cfg, "quick_gelu": quick, "custom_text": True})
    return model, OpenClipProcessor(tokenizer, model.visual.preprocess_cfg)


def save_open_clip(model: Any, folder: str | Path, processor: OpenClipProcessor | None = None) -> None:
    """Writes what `open_clip.create_model("local-dir:FOLDER")` and `DualEncoder.from_pretrained` read.

    Args:
        model: From `open_clip_parts` or a loaded encoder, without adapters (`merge_and_unload()` first).
        folder: Made if need be.
        processor: Of the model; needed where the tokenizer is one of transformers'.

    Raises:
        EncoderError: If the model isn't one, or has adapters.
    """
    from safetensors.torch import save_file

    config = getattr(model, "config", None)
    state = model.state_dict()
    if not isinstance(config, OpenClipConfig) or any("base_layer" in key for key in state):
        raise EncoderError(
            f"Expected an open_clip model without adapters, got {type(model).__name__}. Call `merge_and_unload()` "
            "first, or save the adapter with the PEFT model's own `save_pretrained`."
        )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {key: value.detach().cpu().contiguous() for key, value in state.items()},
        folder / "open_clip_model.safetensors",
        metadata={"format": "pt"},
    )
    written = {"model_cfg": config.model_cfg, "preprocess_cfg": model.visual.preprocess_cfg}
    (folder / "open_clip_config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    if processor is not None and processor.tokenizer._inner is not None:
        processor.tokenizer._inner.save_pretrained(folder)


def _image_end(visual: Any) -> tuple[str, str | None]:
    """The model type, and where the last affine of an image tower is."""
    if isinstance(getattr(visual, "proj", None), nn.Parameter):
        return "open_clip", "proj"
    head, trunk = getattr(visual, "head", None), getattr(visual, "trunk", None)
    if trunk is None or head is None:
        return "open_clip_other", None
    for name in ("proj", "mlp.fc2"):
        if any(name == found for found, _ in head.named_modules()):
            return "open_clip", f"head.{name}"
    classifier = trunk.get_classifier()
    if not len(head) and type(classifier) is nn.Linear:
        return "open_clip", next(name for name, module in visual.named_modules() if module is classifier)
    pooling = getattr(trunk, "attn_pool", None)
    if not len(head) and isinstance(classifier, nn.Identity) and type(pooling).__name__ == "AttentionPoolLatent":
        return "open_clip_siglip", None
    return "open_clip_other", None


def _text_end(text: Any) -> str | None:
    """Where the last affine of a text tower is, if there is one."""
    if isinstance(getattr(text, "text_projection", None), (nn.Parameter, nn.Linear)):
        return "text_projection"
    last = getattr(text, "proj", None)
    if isinstance(last, nn.Linear):
        return "proj"
    return f"proj.{len(last) - 1}" if isinstance(last, nn.Sequential) and isinstance(last[-1], nn.Linear) else None


def _expose(tower: nn.Module, path: str) -> None:
    """Make the tower's last affine, at `path`, the linear layer `projection` that a forward hook runs."""
    owner, leaf = tower.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
    found = getattr(owner, leaf)
    if isinstance(found, nn.Parameter):
        layer = nn.Linear(found.shape[0], found.shape[1], bias=False, device="meta")
        layer.weight = nn.Parameter(found.detach().T.contiguous(), requires_grad=found.requires_grad)
    else:
        layer = found
    bare = isinstance(found, nn.Parameter)
    # open_clip asks whether there is a parameter, or a layer of a class, there: None is what it passes over.
    setattr(owner, leaf, None if bare or leaf == "text_projection" else nn.Identity())
    tower.add_module(_LAYER, layer)
    names = {f"{_LAYER}.weight": path} if bare else {f"{_LAYER}.{p}": f"{path}.{p}" for p in ("weight", "bias")}
    tower.register_forward_hook(_project)
    out, back = _Renamed(names, bare), _Renamed({to: key for key, to in names.items()}, bare)
    tower.register_state_dict_post_hook(out)  # type: ignore[no-untyped-call]
    tower.register_load_state_dict_pre_hook(back)  # type: ignore[no-untyped-call]


def _project(tower: nn.Module, args: Any, pooled: Tensor) -> Tensor:
    layer: Callable[[Tensor], Tensor] = getattr(tower, _LAYER)
    return layer(pooled)


@dataclass(eq=False)  # torch sets an attribute of its own
class _Renamed:
    """A hook on state dicts that puts the last layer's tensors under other keys."""

    names: Mapping[str, str]
    transposed: bool

    def __call__(self, tower: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        for old, new in self.names.items():
            if prefix + old in state:
                value = state.pop(prefix + old)
                state[prefix + new] = value.T if self.transposed else value


def open_clip_name(name: str) -> str | None:
    """Repo id or folder behind open_clip's prefix "hf-hub:" or "local-dir:"; None for a name without one."""
    prefix, colon, rest = name.partition(":")
    return rest if colon and prefix in ("hf-hub", "local-dir") else None


def open_clip_keys(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors under the keys this model has: of an open_clip model, whose CLIP class has others.

    Args:
        model: Any model; only open_clip's are looked at.
        tensors: By key.
    """
    if not isinstance(getattr(model, "config", None), OpenClipConfig):
        return tensors
    converted: dict[str, Tensor] = import_open_clip().model.convert_to_custom_text_state_dict(tensors)
    return converted


def load_open_clip(
    name: str, revision: str | None, dtype: torch.dtype | str, hub: Mapping[str, Any]
) -> tuple[nn.Module, OpenClipProcessor]:
    """An open_clip model and its processor, with every weight from its checkpoint.

    Args:
        name: "hf-hub:owner/name" or "local-dir:folder".
        revision: Of the repo.
        dtype: Of the weights; "auto" is float32.
        hub: `token`, `cache_dir` and `local_files_only`.

    Raises:
        EncoderError: If the model is of a class with other towers.
        ImportError: If open_clip can't be imported.
        OSError, RuntimeError, ValueError: If it can't be loaded; as the Hub's client and open_clip do.
    """
    open_clip = import_open_clip()
    place = str(open_clip_name(name))
    folder = Path(place) if name.startswith("local-dir:") else _download(place, {**hub, "revision": revision})
    config = json.loads((folder / "open_clip_config.json").read_text(encoding="utf-8"))["model_cfg"]
    model = open_clip.create_model(f"local-dir:{folder}", force_custom_text=True, require_pretrained=True).eval()
    named = config["text_cfg"].get("hf_tokenizer_name")
    if named and not (folder / "tokenizer_config.json").is_file():
        tokenizer = open_clip.tokenizer.HFTokenizer(
            named,
            context_length=config["text_cfg"].get("context_length", 77),
            tokenizer_mode=config["text_cfg"].get("tokenizer_mode"),
            **{**hub, **config["text_cfg"].get("tokenizer_kwargs", {})},
        )
    else:
        tokenizer = open_clip.get_tokenizer(f"local-dir:{folder}")
    model, processor = open_clip_parts(model, tokenizer, config)
    setattr(model, "name_or_path", name)  # noqa: B010  # PEFT records it as an adapter's base
    return model.to(getattr(torch, dtype.replace("auto", "float32")) if isinstance(dtype, str) else dtype), processor


def _download(repo: str, options: Mapping[str, Any]) -> Path:
    """The folder with the configuration, the tokenizer and the weights of a repo on the Hub."""
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError

    folder = snapshot_download(repo, allow_patterns=["*.json", "*.txt", "*.model"], **options)
    try:
        hf_hub_download(repo, "open_clip_model.safetensors", **options)
    except EntryNotFoundError:
        hf_hub_download(repo, "open_clip_pytorch_model.bin", **options)  # read without running code
    return Path(folder)
