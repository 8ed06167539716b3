"""Items that are encoded together equal the same items encoded one by one.

The bound, 2e-6 relative L2 in float32, means something only where float32 itself is better than
that: a test holds the noise of transformers' own float32 run below 1e-6 on the same towers.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import EncoderOutput
from tests.oracles import (
    BY_NAME,
    EVERY_TOWER,
    FRAME_BY_FRAME,
    JOINING_TOWERS,
    PATCH_TOWERS,
    TILE_TOWERS,
    TOWERS,
    Family,
    Grids,
    LiftFloat32,
    build_pair,
    distance,
    distances,
    draw_pixels,
    grids_for,
    joined,
    tiny,
)

PACKED, CALM = 2e-6, 0.5

EVEN = st.integers(1, 7).map(lambda n: 2 * n)
ITEM = st.tuples(st.integers(1, 3), EVEN, EVEN).map(list)
ITEMS = st.lists(ITEM, min_size=1, max_size=6)
TILED = st.tuples(st.lists(st.integers(1, 4), min_size=1, max_size=4), EVEN, EVEN).map(
    lambda drawn: [[t, drawn[1], drawn[2]] for t in drawn[0]]
)


def one_by_one(encoder: VisionEncoder, pixels: torch.Tensor, grids: Grids) -> list[EncoderOutput]:
    rows = [spec.input_size for spec in encoder.item_specs(grids)]
    return [encoder(part, [grid]) for part, grid in zip(pixels.split(rows), grids, strict=True)]


def assert_packed_equals_single(name: str, grids: Grids) -> None:
    encoder = tiny(name, calm=CALM)
    pixels = draw_pixels(encoder, grids, seed=len(grids))
    packed = encoder(pixels, grids)
    worst = distances(packed, joined(one_by_one(encoder, pixels, grids)))
    assert max(worst.values()) <= PACKED, (grids, worst)


@pytest.mark.parametrize("name", PATCH_TOWERS)
@given(grids=ITEMS)
@settings(max_examples=12)
def test_packed_images_and_clips_match_one_by_one(name: str, grids: Grids) -> None:
    assert_packed_equals_single(name, grids)


@pytest.mark.parametrize("name", TILE_TOWERS)
@given(grids=TILED)
@settings(max_examples=12)
def test_packed_tiles_match_one_by_one(name: str, grids: Grids) -> None:
    assert_packed_equals_single(name, grids)


@pytest.mark.parametrize("family", EVERY_TOWER, ids=lambda family: family.name)
def test_a_packed_pair_matches_one_by_one(family: Family) -> None:
    assert_packed_equals_single(family.name, grids_for(family.name))


@pytest.mark.parametrize("name", TOWERS)
def test_the_order_of_items_is_the_order_of_results(name: str) -> None:
    encoder = tiny(name, calm=CALM)
    grids = (
        [[2, 4, 4], [1, 4, 4], [3, 4, 4]]
        if BY_NAME[name].tiled
        else [[1, 4, 6], [2, 8, 2], [1, 10, 10]]
    )
    pixels = draw_pixels(encoder, grids)
    specs = encoder.item_specs(grids)
    parts = pixels.split([spec.input_size for spec in specs])
    forward = encoder.split(encoder(pixels, grids), grids)
    turned = grids[::-1]
    backward = encoder.split(encoder(torch.cat(parts[::-1]), turned), turned)
    for there, back in zip(forward, backward[::-1], strict=True):
        assert max(distances(there, back).values()) <= PACKED


@pytest.mark.parametrize("name", [name for name in FRAME_BY_FRAME if name not in JOINING_TOWERS])
def test_frames_of_a_clip_match_the_same_frames_as_images(name: str) -> None:
    """No frame attends to another frame in the tower."""
    encoder = tiny(name, calm=CALM)
    pixels = draw_pixels(encoder, [[3, 4, 6]])
    clip, images = encoder(pixels, [[3, 4, 6]]), encoder(pixels, [[1, 4, 6]] * 3)
    assert max(distances(clip, images).values()) <= PACKED


@pytest.mark.parametrize("name", TOWERS)
def test_split_returns_each_items_own_rows(name: str) -> None:
    encoder = tiny(name, calm=CALM)
    grids = [[2, 4, 6], [1, 4, 6]] if BY_NAME[name].tiled else [[2, 4, 6], [1, 2, 2]]
    output = encoder(draw_pixels(encoder, grids), grids)
    items = encoder.split(output, grids)
    whole = joined(items)
    assert torch.equal(whole.last_hidden_state, output.last_hidden_state)
    assert torch.equal(whole.pooler_output, output.pooler_output)
    for item, spec in zip(items, encoder.item_specs(grids), strict=True):
        assert item.last_hidden_state.shape[0] == spec.input_size
        assert item.pooler_output.shape[0] == spec.output_tokens
        assert all(layer.shape[0] == spec.output_tokens for layer in item.deepstack_features)
    assert items[0].last_hidden_state.data_ptr() == output.last_hidden_state.data_ptr()


@pytest.mark.parametrize("name", TOWERS)
def test_split_drops_the_pad_rows_behind_the_last_item(name: str) -> None:
    encoder = tiny(name, calm=CALM)
    grids = [[1, 4, 4], [1, 4, 4]]
    output = encoder(draw_pixels(encoder, [*grids, [1, 4, 4]]), [*grids, [1, 4, 4]])
    whole = joined(encoder.split(output, grids))
    rows = sum(spec.input_size for spec in encoder.item_specs(grids))
    assert torch.equal(whole.last_hidden_state, output.last_hidden_state[:rows])


@pytest.mark.parametrize("family", EVERY_TOWER, ids=lambda family: family.name)
def test_the_reference_is_exact_enough_in_float32_for_the_packed_bound(family: Family) -> None:
    grids = [[3, 14, 14]] if family.tiled else [[1, 14, 14], [3, 2, 12]]
    lift = LiftFloat32()
    encoder, reference = build_pair(family, family.tiny, calm=CALM)
    _, truth = build_pair(family, family.tiny, torch.float64, lift, CALM)
    pixels, grid_thw = draw_pixels(encoder, grids), torch.tensor(grids)
    rough = family.output(reference, pixels, grid_thw)
    with lift:
        exact = family.output(truth, pixels.double(), grid_thw)
    noise = distance(rough.pooler_output, exact.pooler_output)
    assert noise < 1e-6, noise
    assert noise > 1e-9
