"""Two-tower models of several families behind one interface."""

from __future__ import annotations

from .._pooling import Feature
from .encoder import DualEncoder, ProbeFeatures
from .families import EditSite, Family, edit_site, family_of, register_family, supported_families
from .identity import EncoderIdentity
from .media import Audio, content_hash, decode_audio, decode_image, modality_of
from .open_clip_models import open_clip_parts, save_open_clip

__all__ = [
    "Audio",
    "DualEncoder",
    "EditSite",
    "EncoderIdentity",
    "Family",
    "Feature",
    "ProbeFeatures",
    "content_hash",
    "decode_audio",
    "decode_image",
    "edit_site",
    "family_of",
    "modality_of",
    "open_clip_parts",
    "register_family",
    "save_open_clip",
    "supported_families",
]
