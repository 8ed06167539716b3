"""Fused attention with SAM's relative positions, against the reference; on the CPU interpreted."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from accelerated_cases import DEVICE, needs_interpreter, needs_triton, relative
from deepseek_cases import build
from encoders.accelerated.attention_kernels import RelativeViews
from encoders.accelerated.choices import RELATIVE, KernelChoices
from encoders.parts.sam import SamAttention, in_windows
from oracles import distances, draw_pixels
from oracles.memory import LargestTensor

pytestmark = needs_triton

DTYPES = [torch.float32, torch.float16] if DEVICE.type == "cpu" else [torch.float16]
"""On a GPU a float32 product is one of TensorFloat-32, and no tower takes the kernel there."""
ROUNDING = {torch.float32: 2e-6, torch.float16: 2e-3}
VIEWS = {
    "whole": RelativeViews(2, 5, 7, 0),
    "whole, as wide as a line of keys": RelativeViews(1, 16, 16, 0),
    "whole, several keys per line": RelativeViews(1, 3, 40, 0),
    "windows that fit": RelativeViews(1, 8, 12, 4),
    "windows beyond the view": RelativeViews(2, 20, 17, 14),
    "a window larger than the view": RelativeViews(1, 4, 4, 5),
    "a view of one patch": RelativeViews(1, 1, 1, 0),
}


def attention_of(size: int, views: RelativeViews, heads: int = 2) -> SamAttention:
    """SAM's attention in float64, without the product after it."""
    torch.manual_seed(0)
    module = SamAttention(heads * size, heads, views.window or max(views.h, views.w))
    module.proj = nn.Identity()  # type: ignore[assignment]
    return module.double().to(DEVICE).requires_grad_(False)


def fused(module: SamAttention, x: Tensor, views: RelativeViews) -> Tensor:
    """The kernel's result for rows [B, h, w, D], in their dtype."""
    from encoders.accelerated.relative_attention import attend

    tables = tuple(table.to(x.dtype) for table in module.tables(*views.segment))
    bias = module.qkv.bias.to(x.dtype)
    qkv = nn.functional.linear(x.flatten(0, 2), module.qkv.weight.to(x.dtype), bias)
    shape = (len(qkv), module.num_heads, x.shape[-1] // module.num_heads)
    out = attend(qkv, bias, tables, views, x.new_full(shape, float("nan")))
    return out.flatten(1).view_as(x)


def drawn(module: SamAttention, views: RelativeViews) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    width = module.qkv.in_features
    return torch.randn(*views[:3], width, generator=generator, dtype=torch.float64).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [16, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("views", VIEWS.values(), ids=VIEWS)
def test_the_kernel_computes_sams_attention(
    views: RelativeViews, size: int, dtype: torch.dtype
) -> None:
    module = attention_of(size, views)
    x = drawn(module, views)
    truth = in_windows(module, x, views.window) if views.window else module(x)
    assert relative(fused(module, x.to(dtype), views), truth) <= ROUNDING[dtype]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("name", ["whole", "windows beyond the view"])
def test_nan_in_one_view_stays_in_that_view(name: str) -> None:
    views, dtype = VIEWS[name], DTYPES[0]
    module = attention_of(16, views)
    x = drawn(module, views).to(dtype)
    clean = fused(module, x, views)
    x[1] = float("nan")
    dirty = fused(module, x, views)
    assert torch.equal(dirty[0], clean[0])
    assert dirty[1].isnan().all()


def test_no_tensor_grows_with_the_square_of_the_patches() -> None:
    views = RelativeViews(1, 32, 32, 0)
    module = attention_of(16, views)
    x = drawn(module, views).float()
    with LargestTensor() as largest:
        fused(module, x, views)
    patches, heads = 32 * 32, 2
    entries = patches * heads * (2 * (2 * 32 - 1) + 2)
    assert largest.numel <= entries * x.element_size()  # the interpreter copies tensors as bytes
    assert largest.numel < heads * patches**2


# --- towers ---------------------------------------------------------------------------------------

PATHS = [
    pytest.param("deepseek_ocr", "image", 4, marks=pytest.mark.slow),
    ("deepseek_ocr", "tiles", 8),
    ("deepseek_vl_hybrid", "high", 4),
]
"""Families, paths and views: the error of one view alone is noise, 0.7 to 1.35 times the other."""


def tower(name: str, path: str, dtype: torch.dtype = torch.float16) -> Any:
    return build(name, dtype).paths[path]


def case(encoder: Any, views: int = 1) -> tuple[Tensor, list[list[int]]]:
    grids = [[views, *encoder.grid_for(1)[1:]]]
    return draw_pixels(encoder, grids, dtype=torch.float16), grids


@needs_interpreter
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize(("name", "path", "views"), PATHS)
@torch.no_grad()
def test_half_precision_is_as_exact_as_the_reference(name: str, path: str, views: int) -> None:
    encoder = tower(name, path)
    fast = encoder.accelerated()
    pixels, grids = case(encoder, views)
    truth = copy.deepcopy(encoder).double()(pixels.double(), grids)
    theirs = distances(encoder(pixels, grids), truth)
    for field, ours in distances(fast(pixels, grids), truth).items():
        assert ours <= 1.1 * theirs[field], field
    choices = fast.kernel_choices()
    assert (choices["reference_because"], choices["layers_called"]) == (None, 0)
    assert {row["kernel"] for row in choices["relative_positions"]} == {"triton"}
    assert len(choices["relative_positions"]) == 2  # windows and whole views
    assert fast.accelerator.taken == "triton"


def disturb_products(tower: Any, fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for block in tower.blocks:
        block.attn.qkv.register_forward_hook(lambda module, args, out: 2 * out)


def pin_another(tower: Any, fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fast.accelerator.attention.asked = "flash2"


def break_the_kernel(tower: Any, fast: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoders.accelerated.relative_attention.distance", lambda *_: 0.3)


@needs_interpreter
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("change", [disturb_products, pin_another, break_the_kernel])
@torch.no_grad()
def test_what_the_kernel_cannot_run_is_called_and_counted(
    change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = tower("deepseek_vl_hybrid", "high")
    fast = encoder.accelerated()
    change(encoder, fast, monkeypatch)
    pixels, grids = case(encoder)
    assert max(distances(fast(pixels, grids), encoder(pixels, grids)).values()) == 0
    choices = fast.kernel_choices()
    assert choices["layers_called"] == 3  # blocks
    if change is break_the_kernel:
        assert choices["dropped"] == {RELATIVE: "its result is 3.0e-01 from float32 attention"}


@pytest.mark.parametrize(
    ("size", "views"), [(24, VIEWS["whole"]), (64, RelativeViews(1, 4, 129, 0))]
)
def test_other_head_sizes_and_wider_views_are_not_taken(size: int, views: RelativeViews) -> None:
    choices, rows = KernelChoices("auto"), torch.zeros(4, 2 * size, dtype=torch.float16)
    assert not choices.takes_relative(rows, 2, views)
    assert choices.to_dict()["relative_positions"] == []
