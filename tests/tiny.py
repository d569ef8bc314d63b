"""Tiny random dual encoders with real processors, built in memory: no network, milliseconds each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers as tf
from PIL import Image

from hf_platonic.encoders import Audio, DualEncoder

TEXT: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION: dict[str, Any] = {
    "hidden_size": 20,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
CHARACTERS = [chr(i) for i in range(33, 127)]
RATE = 8000
"""Sampling rate of the tiny CLAP, in Hz; its clips are at most one second."""


def byte_vocabulary(*special: str) -> dict[str, int]:
    """Special tokens first, then every byte as byte-level BPE writes it, alone and at the end of a word."""
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    tokens = [*special, *alphabet, *(a + "</w>" for a in alphabet)]
    return {token: i for i, token in enumerate(tokens)}


def clip_tokenizer(limit: int = 77) -> Any:
    vocabulary = byte_vocabulary()
    vocabulary |= {"<|startoftext|>": len(vocabulary), "<|endoftext|>": len(vocabulary) + 1}
    return tf.CLIPTokenizer(vocabulary, [], model_max_length=limit)


def gemma_tokenizer() -> Any:
    vocabulary = {t: i for i, t in enumerate(("<pad>", "<eos>", "<bos>", "<unk>", "<mask>"))}
    for token in [*(f"<0x{i:02X}>" for i in range(256)), "▁", *CHARACTERS]:
        vocabulary[token] = len(vocabulary)
    return tf.GemmaTokenizer(vocabulary, [], add_bos_token=False, add_eos_token=True, model_max_length=64)


def roberta_tokenizer() -> Any:
    vocabulary = byte_vocabulary("<s>", "<pad>", "</s>", "<unk>", "<mask>")
    return tf.RobertaTokenizer(vocabulary, [], model_max_length=62)


def unigram_tokenizer() -> Any:
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -1.0)]
    pieces += [(c, -2.0) for c in CHARACTERS] + [("<mask>", 0.0)]
    return tf.XLMRobertaTokenizer(pieces, model_max_length=62)


def bert_tokenizer() -> Any:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *CHARACTERS, *("##" + c for c in CHARACTERS)]
    return tf.BertTokenizer({t: i for i, t in enumerate(tokens)}, model_max_length=64)


def text(tokenizer: Any, **more: Any) -> dict[str, Any]:
    ids = {key: getattr(tokenizer, key) for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
    return {**TEXT, "vocab_size": len(tokenizer), "max_position_embeddings": 64, **ids, **more}


def image_processor(kind: str = "CLIP") -> Any:
    size = {"shortest_edge": 16} if kind == "CLIP" else {"height": 16, "width": 16}
    crop = {"crop_size": {"height": 16, "width": 16}} if kind.endswith("CLIP") else {}
    return getattr(tf, f"{kind}ImageProcessorPil")(size=size, **crop)


def clip(**_: Any) -> tuple[Any, Any]:
    tokenizer = clip_tokenizer()
    config = tf.CLIPConfig(
        text_config=text(tokenizer, max_position_embeddings=77), vision_config=VISION, projection_dim=16
    )
    return tf.CLIPModel(config), tf.CLIPProcessor(image_processor(), tokenizer)


def metaclip_2(**_: Any) -> tuple[Any, Any]:
    tokenizer = unigram_tokenizer()
    config = tf.MetaClip2Config(text_config=text(tokenizer), vision_config=VISION, projection_dim=16)
    return tf.MetaClip2Model(config), tf.CLIPProcessor(image_processor(), tokenizer)


def siglip(**_: Any) -> tuple[Any, Any]:
    tokenizer = unigram_tokenizer()  # SigLIP's own class needs sentencepiece
    config = tf.SiglipConfig(text_config=text(tokenizer, hidden_size=20, projection_size=20), vision_config=VISION)
    return tf.SiglipModel(config), tf.SiglipProcessor(image_processor("Siglip"), tokenizer)


def siglip2(**_: Any) -> tuple[Any, Any]:
    tokenizer = gemma_tokenizer()
    config = tf.SiglipConfig(text_config=text(tokenizer, hidden_size=20, projection_size=20), vision_config=VISION)
    return tf.SiglipModel(config), tf.SiglipProcessor(image_processor("Siglip"), tokenizer)


def siglip2_naflex(**_: Any) -> tuple[Any, Any]:
    tokenizer = gemma_tokenizer()
    vision = {key: value for key, value in VISION.items() if key != "image_size"}
    config = tf.Siglip2Config(
        text_config=text(tokenizer, hidden_size=20, projection_size=20), vision_config={**vision, "num_patches": 16}
    )
    processor = tf.Siglip2ImageProcessorPil(patch_size=8, max_num_patches=16)
    return tf.Siglip2Model(config), tf.Siglip2Processor(processor, tokenizer)


def chinese_clip(**_: Any) -> tuple[Any, Any]:
    tokenizer = bert_tokenizer()
    config = tf.ChineseCLIPConfig(text_config=text(tokenizer), vision_config=VISION, projection_dim=16)
    return tf.ChineseCLIPModel(config), tf.ChineseCLIPProcessor(image_processor("ChineseCLIP"), tokenizer)


def altclip(**_: Any) -> tuple[Any, Any]:
    tokenizer = unigram_tokenizer()
    config = tf.AltCLIPConfig(
        text_config=text(tokenizer, project_dim=28, type_vocab_size=1),
        vision_config=VISION,
        projection_dim=16,
    )
    return tf.AltCLIPModel(config), tf.AltCLIPProcessor(image_processor(), tokenizer)


def vision_text_dual_encoder(**_: Any) -> tuple[Any, Any]:
    tokenizer = bert_tokenizer()
    config = tf.VisionTextDualEncoderConfig.from_vision_text_configs(
        tf.ViTConfig(**VISION), tf.BertConfig(**text(tokenizer)), projection_dim=16
    )
    processor = tf.VisionTextDualEncoderProcessor(image_processor("ViT"), tokenizer)
    return tf.VisionTextDualEncoderModel(config), processor


def clap(*, fused: bool = False) -> tuple[Any, Any]:
    tokenizer = roberta_tokenizer()
    audio = {
        "image_size": 128,
        "spec_size": 128,
        "num_mel_bins": 64,
        "window_size": 4,
        "patch_size": 8,
        "patch_stride": [8, 8],
        "hidden_size": 32,
        "patch_embeds_hidden_size": 16,
        "depths": [1, 1],
        "num_hidden_layers": 2,
        "num_attention_heads": [2, 2],
        "projection_dim": 16,
        "enable_fusion": fused,
    }
    config = tf.ClapConfig(
        text_config=text(tokenizer, projection_dim=16, type_vocab_size=1), audio_config=audio, projection_dim=16
    )
    extractor = tf.ClapFeatureExtractor(
        sampling_rate=RATE,
        hop_length=100,
        max_length_s=1,
        fft_window_size=512,
        frequency_max=4000,
        truncation="fusion" if fused else "rand_trunc",
    )
    return tf.ClapModel(config), tf.ClapProcessor(extractor, tokenizer)


def clap_fused(**_: Any) -> tuple[Any, Any]:
    return clap(fused=True)


def align(**_: Any) -> tuple[Any, Any]:
    tokenizer = bert_tokenizer()
    vision = {
        "image_size": 32,
        "kernel_sizes": [3, 3, 5],
        "in_channels": [32, 16, 24],
        "out_channels": [16, 24, 30],
        "strides": [1, 1, 2],
        "num_block_repeats": [1, 1, 2],
        "expand_ratios": [1, 6, 6],
        "depthwise_padding": [],
        "hidden_dim": 16,
        "width_coefficient": 1.0,
        "depth_coefficient": 1.0,
    }
    config = tf.AlignConfig(text_config=text(tokenizer), vision_config=vision, projection_dim=32)
    processor = tf.EfficientNetImageProcessorPil(size={"height": 32, "width": 32})
    return tf.AlignModel(config), tf.AlignProcessor(processor, tokenizer)


def clipseg(**_: Any) -> tuple[Any, Any]:
    tokenizer = clip_tokenizer()
    config = tf.CLIPSegConfig(
        text_config=text(tokenizer, max_position_embeddings=77), vision_config=VISION, projection_dim=16
    )
    return tf.CLIPSegModel(config), tf.CLIPSegProcessor(image_processor("ViT"), tokenizer)


def blip(cls: Any = tf.BlipModel, **_: Any) -> tuple[Any, Any]:
    tokenizer = bert_tokenizer()
    config = tf.BlipConfig(
        text_config=text(tokenizer, encoder_hidden_size=20),
        vision_config=VISION,
        projection_dim=16,
        image_text_hidden_size=12,
    )
    return cls(config), tf.BlipProcessor(image_processor("Blip"), tokenizer)


def blip_itc(**_: Any) -> tuple[Any, Any]:
    return blip(tf.BlipForImageTextRetrieval)


def tipsv2(**_: Any) -> tuple[Any, Any]:
    # Its image processor needs torchvision; ViT's does the same resizing.
    pieces = ["<pad>", "<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *CHARACTERS]
    tokenizer = tf.Tipsv2Tokenizer({piece: i for i, piece in enumerate(pieces)}, [])
    vision = {key: value for key, value in VISION.items() if key != "intermediate_size"}
    config = tf.Tipsv2Config(
        text_config={**TEXT, "hidden_size": 20, "vocab_size": len(tokenizer), "max_position_embeddings": 64},
        vision_config={**vision, "mlp_ratio": 2},
    )
    return tf.Tipsv2Model(config), tf.SiglipProcessor(image_processor("ViT"), tokenizer)


def xclip(**_: Any) -> tuple[Any, Any]:
    tokenizer = clip_tokenizer()
    mit = {
        "mit_hidden_size": 16,
        "mit_intermediate_size": 32,
        "mit_num_hidden_layers": 1,
        "mit_num_attention_heads": 2,
        "num_frames": 2,
    }
    config = tf.XCLIPConfig(
        text_config=text(tokenizer, max_position_embeddings=77, hidden_size=16),
        vision_config={**VISION, **mit},
        projection_dim=16,
        prompt_layers=1,
        prompt_num_attention_heads=2,
    )
    size = {"shortest_edge": 16}
    processor = tf.VideoMAEImageProcessorPil(size=size, crop_size={"height": 16, "width": 16})
    return tf.XCLIPModel(config), tf.XCLIPProcessor(processor, tokenizer)


def groupvit(**_: Any) -> tuple[Any, Any]:
    tokenizer = clip_tokenizer()
    vision = {
        **VISION,
        "depths": [1, 1, 1],
        "num_hidden_layers": 3,
        "num_group_tokens": [4, 2, 0],
        "num_output_groups": [4, 2, 2],
    }
    config = tf.GroupViTConfig(
        text_config=text(tokenizer, max_position_embeddings=77),
        vision_config=vision,
        projection_dim=16,
        projection_intermediate_dim=24,
    )
    return tf.GroupViTModel(config), tf.CLIPProcessor(image_processor(), tokenizer)


def aimv2(**_: Any) -> tuple[Any, Any]:
    tokenizer = clip_tokenizer()
    config = tf.Aimv2Config(
        text_config=text(tokenizer, max_position_embeddings=77), vision_config=VISION, projection_dim=16
    )
    return tf.Aimv2Model(config), tf.CLIPProcessor(image_processor(), tokenizer)


BUILDERS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "clip": clip,
    "metaclip_2": metaclip_2,
    "siglip": siglip,
    "siglip2": siglip2,
    "siglip2_naflex": siglip2_naflex,
    "altclip": altclip,
    "chinese_clip": chinese_clip,
    "vision-text-dual-encoder": vision_text_dual_encoder,
    "clipseg": clipseg,
    "blip": blip,
    "blip_itc": blip_itc,
    "aimv2": aimv2,
    "groupvit": groupvit,
    "clap": clap,
    "clap_fused": clap_fused,
}
SOURCE_BUILDERS: dict[str, Callable[..., tuple[Any, Any]]] = {"align": align, "tipsv2": tipsv2, "xclip": xclip}
EXTRA_BUILDERS: dict[str, Callable[..., tuple[Any, Any]]] = {}
"""Of models behind an extra, filled in by `tiny_open_clip`."""
FAMILIES = tuple(BUILDERS)
"""Those whose probe tower can be edited."""
SOURCES = tuple(SOURCE_BUILDERS)
"""Those that can only be read."""
IMAGE_FAMILIES = tuple(name for name in FAMILIES if not name.startswith("clap"))


def tiny_parts(family: str = "clip", *, seed: int = 0) -> tuple[Any, Any]:
    """(model in evaluation mode, processor) of a family; equal seeds give equal weights."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, processor = {**BUILDERS, **SOURCE_BUILDERS, **EXTRA_BUILDERS}[family]()
        for parameter in model.parameters():  # the libraries' small initial values hide mistakes
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)
            elif parameter.ndim == 1 and parameter.numel() > 1:
                parameter.data.add_(0.1 * torch.randn_like(parameter))
    return model.eval(), processor


def text_tower(model: Any) -> Any:
    """The module that reads prompts."""
    return model.text_encoder if hasattr(model, "text_encoder") else model.text_model


def tiny_encoder(family: str = "clip", *, seed: int = 0) -> DualEncoder:
    """A `DualEncoder` of one of `FAMILIES`, with random weights."""
    return DualEncoder(*tiny_parts(family, seed=seed))


def tiny_images(n: int = 4, *, seed: int = 0, size: tuple[int, int] = (20, 24)) -> list[Image.Image]:
    """n different RGB images (width, height)."""
    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)) for _ in range(n)]


def tiny_clips(n: int = 4, *, seed: int = 0, seconds: float = 0.4, rate: int = RATE) -> list[Audio]:
    """n different mono clips."""
    rng = np.random.default_rng(seed)
    time = np.arange(int(seconds * rate)) / rate
    clips = []
    for _ in range(n):
        tone = 0.5 * np.sin(2 * np.pi * rng.uniform(100, 2000) * time) + 0.1 * rng.standard_normal(time.size)
        clips.append(Audio(tone.astype(np.float32), rate))
    return clips


def tiny_probes(encoder: DualEncoder, n: int = 4, *, seed: int = 0) -> list[Any]:
    """n probes of the encoder's modality."""
    return tiny_images(n, seed=seed) if encoder.modality == "image" else tiny_clips(n, seed=seed)
