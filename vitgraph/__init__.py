"""Vision encoders of InternVL, Qwen-VL, Step and DeepSeek: loaded strictly, replayed as graphs.

``import vitgraph`` offers the whole library and imports each part when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from encoders import (
        DeepseekOCRConfig,
        DeepseekOCREncoder,
        DeepseekVL2Config,
        DeepseekVL2Encoder,
        DeepseekVLConfig,
        DeepseekVLEncoder,
        DeepseekVLHybridConfig,
        DeepseekVLHybridEncoder,
        EncoderOutput,
        InternViT,
        InternViTConfig,
        Qwen2_5VLConfig,
        Qwen2_5VLEncoder,
        Qwen2VLConfig,
        Qwen2VLEncoder,
        Qwen3VLConfig,
        Qwen3VLEncoder,
        Step3Config,
        Step3Encoder,
        Step3VLConfig,
        Step3VLEncoder,
        VisionInputs,
        prune_video_tokens,
    )
    from encoders.inputs import read_video
    from graphwrap import GraphedEncoder
    from weights import CheckpointError, extract_encoder, inspect_checkpoint, load_encoder

    from .embedding.batch import EmbedBatch
    from .models import list_models
    from .parallel import DataParallelEncoder
    from .plots import plot_feature_maps

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "DataParallelEncoder",
    "DeepseekOCRConfig",
    "DeepseekOCREncoder",
    "DeepseekVL2Config",
    "DeepseekVL2Encoder",
    "DeepseekVLConfig",
    "DeepseekVLEncoder",
    "DeepseekVLHybridConfig",
    "DeepseekVLHybridEncoder",
    "EmbedBatch",
    "EncoderOutput",
    "GraphedEncoder",
    "InternViT",
    "InternViTConfig",
    "Qwen2VLConfig",
    "Qwen2VLEncoder",
    "Qwen2_5VLConfig",
    "Qwen2_5VLEncoder",
    "Qwen3VLConfig",
    "Qwen3VLEncoder",
    "Step3Config",
    "Step3Encoder",
    "Step3VLConfig",
    "Step3VLEncoder",
    "VisionInputs",
    "__version__",
    "extract_encoder",
    "inspect_checkpoint",
    "list_models",
    "load_encoder",
    "plot_feature_maps",
    "prune_video_tokens",
    "read_video",
]

_MODULES = {
    "GraphedEncoder": "graphwrap",
    "CheckpointError": "weights",
    "extract_encoder": "weights",
    "inspect_checkpoint": "weights",
    "load_encoder": "weights",
    "DataParallelEncoder": "vitgraph.parallel",
    "EmbedBatch": "vitgraph.embedding.batch",
    "list_models": "vitgraph.models",
    "plot_feature_maps": "vitgraph.plots",
    "read_video": "encoders.inputs",
}
"""The module of each name; ``encoders`` has all others."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used (PEP 562)."""
    if name.startswith("_") or name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_MODULES.get(name, "encoders")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Offer the names that are not imported yet, too."""
    return sorted({*globals(), *__all__})
