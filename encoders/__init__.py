"""Reference vision encoders in pure PyTorch: one file per family, one contract for all families.

Each maker or line of models has a folder with its towers, one file each, and its pixels
(``*_pixels``; those of Qwen and GLM are in ``inputs.patches``, because others use them): ``qwen``,
``intern``, ``siglip``, ``clip``, ``glm``, ``gemma``, ``deepseek``, ``step``, ``kimi``, ``mistral``,
``minimax``, ``baidu``, ``llama``, ``idefics``, ``ibm``, ``lfm``, ``dino``, ``nvidia``, ``meta`` and
``rednote``. Gemma 3, PaliGemma and LLaVA-OneVision are in ``siglip``, whose tower they have.

All other files and folders are shared; in the order in which a value travels:

- ``hf_config``: reads the ``config.json`` of a checkpoint
- ``stored_tensors``: the dtypes and the order of rows in which a checkpoint stores tensors
- ``inputs``: turns images and videos into pixels and grids; ``grids``: reads and checks grids
- ``data``: the values that encoders take and return, which every family imports
- ``base``: the base classes; ``layers``: layers that several makers share
- ``block_parts``: the layers of a block by role; ``accelerated``: runs them with fast kernels
- ``triton_build``: keeps the hash of Triton's files, which every process would compute
- ``streams``: ``encode``, ``embed``, ``encode_many`` and ``embed_many``
- ``contract``: the methods that ``graphwrap`` and accelerators call; it exports ``data``, too

Importing an encoder imports no image library: ``Video``, ``ItemError`` and a few more are imported
when they are first used.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from .allenai.molmo2 import Molmo2Config as Molmo2Config
from .allenai.molmo2 import Molmo2Encoder as Molmo2Encoder
from .baidu.ernie4_5_vl import Ernie4_5VLConfig as Ernie4_5VLConfig
from .baidu.ernie4_5_vl import Ernie4_5VLEncoder as Ernie4_5VLEncoder
from .baidu.paddleocr_vl import PaddleOCRVLConfig as PaddleOCRVLConfig
from .baidu.paddleocr_vl import PaddleOCRVLEncoder as PaddleOCRVLEncoder
from .base.configs import PatchConfig as PatchConfig
from .base.configs import TileConfig as TileConfig
from .base.configs import VisionConfig as VisionConfig
from .base.encoder import Encoder as Encoder
from .base.patch_encoder import PatchEncoder as PatchEncoder
from .base.paths_encoder import PathsEncoder as PathsEncoder
from .base.vision_encoder import VisionEncoder as VisionEncoder
from .clip.clip import ClipConfig as ClipConfig
from .clip.clip import ClipEncoder as ClipEncoder
from .clip.clip import LlavaConfig as LlavaConfig
from .clip.clip import LlavaEncoder as LlavaEncoder
from .clip.clip import LlavaNextConfig as LlavaNextConfig
from .clip.clip import LlavaNextEncoder as LlavaNextEncoder
from .contract import EncoderConfig as EncoderConfig
from .contract import GraphableEncoder as GraphableEncoder
from .contract import Preprocessor as Preprocessor
from .data import EncoderItemSpec as EncoderItemSpec
from .data import EncoderOutput as EncoderOutput
from .data import FeatureRows as FeatureRows
from .data import Grid as Grid
from .data import GridLike as GridLike
from .data import Metadata as Metadata
from .data import OutputField as OutputField
from .data import PartialOutput as PartialOutput
from .data import PathInputs as PathInputs
from .data import Tiling as Tiling
from .data import VisionInputs as VisionInputs
from .deepseek.deepseek_ocr import DeepseekOCRConfig as DeepseekOCRConfig
from .deepseek.deepseek_ocr import DeepseekOCREncoder as DeepseekOCREncoder
from .deepseek.deepseek_ocr import ModeName as ModeName
from .deepseek.deepseek_ocr2 import DeepseekOCR2Config as DeepseekOCR2Config
from .deepseek.deepseek_ocr2 import DeepseekOCR2Encoder as DeepseekOCR2Encoder
from .deepseek.deepseek_v4 import DeepseekV4Config as DeepseekV4Config
from .deepseek.deepseek_v4 import DeepseekV4Encoder as DeepseekV4Encoder
from .deepseek.deepseek_vl import DeepseekVLConfig as DeepseekVLConfig
from .deepseek.deepseek_vl import DeepseekVLEncoder as DeepseekVLEncoder
from .deepseek.deepseek_vl import DeepseekVLHybridConfig as DeepseekVLHybridConfig
from .deepseek.deepseek_vl import DeepseekVLHybridEncoder as DeepseekVLHybridEncoder
from .deepseek.deepseek_vl2 import DeepseekVL2Config as DeepseekVL2Config
from .deepseek.deepseek_vl2 import DeepseekVL2Encoder as DeepseekVL2Encoder
from .deepseek.sam import SamSizes as SamSizes
from .dino.dinov2 import Dinov2Config as Dinov2Config
from .dino.dinov2 import Dinov2Encoder as Dinov2Encoder
from .dino.dinov3 import Dinov3Config as Dinov3Config
from .dino.dinov3 import Dinov3Encoder as Dinov3Encoder
from .gemma.gemma4 import Gemma4Config as Gemma4Config
from .gemma.gemma4 import Gemma4Encoder as Gemma4Encoder
from .glm.glm4v import Glm4VConfig as Glm4VConfig
from .glm.glm4v import Glm4VEncoder as Glm4VEncoder
from .glm.glm_ocr import GlmOCRConfig as GlmOCRConfig
from .glm.glm_ocr import GlmOCREncoder as GlmOCREncoder
from .ibm.granite_docling import GraniteDoclingConfig as GraniteDoclingConfig
from .ibm.granite_docling import GraniteDoclingEncoder as GraniteDoclingEncoder
from .ibm.granite_docling import RouteName as RouteName
from .idefics.idefics3 import Idefics3Config as Idefics3Config
from .idefics.idefics3 import Idefics3Encoder as Idefics3Encoder
from .intern.intern_vit import InternViT as InternViT
from .intern.intern_vit import InternViTConfig as InternViTConfig
from .kimi.moonvit import MoonViTConfig as MoonViTConfig
from .kimi.moonvit import MoonViTEncoder as MoonViTEncoder
from .layers.blocks import BlockSizes as BlockSizes
from .layers.blocks import Gelu as Gelu
from .lfm.lfm2_vl import Lfm2VLConfig as Lfm2VLConfig
from .lfm.lfm2_vl import Lfm2VLEncoder as Lfm2VLEncoder
from .llama.llama4 import Llama4Config as Llama4Config
from .llama.llama4 import Llama4Encoder as Llama4Encoder
from .meta.muse_glimmer import MuseGlimmerConfig as MuseGlimmerConfig
from .meta.muse_glimmer import MuseGlimmerEncoder as MuseGlimmerEncoder
from .meta.sam3 import Sam3Config as Sam3Config
from .meta.sam3 import Sam3Encoder as Sam3Encoder
from .minicpm.minicpm_v import MiniCPMVConfig as MiniCPMVConfig
from .minicpm.minicpm_v import MiniCPMVEncoder as MiniCPMVEncoder
from .minimax.minimax_m3 import MiniMaxM3Config as MiniMaxM3Config
from .minimax.minimax_m3 import MiniMaxM3Encoder as MiniMaxM3Encoder
from .mistral.pixtral import PixtralConfig as PixtralConfig
from .mistral.pixtral import PixtralEncoder as PixtralEncoder
from .nvidia.c_radio import CRadioConfig as CRadioConfig
from .nvidia.c_radio import CRadioEncoder as CRadioEncoder
from .nvidia.cosmos3_edge import Cosmos3EdgeConfig as Cosmos3EdgeConfig
from .nvidia.cosmos3_edge import Cosmos3EdgeEncoder as Cosmos3EdgeEncoder
from .nvidia.nemotron import NemotronConfig as NemotronConfig
from .nvidia.nemotron import NemotronEncoder as NemotronEncoder
from .qwen.qwen2_5_vl import Qwen2_5VLConfig as Qwen2_5VLConfig
from .qwen.qwen2_5_vl import Qwen2_5VLEncoder as Qwen2_5VLEncoder
from .qwen.qwen2_vl import Qwen2VLConfig as Qwen2VLConfig
from .qwen.qwen2_vl import Qwen2VLEncoder as Qwen2VLEncoder
from .qwen.qwen3_vl import Qwen3VLConfig as Qwen3VLConfig
from .qwen.qwen3_vl import Qwen3VLEncoder as Qwen3VLEncoder
from .rednote.dots_ocr import DotsOCRConfig as DotsOCRConfig
from .rednote.dots_ocr import DotsOCREncoder as DotsOCREncoder
from .siglip.siglip import Gemma3Config as Gemma3Config
from .siglip.siglip import Gemma3Encoder as Gemma3Encoder
from .siglip.siglip import LlavaOnevisionConfig as LlavaOnevisionConfig
from .siglip.siglip import LlavaOnevisionEncoder as LlavaOnevisionEncoder
from .siglip.siglip import PaliGemmaConfig as PaliGemmaConfig
from .siglip.siglip import PaliGemmaEncoder as PaliGemmaEncoder
from .siglip.siglip import SiglipConfig as SiglipConfig
from .siglip.siglip import SiglipEncoder as SiglipEncoder
from .siglip.siglip2 import Siglip2Config as Siglip2Config
from .siglip.siglip2 import Siglip2Encoder as Siglip2Encoder
from .step.step3 import Step3Config as Step3Config
from .step.step3 import Step3Encoder as Step3Encoder
from .step.step3_vl import Step3VLConfig as Step3VLConfig
from .step.step3_vl import Step3VLEncoder as Step3VLEncoder
from .tencent.hunyuan_vl import HunyuanVLConfig as HunyuanVLConfig
from .tencent.hunyuan_vl import HunyuanVLEncoder as HunyuanVLEncoder

if TYPE_CHECKING:
    from .base.saving import Publication as Publication
    from .inputs.intake import Video as Video
    from .streams.item_errors import ItemError as ItemError
    from .streams.pruning import PrunedTokens as PrunedTokens
    from .streams.pruning import prune_video_tokens as prune_video_tokens

_MODULES = {
    alias.name: f"{'.' * node.level}{node.module}"
    for node in ast.walk(ast.parse(Path(__file__).read_text(encoding="utf-8")))
    if isinstance(node, ast.ImportFrom) and node.level
    for alias in node.names
}
"""The public names, which the imports above list -> the module that defines each."""
__all__ = sorted(_MODULES)


if not TYPE_CHECKING:  # else a type checker would accept any misspelt name

    def __getattr__(name: str) -> object:
        """Import a public name when it is first used (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
