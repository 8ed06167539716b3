"""Checkpoints: find one by repo id or path, take its vision tower, strictly and safely."""

from .errors import CheckpointError
from .families import FAMILIES, Family
from .inspection import CheckpointInfo, extract_encoder, inspect_checkpoint
from .layouts import LAYOUTS, Layout
from .load import load_encoder
from .published import PUBLISHED, PublishedModel

__all__ = [
    "FAMILIES",
    "LAYOUTS",
    "PUBLISHED",
    "CheckpointError",
    "CheckpointInfo",
    "Family",
    "Layout",
    "PublishedModel",
    "extract_encoder",
    "inspect_checkpoint",
    "load_encoder",
]
