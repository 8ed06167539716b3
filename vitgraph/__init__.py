"""Vision encoders of InternVL, Qwen-VL, Step and DeepSeek: loaded strictly, replayed as graphs.

``import vitgraph`` offers the whole library and imports each part when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from encoders import *  # noqa: F403
    from encoders.inputs import read_video as read_video
    from graphwrap import GraphedEncoder as GraphedEncoder
    from weights import CheckpointError as CheckpointError
    from weights import extract_encoder as extract_encoder
    from weights import inspect_checkpoint as inspect_checkpoint
    from weights import load_encoder as load_encoder

    from .embedding.batch import EmbedBatch as EmbedBatch
    from .fetching import load_image as load_image
    from .models import list_models as list_models
    from .parallel import DataParallelEncoder as DataParallelEncoder
    from .plots import plot_feature_maps as plot_feature_maps

__version__ = "0.1.0"

_MODULES = {
    "CheckpointError": "weights",
    "DataParallelEncoder": "vitgraph.parallel",
    "EmbedBatch": "vitgraph.embedding.batch",
    "GraphedEncoder": "graphwrap",
    "extract_encoder": "weights",
    "inspect_checkpoint": "weights",
    "list_models": "vitgraph.models",
    "load_encoder": "weights",
    "load_image": "vitgraph.fetching",
    "plot_feature_maps": "vitgraph.plots",
    "prune_video_tokens": "encoders",
    "read_video": "encoders.inputs",
}
"""The module of each name beside the classes of ``encoders``, all of which are offered, too."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name == "__all__":
        return sorted({"__version__", *_MODULES, *import_module("encoders").__all__})
    offered = name in _MODULES or (name[:1].isupper() and name in import_module("encoders").__all__)
    if not offered:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES.get(name, "encoders")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Offer the names that are not imported yet, too."""
    return sorted({*globals(), *__getattr__("__all__")})
