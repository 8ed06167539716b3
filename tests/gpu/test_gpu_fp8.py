"""Products in fp8 on a GPU: near bfloat16, the same bits again, in graphs too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from encoders import VisionEncoder
from encoders.accelerated.fused_blocks import FusedForward
from graphwrap import GraphedEncoder
from tests.gpu.gpu_towers import (
    FAMILIES,
    GRAPHED,
    any_sync_is_an_error,
    assert_padding_changes_no_bit,
    calls_of,
    new_tower,
    on_gpu,
)
from tests.support.graphs.outputs import assert_same_bits, copy_of, worst_distance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
        reason="needs products in fp8",
    ),
]


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product that can run in fp8 does, whatever is faster."""
    monkeypatch.setattr(FusedForward, "_time", lambda self, step, parts, fp8: 0.0 if fp8 else 1.0)


def in_fp8(encoder: VisionEncoder) -> VisionEncoder:
    return encoder.accelerated(precision="fp8")


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("name", FAMILIES)
def test_fp8_is_near_bfloat16_and_gives_its_bits_again(name: str) -> None:
    encoder = new_tower(name)
    fast = in_fp8(encoder)
    for seed, grids in enumerate(calls_of(name).values()):
        pixels = on_gpu(encoder, grids, seed)
        first = copy_of(fast(pixels, grids))
        assert worst_distance(first, encoder(pixels, grids)) <= 0.15
        assert_same_bits(fast(pixels, grids), first)
    products: Any = fast.kernel_choices()["products"]
    steps = {row["step"] for row in products}
    assert steps == {"qkv", "proj", "mlp"}


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("name", GRAPHED)
def test_a_graph_in_fp8_gives_the_eager_bits_and_sees_new_weights(name: str) -> None:
    encoder = new_tower(name)
    fast, grids = in_fp8(encoder), next(iter(calls_of(name).values()))
    pixels, metadata = on_gpu(encoder, grids), fast.prepare_encoder_metadata(grids)
    fast(pixels, encoder_metadata=metadata)  # compiles kernels, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = fast(pixels, encoder_metadata=metadata)
    for seed in range(3):
        pixels.copy_(on_gpu(encoder, grids, seed))
        for parameter in encoder.parameters():
            parameter.data.add_(0.02 * torch.randn_like(parameter))
        graph.replay()
        assert_same_bits(held, copy_of(fast(pixels, encoder_metadata=metadata)))
    assert_same_bits(held, in_fp8(encoder)(pixels, encoder_metadata=metadata))


@pytest.mark.usefixtures("forced")
@pytest.mark.parametrize("name", GRAPHED)
def test_nan_in_pad_rows_changes_no_bit_in_fp8(name: str) -> None:
    assert_padding_changes_no_bit(in_fp8(new_tower(name)), name)


@pytest.mark.usefixtures("forced")
def test_a_warm_forward_in_fp8_never_waits_for_the_gpu() -> None:
    fast = in_fp8(new_tower("qwen2_5_vl"))
    grids = next(iter(calls_of("qwen2_5_vl").values()))
    pixels, metadata = on_gpu(fast, grids), fast.prepare_encoder_metadata(grids)
    answer = copy_of(fast(pixels, encoder_metadata=metadata))
    with any_sync_is_an_error():
        output = fast(pixels, encoder_metadata=metadata)
    assert_same_bits(output, answer)


def test_graphs_that_choose_fp8_by_time_give_their_bits_again() -> None:
    encoder = new_tower("qwen2_5_vl")
    graphed = GraphedEncoder(encoder, [2048], precision="fp8", outputs=("pooler_output",))
    grids = [[1, 64, 64], [1, 64, 64]]
    output = copy_of(graphed(on_gpu(encoder, grids), grids))
    again = graphed(on_gpu(encoder, grids), grids)
    assert_same_bits(again, output)
    graphed.release()
