"""Reference vision encoders in pure PyTorch: one file per family, one contract for all families.

The source and the repo ids of a family are listed at the top of its file.
"""

from .contract import (
    EncoderItemSpec,
    EncoderOutput,
    GraphableEncoder,
    PartialOutput,
    PathInputs,
    VisionInputs,
)
from .deepseek_ocr import DeepseekOCRConfig, DeepseekOCREncoder
from .deepseek_vl import (
    DeepseekVLConfig,
    DeepseekVLEncoder,
    DeepseekVLHybridConfig,
    DeepseekVLHybridEncoder,
)
from .deepseek_vl2 import DeepseekVL2Config, DeepseekVL2Encoder
from .encoder import Encoder
from .inputs import Video
from .intern_vit import InternViT, InternViTConfig
from .paths import PathsEncoder
from .qwen2_5_vl import Qwen2_5VLConfig, Qwen2_5VLEncoder
from .qwen2_vl import Qwen2VLConfig, Qwen2VLEncoder
from .qwen3_vl import Qwen3VLConfig, Qwen3VLEncoder
from .step3 import Step3Config, Step3Encoder
from .step3_vl import Step3VLConfig, Step3VLEncoder
from .streams import ItemError
from .video_pruning import PrunedTokens, prune_video_tokens
from .vision_encoder import VisionEncoder

__all__ = [
    "DeepseekOCRConfig",
    "DeepseekOCREncoder",
    "DeepseekVL2Config",
    "DeepseekVL2Encoder",
    "DeepseekVLConfig",
    "DeepseekVLEncoder",
    "DeepseekVLHybridConfig",
    "DeepseekVLHybridEncoder",
    "Encoder",
    "EncoderItemSpec",
    "EncoderOutput",
    "GraphableEncoder",
    "InternViT",
    "InternViTConfig",
    "ItemError",
    "PartialOutput",
    "PathInputs",
    "PathsEncoder",
    "PrunedTokens",
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
    "Video",
    "VisionEncoder",
    "VisionInputs",
    "prune_video_tokens",
]
