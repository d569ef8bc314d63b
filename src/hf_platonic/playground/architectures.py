"""The eight small dual encoders of the playground: configurations, tokenizers and processors.

Every model is an ordinary transformers class. What differs between them is what differs between published
families: patch and image size, width, depth, embedding size, tokenizer, pooling, loss. The tokenizers are the
families' own classes over a small vocabulary built from the caption grammar plus every printable ASCII character,
so that an unknown word still becomes a distinct sequence.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

TEXT_LENGTH = 24
"""Longest text of every model, in tokens."""

SAMPLING_RATE = 8000
"""Hz of every sound."""

CLIP_SECONDS = 1
"""Seconds of every sound: the most that the feature extractors take without cutting at random."""


@dataclass(frozen=True)
class Blueprint:
    """What tells one model from another.

    Attributes:
        family: Which builder makes it.
        width: Hidden size of the image or audio tower (of its first stage where it has stages).
        depth: Layers of each stage of that tower; one number where it has one stage.
        embedding: Size of the common embedding.
        text_width: Hidden size of the two text layers.
        image_size: Side of the model's input in pixels.
        patch_size: Side of a patch in pixels.
        sigmoid: Trained with a sigmoid loss in place of a softmax one.
        lower_case: The model's text was lower-cased before the tokenizer.
        seed: Seed of the initial weights, of the corpus subset and of the batches.
        steps: Pre-training steps.
        learning_rate: Peak of the pre-training schedule.
        lora_targets: Regular expression (full match) of the linear layers that the fine-tunes adapt.
    """

    family: Literal["clip", "siglip", "siglip2", "metaclip2", "convnext-bert", "clap"]
    width: int
    depth: tuple[int, ...]
    embedding: int
    text_width: int
    seed: int
    steps: int
    lora_targets: str
    image_size: int = 0
    patch_size: int = 0
    sigmoid: bool = False
    lower_case: bool = False
    learning_rate: float = 2e-3

    @property
    def modality(self) -> Literal["image", "audio"]:
        """What the first tower reads."""
        return "audio" if self.family == "clap" else "image"


_VIT = r"vision_model\.encoder\.layers\..*\.(q_proj|v_proj)"
_CONVNEXT = r"vision_model\.encoder\.stages\..*\.(pwconv1|pwconv2)"
_HTSAT = r"audio_model\.audio_encoder\.layers\..*\.(query|value)"

BLUEPRINTS: dict[str, Blueprint] = {
    "clip-narrow": Blueprint("clip", 80, (4,), 64, 64, 11, 1600, _VIT, image_size=40, patch_size=8),
    "clip-wide": Blueprint("clip", 128, (3,), 96, 64, 12, 1000, _VIT, image_size=48, patch_size=12),
    "siglip": Blueprint("siglip", 96, (3,), 96, 64, 13, 1600, _VIT, image_size=40, patch_size=8, sigmoid=True),
    "siglip2": Blueprint(
        "siglip2", 112, (3,), 112, 64, 14, 1000, _VIT, image_size=36, patch_size=9, sigmoid=True, lower_case=True
    ),
    "metaclip2": Blueprint("metaclip2", 96, (4,), 80, 64, 15, 1000, _VIT, image_size=40, patch_size=10),
    "convnext-bert": Blueprint(
        "convnext-bert", 40, (1, 1, 2), 72, 64, 16, 1000, _CONVNEXT, image_size=40, patch_size=4
    ),
    "clap-narrow": Blueprint("clap", 32, (2, 2), 64, 48, 17, 1000, _HTSAT, patch_size=4),
    "clap-wide": Blueprint("clap", 48, (2, 2), 80, 64, 18, 1000, _HTSAT, patch_size=4),
}
"""Every model by name, image models first."""


def build_tokenizer(family: str, captions: Sequence[str]) -> PreTrainedTokenizerBase:
    """Return the family's tokenizer over the words of `captions` and all printable ASCII characters.

    Args:
        family: `Blueprint.family`.
        captions: Texts whose words become single tokens.

    Returns:
        A fast tokenizer that cuts and pads to `TEXT_LENGTH`.

    Raises:
        ValueError: The family is unknown.
    """
    import transformers as hf

    words = sorted({word for caption in captions for word in caption.split()})
    characters = sorted(set(string.printable) - set(string.whitespace))
    common: dict[str, Any] = {"model_max_length": TEXT_LENGTH, "padding_side": "right"}
    # Unigram: a whole word costs less than its characters, so every known word is one token.
    pieces = [("▁", -3.0), *((f"▁{word}", -2.0) for word in words), *((c, -9.0) for c in characters)]
    if family == "clip":
        return _train_bpe(hf.CLIPTokenizer(**common), captions, characters, suffix="</w>")
    if family == "clap":
        return _train_bpe(hf.RobertaTokenizer(**common), captions, ["Ġ", *characters])
    if family == "siglip2":
        # Gemma's BPE has no pre-tokenizer to keep it from joining words, so it is trained on single words.
        lowered = sorted({word.lower() for word in words})
        tokenizer = hf.GemmaTokenizer(add_bos_token=False, add_eos_token=True, **common)
        return _train_bpe(tokenizer, [*lowered, *(f" {word}" for word in lowered)], ["▁", *characters])
    if family == "siglip":
        special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0)]
        return hf.T5Tokenizer(vocab=special + pieces, extra_ids=0, **common)
    if family == "metaclip2":
        special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0), ("<mask>", 0.0)]
        return hf.XLMRobertaTokenizer(vocab=special + pieces, **common)
    if family == "convnext-bert":
        continued = [f"##{c}" for c in characters]
        known = [
            "[PAD]",
            "[UNK]",
            "[CLS]",
            "[SEP]",
            "[MASK]",
            *(word.lower() for word in words),
            *characters,
            *continued,
        ]
        vocabulary = {word: index for index, word in enumerate(dict.fromkeys(known))}
        return hf.BertTokenizer(vocab=vocabulary, do_lower_case=True, **common)
    raise ValueError(f"Expected a family of BLUEPRINTS, got {family!r}. Use `Blueprint.family`.")


def _train_bpe(
    tokenizer: PreTrainedTokenizerBase, captions: Sequence[str], alphabet: list[str], *, suffix: str = ""
) -> PreTrainedTokenizerBase:
    # Twice the list puts every word over the trainer's minimum count, so every word ends as one token.
    initial = [*alphabet, *(character + suffix for character in alphabet if suffix)]
    return tokenizer.train_new_from_iterator(
        [list(captions) * 2], vocab_size=900, initial_alphabet=initial, show_progress=False
    )


def build_processor(blueprint: Blueprint, tokenizer: PreTrainedTokenizerBase) -> ProcessorMixin:
    """Return the processor that a published model of this family would have, at the playground's size.

    Args:
        blueprint: The model.
        tokenizer: Its tokenizer.

    Returns:
        Processor with a Pillow image processor or a CLAP feature extractor.
    """
    import transformers as hf

    side = blueprint.image_size
    square = {"height": side, "width": side}
    edge = {"shortest_edge": side}
    if blueprint.family == "clap":
        extractor = hf.ClapFeatureExtractor(
            feature_size=32,
            sampling_rate=SAMPLING_RATE,
            hop_length=64,
            fft_window_size=512,
            max_length_s=CLIP_SECONDS,
            frequency_min=60,
            frequency_max=SAMPLING_RATE // 2,
            truncation="rand_trunc",
            padding="repeatpad",
        )
        return hf.ClapProcessor(extractor, tokenizer)
    if blueprint.family in ("siglip", "siglip2"):
        return hf.SiglipProcessor(hf.SiglipImageProcessorPil(size=square), tokenizer)
    if blueprint.family == "convnext-bert":
        images = hf.ConvNextImageProcessorPil(size=edge, crop_pct=1.0)
        return hf.VisionTextDualEncoderProcessor(images, tokenizer)
    return hf.CLIPProcessor(hf.CLIPImageProcessorPil(size=edge, crop_size=square), tokenizer)


def build_model(blueprint: Blueprint, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Return the untrained model; the caller seeds torch.

    Position embeddings start five times larger than usual, at the size of the patches': in so short a training,
    places and outlines are otherwise learnt late.

    Args:
        blueprint: The model.
        tokenizer: Its tokenizer, for the size of the vocabulary and the special tokens.

    Returns:
        The model in float32, without dropout.
    """
    model = _new_model(blueprint, tokenizer)
    if blueprint.family in ("clip", "metaclip2", "siglip", "siglip2"):
        model.vision_model.embeddings.position_embedding.weight.data.mul_(5)
    return model


def _new_model(blueprint: Blueprint, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    import transformers as hf

    family, width, embedding = blueprint.family, blueprint.width, blueprint.embedding
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": blueprint.text_width,
        "intermediate_size": 2 * blueprint.text_width,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": TEXT_LENGTH,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        # The text towers of the CLIP kind pool at this token, so it has to be the tokenizer's own.
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision: dict[str, Any] = {
        "hidden_size": width,
        "intermediate_size": (5 * width) // 2,
        "num_hidden_layers": sum(blueprint.depth),
        "num_attention_heads": 4,
        "image_size": blueprint.image_size,
        "patch_size": blueprint.patch_size,
    }
    if family in ("clip", "metaclip2"):
        config_class, model_class = (
            (hf.CLIPConfig, hf.CLIPModel) if family == "clip" else (hf.MetaClip2Config, hf.MetaClip2Model)
        )
        text["projection_dim"] = vision["projection_dim"] = embedding
        return model_class(config_class(text_config=text, vision_config=vision, projection_dim=embedding))
    if family in ("siglip", "siglip2"):
        text["projection_size"] = width
        model = hf.SiglipModel(hf.SiglipConfig(text_config=text, vision_config=vision))
        model.logit_scale.data.fill_(2.3)
        model.logit_bias.data.fill_(-4.0)
        return model
    if family == "convnext-bert":
        sizes = [width, 2 * width, 3 * width]
        convnext = hf.ConvNextConfig(
            num_stages=3,
            depths=list(blueprint.depth),
            hidden_sizes=sizes,
            patch_size=blueprint.patch_size,
            image_size=blueprint.image_size,
            layer_scale_init_value=0.5,
            hidden_size=sizes[-1],
        )
        bert = hf.BertConfig(**text, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        pair = hf.VisionTextDualEncoderConfig.from_vision_text_configs(convnext, bert, projection_dim=embedding)
        return hf.VisionTextDualEncoderModel(pair)
    depths = list(blueprint.depth)
    audio = {
        "num_mel_bins": 32,
        "spec_size": 64,
        "window_size": 4,
        "patch_size": blueprint.patch_size,
        "patch_stride": [blueprint.patch_size] * 2,
        "patch_embeds_hidden_size": width,
        "hidden_size": width * 2 ** (len(depths) - 1),
        "depths": depths,
        "num_attention_heads": [4] * len(depths),
        "num_hidden_layers": len(depths),
        "mlp_ratio": 2.0,
        "hidden_dropout_prob": 0.0,
        "projection_dim": embedding,
    }
    text |= {
        # RoBERTa counts positions from the padding index up.
        "max_position_embeddings": TEXT_LENGTH + tokenizer.pad_token_id + 1,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "projection_dim": embedding,
    }
    return hf.ClapModel(hf.ClapConfig(text_config=text, audio_config=audio, projection_dim=embedding))
