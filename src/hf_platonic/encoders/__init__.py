"""Two-tower models of several families behind one interface."""

from __future__ import annotations

from .encoder import DualEncoder, ProbeFeatures
from .families import EditSite, Family, edit_site, family_of, register_family, supported_families
from .identity import EncoderIdentity
from .media import Audio, content_hash, decode_audio, decode_image, modality_of

__all__ = [
    "Audio",
    "DualEncoder",
    "EditSite",
    "EncoderIdentity",
    "Family",
    "ProbeFeatures",
    "content_hash",
    "decode_audio",
    "decode_image",
    "edit_site",
    "family_of",
    "modality_of",
    "register_family",
    "supported_families",
]
