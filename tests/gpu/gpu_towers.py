"""Towers at published widths with few blocks, and calls for them, for the GPU tests of graphs.

Costs are set aside (``replaying``): which of replay and eager is quicker is a benchmark's
question; here everything that fits is replayed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Literal, TypeAlias, cast

import pytest
import torch
from torch import Tensor

from encoders import (
    Gemma4Config,
    Gemma4Encoder,
    GlmOCRConfig,
    GlmOCREncoder,
    InternViT,
    Qwen2_5VLEncoder,
    Qwen2VLEncoder,
    Qwen3VLEncoder,
    VisionEncoder,
)
from encoders.accelerated.attention.candidates import KERNELS, AttentionKernel, is_installed
from encoders.accelerated.shapes import AttentionShape
from encoders.base.tile_encoder import TileEncoder
from encoders.block_parts import BlockParts, NamesItsParts
from encoders.contract import EncoderOutput, GridLike
from encoders.intern.intern_vit import InternViTConfig
from encoders.qwen.qwen2_5_vl import Qwen2_5VLConfig
from encoders.qwen.qwen2_vl import Qwen2VLConfig
from encoders.qwen.qwen3_vl import Qwen3VLConfig
from encoders.step.step3_vl import Step3VLConfig, Step3VLTower
from graphwrap import GraphedEncoder
from graphwrap.costs import Costs
from graphwrap.encoder_forms import FormKernels
from graphwrap.packing import Packer
from tests.support.graphs.outputs import EVERY_FIELD, assert_same_bits, fields

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
"""The marks of every test here."""
Grids = list[list[int]]
FAMILIES = ["intern_vit", "qwen2_5_vl", "qwen3_vl", "exaone4_5", "step3_vl", "glm5_next"]
"""One of each kind of block: fused steps, and layers that change, are tested on all of these.

They are layer scales; gated MLPs in windows, with copies of weights; GELU inside the product; keys
that heads share; tiles with rotary positions; normed queries and keys. (``test_gpu_parity.py`` and
``test_gpu_graphs_families.py`` run all other towers in their fused form.)
"""
GRAPHED = ["intern_vit", "qwen2_5_vl", "qwen3_vl"]
"""One of each kind of replay: tiles; windows beside segments; outputs of inner blocks."""
TILE_PATCHES = {"intern_vit": 32, "step3_vl": 36}
"""Side of a tile in patches, of the towers over tiles; of Step3-VL its path "tiles"."""
INTERN = {
    "force_image_size": 448,
    "llm_config": {"hidden_size": 896},
    "vision_config": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 2,
        "image_size": 448,
        "norm_type": "layer_norm",
        "qk_normalization": False,
        "qkv_bias": True,
    },
}
QWEN2_5 = {
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 3584,
    "depth": 3,
    "fullatt_block_indexes": [1],
}
EXAONE = {
    **QWEN2_5,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_heads": 32,
    "num_key_value_heads": 8,
    "out_hidden_size": 5120,
}
STEP3 = {
    "understand_projector_stride": 2,
    "projector_bias": False,
    "text_config": {"hidden_size": 4096},
    "vision_config": {
        "image_size": 728,
        "patch_size": 14,
        "width": 1536,
        "layers": 2,
        "heads": 16,
        "mlp_ratio": 8960 / 1536,
        "num_channels": 3,
        "use_cls_token": False,
        "use_abs_posemb": True,
        "use_ln_pre": True,
        "use_ln_post": False,
        "use_rope2d": True,
        "ls_init_value": 0.1,
        "layer_norm_eps": 1e-5,
        "hidden_act": "quick_gelu",
        "output_dim": None,
        "pool_type": "none",
    },
}
GLM5 = {"model_type": "glm5_next_vision", "depth": 2, "out_hidden_size": 4096}
GEMMA4_E2B = {
    "model_type": "gemma4_vision",
    "use_clipped_linears": True,
    "num_hidden_layers": 2,
    "pooling_kernel_size": 2,
}
"""Clipped layers; published are 3x3 patches per token, which the grids here are no multiples of."""
QWEN3 = {"depth": 3, "deepstack_visual_indexes": [0, 2], "out_hidden_size": 4096}


BUILD: dict[str, Callable[[], VisionEncoder]] = {
    "intern_vit": lambda: InternViT(InternViTConfig.from_hf(INTERN)),
    "qwen2_vl": lambda: Qwen2VLEncoder(Qwen2VLConfig.from_hf({"depth": 2})),
    "qwen2_5_vl": lambda: Qwen2_5VLEncoder(Qwen2_5VLConfig.from_hf(QWEN2_5)),
    "qwen3_vl": lambda: Qwen3VLEncoder(Qwen3VLConfig.from_hf(QWEN3)),
    "exaone4_5": lambda: Qwen2_5VLEncoder(Qwen2_5VLConfig.from_hf(EXAONE)),
    "glm5_next": lambda: GlmOCREncoder(GlmOCRConfig.from_hf(GLM5)),
    "gemma4_e2b": lambda: Gemma4Encoder(Gemma4Config.from_hf(GEMMA4_E2B)),
    "step3_vl": lambda: Step3VLTower(Step3VLConfig.from_hf(STEP3)),
}


def new_tower(name: str, dtype: torch.dtype = torch.bfloat16) -> VisionEncoder:
    """Published widths, two or three blocks, weights from a seed, scaled to peaked attention."""
    torch.manual_seed(0)
    encoder = BUILD[name]().eval().requires_grad_(False)
    for key, weight in encoder.named_parameters():
        if weight.ndim > 1 and "pos" not in key:
            weight.mul_(2.5 if "qkv" in key else 1.7)  # a Linear's own are 1 / sqrt(3 * inputs)
    for number, bound in enumerate(encoder.buffers()):
        if bound.ndim == 0:  # of a layer that clips
            bound.copy_(bound.sign() * (0.8 + 0.01 * number))
    return encoder.to("cuda", dtype)


@cache
def tower(name: str) -> VisionEncoder:
    """A shared tower; tests must not change it."""
    return new_tower(name)


@cache
def form(name: str, kernels: FormKernels) -> VisionEncoder:
    """A shared tower, or its accelerated form: one set of choices for all who compare bits."""
    return tower(name) if kernels == "reference" else tower(name).accelerated(kernels)


def forms(names: list[str]) -> list[tuple[str, FormKernels]]:
    """Every tower with the reference and every attention kernel that is installed and fits it."""
    if not torch.cuda.is_available():  # nothing will run, so nothing is built to be asked
        return [(name, "reference") for name in names]
    with torch.device("meta"):
        towers = {name: BUILD[name]() for name in names}
    return [(name, kernel) for name, made in towers.items() for kernel in kernels_for(made)]


def kernels_for(encoder: VisionEncoder) -> list[FormKernels]:
    """The reference and every attention kernel that is installed and takes this tower."""
    blocks = [block for block in encoder.modules() if isinstance(block, NamesItsParts)]
    every = [parts for parts in (block.parts() for block in blocks) if parts is not None]
    taking = [
        name
        for name, kernel in KERNELS.items()
        if every and is_installed(kernel.package) and all(fits(kernel, encoder, x) for x in every)
    ]
    return ["reference", *cast("list[FormKernels]", taking)]


def fits(kernel: AttentionKernel, encoder: VisionEncoder, parts: BlockParts) -> bool:
    """Whether a kernel takes the attention of a block; one kernel has relative positions."""
    if parts.relative is not None:
        return kernel.name == "triton"
    heads, shared = parts.num_heads, parts.num_key_value_heads or parts.num_heads
    size = parts.qkv.out_features // (heads + 2 * shared)
    equal, dtype = isinstance(encoder, TileEncoder), torch.bfloat16
    shape = AttentionShape(heads, size, 100, 1, 100, equal, str(dtype), heads // shared)
    return kernel.takes(shape, dtype, (9, 0))


def budgets_of(name: str) -> list[int]:
    tiles = {"intern_vit": 256, "step3_vl": 81}.get(name)
    return [tiles, 4 * tiles, 8 * tiles] if tiles else [64, 256, 1024]


def calls_of(name: str) -> dict[str, Grids]:
    """Images and clips alone and mixed; every item fits the largest budget."""
    if name in TILE_PATCHES:
        counts = {
            "one tile": [1],
            "an image": [7],
            "images": [1, 3, 1],
            "a clip": [8],
            "images and a clip": [1, 5, 4, 1],
        }
        side = TILE_PATCHES[name]
        return {call: [[count, side, side] for count in each] for call, each in counts.items()}
    return {
        "a thumbnail": [[1, 4, 6]],
        "an image": [[1, 34, 46]],
        "images": [[1, 16, 16], [1, 34, 46], [1, 2, 2], [1, 16, 26]],
        "a clip": [[16, 14, 14]],
        "images and a clip": [[1, 16, 16], [4, 16, 16], [1, 46, 34], [2, 8, 8], [1, 30, 2]],
    }


def pixels_for(encoder: Any, grids: GridLike, seed: int = 0) -> Tensor:
    """Normalised float32 pixels on the CPU."""
    rows = sum(spec.input_size for spec in encoder.item_specs(grids))
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, *encoder.row_shape, generator=generator)


def on_gpu(encoder: Any, grids: GridLike, seed: int = 0) -> Tensor:
    return pixels_for(encoder, grids, seed).to("cuda", torch.bfloat16)


def assert_padding_changes_no_bit(encoder: VisionEncoder, name: str) -> None:
    """Hold that real rows have the same bits beside pad rows of zeros and of NaN."""
    side = TILE_PATCHES.get(name)
    grids = [[2, side, side]] if side else [[1, 10, 14], [2, 4, 6]]
    pixels = on_gpu(encoder, grids)
    rows = len(pixels) + (2 if side else 60)
    metadata = encoder.prepare_encoder_metadata(
        grids, max_frames_per_batch=6, max_input_size=rows, max_windows_per_batch=12
    )
    outputs = []
    for fill in (0.0, float("nan")):
        padded = pixels.new_full((rows, *pixels.shape[1:]), fill)
        padded[: len(pixels)] = pixels
        outputs.append(encoder.split(encoder(padded, encoder_metadata=metadata), grids))
    for clean, poisoned in zip(*outputs, strict=True):
        assert all(bool(value.isfinite().all()) for value in fields(clean).values())
        assert_same_bits(clean, poisoned)


def replaying(encoder: Any, budgets: Any, **settings: Any) -> GraphedEncoder:
    """Captured graphs, routed as the static backend routes: everything that fits is replayed."""
    settings = {"outputs": EVERY_FIELD, "backend": "cudagraph", **settings}
    graphed = GraphedEncoder(encoder, budgets, **settings).capture(progress=False)
    assert graphed._captured is not None
    for path in graphed._captured.paths.values():
        measured = path.graphs.packer
        costs = Costs.unmeasured(path.graphs.by_budget)
        path.graphs.packer = Packer(costs, measured.max_batch_size, measured.eager_tokens)
    return graphed


@contextlib.contextmanager
def any_sync_is_an_error() -> Iterator[None]:
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


Moment: TypeAlias = Literal["run", "capture"]
"""When a test lets an encoder fail: while it runs on padding, or while its graph is captured."""


def fail_at(
    encoder: VisionEncoder,
    rows: int,
    moment: Moment,
    fail: Callable[[], None],
    times: int = 1,
) -> None:
    """Make ``forward`` fail after its work, the first times it runs or captures so many rows."""
    forward, left = encoder.forward, [times]

    def failing(pixel_values: Tensor, *args: Any, **kwargs: Any) -> EncoderOutput:
        output = forward(pixel_values, *args, **kwargs)
        captures = torch.cuda.is_current_stream_capturing()
        if len(pixel_values) == rows and captures == (moment == "capture") and left[0]:
            left[0] -= 1
            fail()
        return output

    encoder.forward = failing  # type: ignore[method-assign]
