"""Linear layers that clamp their inputs and outputs run inside fused blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from encoders.base.vision_encoder import VisionEncoder
from graphwrap import GraphedEncoder
from tests.oracles import distances, draw_pixels
from tests.support.accelerated.cases import (
    DEVICE,
    DTYPES,
    FEW_ROWS,
    NONE,
    activated,
    assert_close,
    assert_fused,
    drawn,
    fresh,
    needs_interpreter,
    needs_triton,
    normed,
    relative,
    run,
    run_twice,
    summed,
)
from tests.support.accelerated.wrapped_layers import Lora

pytestmark = [
    needs_triton,
    needs_interpreter,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
NAME = "gemma4_e2b"
"""A tower that clamps in every linear layer of its blocks."""


def tight() -> VisionEncoder:
    """Return a tower in which every bound moves the outputs, and no two are the same."""
    encoder = fresh(NAME)
    for number, bound in enumerate(encoder.buffers()):
        bound.mul_(0.3 + 0.001 * number)
    return encoder


def limits(low: float, high: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.tensor(low).to(DEVICE, dtype), torch.tensor(high).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["gelu_tanh", None])
def test_an_activation_clamps_what_it_reads_and_writes(
    kind: str | None, dtype: torch.dtype
) -> None:
    from encoders.accelerated.triton_kernels.activations import activate

    x, up = (3 * drawn(3, 140, dtype=dtype, seed=seed) for seed in range(2))
    x[0, 0] = up[1, 1] = float("nan")
    bounds = limits(-0.5, 1.0, dtype)
    for ranges in (NONE, (bounds, None, None), (None, bounds, None), (None, None, bounds)):
        for factor in (None, up):
            out = activate(x, kind, factor, ranges=ranges)
            truth = activated(x, kind, factor, ranges=ranges)
            assert torch.equal(out.isnan(), truth.isnan())
            assert relative(out.nan_to_num(), truth.nan_to_num()) <= 1e-3
            assert ranges is NONE or not torch.equal(out, activate(x, kind, factor))


@pytest.mark.parametrize("inner", [None, "RMS norm"])
def test_a_norm_clamps_the_branch_that_it_adds(inner: str | None) -> None:
    from encoders.accelerated.triton_kernels.norms import Norm, Sum, add_normalise

    norm = Norm(1 + drawn(72, seed=4), None, 1e-6, True)
    kept = limits(-0.5, 1.0, torch.float32)
    stream = Sum(drawn(5, 72), drawn(5, 72, seed=1), branch_norm=norm if inner else None)
    truth = summed(stream._replace(branch_range=kept))
    total, rows = add_normalise(stream._replace(branch_range=kept), norm)
    assert relative(total, truth) <= 1e-6
    assert relative(rows, normed(truth, norm)) <= 1e-6
    assert relative(truth, summed(stream)) > 1e-2


@pytest.mark.slow
@pytest.mark.usefixtures("fused_in_interpreter")
def test_a_bounded_tower_gives_the_references_outputs() -> None:
    encoder = tight()
    fast, truth = encoder.accelerated(), run(encoder, NAME, grids=FEW_ROWS)
    assert_close(run_twice(fast, NAME, FEW_ROWS), truth)
    assert_fused(fast)
    assert max(distances(truth, run(fresh(NAME), NAME, grids=FEW_ROWS)).values()) > 1e-2


@pytest.mark.usefixtures("fused")
def test_a_bound_written_in_place_is_seen() -> None:
    encoder = tight()
    fast, before = encoder.accelerated(), run(encoder, NAME)
    run(fast, NAME)
    for bound in encoder.blocks[1].buffers():
        bound.mul_(0.5)
    truth = run(encoder, NAME)
    assert_close(run(fast, NAME), truth)
    assert_fused(fast)
    assert max(distances(truth, before).values()) > 1e-3


@pytest.mark.usefixtures("fused")
def test_a_wrapped_or_hooked_layer_that_clamps_is_called_and_counted() -> None:
    encoder = tight()
    fast, block, before = encoder.accelerated(), encoder.blocks[1], run(encoder, NAME)

    def check() -> None:
        truth = run(encoder, NAME)
        assert_close(run(fast, NAME), truth)
        assert_fused(fast, layers_called=1)
        assert max(distances(truth, before).values()) > 1e-5

    def changed(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return 1.1 * out + 0.1

    for parent, key in ((block.attn, "qkv"), (block.mlp, "gate_proj"), (block.mlp, "down_proj")):
        layer = getattr(parent, key)
        setattr(parent, key, Lora(layer, 0.3))
        check()
        setattr(parent, key, layer)
        for module in (layer, layer.bounds[0]):
            hook = module.register_forward_hook(changed)
            check()
            hook.remove()
    block.post_norm1.register_forward_hook(changed)
    check()


@pytest.mark.usefixtures("fused")
def test_layers_that_clamp_stay_out_of_fp8() -> None:
    encoder = tight().bfloat16()
    fast = encoder.accelerated(precision="fp8")
    run(fast, NAME)
    assert_fused(fast)
    assert fast.kernel_choices()["products"] == []


@pytest.mark.usefixtures("fused")
@torch.no_grad()
def test_graphs_of_a_bounded_tower_replay_its_fused_blocks() -> None:
    encoder, grids = tight(), [[1, 4, 6], [1, 2, 4]]
    fast = encoder.accelerated()
    graphed = GraphedEncoder(fast, [8, 16], backend="static")
    pixels = draw_pixels(encoder, grids)
    ours, truth = graphed(pixels, grids).pooler_output, encoder(pixels, grids).pooler_output
    assert ours is not None
    assert relative(ours, truth) <= 2e-6
    assert graphed.stats().eager_items == 0
    assert_fused(fast)
