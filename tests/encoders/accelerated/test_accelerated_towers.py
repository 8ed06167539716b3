"""Accelerated encoders give the reference's outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from encoders.contract import EncoderOutput
from tests.oracles import (
    BY_NAME,
    FEW_FAST,
    KINDS,
    build_encoder,
    distances,
    draw_pixels,
    fields_of,
    slow,
    tiny,
)
from tests.support.accelerated.cases import (
    CLOSE,
    FEW_ROWS,
    OURS,
    assert_close,
    assert_fused,
    grids_for,
    needs_interpreter,
    needs_triton,
    run,
    same_bits,
    small,
)
from tests.support.comparisons import assert_all_equal

pytestmark = [
    needs_triton,
    needs_interpreter,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]


@pytest.mark.usefixtures("fused_in_interpreter")
@pytest.mark.parametrize(
    "name", [*FEW_FAST, *map(slow, ["qwen2_5_omni", "exaone4_5", "qwen3_5", "kimi_k3"])]
)
def test_every_output_is_that_of_the_reference(name: str) -> None:
    encoder = tiny(name)
    fast = encoder.accelerated()
    assert type(fast) is type(encoder)
    assert_close(run(fast, name, grids=FEW_ROWS), run(encoder, name, grids=FEW_ROWS))
    assert_fused(fast)


@pytest.mark.slow
@pytest.mark.usefixtures("fused_in_interpreter")
@pytest.mark.parametrize("name", KINDS)
def test_outputs_repeat_to_the_bit(name: str) -> None:
    fast = tiny(name).accelerated()
    assert same_bits(run(fast, name, grids=FEW_ROWS), run(fast, name, grids=FEW_ROWS))


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
    assert_all_equal(kept, copied)


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


def cut_to(ours: Any, truth: Any) -> Any:
    """The rows that the unpadded output has."""
    if isinstance(ours, tuple):
        return tuple(map(cut_to, ours, truth))
    if isinstance(ours, dict):
        return {name: cut_to(rows, truth[name]) for name, rows in ours.items()}
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


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("name", OURS)
@torch.no_grad()
def test_outputs_of_fused_blocks_are_the_references(name: str) -> None:
    encoder, grids, names = tiny(name), grids_for(name), ("blocks.0", "blocks.1", "blocks.1.mlp")
    pixels = draw_pixels(encoder, grids)
    expected = encoder.with_extras(names)(pixels, grids)
    for giving in (
        encoder.accelerated().with_extras(names),
        encoder.with_extras(names).accelerated(),
    ):
        output = giving(pixels, grids)
        assert_close(output, expected)
        for extra in names:
            assert (output[extra] - expected[extra]).norm() <= CLOSE * expected[extra].norm()
