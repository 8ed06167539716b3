"""Reference vision encoders in pure PyTorch: one file per family, one contract for all families.

Each maker has a folder with its towers, one file each, and its pixels (``*_pixels``): ``qwen``,
``intern``, ``siglip``, ``glm``, ``gemma``, ``deepseek``, ``step``, ``kimi``, ``mistral``,
``minimax``, ``baidu``, ``llama``, ``idefics`` and ``lfm``.

All other files and folders are shared; in the order in which a value travels:

- ``hf_config``: reads the ``config.json`` of a checkpoint
- ``inputs``: turns images and videos into pixels and grids; ``grids``: reads and checks grids
- ``data``: the values that encoders take and return, which every family imports
- ``base``: the base classes; ``layers``: layers that several makers share
- ``block_parts``: the layers of a block by role; ``accelerated``: runs them with fast kernels
- ``streams``: ``encode`` and ``encode_many``
- ``contract``: the methods that ``graphwrap`` and accelerators call; it exports ``data``, too

Importing an encoder imports no image library: ``Video``, ``ItemError`` and a few more are imported
when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from .baidu.ernie4_5_vl import Ernie4_5VLConfig, Ernie4_5VLEncoder
from .baidu.paddleocr_vl import PaddleOCRVLConfig, PaddleOCRVLEncoder
from .base.configs import PatchConfig, TileConfig, VisionConfig
from .base.encoder import Encoder
from .base.patch_encoder import PatchEncoder
from .base.paths_encoder import PathsEncoder
from .base.vision_encoder import VisionEncoder
from .contract import EncoderConfig, GraphableEncoder, Preprocessor
from .data import (
    EncoderItemSpec,
    EncoderOutput,
    FeatureRows,
    Grid,
    GridLike,
    Metadata,
    OutputField,
    PartialOutput,
    PathInputs,
    Tiling,
    VisionInputs,
)
from .deepseek.deepseek_ocr import DeepseekOCRConfig, DeepseekOCREncoder, ModeName
from .deepseek.deepseek_vl import (
    DeepseekVLConfig,
    DeepseekVLEncoder,
    DeepseekVLHybridConfig,
    DeepseekVLHybridEncoder,
)
from .deepseek.deepseek_vl2 import DeepseekVL2Config, DeepseekVL2Encoder
from .deepseek.sam import SamSizes
from .gemma.gemma4 import Gemma4Config, Gemma4Encoder
from .glm.glm4v import Glm4VConfig, Glm4VEncoder
from .glm.glm_ocr import GlmOCRConfig, GlmOCREncoder
from .idefics.idefics3 import Idefics3Config, Idefics3Encoder
from .intern.intern_vit import InternViT, InternViTConfig
from .kimi.moonvit import MoonViTConfig, MoonViTEncoder
from .layers.blocks import BlockSizes, Gelu
from .lfm.lfm2_vl import Lfm2VLConfig, Lfm2VLEncoder
from .llama.llama4 import Llama4Config, Llama4Encoder
from .minimax.minimax_m3 import MiniMaxM3Config, MiniMaxM3Encoder
from .mistral.pixtral import PixtralConfig, PixtralEncoder
from .qwen.qwen2_5_vl import Qwen2_5VLConfig, Qwen2_5VLEncoder
from .qwen.qwen2_vl import Qwen2VLConfig, Qwen2VLEncoder
from .qwen.qwen3_vl import Qwen3VLConfig, Qwen3VLEncoder
from .siglip.siglip import Gemma3Config, Gemma3Encoder, SiglipConfig, SiglipEncoder
from .siglip.siglip2 import Siglip2Config, Siglip2Encoder
from .step.step3 import Step3Config, Step3Encoder
from .step.step3_vl import Step3VLConfig, Step3VLEncoder

if TYPE_CHECKING:
    from .base.saving import Publication
    from .inputs.intake import Video
    from .streams.item_errors import ItemError
    from .streams.pruning import PrunedTokens, prune_video_tokens

__all__ = [
    "BlockSizes",
    "DeepseekOCRConfig",
    "DeepseekOCREncoder",
    "DeepseekVL2Config",
    "DeepseekVL2Encoder",
    "DeepseekVLConfig",
    "DeepseekVLEncoder",
    "DeepseekVLHybridConfig",
    "DeepseekVLHybridEncoder",
    "Encoder",
    "EncoderConfig",
    "EncoderItemSpec",
    "EncoderOutput",
    "Ernie4_5VLConfig",
    "Ernie4_5VLEncoder",
    "FeatureRows",
    "Gelu",
    "Gemma3Config",
    "Gemma3Encoder",
    "Gemma4Config",
    "Gemma4Encoder",
    "Glm4VConfig",
    "Glm4VEncoder",
    "GlmOCRConfig",
    "GlmOCREncoder",
    "GraphableEncoder",
    "Grid",
    "GridLike",
    "Idefics3Config",
    "Idefics3Encoder",
    "InternViT",
    "InternViTConfig",
    "ItemError",
    "Lfm2VLConfig",
    "Lfm2VLEncoder",
    "Llama4Config",
    "Llama4Encoder",
    "Metadata",
    "MiniMaxM3Config",
    "MiniMaxM3Encoder",
    "ModeName",
    "MoonViTConfig",
    "MoonViTEncoder",
    "OutputField",
    "PaddleOCRVLConfig",
    "PaddleOCRVLEncoder",
    "PartialOutput",
    "PatchConfig",
    "PatchEncoder",
    "PathInputs",
    "PathsEncoder",
    "PixtralConfig",
    "PixtralEncoder",
    "Preprocessor",
    "PrunedTokens",
    "Publication",
    "Qwen2VLConfig",
    "Qwen2VLEncoder",
    "Qwen2_5VLConfig",
    "Qwen2_5VLEncoder",
    "Qwen3VLConfig",
    "Qwen3VLEncoder",
    "SamSizes",
    "Siglip2Config",
    "Siglip2Encoder",
    "SiglipConfig",
    "SiglipEncoder",
    "Step3Config",
    "Step3Encoder",
    "Step3VLConfig",
    "Step3VLEncoder",
    "TileConfig",
    "Tiling",
    "Video",
    "VisionConfig",
    "VisionEncoder",
    "VisionInputs",
    "prune_video_tokens",
]

_MODULES = {
    "ItemError": ".streams.item_errors",
    "PrunedTokens": ".streams.pruning",
    "Publication": ".base.saving",
    "Video": ".inputs.intake",
    "prune_video_tokens": ".streams.pruning",
}
"""The public names that are imported when they are first used -> the module that defines each."""


if not TYPE_CHECKING:  # else a type checker would accept any misspelt name

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
