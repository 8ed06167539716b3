"""The families: one record per encoder.

A family has a record, which is Python (``family`` defines its class), and ``facts/<family>.json``,
which lists its published checkpoints. A module holds the records of one maker, and is named as the
folder of its towers in ``encoders``.

A new family is a record, an entry in ``FAMILIES`` and a file of facts.
"""

from __future__ import annotations

from collections.abc import Mapping

from .allenai import MOLMO2
from .baidu import ERNIE4_5_VL, PADDLEOCR_VL
from .clip import CLIP, LLAVA, LLAVA_NEXT
from .deepseek import (
    DEEPSEEK_OCR,
    DEEPSEEK_OCR2,
    DEEPSEEK_V4,
    DEEPSEEK_VL,
    DEEPSEEK_VL2,
    DEEPSEEK_VL_HYBRID,
)
from .dino import DINOV2, DINOV3
from .family import Family
from .gemma import GEMMA4
from .glm import GLM4V, GLM_OCR
from .ibm import GRANITE_DOCLING
from .idefics import IDEFICS3
from .intern import INTERN_VIT
from .kimi import MOONVIT
from .lfm import LFM2_VL
from .llama import LLAMA4
from .meta import MUSE_GLIMMER, SAM3
from .minicpm import MINICPM_V
from .minimax import MINIMAX_M3
from .mistral import PIXTRAL
from .nvidia import C_RADIO, COSMOS3_EDGE, NEMOTRON
from .qwen import QWEN2_5_VL, QWEN2_VL, QWEN3_VL
from .rednote import DOTS_OCR
from .siglip import GEMMA3, LLAVA_ONEVISION, PALIGEMMA, SIGLIP, SIGLIP2
from .step import STEP3, STEP3_VL
from .tencent import HUNYUAN_VL

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        INTERN_VIT,
        QWEN2_VL,
        QWEN2_5_VL,
        QWEN3_VL,
        STEP3_VL,
        STEP3,
        DEEPSEEK_OCR,
        DEEPSEEK_OCR2,
        DEEPSEEK_VL,
        DEEPSEEK_VL_HYBRID,
        DEEPSEEK_VL2,
        DEEPSEEK_V4,
        GLM4V,
        GLM_OCR,
        CLIP,
        LLAVA,
        LLAVA_NEXT,
        SIGLIP,
        SIGLIP2,
        GEMMA3,
        PALIGEMMA,
        LLAVA_ONEVISION,
        PIXTRAL,
        GEMMA4,
        PADDLEOCR_VL,
        IDEFICS3,
        GRANITE_DOCLING,
        MOLMO2,
        MOONVIT,
        LLAMA4,
        LFM2_VL,
        MINIMAX_M3,
        HUNYUAN_VL,
        ERNIE4_5_VL,
        DINOV2,
        DINOV3,
        SAM3,
        MUSE_GLIMMER,
        C_RADIO,
        NEMOTRON,
        COSMOS3_EDGE,
        DOTS_OCR,
        MINICPM_V,
    )
}
"""Every family by name."""
