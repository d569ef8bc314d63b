"""Tiny random open_clip models; importing this module adds them to `tiny`'s builders."""

from __future__ import annotations

import atexit
import gzip
import shutil
import tempfile
from pathlib import Path
from typing import Any

import open_clip
import timm
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from tiny import EXTRA_BUILDERS

from hf_platonic.encoders.open_clip_models import open_clip_parts

# CLIP's tokenizer without merges: a token a letter.
MERGES = Path(tempfile.mkdtemp()) / "merges.txt.gz"
atexit.register(shutil.rmtree, MERGES.parent)
MERGES.write_bytes(gzip.compress(b"#version"))
WORDS = open_clip.tokenizer.SimpleTokenizer(str(MERGES), context_length=24)
TEXT: dict[str, Any] = {"context_length": 24, "vocab_size": WORDS.vocab_size, "width": 24, "heads": 2, "layers": 2}
TEXT["tokenizer_kwargs"] = {"bpe_path": str(MERGES)}
VISION = {"image_size": 16, "patch_size": 8, "width": 32, "head_width": 16, "layers": 2}


def tower(cls: Any, **fixed: Any) -> Any:
    """An entry point as timm registers them."""

    def make(num_classes: int = 10, global_pool: str = "token", **_: Any) -> Any:
        sizes = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 2}
        model = cls(num_classes=num_classes, global_pool=global_pool, **sizes, **fixed)
        model.default_cfg = {}
        return model

    return make


def register(name: str, make: Any) -> None:
    make.__name__, make.__module__ = name, __name__
    timm.models.register_model(make)


# The shape of eva02_large_patch14_clip_224 and vit_base_patch16_siglip_224, which open_clip's configurations name.
register(
    "tiny_eva02_clip",
    tower(
        Eva,
        num_heads=2,
        qkv_fused=False,
        mlp_ratio=4 * 2 / 3,
        swiglu_mlp=True,
        scale_mlp=True,
        scale_attn_inner=True,
        use_rot_pos_emb=True,
        ref_feat_shape=(2, 2),
    ),
)
register("tiny_vit_siglip", tower(VisionTransformer, num_heads=2, class_token=False))

CONFIGS: dict[str, dict[str, Any]] = {
    "open_clip": {"embed_dim": 16, "quick_gelu": True, "vision_cfg": VISION, "text_cfg": TEXT},
    "open_clip_eva": {
        "embed_dim": 16,
        "vision_cfg": {
            "image_size": 16,
            "timm_model_name": "tiny_eva02_clip",
            "timm_pool": "token",
            "timm_proj": None,
        },
        "text_cfg": TEXT,
    },
    "open_clip_siglip": {
        "embed_dim": 32,
        "init_logit_bias": -10,
        "vision_cfg": {
            "image_size": 16,
            "timm_model_name": "tiny_vit_siglip",
            "timm_pool": "map",
            "timm_proj": "none",
        },
        "text_cfg": {**TEXT, "no_causal_mask": True, "proj_bias": True, "pool_type": "last"},
    },
    "open_clip_resnet": {
        "embed_dim": 16,
        "vision_cfg": {"image_size": 32, "layers": [1, 1, 1, 1], "width": 8, "head_width": 16},
        "text_cfg": TEXT,
    },
}


def bare(family: str) -> Any:
    """A `CustomTextCLIP` as open_clip makes it."""
    model = open_clip.model.CustomTextCLIP(**CONFIGS[family]).eval()
    size = {"size": CONFIGS[family]["vision_cfg"]["image_size"]}
    open_clip.model.set_model_preprocess_cfg(model, open_clip.transform.merge_preprocess_dict(PREPROCESS, size))
    return model


PREPROCESS = open_clip.transform.PreprocessCfg()


def parts(family: str) -> tuple[Any, Any]:
    """Model and processor."""
    return open_clip_parts(bare(family), WORDS, CONFIGS[family])


EXTRA_BUILDERS.update({family: lambda family=family, **_: parts(family) for family in CONFIGS})
