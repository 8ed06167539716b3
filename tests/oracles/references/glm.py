"""The rows of GLM's towers, whose references are built and run like Qwen's."""

from __future__ import annotations

from ..family import make_row
from ..keys import same_keys
from ..sizes import GLM4V_NARROW, GLM5_NARROW
from .qwen import glm_output, qwen_reference

ROWS = [
    make_row(
        "glm4v", "zai-org/GLM-4.1V-9B-Thinking",
        qwen_reference("glm4v", "Glm4vVisionModel"),
        same_keys, glm_output,
        shallow={"depth": 2},
        narrow=GLM4V_NARROW,
        tiny={**GLM4V_NARROW, "depth": 3},
        slow=True,
        eager=True,
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
        eager=True,
    ),
    make_row(
        "glm5_next", "zai-org/GLM-5.3-Flash",
        qwen_reference("glm5_next", "Glm5NextVisionModel"),
        same_keys, glm_output,
        shallow={"depth": 2},
        narrow=GLM5_NARROW,
        tiny={**GLM5_NARROW, "depth": 3},
        slow=True,
        eager=True,
    ),
]  # fmt: skip
