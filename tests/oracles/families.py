"""The one table of towers that all tests share, each at three sizes beside the published one.

Encoder, config class and published config come from the family's record in ``weights``; the
reference from transformers and the key map to it stand here.
"""

from __future__ import annotations

from encoders.lfm.lfm2_vl import Lfm2VLTower

from .family import make_row
from .keys import intern_keys, omni2_5_keys, omni3_keys, same_keys
from .references.c_radio import (
    C_RADIO_NARROW,
    c_radio_keys,
    c_radio_output,
    c_radio_reference,
    c_radio_v3_keys,
    c_radio_v3_output,
    c_radio_v3_reference,
)
from .references.clip import (
    UNPROJECTED,
    clip_keys,
    clip_output,
    clip_reference,
    llava_output,
    llava_reference,
)
from .references.dino import (
    DINO_NARROW,
    dino_output,
    dinov2_keys,
    dinov2_reference,
    dinov3_keys,
    dinov3_reference,
)
from .references.ernie4_5_vl import ERNIE_NARROW, ErnieReference, ernie_keys, ernie_output
from .references.gemma4 import gemma4_keys, gemma4_output, gemma4_reference
from .references.idefics3 import idefics3_keys, idefics3_output, idefics3_reference
from .references.intern_vit import intern_output, intern_reference
from .references.lfm2_vl import lfm2_keys, lfm2_output, lfm2_reference
from .references.llama4 import LLAMA4_NARROW, llama4_keys, llama4_output, llama4_reference
from .references.minimax_m3 import (
    MINIMAX_M3_NARROW,
    MiniMaxM3Reference,
    minimax_m3_keys,
    minimax_m3_output,
)
from .references.moonvit import KIMI_K25, KIMI_VL, MoonViTReference, moonvit_keys, moonvit_output
from .references.paddleocr_vl import paddle_keys, paddle_output, paddle_reference
from .references.pixtral import PixtralReference, pixtral_keys, pixtral_output
from .references.qwen import glm_output, qwen2_5_output, qwen_output, qwen_reference
from .references.sam3 import SAM3_NARROW, sam3_keys, sam3_output, sam3_reference
from .references.siglip import (
    HEADLESS,
    SIZES,
    gemma3_keys,
    gemma3_output,
    gemma3_reference,
    siglip2_output,
    siglip2_reference,
    siglip_keys,
    siglip_output,
    siglip_reference,
)
from .several_views import SEVERAL_VIEWS
from .sizes import (
    GEMMA4_NARROW,
    GLM4V_NARROW,
    GLM5_NARROW,
    INTERN_NARROW,
    INTERN_TILE,
    PADDLE_NARROW,
    PIXTRAL_NARROW,
    QWEN2_5_NARROW,
    QWEN2_5_SHALLOW,
    QWEN2_NARROW,
    QWEN3_NARROW,
    QWEN3_SHALLOW,
)

FAMILIES = [
    make_row(
        "intern_vit_300m", "OpenGVLab/InternVL2_5-1B", intern_reference, intern_keys, intern_output,
        shallow={"num_hidden_layers": 2},
        narrow=INTERN_NARROW,
        tiny={**INTERN_NARROW, "num_hidden_layers": 3, **INTERN_TILE},
    ),
    make_row(
        "intern_vit_6b", "OpenGVLab/InternVL2_5-38B", intern_reference, intern_keys, intern_output,
        shallow={"num_hidden_layers": 1},
        narrow={**INTERN_NARROW, "hidden_size": 60, "num_attention_heads": 3},
        tiny={**INTERN_NARROW, "num_hidden_layers": 3, **INTERN_TILE},
    ),
    make_row(
        "qwen2_vl", "Qwen/Qwen2-VL-7B-Instruct",
        qwen_reference("qwen2_vl", "Qwen2VisionTransformerPretrainedModel"),
        same_keys, qwen_output,
        shallow={"depth": 2},
        narrow=QWEN2_NARROW,
        tiny={**QWEN2_NARROW, "depth": 3},
    ),
    make_row(
        "qwen2_5_vl", "Qwen/Qwen2.5-VL-7B-Instruct",
        qwen_reference("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel"),
        same_keys, qwen2_5_output,
        shallow=QWEN2_5_SHALLOW,
        narrow=QWEN2_5_NARROW,
        tiny={**QWEN2_5_NARROW, **QWEN2_5_SHALLOW},
    ),
    make_row(
        "qwen2_5_omni", "Qwen/Qwen2.5-Omni-7B",
        qwen_reference("qwen2_5_omni", "Qwen2_5OmniVisionEncoder"),
        omni2_5_keys, qwen2_5_output,
        shallow=QWEN2_5_SHALLOW,
        narrow=QWEN2_5_NARROW,
        tiny={**QWEN2_5_NARROW, **QWEN2_5_SHALLOW},
        variant=True,
    ),
    make_row(
        "exaone4_5", "LGAI-EXAONE/EXAONE-4.5-33B",
        qwen_reference("exaone4_5", "Exaone4_5_VisionModel"),
        same_keys, qwen2_5_output,
        shallow={"depth": 2, "fullatt_block_indexes": [1]},
        narrow={**QWEN2_5_NARROW, "num_key_value_heads": 2},
        tiny={**QWEN2_5_NARROW, **QWEN2_5_SHALLOW, "num_key_value_heads": 2},
        variant=True,
    ),
    make_row(
        "qwen3_vl", "Qwen/Qwen3-VL-8B-Instruct",
        qwen_reference("qwen3_vl", "Qwen3VLVisionModel"),
        same_keys, qwen_output,
        shallow=QWEN3_SHALLOW,
        narrow=QWEN3_NARROW,
        tiny={**QWEN3_NARROW, **QWEN3_SHALLOW},
    ),
    make_row(
        "qwen3_omni", "Qwen/Qwen3-Omni-30B-A3B-Instruct",
        qwen_reference("qwen3_omni_moe", "Qwen3OmniMoeVisionEncoder"),
        omni3_keys, qwen_output,
        shallow=QWEN3_SHALLOW,
        narrow=QWEN3_NARROW,
        tiny={**QWEN3_NARROW, **QWEN3_SHALLOW},
        variant=True,
    ),
    make_row(
        "qwen3_5", "Qwen/Qwen3.5-27B",
        qwen_reference("qwen3_5", "Qwen3_5VisionModel"),
        same_keys, qwen_output,
        shallow={"depth": 2},
        narrow=QWEN3_NARROW,
        tiny={**QWEN3_NARROW, "depth": 3},
        variant=True,
    ),
    make_row(
        "glm4v", "zai-org/GLM-4.1V-9B-Thinking",
        qwen_reference("glm4v", "Glm4vVisionModel"),
        same_keys, glm_output,
        shallow={"depth": 2},
        narrow=GLM4V_NARROW,
        tiny={**GLM4V_NARROW, "depth": 3},
    ),
    make_row(
        "glm4v_moe", "zai-org/GLM-4.5V",
        qwen_reference("glm4v_moe", "Glm4vMoeVisionModel"),
        same_keys, glm_output,
        shallow={"depth": 2},
        narrow=GLM4V_NARROW,
        tiny={**GLM4V_NARROW, "depth": 3},
        variant=True,
    ),
    make_row(
        "glm_ocr", "zai-org/GLM-OCR",
        qwen_reference("glm_ocr", "GlmOcrVisionModel"),
        same_keys, glm_output,
        shallow={"depth": 2},
        narrow=GLM4V_NARROW,
        tiny={**GLM4V_NARROW, "depth": 3},
        variant=True,
    ),
    make_row(
        "glm5_next", "zai-org/GLM-5.3-Flash",
        qwen_reference("glm5_next", "Glm5NextVisionModel"),
        same_keys, glm_output,
        shallow={"depth": 2},
        narrow=GLM5_NARROW,
        tiny={**GLM5_NARROW, "depth": 3},
    ),
    make_row(
        "pixtral", "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
        PixtralReference, pixtral_keys, pixtral_output,
        shallow={"num_hidden_layers": 2},
        narrow=PIXTRAL_NARROW,
        tiny={**PIXTRAL_NARROW, "num_hidden_layers": 3},
    ),
    make_row(
        "pixtral_12b", "mistral-community/pixtral-12b",
        PixtralReference, pixtral_keys, pixtral_output,
        shallow={"num_hidden_layers": 2},
        narrow={**PIXTRAL_NARROW, "hidden_act": "gelu"},
        tiny={**PIXTRAL_NARROW, "num_hidden_layers": 3, "hidden_act": "gelu"},
        variant=True,
    ),
    make_row(
        "moonvit", "moonshotai/Kimi-K2.5", MoonViTReference, moonvit_keys, moonvit_output,
        shallow={"vt_num_hidden_layers": 2},
        narrow=KIMI_K25, tiny={**KIMI_K25, "vt_num_hidden_layers": 3},
    ),
    make_row(
        "kimi_vl", "moonshotai/Kimi-VL-A3B-Instruct", MoonViTReference, moonvit_keys,
        moonvit_output, shallow={"num_hidden_layers": 2},
        narrow=KIMI_VL, tiny={**KIMI_VL, "num_hidden_layers": 3}, variant=True,
    ),
    make_row(
        "llama4", "meta-llama/Llama-4-Scout-17B-16E-Instruct", llama4_reference, llama4_keys,
        llama4_output,
        shallow={"num_hidden_layers": 1},
        narrow=LLAMA4_NARROW,
        tiny={**LLAMA4_NARROW, "num_hidden_layers": 3, "image_size": 112},
    ),
    make_row(
        "minimax_m3", "MiniMaxAI/MiniMax-M3", MiniMaxM3Reference, minimax_m3_keys,
        minimax_m3_output, shallow={"num_hidden_layers": 1},
        narrow=MINIMAX_M3_NARROW, tiny={**MINIMAX_M3_NARROW, "num_hidden_layers": 3},
    ),
    make_row(
        "ernie4_5_vl", "baidu/ERNIE-4.5-VL-28B-A3B-PT", ErnieReference, ernie_keys, ernie_output,
        shallow={"depth": 2}, narrow=ERNIE_NARROW, tiny={**ERNIE_NARROW, "depth": 3},
    ),
    make_row(
        "gemma4", "google/gemma-4-31B-it", gemma4_reference, gemma4_keys, gemma4_output,
        shallow={"num_hidden_layers": 2},
        narrow=GEMMA4_NARROW,
        tiny={**GEMMA4_NARROW, "num_hidden_layers": 3, "pooling_kernel_size": 2},
    ),
    make_row(
        "gemma4_e2b", "google/gemma-4-E2B-it", gemma4_reference, gemma4_keys, gemma4_output,
        shallow={"num_hidden_layers": 2},
        narrow=GEMMA4_NARROW,
        tiny={**GEMMA4_NARROW, "num_hidden_layers": 3, "pooling_kernel_size": 2},
        variant=True,
    ),
    *SEVERAL_VIEWS,
    make_row(
        "siglip2", "google/siglip2-so400m-patch16-naflex", siglip2_reference, siglip_keys,
        siglip2_output,
        shallow={**HEADLESS, "num_hidden_layers": 2},
        narrow={**HEADLESS, **SIZES},
        tiny={**HEADLESS, **SIZES, "num_hidden_layers": 3},
    ),
    make_row(
        "siglip", "google/siglip2-so400m-patch14-384", siglip_reference, siglip_keys, siglip_output,
        shallow={**HEADLESS, "num_hidden_layers": 2},
        narrow={**HEADLESS, **SIZES},
        tiny={**HEADLESS, **SIZES, "num_hidden_layers": 3, "image_size": 112},
        variant=True,
    ),
    make_row(
        "clip", "openai/clip-vit-large-patch14-336", clip_reference, clip_keys, clip_output,
        shallow={**UNPROJECTED, "num_hidden_layers": 2},
        narrow={**UNPROJECTED, **SIZES},
        tiny={**UNPROJECTED, **SIZES, "num_hidden_layers": 3, "image_size": 112},
    ),
    make_row(
        "llava", "llava-hf/llava-1.5-7b-hf", llava_reference, clip_keys, llava_output,
        shallow={"num_hidden_layers": 2},
        narrow={**SIZES, "llm_width": 48},
        tiny={**SIZES, "num_hidden_layers": 3, "image_size": 112, "llm_width": 48},
        variant=True,
    ),
    make_row(
        "gemma3", "google/gemma-3-4b-it", gemma3_reference, gemma3_keys, gemma3_output,
        shallow={"num_hidden_layers": 1, "mm_tokens_per_image": 1024},
        narrow={**SIZES, "mm_tokens_per_image": 1024, "llm_width": 48},
        tiny={
            **SIZES, "num_hidden_layers": 3, "image_size": 112, "mm_tokens_per_image": 16,
            "llm_width": 48,
        },
        variant=True,
    ),
    make_row(
        "paddleocr_vl", "PaddlePaddle/PaddleOCR-VL", paddle_reference, paddle_keys, paddle_output,
        shallow={"num_hidden_layers": 1},
        narrow={**PADDLE_NARROW, "llm_width": 48},
        tiny={**PADDLE_NARROW, "num_hidden_layers": 3, "llm_width": 48},
    ),
    make_row(
        "idefics3", "HuggingFaceM4/Idefics3-8B-Llama3", idefics3_reference, idefics3_keys,
        idefics3_output,
        shallow={"num_hidden_layers": 1},
        narrow={**SIZES, "llm_width": 48},
        tiny={**SIZES, "num_hidden_layers": 3, "image_size": 112, "llm_width": 48},
        variant=True,
    ),
    make_row(
        "lfm2_vl", "LiquidAI/LFM2-VL-450M", lfm2_reference, lfm2_keys, lfm2_output,
        shallow={"num_hidden_layers": 2},
        narrow={**SIZES, "llm_width": 48},
        tiny={**SIZES, "num_hidden_layers": 3, "llm_width": 48},
        tower=Lfm2VLTower,
    ),
    make_row(
        "lfm2_5_vl", "LiquidAI/LFM2.5-VL-1.6B", lfm2_reference, lfm2_keys, lfm2_output,
        shallow={"num_hidden_layers": 2},
        narrow={**SIZES, "llm_width": 48},
        tiny={**SIZES, "num_hidden_layers": 3, "llm_width": 48},
        variant=True,
        tower=Lfm2VLTower,
    ),
    make_row(
        "dinov2", "facebook/dinov2-base", dinov2_reference, dinov2_keys, dino_output,
        shallow={"num_hidden_layers": 2},
        narrow=DINO_NARROW,
        tiny={**DINO_NARROW, "num_hidden_layers": 3, "image_size": 112},
    ),
    make_row(
        "dinov2_registers", "facebook/dinov2-with-registers-giant", dinov2_reference, dinov2_keys,
        dino_output,
        shallow={"num_hidden_layers": 1},
        narrow=DINO_NARROW,
        tiny={**DINO_NARROW, "num_hidden_layers": 3, "image_size": 112},
        variant=True,
    ),
    make_row(
        "dinov3", "facebook/dinov3-vitb16-pretrain-lvd1689m", dinov3_reference, dinov3_keys,
        dino_output,
        shallow={"num_hidden_layers": 2},
        narrow=SIZES,
        tiny={**SIZES, "num_hidden_layers": 3},
    ),
    make_row(
        "dinov3_plus", "facebook/dinov3-vith16plus-pretrain-lvd1689m", dinov3_reference,
        dinov3_keys, dino_output,
        shallow={"num_hidden_layers": 1},
        narrow=SIZES,
        tiny={**SIZES, "num_hidden_layers": 3},
        variant=True,
    ),
    make_row(
        "sam3", "facebook/sam3", sam3_reference, sam3_keys, sam3_output,
        shallow={
            "num_hidden_layers": 2, "global_attn_indexes": [1], "window_size": 2,
            "scale_factors": [1.0],
        },
        narrow=SAM3_NARROW,
        tiny={
            **SAM3_NARROW, "num_hidden_layers": 3, "global_attn_indexes": [1], "image_size": 112,
        },
    ),
    make_row(
        "c_radio", "nvidia/C-RADIOv4-H", c_radio_reference, c_radio_keys, c_radio_output,
        shallow={"num_hidden_layers": 1},
        narrow=C_RADIO_NARROW,
        tiny={**C_RADIO_NARROW, "num_hidden_layers": 3, "max_img_size": 192},
    ),
    make_row(
        "c_radio_v3", "nvidia/C-RADIOv3-B", c_radio_v3_reference, c_radio_v3_keys,
        c_radio_v3_output,
        shallow={"num_hidden_layers": 2},
        narrow=C_RADIO_NARROW,
        tiny={**C_RADIO_NARROW, "num_hidden_layers": 3, "max_img_size": 192},
        variant=True,
    ),
]  # fmt: skip
