"""Accelerated towers on a GPU: same numbers, same bits again, the module stays the module."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from encoders import VisionEncoder
from graphwrap.encoder_forms import FormKernels
from tests.gpu.gpu_towers import (
    FAMILIES,
    NEEDS_CUDA,
    Grids,
    any_sync_is_an_error,
    assert_padding_changes_no_bit,
    calls_of,
    form,
    forms,
    new_tower,
    on_gpu,
    tower,
)
from tests.support.graphs.outputs import assert_same_bits, copy_of, fields, worst_distance

pytestmark = NEEDS_CUDA

WIDER = {torch.float32: torch.float64, torch.float16: torch.float32}
"""The dtype whose result counts as exact."""
FLOOR = {torch.float32: 1e-6, torch.float16: 1e-3}
"""Relative L2 errors that are always allowed: a few roundings of one block."""


def assert_as_exact(
    fast: VisionEncoder, encoder: VisionEncoder, pixels: torch.Tensor, grids: Grids
) -> None:
    """The rule for one grid: an error at most 1.3 times the reference's, float32 being the truth.

    Two runs in bfloat16 are no measure of each other: both are as far from the truth.
    """
    truth = copy.deepcopy(encoder).float()(pixels.float(), grids)
    theirs = encoder(pixels, grids)
    for name, value in fields(fast(pixels, grids)).items():
        exact = fields(truth)[name]
        ours, reference = ((x.float() - exact).norm() for x in (value, fields(theirs)[name]))
        assert ours <= 1.3 * reference, f"{name}: {ours:.3e} against {reference:.3e}"


@pytest.mark.parametrize(("name", "kernels"), forms(FAMILIES))
def test_every_kernel_gives_the_references_output_and_its_bits_again(
    name: str, kernels: FormKernels
) -> None:
    encoder, fast = tower(name), form(name, kernels)
    for seed, grids in enumerate(calls_of(name).values()):
        pixels = on_gpu(encoder, grids, seed)
        first = copy_of(fast(pixels, grids))
        assert_as_exact(fast, encoder, pixels, grids)
        assert_same_bits(fast(pixels, grids), first)
    if kernels != "reference":
        assert fast.accelerator is not None
        assert kernels in fast.accelerator.kernels_used or kernels == "auto"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_other_dtypes_are_accelerated_and_as_exact(name: str, dtype: torch.dtype) -> None:
    encoder = new_tower(name, dtype)
    fast = encoder.accelerated()
    exact = copy.deepcopy(encoder).to(WIDER[dtype])
    for seed, grids in enumerate(calls_of(name).values()):
        pixels = on_gpu(encoder, grids, seed).to(dtype)
        truth = fields(exact(pixels.to(WIDER[dtype]), grids))
        theirs = fields(encoder(pixels, grids))
        for field, value in fields(fast(pixels, grids)).items():
            ours, reference = (
                float((x.to(WIDER[dtype]) - truth[field]).norm() / truth[field].norm())
                for x in (value, theirs[field])
            )
            assert ours <= max(1.3 * reference, FLOOR[dtype]), f"{field}: {ours}, {reference}"
    assert fast.kernel_choices()["reference_because"] is None


def test_layers_that_clip_are_as_exact_and_a_graph_gives_their_bits() -> None:
    encoder = new_tower("gemma4_e2b")
    fast = encoder.accelerated()
    for seed, grids in enumerate(calls_of("gemma4_e2b").values()):
        pixels = on_gpu(encoder, grids, seed)
        assert_as_exact(fast, encoder, pixels, grids)
        metadata = fast.prepare_encoder_metadata(grids)
        first = copy_of(fast(pixels, encoder_metadata=metadata))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            held = fast(pixels, encoder_metadata=metadata)
        graph.replay()
        assert_same_bits(held, first)
    assert fast.kernel_choices()["layers_called"] == 0


def test_float64_runs_the_reference_and_warns_once() -> None:
    encoder = new_tower("qwen3_vl", torch.float64)
    with pytest.warns(UserWarning, match="float64") as warned:
        fast = encoder.accelerated()
    assert len(warned) == 1
    pixels = on_gpu(encoder, [[1, 8, 8]]).double()
    assert_same_bits(fast(pixels, [[1, 8, 8]]), encoder(pixels, [[1, 8, 8]]))
    assert "float64" in str(fast.kernel_choices()["reference_because"])


@pytest.mark.parametrize(("name", "kernels"), forms(FAMILIES))
def test_nan_in_pad_rows_changes_no_bit_of_real_rows(name: str, kernels: FormKernels) -> None:
    assert_padding_changes_no_bit(form(name, kernels), name)


def test_mergers_on_a_second_stream_give_the_eager_bits() -> None:
    encoder, fast = tower("qwen3_vl"), form("qwen3_vl", "torch")
    grids = next(iter(calls_of("qwen3_vl").values()))
    pixels, metadata = on_gpu(encoder, grids), fast.prepare_encoder_metadata(grids)
    fast(pixels, encoder_metadata=metadata)  # compiles kernels, which a capture cannot
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = fast(pixels, encoder_metadata=metadata)
    for seed in range(20):
        pixels.copy_(on_gpu(encoder, grids, seed))
        graph.replay()
        assert_same_bits(held, copy_of(fast(pixels, encoder_metadata=metadata)))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_warm_forward_never_waits_for_the_gpu(name: str) -> None:
    fast = form(name, "auto")
    grids = next(iter(calls_of(name).values()))
    pixels = on_gpu(fast, grids)
    metadata = fast.prepare_encoder_metadata(grids)
    answer = copy_of(fast(pixels, encoder_metadata=metadata))
    with any_sync_is_an_error():
        output = fast(pixels, encoder_metadata=metadata)
    assert_same_bits(output, answer)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("counted", [True, False], ids=["in place", "through data"])
def test_an_update_of_one_layer_is_seen_by_the_next_call(name: str, counted: bool) -> None:
    encoder = new_tower(name)
    fast = encoder.accelerated()
    grids = next(iter(calls_of(name).values()))
    pixels = on_gpu(encoder, grids)
    for parameter in encoder.blocks[1].parameters():
        before = copy_of(fast(pixels, grids))
        (parameter if counted else parameter.data).add_(0.05 * torch.randn_like(parameter))
        after = copy_of(fast(pixels, grids))
        assert worst_distance(after, before) > 0, "the update was not seen"
        fresh = encoder.accelerated()
        fresh.load_kernel_choices(fast.kernel_choices())
        assert_same_bits(fresh(pixels, grids), after)


@pytest.mark.parametrize("counted", [True, False], ids=["in place", "through data"])
def test_a_replay_sees_an_update_of_derived_weights(counted: bool) -> None:
    encoder = new_tower("qwen2_5_vl")  # the family whose MLPs have aligned copies
    fast = encoder.accelerated()
    grids = next(iter(calls_of("qwen2_5_vl").values()))
    pixels, metadata = on_gpu(encoder, grids), fast.prepare_encoder_metadata(grids)
    before = copy_of(fast(pixels, encoder_metadata=metadata))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = fast(pixels, encoder_metadata=metadata)
    assert fast.accelerator is not None
    for parameter in encoder.get_submodule("blocks.1.mlp").parameters():
        (parameter if counted else parameter.data).add_(0.05 * torch.randn_like(parameter))
    fast.accelerator.refresh()
    graph.replay()
    after = copy_of(held)
    assert worst_distance(after, before) > 0, "the update was not seen"
    assert_same_bits(fast(pixels, encoder_metadata=metadata), after)


class Adapter(nn.Module):
    """A low-rank addition around a layer, as peft makes one."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        kwargs = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.down = nn.Linear(base.in_features, 4, bias=False, **kwargs).requires_grad_(False)
        self.up = nn.Linear(4, base.out_features, bias=False, **kwargs).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def linears(block: nn.Module) -> list[tuple[nn.Module, str]]:
    """Every Linear of a block, by its owner and name."""
    return [
        (owner, name)
        for owner in block.modules()
        for name, layer in owner.named_children()
        if type(layer) is nn.Linear
    ]


def add_adapters(encoder: VisionEncoder) -> None:
    for owner, name in linears(encoder.blocks[1]):
        setattr(owner, name, Adapter(getattr(owner, name)))


def add_hooks(encoder: VisionEncoder) -> None:
    for owner, name in linears(encoder.blocks[1]):
        getattr(owner, name).register_forward_hook(lambda module, args, out: out * 1.5)
    encoder.blocks[0].register_forward_hook(lambda module, args, out: out * 0.5)


@pytest.mark.parametrize("change", [add_adapters, add_hooks])
@pytest.mark.parametrize("name", FAMILIES)
def test_layers_that_are_more_than_their_weight_take_effect(
    name: str, change: Callable[[VisionEncoder], None]
) -> None:
    encoder = new_tower(name)
    fast = encoder.accelerated()
    grids = next(iter(calls_of(name).values()))
    pixels = on_gpu(encoder, grids)
    before = copy_of(fast(pixels, grids))
    change(encoder)
    after = fast(pixels, grids)
    assert worst_distance(after, before) > 0, "the same bits: the change had no effect"
    assert_as_exact(fast, encoder, pixels, grids)
    called: Any = fast.kernel_choices()["layers_called"]
    assert called > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_state_dict_and_copies_are_as_before(name: str) -> None:
    encoder = new_tower(name)
    keys = {key: (value.shape, value.dtype) for key, value in encoder.state_dict().items()}
    fast = encoder.accelerated()
    grids = next(iter(calls_of(name).values()))
    pixels = on_gpu(encoder, grids)
    answer = copy_of(fast(pixels, grids))
    for module in (encoder, fast, copy.deepcopy(fast)):
        state = module.state_dict()
        assert {key: (value.shape, value.dtype) for key, value in state.items()} == keys
    copied = copy.deepcopy(fast)
    copied.load_kernel_choices(fast.kernel_choices())
    assert_same_bits(copied(pixels, grids), answer)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("name", ["qwen3_vl", "intern_vit"])
def test_a_tower_on_another_gpu_than_the_current_one_is_accelerated(name: str) -> None:
    encoder = new_tower(name)
    grids = calls_of(name)["an image"]
    pixels = on_gpu(encoder, grids)
    answer = copy_of(encoder.accelerated("triton")(pixels, grids))
    fast = encoder.to("cuda:1").accelerated("triton")
    with torch.cuda.device(0):
        output = fast(pixels.to("cuda:1"), grids)
    for field, value in fields(output).items():
        assert value.device == torch.device("cuda:1")
        assert torch.equal(value.cpu(), fields(answer)[field].cpu())
