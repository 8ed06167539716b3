"""The rows of the towers that read several views of an image: Step and DeepSeek."""

from __future__ import annotations

from encoders.deepseek.deepseek_ocr import DeepseekOCRTower
from encoders.deepseek.deepseek_vl import LowResolution
from encoders.deepseek.deepseek_vl2 import DeepseekVL2Tower
from encoders.step.step3 import Step3Tower
from encoders.step.step3_vl import Step3VLTower

from .family import make_row
from .keys import same_keys
from .references.deepseek import (
    NARROW,
    SAM_NARROW,
    SAM_TINY,
    hybrid,
    hybrid_low_keys,
    hybrid_low_output,
    hybrid_low_reference,
    ocr,
    ocr_keys,
    ocr_output,
    ocr_reference,
    siglip,
    vl_keys,
    vl_output,
    vl_reference,
)
from .references.deepseek_vl2 import VL2Reference, vl2_output
from .references.step import (
    Step3Reference,
    Step3VLReference,
    step3_output,
    step3_vl_keys,
    step3_vl_output,
)
from .sizes import (
    STEP3_NARROW,
    STEP3_VL_NARROW,
)

SEVERAL_VIEWS = [
    make_row(
        "step3_vl", "stepfun-ai/Step3-VL-10B", Step3VLReference, step3_vl_keys, step3_vl_output,
        shallow={"layers": 1},
        narrow=STEP3_VL_NARROW,
        tiny={**STEP3_VL_NARROW, "layers": 3, "image_size": 112},
        tower=Step3VLTower,
    ),
    make_row(
        "step3", "stepfun-ai/step3", Step3Reference, same_keys, step3_output,
        shallow={"num_hidden_layers": 1},
        narrow=STEP3_NARROW,
        tiny={**STEP3_NARROW, "num_hidden_layers": 3, "image_size": 112},
        variant=True,
        tower=Step3Tower,
    ),
    make_row(
        "deepseek_vl", "deepseek-ai/deepseek-vl-1.3b-chat", vl_reference, vl_keys, vl_output,
        shallow=siglip(layers=1),
        narrow={**siglip(width=64, heads=4, intermediate_size=112), "llm_width": 48},
        tiny={
            **siglip(width=64, heads=4, intermediate_size=112, layers=3, image_size=128),
            "llm_width": 48,
        },
        variant=True,
    ),
    make_row(
        "deepseek_vl_hybrid", "deepseek-ai/deepseek-vl-7b-chat", hybrid_low_reference,
        hybrid_low_keys, hybrid_low_output,
        shallow=hybrid(low={"layers": 1}, high={"layers": 1, "global_attn_indexes": [0]}),
        narrow={**hybrid(low=NARROW, high=SAM_NARROW), "llm_width": 48},
        tiny={
            **hybrid(low={**NARROW, "layers": 3, "image_size": 128}, high=SAM_TINY),
            "llm_width": 48,
        },
        variant=True,
        tower=LowResolution,
    ),
    make_row(
        "deepseek_vl2", "deepseek-ai/deepseek-vl2-tiny", VL2Reference, same_keys, vl2_output,
        shallow={"layers": 1},
        narrow={"width": 64, "heads": 4, "mlp_ratio": 1.75, "llm_width": 48},
        tiny={
            "width": 64, "heads": 4, "mlp_ratio": 1.75, "layers": 3, "llm_width": 48,
        },
        variant=True,
        tower=DeepseekVL2Tower,
    ),
    make_row(
        "deepseek_ocr", "deepseek-ai/DeepSeek-OCR", ocr_reference, ocr_keys, ocr_output,
        shallow=ocr(clip={"layers": 1}, sam={"layers": 2, "global_attn_indexes": [1]}),
        narrow={**ocr(clip=NARROW, sam={**SAM_NARROW, "downsample_channels": [40, 64]}),
                "llm_width": 48},
        tiny={
            **ocr(clip={**NARROW, "layers": 3}, sam={**SAM_TINY, "downsample_channels": [40, 64]}),
            "image_size": 128, "llm_width": 48,
        },
        variant=True,
        tower=DeepseekOCRTower,
        side=128,
    ),
]  # fmt: skip
