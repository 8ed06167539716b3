"""Reference vision encoders in pure PyTorch: one file a family, one contract for all.

Source and repo ids stand at the top of each family's file.
"""

from .contract import (
    EncoderItemSpec,
    EncoderOutput,
    GraphableEncoder,
    VisionInputs,
)
from .inputs import Video
from .intern_vit import InternViT, InternViTConfig
from .qwen2_5_vl import Qwen2_5VLConfig, Qwen2_5VLEncoder
from .qwen2_vl import Qwen2VLConfig, Qwen2VLEncoder
from .qwen3_vl import Qwen3VLConfig, Qwen3VLEncoder
from .streams import ItemError
from .vision_encoder import VisionEncoder

__all__ = [
    "EncoderItemSpec",
    "EncoderOutput",
    "GraphableEncoder",
    "InternViT",
    "InternViTConfig",
    "ItemError",
    "Qwen2VLConfig",
    "Qwen2VLEncoder",
    "Qwen2_5VLConfig",
    "Qwen2_5VLEncoder",
    "Qwen3VLConfig",
    "Qwen3VLEncoder",
    "Video",
    "VisionEncoder",
    "VisionInputs",
]
