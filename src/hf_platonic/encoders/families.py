"""The table of dual-encoder families: one row says how a family reads probes and prompts, and where it is edited.

Adding a family is one row (see `register_family`), plus a function where its preprocessing has a quirk of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from .._pooling import Feature
from ..errors import EncoderError
from .preprocessing import audio_inputs, frame_inputs, image_inputs

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = [
    "EditSite",
    "Family",
    "bare_model",
    "call",
    "device_of",
    "edit_site",
    "edited_linear",
    "evaluating",
    "family_of",
    "register_family",
    "supported_families",
    "unwrap",
]

Modality = Literal["image", "audio"]
Tower = Literal["probe", "text"]
SiteKind = Literal["output", "input", "features"]


@dataclass(frozen=True)
class EditSite:
    """The linear layer that writes an embedding, and which of its sides an operator acts on.

    Attributes:
        module: Dotted name within the bare model, e.g. "visual_projection".
        kind: "output" where nothing but a rescaling of rows follows the layer (the operator acts on the embedding),
            "input" where a residual is added after it (the operator acts on `[u, 1]`, `u` the layer's input), and
            "features" where an operator adds to its output what it reads from `[u, f, 1]`, `f` inner features.
        tower: Whose embedding it is: the probes' or the prompts'.
        features: What `f` is made of; empty for other kinds.
    """

    module: str
    kind: SiteKind
    tower: Tower = "probe"
    features: tuple[Feature, ...] = ()


def _never(tokenizer: Any) -> bool:
    return False


def _is_gemma(tokenizer: Any) -> bool:
    # Fixed-resolution SigLIP 2 is a SiglipModel; only its tokenizer tells it from SigLIP, and "do_lower_case" of its
    # configuration isn't honoured by every tokenizer class (transformers PR 43101).
    name = type(tokenizer).__name__
    declared = str(getattr(tokenizer, "init_kwargs", {}).get("tokenizer_class"))
    if any(word in text for word in ("Gemma", "Siglip2") for text in (name, declared)):
        return True
    return (getattr(tokenizer, "bos_token", None), getattr(tokenizer, "eos_token", None)) == ("<bos>", "<eos>")


@dataclass(frozen=True)
class Family:
    """One row of the table.

    Attributes:
        name: Shown in messages and in `supported_families`.
        model_types: Values of `model.config.model_type` that belong to the family; or names of model classes, where
            one model type has several that differ. A class's own row comes first.
        modality: What a probe is.
        site: The edit site; its `module` may be the end of the dotted name, as long as exactly one module has it.
            None where no affine layer writes the embedding: such a model is read, as a source, but its probe tower
            can't be a target.
        text_site: The same for the prompts' embedding, always an output site; None where the text tower can't be
            edited.
        probe_getter: Method of the model that returns probe embeddings, a tensor (b, d) or an output object with
            `pooler_output`; or a function of the model and the same keyword arguments. A site of kind "input" needs
            it un-normalised.
        prompt_getter: The same for prompts; called with `input_ids` and, if `text_mask`, `attention_mask`.
        prepare: `(processor, config, probes, offset) -> dict of CPU tensors`, the getter's keyword arguments. It must
            be deterministic and treat each probe on its own.
        padding: "max_length" where the text tower was trained on full-length rows (it pools the last position);
            "some" where every batch needs a padded column, because attention is causal only if the mask has a zero.
        text_mask: Whether the text tower is given an attention mask.
        pools_eos: Whether the text embedding is read at the end-of-sequence token, so that every row needs one.
        lower_case: `tokenizer -> bool`: whether prompts are lower-cased before tokenisation.
        feature_modules: Regular expression that the names of the probe tower's blocks match in full, each of which
            hands on tokens (b, t, w) or a map (b, w, height, width). None: found by running the tower.
    """

    name: str
    model_types: tuple[str, ...]
    modality: Modality
    site: EditSite | None
    probe_getter: str | Callable[..., Any] = "get_image_features"
    prompt_getter: str | Callable[..., Any] = "get_text_features"
    prepare: Callable[..., dict[str, Tensor]] = field(default=image_inputs, repr=False)
    padding: Literal["longest", "max_length", "some"] = "longest"
    text_mask: bool = True
    pools_eos: bool = False
    lower_case: Callable[[Any], bool] = field(default=_never, repr=False)
    text_site: str | None = None
    feature_modules: str | None = None


_PROJECTION = EditSite("visual_projection", "output")


def _blip_image(model: Any, pixel_values: Tensor) -> Tensor:
    """The retrieval model's contrastive image embedding, which its `forward` computes in passing."""
    embedding: Tensor = model.vision_proj(model.vision_model(pixel_values=pixel_values).last_hidden_state[:, 0])
    return embedding


def _blip_text(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """The same for a prompt."""
    output = model.text_encoder(input_ids=input_ids, attention_mask=attention_mask)
    embedding: Tensor = model.text_proj(output.last_hidden_state[:, 0])
    return embedding


_FAMILIES: dict[str, Family] = {}
_DOT_PRODUCTS = ("pe_audio", "pe_video", "pe_audio_video")
"""Model types whose `forward` scores by dot products, so that an embedding's length means something."""


def register_family(family: Family) -> None:
    """Add a row to the table; from then on its model types are read and edited like the built-in ones.

    Args:
        family: The row. Registering an equal row again does nothing.

    Raises:
        EncoderError: If another row already has one of its model types.
    """
    for model_type in family.model_types:
        if _FAMILIES.get(model_type, family) != family:
            raise EncoderError(
                f"Expected a new model type, got {model_type!r}, which family {_FAMILIES[model_type].name!r} already "
                "has. Give the model's configuration a `model_type` of its own."
            )
    _FAMILIES.update(dict.fromkeys(family.model_types, family))


def supported_families() -> Mapping[str, Family]:
    """A copy of the table, by `config.model_type` (or the class name, where one type has several classes)."""
    return dict(_FAMILIES)


for _row in (
    Family("CLIP", ("clip",), "image", _PROJECTION, pools_eos=True, text_site="text_projection"),
    Family("MetaCLIP 2", ("metaclip_2",), "image", _PROJECTION, pools_eos=True, text_site="text_projection"),
    Family("CLIPSeg", ("clipseg",), "image", _PROJECTION, pools_eos=True, text_site="text_projection"),
    # Its causal mask is dropped for a batch without padding, and attention then looks ahead (transformers 5.24, sdpa).
    Family("AIMv2", ("aimv2",), "image", _PROJECTION, padding="some", pools_eos=True, text_site="text_projection"),
    Family(
        "GroupViT",
        ("groupvit",),
        "image",
        EditSite("visual_projection.3", "output"),
        pools_eos=True,
        text_site="text_projection.3",
    ),
    Family("AltCLIP", ("altclip",), "image", _PROJECTION, text_site="text_projection"),
    Family("Chinese-CLIP", ("chinese_clip",), "image", _PROJECTION, text_site="text_projection"),
    Family("BLIP", ("blip",), "image", _PROJECTION, text_site="text_projection"),
    Family(
        "BLIP image-text retrieval (ITC)",
        ("BlipForImageTextRetrieval",),
        "image",
        EditSite("vision_proj", "output"),
        probe_getter=_blip_image,
        prompt_getter=_blip_text,
        text_site="text_proj",
    ),
    Family("VisionTextDualEncoder", ("vision-text-dual-encoder",), "image", _PROJECTION, text_site="text_projection"),
    Family(
        "SigLIP and SigLIP 2",
        ("siglip", "siglip2"),
        "image",
        # The pooling head ends in `a + mlp(norm(a))`: no operator on its output folds, the last affine's input does.
        EditSite("head.mlp.fc2", "input"),
        padding="max_length",
        text_mask=False,
        lower_case=_is_gemma,
        text_site="text_model.head",
    ),
    # The image embedding is an average over positions of a convolutional stack: no affine layer writes it.
    Family("ALIGN", ("align",), "image", None, text_site="text_projection"),
    # Both towers end in a layer normalisation, which folds no more than a diagonal.
    Family("TIPSv2", ("tipsv2",), "image", None),
    # The video embedding is a mean over a residual transformer, and `forward` adapts each prompt to the video.
    Family(
        "X-CLIP", ("xclip",), "image", None, probe_getter="get_video_features", prepare=frame_inputs, pools_eos=True
    ),
    Family(
        "CLAP",
        ("clap",),
        "audio",
        EditSite("audio_projection.linear2", "output"),
        probe_getter="get_audio_features",
        prepare=audio_inputs,
        text_site="text_projection.linear2",
    ),
):
    register_family(_row)


def bare_model(model: nn.Module) -> nn.Module:
    """The transformers model itself: the inside of a PeftModel (its tuner layers stay), or `model` as it is.

    Raises:
        EncoderError: For prompt-learning adapters, which act in `PeftModel.forward` and would be skipped silently.
    """
    if not hasattr(model, "peft_config") or not hasattr(model, "get_base_model"):
        return model
    configs = list(getattr(model, "peft_config").values())  # noqa: B009
    if any(getattr(config, "is_prompt_learning", False) for config in configs):
        raise EncoderError(
            "Expected an adapter that lives in the model's layers, got prompt learning "
            f"({configs[0].peft_type}), which feature getters bypass. Use LoRA or another layer-level method."
        )
    inner: nn.Module = getattr(model, "get_base_model")()  # noqa: B009
    return inner


def family_of(model: nn.Module) -> Family:
    """The table's row for a model, by `model.config.model_type`.

    Args:
        model: A transformers model, bare, with injected tuner layers, or inside a PeftModel.

    Raises:
        EncoderError: If no row has its model type; the message lists those that are supported.
    """
    bare = bare_model(model)
    model_type = getattr(getattr(bare, "config", None), "model_type", None)
    for key in (type(bare).__name__, model_type):
        if key in _FAMILIES:
            return _FAMILIES[str(key)]
    if model_type in _DOT_PRODUCTS:
        raise EncoderError(
            f"Expected a dual encoder that scores by cosines, got {type(model).__name__} of model type "
            f"{model_type!r}, which scores by dot products: affinities in [-1, 1] aren't what it ranks by. "
            "It can be neither a source nor a target; use another encoder of sounds, such as CLAP."
        )
    raise EncoderError(
        f"Expected a dual encoder of model type {', '.join(sorted(_FAMILIES))}; got {type(model).__name__} of "
        f"model type {model_type!r}. Load the whole two-tower model (e.g. with AutoModel), or add a row with "
        "`register_family`."
    )


def edit_site(
    model: nn.Module, *, tower: Tower = "probe", kind: SiteKind | None = None, family: Family | None = None
) -> EditSite:
    """The layer of this model where an operator is applied, verified to exist and to be linear.

    Args:
        model: A dual encoder, bare, with injected tuner layers, or inside a PeftModel.
        tower: Whose embedding the layer writes.
        kind: Which side of it; None: what the family's row says. "input" is exact at every site of a probe tower;
            "features" too, as long as it stays a live adapter (`DualEncoder.at` says which features there are).
        family: The row; None: looked up.

    Returns:
        The site, its dotted name in full and relative to the bare model.

    Raises:
        EncoderError: If the family is unknown or can't be edited that way, or the model has no such layer, several,
            or one that isn't linear.
    """
    family, bare = family or family_of(model), bare_model(model)
    if kind not in (None, "output", "input", "features") or tower not in ("probe", "text"):
        raise EncoderError(
            f'Expected a site "output", "input" or "features" of tower "probe" or "text", got {kind!r} of {tower!r}.'
        )
    row = family.site
    if tower == "text":
        row = None if family.text_site is None else EditSite(family.text_site, "output", "text")
    if row is None:
        other = ' Its text tower can be: pass tower="text".' if tower == "probe" and family.text_site else ""
        raise EncoderError(
            f"Expected a target with an affine layer that writes its {tower} embedding, got {family.name}, which has "
            f"none: it can be a source, but no edit of this tower would be exact.{other}"
        )
    if kind not in (None, row.kind) and (tower == "text" or (row.kind == "input" and kind == "output")):
        raise EncoderError(
            f'Expected site "{row.kind}" for the {tower} tower of {family.name}, got "{kind}": the edit wouldn\'t be '
            f'exact there. Leave `site` out, or pass "{row.kind}".'
        )
    end = row.module
    # By role rather than by path: transformers has moved towers before (5.0 flattened CLIP's).
    names = [name for name, _ in bare.named_modules() if name == end or name.endswith("." + end)]
    if len(names) != 1:
        raise EncoderError(
            f"Expected exactly one module named {end!r} in {type(bare).__name__} ({family.name}), "
            f"got {names or 'none'}. Load the model with its projection or pooling head; "
            "models without one can't be edited."
        )
    site = EditSite(names[0], kind or row.kind, tower)
    edited_linear(model, site)
    return site


def edited_linear(model: nn.Module, site: EditSite) -> nn.Linear:
    """The `nn.Linear` at an edit site, or what a quantised model has instead, beneath any PEFT layers around it.

    Raises:
        EncoderError: If there's none.
    """
    module = bare_model(model).get_submodule(site.module)
    while True:
        inner = getattr(module, "base_layer", getattr(module, "original_module", None))
        if inner is None:
            break
        module = inner
    if not all(isinstance(getattr(module, size, None), int) for size in ("in_features", "out_features")):
        raise EncoderError(
            f"Expected `{site.module}` to be a linear layer, got {type(module).__name__}. "
            "This variant of the model can't be edited."
        )
    return cast("nn.Linear", module)


def device_of(model: nn.Module, site: EditSite | None) -> torch.device:
    """Where a model computes: at its edit site, or its first weights.

    Weights that accelerate keeps elsewhere are on the meta device between calls; its hooks say where they go.
    """
    bare = bare_model(model)
    path = [] if site is None else site.module.split(".")
    weight = next(bare.parameters()) if site is None else edited_linear(model, site).weight
    around = [bare.get_submodule(".".join(path[:depth])) for depth in range(len(path), 0, -1)]
    for module in (*around, *bare.modules()) if weight.is_meta else ():
        placed = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
        if placed is not None:
            return torch.device(placed)
    return weight.device


def unwrap(output: object) -> Tensor:
    """The embedding tensor that a feature getter returned, from either generation of transformers.

    Args:
        output: A tensor (transformers 4), or an output object whose `pooler_output` is the embedding (5 and later).

    Raises:
        EncoderError: For anything else.
    """
    for value in (output, getattr(output, "pooler_output", None)):
        if torch.is_tensor(value):
            return value
    raise EncoderError(
        f"Expected embeddings as a tensor or an output with `pooler_output`, got {type(output).__name__}. "
        "The family's getter must return one of them."
    )


def call(model: nn.Module, getter: str | Callable[..., Any], inputs: Mapping[str, Tensor]) -> Tensor:
    """What a family's getter says about the inputs, as float32 rows."""
    bound = getattr(model, getter) if isinstance(getter, str) else partial(getter, model)
    return unwrap(bound(**inputs)).float()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside, each module's own mode afterwards."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
