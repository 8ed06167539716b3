"""What completion offers on an encoder is what users call; what subclasses call is private."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import nn

from vitgraph.seeded import write_seeded_checkpoint
from weights import load_encoder

EVERY = {
    *("accelerated", "kernel_choices", "load_kernel_choices"),
    *("config", "preprocessor", "published", "num_features", "out_features", "device", "dtype"),
    *("preprocess", "encode", "encode_many", "embed", "embed_many", "item_encoder", "feature_maps"),
    *("forward_intermediates", "with_extras"),
    *("paths", "join", "blocks", "save_pretrained", "push_to_hub", "prepare_encoder_metadata"),
    *("pooling_head", "class_token"),
    *("gradient_checkpointing_enable", "gradient_checkpointing_disable"),
}
ONE_PATH = EVERY | {
    *("accelerator", "gradient_checkpointing"),
    *("budget_range", "row_shape", "grid_for", "item_specs", "split"),
    *("embed_patches", "steps", "in_input_order", "block_outputs", "inner_stacks", "prefix_rows"),
    "rows_of_prefix",
}
PACKED = ONE_PATH | {"pack", "prefixed_output"}
SEVERAL_PATHS = EVERY | {"split_paths"}
OFFERED = {
    "qwen2_vl": PACKED,
    "qwen2_5_vl": PACKED,
    "qwen3_vl": PACKED,
    "glm4v": PACKED,
    "glm_ocr": PACKED,
    "pixtral": PACKED,
    "kimi_k25": PACKED,
    "lfm2_5_vl": SEVERAL_PATHS,
    "ernie4_5_vl": PACKED,
    "intern_vit": ONE_PATH | {"at", "side"},
    "paddleocr_vl": PACKED,
    "idefics3": ONE_PATH | {"at", "side"},
    "clip": ONE_PATH | {"at", "side"},
    "llava": ONE_PATH | {"at", "side"},
    "siglip": ONE_PATH | {"at", "side"},
    "siglip2": PACKED,
    "gemma3": ONE_PATH | {"at", "side"},
    "deepseek_vl": ONE_PATH | {"at", "side"},
    "deepseek_vl_hybrid": SEVERAL_PATHS,
    "deepseek_vl2": SEVERAL_PATHS,
    "llava_next": SEVERAL_PATHS,
    "llava_onevision": SEVERAL_PATHS,
    "molmo2": SEVERAL_PATHS,
    "deepseek_ocr": SEVERAL_PATHS | {"at_mode"},
    "deepseek_ocr2": SEVERAL_PATHS,
    "gemma4": PACKED,
    "step3": SEVERAL_PATHS,
    "step3_vl": SEVERAL_PATHS,
}
"""The names of each family's encoder beside those of torch's modules, its layers and parameters."""


@pytest.mark.parametrize("family", OFFERED)
def test_completion_offers_what_users_call(family: str, tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path / family, family, width=64)
    encoder = load_encoder(folder, progress=False)
    tensors = [*encoder.named_parameters(), *encoder.named_buffers()]
    layers = {name for name, _ in [*encoder.named_children(), *tensors]}
    offered = set(dir(encoder)) - set(dir(nn.Module)) - layers - {"training"}
    assert {name for name in offered if not name.startswith("_")} == OFFERED[family] - layers
