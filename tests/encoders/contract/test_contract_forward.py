"""``forward`` reads no device values, compiles to one graph, and supports gradients and dtypes."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import EncoderOutput, Metadata
from tests.oracles import (
    BY_NAME,
    EVERY_TOWER,
    FEW_FAST,
    TOWERS,
    Family,
    LiftFloat32,
    build_pair,
    distance,
    distances,
    draw_pixels,
    draw_weights,
    fresh,
    grids_for,
    tiny,
)
from tests.oracles.references.step import HeadsInHalves

# --- no synchronisation ------------------------------------------------------------------------


def on_fake_gpu(encoder: VisionEncoder, pixels: Tensor, metadata: Metadata) -> EncoderOutput:
    """Run ``forward`` on fake GPU tensors, for which every read of a value raises an error."""
    host = {key: int(value) for key, value in metadata.items() if value.device.type == "cpu"}
    with FakeTensorMode():

        def blank(like: Tensor) -> Tensor:
            return torch.empty(like.shape, dtype=like.dtype, device="cuda")

        values = [*encoder.named_parameters(), *encoder.named_buffers()]
        weights = {key: blank(value) for key, value in values}
        faked = {
            key: torch.tensor(host[key], dtype=torch.int32) if key in host else blank(value)
            for key, value in metadata.items()
        }
        return torch.func.functional_call(
            encoder, weights, (blank(pixels),), {"encoder_metadata": faked}
        )


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.bfloat16) for name in TOWERS),
        *product(["intern_vit_300m", "gemma4"], [torch.float16, torch.float32, torch.float64]),
    ],
    ids=str,
)
def test_forward_reads_no_device_value(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All CUDA paths (flash, memory-efficient, masked, dense) run on fake tensors."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    encoder, grids = tiny(name, dtype), grids_for(name)
    pixels = draw_pixels(encoder, grids)
    metadata = encoder.prepare_encoder_metadata(grids, max_frames_per_batch=6, device="meta")
    output = on_fake_gpu(encoder, pixels, metadata)
    expected = tiny(name)(pixels, grids)
    assert output.pooler_output.shape == expected.pooler_output.shape
    assert output.pooler_output.dtype == dtype
    assert output.pooler_output.device.type == "cuda"


def test_the_fake_gpu_does_catch_a_read() -> None:
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.zeros(1, device="cuda").item()


@pytest.mark.parametrize("name", TOWERS)
def test_forward_runs_without_any_values_at_all(name: str) -> None:
    """Meta tensors have no values, so output shapes depend on input shapes alone."""
    encoder, grids = fresh(name).to("meta"), grids_for(name)
    pixels = draw_pixels(tiny(name), grids).to("meta")
    metadata = encoder.prepare_encoder_metadata(grids)
    output = encoder(pixels, encoder_metadata=metadata)
    expected = tiny(name)(draw_pixels(tiny(name), grids), grids)
    assert output.last_hidden_state.shape == expected.last_hidden_state.shape
    assert output.pooler_output.shape == expected.pooler_output.shape


# --- torch.compile -----------------------------------------------------------------------------


@pytest.mark.slow
def test_forward_with_metadata_compiles_into_one_kernel_program() -> None:
    """Of a tower that pools and clamps; ``test_integrations_docs.py`` compiles Qwen3-VL so."""
    torch.compiler.reset()
    encoder, grids = tiny("gemma4"), grids_for("gemma4")
    pixels = draw_pixels(encoder, grids)
    metadata = encoder.prepare_encoder_metadata(grids)
    compiled = torch.compile(encoder.forward, fullgraph=True, backend="inductor")
    output = compiled(pixels, encoder_metadata=metadata)
    assert max(distances(output, encoder(pixels, grids)).values()) <= 2e-6


@pytest.mark.parametrize("name", FEW_FAST)
def test_one_compilation_without_a_convolution_serves_every_grid(name: str) -> None:
    """Capacities keep all shapes constant, and a product embeds the patches."""
    torch.compiler.reset()
    encoder, graphs = tiny(name), []

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(encoder.forward, fullgraph=True, backend=count, dynamic=False)
    rows = 3 if BY_NAME[name].tiled else 128
    shape = draw_pixels(encoder, grids_for(name)).shape[1:]
    pixels = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(0))
    for grids in (grids_for(name), grids_for(name)[:1], grids_for(name)[1:]):
        metadata = encoder.prepare_encoder_metadata(
            grids,
            max_frames_per_batch=4,
            max_seqlen_override=80,
            max_input_size=rows,
            max_windows_per_batch=48,
        )
        output = compiled(pixels, encoder_metadata=metadata)
        eager = encoder(pixels, encoder_metadata=metadata)
        assert max(distances(output, eager).values()) <= 2e-6
    (graph,) = graphs
    assert "torch.conv" not in graph.code


def loss_of(output: EncoderOutput) -> Tensor:
    """Return a scalar that depends on every field, weighted so that no sum cancels."""
    fields = [output.last_hidden_state, output.pooler_output, *output.deepstack_features]
    total = fields[0].new_zeros(())
    for number, field in enumerate(fields):
        wave = torch.arange(field.numel(), dtype=field.dtype, device=field.device).view_as(field)
        total = total + (field * (wave * 0.37 + number).sin()).sum()
    return total


def reference_order(reference: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return gradients with their rows in the order of the reference's weights."""
    return reference.permuted(state) if isinstance(reference, HeadsInHalves) else state


def gradients_of(encoder: VisionEncoder, loss: Tensor) -> dict[str, Tensor]:
    names, weights = zip(*encoder.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, weights), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_vl", "gemma4"])
def test_the_compiled_backward_gives_the_eager_gradients(name: str) -> None:
    """With taps and DeepStack, and with pooling; the compiled forward runs for every tower."""
    torch.compiler.reset()
    encoder, grids = fresh(name, torch.float64).requires_grad_(True), grids_for(name)
    pixels = draw_pixels(encoder, grids, dtype=torch.float64)
    metadata = encoder.prepare_encoder_metadata(grids)
    compiled = torch.compile(encoder.forward, fullgraph=True, backend="aot_eager")
    eager = gradients_of(encoder, loss_of(encoder(pixels, grids)))
    traced = gradients_of(encoder, loss_of(compiled(pixels, encoder_metadata=metadata)))
    for key, gradient in traced.items():
        assert distance(gradient, eager[key]) <= 1e-10, key


# --- autograd ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*TOWERS, "qwen2_5_omni", "qwen3_5"])
def test_gradients_match_transformers_in_float64(name: str) -> None:
    family, lift = BY_NAME[name], LiftFloat32()
    grids = [[2, 6, 6]] if family.tiled else [[2, 4, 6], [1, 10, 10]]
    encoder, reference = build_pair(family, family.tiny, torch.float64, lift)
    encoder.requires_grad_(True)
    reference.requires_grad_(True)
    pixels, grid_thw = draw_pixels(encoder, grids, dtype=torch.float64), torch.tensor(grids)
    ours = gradients_of(encoder, loss_of(encoder(pixels, grid_thw)))
    with lift:
        loss_of(family.output(reference, pixels, grid_thw)).backward()
    theirs = dict(reference.named_parameters())
    for key, gradient in reference_order(reference, family.keys(ours)).items():
        truth = theirs[key].grad
        # Without rope, a key's bias adds one number to all scores of a query: its gradient is zero.
        scale = max(float(truth.norm()), 1e-3)
        assert float((gradient - truth).norm()) / scale <= 1e-8, key


@pytest.mark.parametrize("name", TOWERS)
def test_pixels_get_gradients(name: str) -> None:
    encoder, grids = tiny(name), grids_for(name)
    pixels = draw_pixels(encoder, grids).requires_grad_(True)
    loss_of(encoder(pixels, grids)).backward()
    assert bool((pixels.grad != 0).any(-1).all())


@pytest.mark.parametrize("name", TOWERS)
def test_gradient_checkpointing_gives_the_same_gradients(name: str) -> None:
    encoder, grids = fresh(name).train().requires_grad_(True), grids_for(name)
    pixels = draw_pixels(encoder, grids)
    plain = gradients_of(encoder, loss_of(encoder(pixels, grids)))
    encoder.gradient_checkpointing = True
    saved = gradients_of(encoder, loss_of(encoder(pixels, grids)))
    for key, gradient in saved.items():
        assert torch.equal(gradient, plain[key]), key


@pytest.mark.parametrize("name", ["intern_vit_300m", "qwen2_5_vl", "qwen3_vl"])
def test_gradient_checkpointing_keeps_less(name: str) -> None:
    """The test counts the tensors that autograd saves; checkpointing saves far fewer."""
    encoder, grids = fresh(name).train().requires_grad_(True), grids_for(name)
    pixels, saved = draw_pixels(encoder, grids), []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.numel())
        return tensor

    counts = {}
    for switch in (False, True):
        encoder.gradient_checkpointing = switch
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            encoder(pixels, grids)
        counts[switch] = len(saved)
    assert counts[True] < 0.5 * counts[False]


@pytest.mark.parametrize("name", TOWERS)
def test_a_step_of_fine_tuning_lowers_the_loss(name: str) -> None:
    encoder, grids = fresh(name).train().requires_grad_(True), grids_for(name)
    pixels = draw_pixels(encoder, grids)
    optimiser = torch.optim.SGD(encoder.parameters(), lr=1e-4)
    losses = []
    for _ in range(2):
        loss = encoder(pixels, grids).pooler_output.pow(2).mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[1] < losses[0]


# --- state and dtypes --------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOWERS)
def test_state_dict_round_trips_to_the_same_bits(name: str) -> None:
    encoder, grids = tiny(name), grids_for(name)
    other = draw_weights(type(encoder)(encoder.config), seed=1).eval()
    pixels = draw_pixels(encoder, grids)
    assert not torch.equal(other(pixels, grids).pooler_output, encoder(pixels, grids).pooler_output)
    other.load_state_dict(encoder.state_dict(), strict=True)
    assert torch.equal(other(pixels, grids).pooler_output, encoder(pixels, grids).pooler_output)


BUFFERS = {
    "gemma4": ["std_bias", "std_scale"],  # buffers in transformers, too
    "dinov2": ["mask_token"],  # which no forward pass reads
    "dinov3": ["mask_token"],
}


@pytest.mark.parametrize("name", TOWERS)
def test_state_dict_holds_parameters_and_nothing_else(name: str) -> None:
    encoder = tiny(name)
    published = BUFFERS.get(name, [])
    parameters = [key for key, _ in encoder.named_parameters()]
    assert [key for key in encoder.state_dict() if key not in published] == parameters
    assert [key for key, _ in encoder.named_buffers()] == published


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", EVERY_TOWER, ids=lambda family: family.name)
def test_half_precision_runs_on_the_cpu(family: Family, dtype: torch.dtype) -> None:
    """Over three blocks, outputs differ from float32 by at most 5 % in bfloat16, 1 % in float16."""
    name = family.name
    encoder, grids = tiny(name, dtype), grids_for(name)
    pixels = draw_pixels(encoder, grids)
    output = encoder(pixels, grids)
    assert output.last_hidden_state.dtype == output.pooler_output.dtype == dtype
    worst = distances(output, tiny(name)(pixels, grids))
    assert max(worst.values()) <= {torch.bfloat16: 0.05, torch.float16: 0.01}[dtype], worst


@pytest.mark.parametrize("name", TOWERS)
def test_pixels_of_any_floating_dtype_are_taken(name: str) -> None:
    encoder, grids = tiny(name), grids_for(name)
    pixels = draw_pixels(encoder, grids).bfloat16()
    expected = encoder(pixels.float(), grids).pooler_output
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        output = encoder(pixels.to(dtype), grids).pooler_output
        assert output.dtype == torch.float32
        assert torch.equal(output, expected)


@pytest.mark.parametrize("name", TOWERS)
def test_pixels_that_are_not_contiguous_are_taken(name: str) -> None:
    encoder, grids = tiny(name), grids_for(name)
    pixels = draw_pixels(encoder, grids)
    strided = pixels.transpose(0, -1).contiguous().transpose(0, -1)
    assert not strided.is_contiguous()
    assert torch.equal(encoder(strided, grids).pooler_output, encoder(pixels, grids).pooler_output)


@pytest.mark.parametrize("name", TOWERS)
def test_outputs_are_contiguous_and_own_their_memory(name: str) -> None:
    encoder, grids = tiny(name), grids_for(name)
    output = encoder(draw_pixels(encoder, grids), grids)
    assert output.last_hidden_state.is_contiguous()
    assert output.pooler_output.is_contiguous()
    assert isinstance(output.deepstack_features, tuple)


@pytest.mark.parametrize("name", TOWERS)
def test_two_runs_give_the_same_bits(name: str) -> None:
    encoder, grids = tiny(name), grids_for(name)
    pixels = draw_pixels(encoder, grids)
    assert torch.equal(encoder(pixels, grids).pooler_output, encoder(pixels, grids).pooler_output)
