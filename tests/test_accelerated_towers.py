"""Accelerated encoders give the reference's outputs, follow its weights, and know when to stop."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from accelerated_cases import (
    CLOSE,
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
    small,
)
from encoders.contract import EncoderOutput
from oracles import (
    BY_NAME,
    FEW_FAST,
    build_encoder,
    distances,
    draw_pixels,
    fields_of,
    slow,
    tiny,
)

pytestmark = [
    needs_triton,
    needs_interpreter,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]


# --- outputs --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fused_in_interpreter")
@pytest.mark.parametrize("name", [*FEW_FAST, *map(slow, ["qwen2_5_omni", "exaone4_5", "qwen3_5"])])
def test_every_output_is_that_of_the_reference(name: str) -> None:
    encoder = tiny(name)
    fast = encoder.accelerated()
    assert type(fast) is type(encoder)
    assert_close(run(fast, name), run(encoder, name))
    assert_fused(fast)


@pytest.mark.usefixtures("fused_in_interpreter")
@pytest.mark.parametrize("name", FEW_FAST)
def test_the_same_call_gives_the_same_bits(name: str) -> None:
    fast = tiny(name).accelerated()
    assert same_bits(run(fast, name), run(fast, name))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("layer", [0, 1, -2])
def test_the_selected_layer_is_the_references(layer: int) -> None:
    family = BY_NAME["intern_vit_300m"]
    encoder = build_encoder(family, {**family.tiny, "select_layer": layer})
    assert_close(run(encoder.accelerated(), family.name), run(encoder, family.name))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_intermediates_are_the_references_in_any_order(name: str) -> None:
    encoder, grids = tiny(name), grids_for(name)
    fast, pixels = encoder.accelerated(), draw_pixels(encoder, grids)
    for wanted in (None, 1, [0], [2, 0], [-2]):
        ours = fast.forward_intermediates(pixels, grids, wanted)
        theirs = encoder.forward_intermediates(pixels, grids, wanted)
        for mine, truth in zip(ours, theirs, strict=True):
            assert (mine - truth).norm() <= CLOSE * truth.norm()
    assert_close(run(fast, name), run(encoder, name))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_states_already_given_are_not_written_over(name: str) -> None:
    encoder, grids = tiny(name), grids_for(name)
    pixels = draw_pixels(encoder, grids)
    kept, copied = [], []
    for state in encoder.accelerated().block_outputs(pixels, grids, [0, 1, 2]):
        kept.append(state)
        copied.append(state.clone())
    assert all(map(torch.equal, kept, copied))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_padding_full_of_nan_changes_no_real_row(name: str) -> None:
    encoder, grids = small(name), grids_for(name)
    fast, real = encoder.accelerated(), run(encoder, name)
    pixels = draw_pixels(encoder, grids)
    rows = len(pixels) + (2 if BY_NAME[name].tiled else 12)
    room = {"max_batch_size": 6, "max_input_size": rows, "max_windows_per_batch": 9}
    metadata = encoder.prepare_encoder_metadata(grids, **room)
    outputs = []
    for filling in (float("nan"), 0.0):
        padded = torch.full((rows, *pixels.shape[1:]), filling)
        padded[: len(pixels)] = pixels
        output = fast(padded, encoder_metadata=metadata)
        outputs.append(EncoderOutput(*map(cut_to, output, real)))
    assert same_bits(*outputs)
    assert_close(outputs[0], real)


def cut_to(ours: Tensor | tuple[Tensor, ...], truth: Tensor | tuple[Tensor, ...]) -> object:
    """The rows that the unpadded output has."""
    if isinstance(ours, tuple):
        return tuple(map(cut_to, ours, truth))
    return ours[: len(truth)]


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_no_rows_give_no_tokens(name: str) -> None:
    encoder = small(name)
    pixels = draw_pixels(encoder, grids_for(name))[:0]
    for ours, truth in zip(
        fields_of(encoder.accelerated()(pixels, [])).values(),
        fields_of(encoder(pixels, [])).values(),
        strict=True,
    ):
        assert ours.shape == truth.shape


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_a_video_is_encoded_as_the_reference_does(name: str) -> None:
    encoder, grids = tiny(name), [[5, 2, 2]]
    pixels = draw_pixels(encoder, grids)
    assert_close(encoder.accelerated()(pixels, grids), encoder(pixels, grids))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", ["intern_vit_300m", "qwen2_vl"])
@torch.no_grad()
def test_encoding_images_gives_the_references_items(name: str) -> None:
    encoder, images = tiny(name), [torch.full((3, 56, 56), 90, dtype=torch.uint8)]
    ours, truth = encoder.accelerated().encode(images, [images]), encoder.encode(images, [images])
    for mine, item in zip(ours, truth, strict=True):
        assert_close(mine, item)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", FEW_FAST)
def test_half_precision_is_as_near_as_the_references(name: str) -> None:
    encoder = tiny(name, torch.float16)
    fast, truth = encoder.accelerated("torch"), run(tiny(name), name)
    ours, theirs = run(fast, name), run(encoder, name)
    assert ours.pooler_output.dtype == torch.float16
    reference = distances(theirs, truth)
    for field, far in distances(ours, truth).items():
        assert far <= 1.5 * reference[field] + 1e-4, field
    assert fast.kernel_choices()["attention"][0]["kernel"] == "triton"


# --- weights --------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_the_state_is_that_of_the_encoder(name: str, tmp_path: Path) -> None:
    encoder, untouched = fresh(name), fresh(name).state_dict()
    fast = encoder.accelerated()
    run(fast, name)
    for state in (encoder.state_dict(), fast.state_dict()):
        assert list(state) == list(untouched)
        for key, value in state.items():
            assert value.dtype == untouched[key].dtype
            assert torch.equal(value, untouched[key])
    save_file(fast.state_dict(), tmp_path / "tower.safetensors")
    assert list(load_file(tmp_path / "tower.safetensors")) == sorted(untouched)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_copies_and_pickles_run_on_their_own(name: str) -> None:
    encoder = fresh(name)
    fast, truth = encoder.accelerated(), run(encoder, name)
    run(fast, name)
    twins = [copy.deepcopy(fast), pickle.loads(pickle.dumps(fast)), copy.deepcopy(encoder)]
    for weight in encoder.parameters():
        weight.zero_()
    for twin in twins:
        assert_close(run(twin, name), truth)
    assert twins[2].accelerator is None
    for twin in twins[:2]:
        assert twin.accelerator is not fast.accelerator
        assert_fused(twin)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_a_state_loaded_later_is_taken(name: str) -> None:
    encoder, other = fresh(name), fresh(name)
    fast = encoder.accelerated()
    run(fast, name)
    for weight in other.parameters():
        weight.mul_(0.9)
    for assign in (False, True):
        encoder.load_state_dict(other.state_dict(), assign=assign)
        assert_close(run(fast, name), run(other, name))
        other.load_state_dict({key: 0.8 * x for key, x in other.state_dict().items()})


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", FEW_FAST)
def test_an_encoder_cast_later_runs_in_its_new_dtype(name: str) -> None:
    encoder = fresh(name)
    fast = encoder.accelerated()
    for dtype in (torch.float32, torch.float16, torch.float32):
        encoder.to(dtype)
        output, half = run(fast, name), dtype == torch.float16
        assert output.pooler_output.dtype == dtype
        assert_close(output, run(encoder, name), 1e-2 if half else CLOSE)
        assert fast.accelerator.taken == ("triton" if half else "reference")


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", FEW_FAST)
def test_each_parameter_written_in_place_is_seen_next_call(name: str) -> None:
    encoder, grids = fresh(name), [[1, 2, 2]]
    fast, pixels = encoder.accelerated(), draw_pixels(encoder, grids)
    truth = encoder(pixels, grids)
    assert_close(fast(pixels, grids), truth)
    for key, weight in encoder.named_parameters():
        before = weight.clone()
        weight.mul_(1.5)
        changed = fast(pixels, grids)
        assert_close(changed, encoder(pixels, grids))
        assert max(distances(changed, truth).values()) > 10 * CLOSE, key
        weight.copy_(before)
    assert_close(fast(pixels, grids), truth)


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_a_weight_written_after_inference_mode_is_seen(name: str) -> None:
    encoder, grids = fresh(name), [[1, 2, 2]]
    fast, pixels = encoder.accelerated(), draw_pixels(encoder, grids)
    with torch.inference_mode():
        fast(pixels, grids)
    for weight in encoder.parameters():
        weight.mul_(0.9)
    assert_close(fast(pixels, grids), encoder(pixels, grids))


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
def test_weights_shared_by_two_blocks_stay_shared(name: str) -> None:
    encoder = fresh(name)
    first, last = (encoder.blocks[number].parts() for number in (0, 2))
    last.proj.weight = first.proj.weight
    encoder.blocks[2].mlp = encoder.blocks[0].mlp
    assert_close(run(encoder.accelerated(), name), run(encoder, name))


# --- what runs the reference ----------------------------------------------------------------------


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
@pytest.mark.parametrize("name", FEW_FAST)
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
