"""When an accelerated encoder runs the reference: training, tracing, autocast and transforms."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.oracles import draw_pixels, fields_of, tiny
from tests.support.accelerated.cases import (
    OURS,
    QWEN,
    assert_close,
    assert_fused,
    fresh,
    grids_for,
    needs_interpreter,
    needs_triton,
    run,
    same_bits,
)

pytestmark = [
    needs_triton,
    needs_interpreter,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_training_runs_the_reference_and_gets_its_gradients(name: str) -> None:
    encoder, grids = fresh(name).requires_grad_(True), grids_for(name)
    fast, pixels = encoder.accelerated(), draw_pixels(encoder, grids)
    gradients = []
    for tower in (encoder, fast):
        output = tower(pixels, grids)
        loss = sum(field.pow(2).sum() for field in fields_of(output).values())
        gradients.append(torch.autograd.grad(loss, list(encoder.parameters()), allow_unused=True))
    for ours, theirs in zip(*gradients, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", QWEN)
def test_pixels_that_require_gradients_get_the_references(name: str) -> None:
    encoder, grids = tiny(name), grids_for(name)
    gradients = []
    for tower in (encoder, encoder.accelerated()):
        pixels = draw_pixels(encoder, grids).requires_grad_(True)
        tower(pixels, grids).pooler_output.sum().backward()
        gradients.append(pixels.grad)
    assert torch.equal(*gradients)


@pytest.mark.slow
@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", ["intern_vit_300m", "qwen2_5_vl"])
def test_a_compiled_tower_is_the_reference_in_one_graph(name: str) -> None:
    torch.compiler.reset()
    encoder, grids = tiny(name), grids_for(name)
    fast, metadata = encoder.accelerated(), encoder.prepare_encoder_metadata(grids)
    compiled = torch.compile(fast.forward, fullgraph=True, backend="eager")
    with torch.no_grad():
        output = compiled(draw_pixels(encoder, grids), encoder_metadata=metadata)
    assert_close(output, run(encoder, name))
    assert fast.kernel_choices()["reference_because"] == "torch.compile is tracing"


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_autocast_runs_the_reference(name: str) -> None:
    encoder = tiny(name)
    fast = encoder.accelerated()
    torch.set_autocast_enabled("cuda", True)
    try:
        output = run(fast, name)
    finally:
        torch.set_autocast_enabled("cuda", False)
    assert same_bits(output, run(encoder, name))
    assert fast.kernel_choices()["reference_because"] == "autocast is on"
    run(fast, name)
    assert_fused(fast)


@pytest.mark.usefixtures("fused")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # in torch's own jvp
@pytest.mark.parametrize("name", OURS)
def test_transforms_of_functions_run_the_reference(name: str) -> None:
    encoder, grids = tiny(name), [[1, 2, 2]]
    metadata = encoder.prepare_encoder_metadata(grids)
    every = torch.stack([draw_pixels(encoder, grids, seed) for seed in range(2)])

    def tokens(tower: nn.Module) -> object:
        return lambda pixels: tower(pixels, encoder_metadata=metadata).pooler_output

    fast = encoder.accelerated()
    with sdpa_kernel(SDPBackend.MATH):
        for call in (
            lambda tower: torch.func.vmap(tokens(tower))(every),
            lambda tower: torch.func.jvp(tokens(tower), (every[0],), (every[1],))[1],
        ):
            assert torch.equal(call(fast), call(encoder))


@pytest.mark.usefixtures("fused_in_interpreter")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # in torch's own jvp
@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_dual_numbers_keep_their_tangents(name: str) -> None:
    encoder, grids = tiny(name), [[1, 2, 2]]
    tangents = []
    for tower in (encoder, encoder.accelerated()):
        pixels, direction = (draw_pixels(encoder, grids, seed) for seed in range(2))
        with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
            output = tower(forward_ad.make_dual(pixels, direction), grids)
            tangents.append(forward_ad.unpack_dual(output.pooler_output).tangent)
    assert torch.equal(*tangents)
