"""The configs of encoders, and the types that signatures of public functions name.

They serve annotations and ``isinstance``; no call needs one of them to be imported. A config is
made by ``from_hf`` of its class, or read from ``encoder.config``.
"""

from __future__ import annotations

from encoders import (
    BlockSizes,
    DeepseekOCRConfig,
    DeepseekVL2Config,
    DeepseekVLConfig,
    DeepseekVLHybridConfig,
    EncoderConfig,
    Ernie4_5VLConfig,
    FeatureRows,
    Gemma3Config,
    Gemma4Config,
    Glm4VConfig,
    GlmOCRConfig,
    Grid,
    GridLike,
    Idefics3Config,
    InternViTConfig,
    Lfm2VLConfig,
    Llama4Config,
    Metadata,
    MiniMaxM3Config,
    MoonViTConfig,
    OutputField,
    PaddleOCRVLConfig,
    PixtralConfig,
    Preprocessor,
    PrunedTokens,
    Publication,
    Qwen2_5VLConfig,
    Qwen2VLConfig,
    Qwen3VLConfig,
    SamSizes,
    Siglip2Config,
    SiglipConfig,
    Step3Config,
    Step3VLConfig,
)
from encoders.configs import PatchConfig, TileConfig, VisionConfig
from encoders.contract import Kernels, Precision
from encoders.data import DeviceOrDtype
from encoders.deepseek_ocr import ModeName
from encoders.inputs.intake import AnyArray
from encoders.layers.blocks import Gelu
from encoders.streams.keywords import Heads, Queries
from encoders.streams.pooling import Pool, VectorPool
from encoders.streams.stream import OnError
from graphwrap import Budget, BudgetStats, GraphStats
from graphwrap.encoder_forms import FeatureMaps, Preprocess
from graphwrap.graphs.replay import OutTensors
from graphwrap.guards import Backend, BackendInUse, OnOverflow
from weights import CheckpointInfo
from weights.families.family import FamilyConfig
from weights.files.snapshot import Route
from weights.hub.repo import Fetch
from weights.load import DtypeName
from weights.strict_json import JsonDict

from .analysis.nearest import NearestPatch
from .colours import Maps

__all__ = [
    "AnyArray",
    "Backend",
    "BackendInUse",
    "BlockSizes",
    "Budget",
    "BudgetStats",
    "CheckpointInfo",
    "DeepseekOCRConfig",
    "DeepseekVL2Config",
    "DeepseekVLConfig",
    "DeepseekVLHybridConfig",
    "DeviceOrDtype",
    "DtypeName",
    "EncoderConfig",
    "Ernie4_5VLConfig",
    "FamilyConfig",
    "FeatureMaps",
    "FeatureRows",
    "Fetch",
    "Gelu",
    "Gemma3Config",
    "Gemma4Config",
    "Glm4VConfig",
    "GlmOCRConfig",
    "GraphStats",
    "Grid",
    "GridLike",
    "Heads",
    "Idefics3Config",
    "InternViTConfig",
    "JsonDict",
    "Kernels",
    "Lfm2VLConfig",
    "Llama4Config",
    "Maps",
    "Metadata",
    "MiniMaxM3Config",
    "ModeName",
    "MoonViTConfig",
    "NearestPatch",
    "OnError",
    "OnOverflow",
    "OutTensors",
    "OutputField",
    "PaddleOCRVLConfig",
    "PatchConfig",
    "PixtralConfig",
    "Pool",
    "Precision",
    "Preprocess",
    "Preprocessor",
    "PrunedTokens",
    "Publication",
    "Queries",
    "Qwen2VLConfig",
    "Qwen2_5VLConfig",
    "Qwen3VLConfig",
    "Route",
    "SamSizes",
    "Siglip2Config",
    "SiglipConfig",
    "Step3Config",
    "Step3VLConfig",
    "TileConfig",
    "VectorPool",
    "VisionConfig",
]
