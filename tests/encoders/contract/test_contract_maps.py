"""Item specs, grids for a budget, outputs of inner blocks, and feature maps."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from encoders.base.patch_encoder import RasterEncoder
from encoders.contract import EncoderItemSpec
from tests.oracles import (
    BY_NAME,
    FRAME_BY_FRAME,
    JOINING_TOWERS,
    MERGING_TOWERS,
    TOWERS,
    Grids,
    build_encoder,
    build_pair,
    distance,
    draw_pixels,
    grids_for,
    tiny,
)

BY_FRAME = [name for name in MERGING_TOWERS if name not in JOINING_TOWERS]
"""Towers whose frames, or pairs of them, make tokens of their own."""
UNIFORM = [name for name in TOWERS if not BY_NAME[name].learned(1, 1)]
"""Towers that make as many tokens of as many patches, whatever the shape of the image."""

# --- costs of items ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in BY_FRAME if name in FRAME_BY_FRAME])
def test_an_items_cost_is_its_patches_tokens_and_frames(name: str) -> None:
    windows = (2 * 1 * 3, 3 * 2) if name == "qwen2_5_vl" else (0, 0)
    learned, encoder = BY_NAME[name].learned, tiny(name)
    before = encoder.prefix_rows
    assert encoder.item_specs([[2, 4, 20], [1, 18, 10]]) == [
        EncoderItemSpec(160, 40 + 2 * learned(2, 10), 2, before + 80, windows[0]),
        EncoderItemSpec(180, 45 + learned(9, 5), 1, before + 180, windows[1]),
    ]


def test_an_items_cost_in_tiles() -> None:
    specs = tiny("intern_vit_300m").item_specs([[13, 32, 32], [1, 4, 8]])
    assert specs == [EncoderItemSpec(13, 13 * 256, 13, 1025), EncoderItemSpec(1, 8, 1, 33)]


@pytest.mark.parametrize("name", TOWERS)
def test_costs_agree_with_metadata_and_outputs(name: str) -> None:
    encoder, grids = tiny(name), grids_for(name)
    specs = encoder.item_specs(grids)
    metadata = encoder.prepare_encoder_metadata(grids)
    output = encoder(draw_pixels(encoder, grids), grids)
    assert sum(spec.input_size for spec in specs) == output.last_hidden_state.shape[0]
    assert sum(spec.output_tokens for spec in specs) == output.pooler_output.shape[0]
    assert sum(spec.segments for spec in specs) == len(metadata["cu_seqlens"]) - 1
    assert max(spec.longest_segment for spec in specs) == int(metadata["max_seqlen"])
    windows = metadata.get("cu_window_seqlens", torch.zeros(1))
    assert sum(spec.windows for spec in specs) == len(windows) - 1


# --- a grid for a budget -----------------------------------------------------------------------


@pytest.mark.parametrize("name", UNIFORM)
@given(tokens=st.integers(1, 3000))
@settings(max_examples=60)
def test_grid_for_makes_enough_tokens_with_the_fewest_rows(name: str, tokens: int) -> None:
    encoder = tiny(name)
    [spec] = encoder.item_specs([encoder.grid_for(tokens)])
    [unit] = encoder.item_specs([encoder.grid_for(1)])
    fewest = -(-tokens // unit.output_tokens)
    assert spec.output_tokens >= tokens
    assert spec.input_size == fewest * unit.input_size
    assert spec.output_tokens == fewest * unit.output_tokens


@pytest.mark.parametrize("name", UNIFORM)
def test_no_grid_with_fewer_rows_makes_as_many_tokens(name: str) -> None:
    """The test tries every grid of up to 64 patches or 3 tiles."""
    encoder = tiny(name)
    side = encoder.grid_for(1)[1:] if BY_NAME[name].tiled else None
    merge = 1 if side else encoder.config.spatial_merge_size
    shapes = [side] if side else list(itertools.product(range(merge, 65, merge), repeat=2))
    every = [[t, h, w] for t in (1, 2, 3) for h, w in shapes if side or t * h * w <= 64]
    specs = encoder.item_specs(every)
    for tokens in range(1, max(spec.output_tokens for spec in specs) + 1):
        [ours] = encoder.item_specs([encoder.grid_for(tokens)])
        best = min(s.input_size for s in specs if s.output_tokens >= tokens)
        assert ours.input_size == best


@pytest.mark.parametrize("name", BY_NAME)
def test_the_budget_range_is_positive_and_reachable(name: str) -> None:
    encoder = tiny(name)
    low, high = encoder.budget_range
    assert 1 <= low < high
    for tokens in (low, high):
        assert encoder.item_specs([encoder.grid_for(tokens)])[0].output_tokens == tokens


@pytest.mark.parametrize("name", TOWERS)
def test_row_shape_is_the_shape_of_a_row(name: str) -> None:
    encoder = tiny(name)
    grid = encoder.grid_for(encoder.budget_range[0])
    [spec] = encoder.item_specs([grid])
    pixels = torch.randn(spec.input_size, *encoder.row_shape)
    assert encoder(pixels, [grid]).pooler_output.shape[0] == spec.output_tokens


# --- inner blocks ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOWERS)
def test_the_last_intermediate_is_the_last_hidden_state(name: str) -> None:
    encoder, grids = tiny(name), grids_for(name)
    pixels = draw_pixels(encoder, grids)
    [last] = encoder.forward_intermediates(pixels, grids, 1)
    assert torch.equal(last, encoder(pixels, grids).last_hidden_state)


@pytest.mark.parametrize("name", TOWERS)
def test_intermediates_are_found_by_number_by_count_and_from_the_end(name: str) -> None:
    encoder, grids = tiny(name), grids_for(name)
    pixels = draw_pixels(encoder, grids)
    first, second, third = encoder.forward_intermediates(pixels, grids, None)
    assert not torch.equal(first, second)
    wanted: Any
    for wanted, expected in (
        ([0, 1, 2], [first, second, third]),
        ([2, 0], [third, first]),
        ((-1, -3), [third, first]),
        ([1, 1, -2], [second] * 3),
        (2, [second, third]),
        (3, [first, second, third]),
        (torch.tensor([0, 2]), [first, third]),
        (torch.tensor(2), [second, third]),
        (np.array([-1]), [third]),
        (np.int64(2), [second, third]),
        ([np.int32(1)], [second]),
        ([], []),
    ):
        found = encoder.forward_intermediates(pixels, grids, wanted)
        assert len(found) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), wanted


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize(
    "wanted", [0, 4, -1, [3], [-4], [0, 7], True, [0.5], [True], 1.5, "1", ["1"]], ids=repr
)
def test_a_block_that_does_not_exist_is_an_error(name: str, wanted: Any) -> None:
    encoder, grids = tiny(name), grids_for(name)
    with pytest.raises(ValueError, match=r"from 1 to 3|blocks 0 to 2"):
        encoder.forward_intermediates(draw_pixels(encoder, grids), grids, wanted)


@pytest.mark.parametrize("name", [name for name in TOWERS if name not in ("siglip2", "lfm2_vl")])
def test_every_intermediate_matches_the_references_block(name: str) -> None:
    """Hooks read the reference's blocks; window order is undone before the comparison."""
    family = BY_NAME[name]
    encoder, reference = build_pair(family, family.tiny)
    seen: list[Tensor] = []
    for block in family.blocks(reference):
        block.register_forward_hook(lambda module, args, out: seen.append(out))
    grids = [[2, 8, 8]] if family.tiled else [[2, 4, 6], [1, 10, 12]]
    pixels, grid_thw = draw_pixels(encoder, grids), torch.tensor(grids)
    family.output(reference, pixels, grid_thw)
    ours = encoder.forward_intermediates(pixels, grids)
    for mine, theirs in zip(ours, family.block_rows(encoder, grids, seen), strict=True):
        assert distance(mine, theirs) <= 1e-5


def test_intermediates_go_beyond_select_layer() -> None:
    """Blocks after ``select_layer`` are available too."""
    family = BY_NAME["intern_vit_300m"]
    encoder = build_encoder(family, {**family.tiny, "select_layer": -2})
    pixels, grids = draw_pixels(encoder, [[1, 4, 4]]), [[1, 4, 4]]
    _, second, third = encoder.forward_intermediates(pixels, grids)
    assert torch.equal(second, encoder(pixels, grids).last_hidden_state)
    assert not torch.equal(second, third)


@pytest.mark.parametrize("name", TOWERS)
def test_later_blocks_than_asked_for_are_not_run(name: str) -> None:
    family = BY_NAME[name]
    encoder = build_encoder(family, family.tiny)
    grids = grids_for(name)
    ran: list[int] = []
    for number, block in enumerate(encoder.blocks):
        block.register_forward_hook(lambda module, args, out, number=number: ran.append(number))
    encoder.forward_intermediates(draw_pixels(encoder, grids), grids, [1, 0])
    assert ran == [0, 1]


# --- features in space -------------------------------------------------------------------------


def patch_codes(name: str, grids: Grids) -> Tensor:
    """Return (item, t, y, x) of every row in the order of a tower, by plain loops.

    Patches run row by row, or in merge-block order.
    """
    side = 1 if issubclass(BY_NAME[name].tower_class, RasterEncoder) else 2
    return torch.tensor(
        [
            (item, frame, top + a, left + b)
            for item, (t, h, w) in enumerate(grids)
            for frame in range(t)
            for top in range(0, h, side)
            for left in range(0, w, side)
            for a in range(side)
            for b in range(side)
        ]
    )


def token_codes(grids: Grids) -> Tensor:
    """Return (item, t, y, x) of every merged token."""
    return torch.tensor(
        [
            (item, *place)
            for item, (t, h, w) in enumerate(grids)
            for place in itertools.product(range(t), range(h // 2), range(w // 2))
        ]
    )


def assert_each_code_is_at_its_place(maps: list[Tensor], sizes: list[tuple[int, int, int]]) -> None:
    assert [tuple(item.shape[:3]) for item in maps] == sizes
    for number, item in enumerate(maps):
        t, h, w = item.shape[:3]
        for place in itertools.product(range(t), range(h), range(w)):
            assert tuple(item[place].tolist()) == (number, *place)


@pytest.mark.parametrize("name", MERGING_TOWERS)
def test_patch_features_land_at_their_row_and_column(name: str) -> None:
    grids = [[2, 4, 6], [1, 10, 2], [1, 2, 2]]
    maps = tiny(name).feature_maps(patch_codes(name, grids), grids)
    assert_each_code_is_at_its_place(maps, [(2, 4, 6), (1, 10, 2), (1, 2, 2)])


@pytest.mark.parametrize("name", BY_FRAME)
def test_token_features_land_at_their_row_and_column(name: str) -> None:
    grids = [[2, 4, 6], [1, 10, 2], [1, 2, 2]]
    maps = tiny(name).feature_maps(token_codes(grids), grids)
    assert_each_code_is_at_its_place(maps, [(2, 2, 3), (1, 5, 1), (1, 1, 1)])


@pytest.mark.parametrize("name", MERGING_TOWERS)
def test_the_layout_is_the_one_the_pixels_came_in(name: str) -> None:
    """All weights after the patch embedding are zero, so a bright patch keeps its position.

    The norm that may follow the patch embedding keeps its weight.
    """
    family = BY_NAME[name]
    encoder = build_encoder(family, family.tiny)
    for key, weight in encoder.named_parameters():
        if not any(word in key for word in ("patch_embed", "post_conv", "ln_pre", "norm_pre")):
            weight.zero_()
    grids = [[1, 6, 8]]
    [place] = (patch_codes(name, grids)[:, 2:] == torch.tensor([3, 5])).all(1).nonzero()[0].tolist()
    pixels = torch.zeros(48, *encoder.row_shape)
    pixels[place] = 1.0
    hidden = encoder(pixels, grids).last_hidden_state
    [heat] = encoder.feature_maps(hidden, grids)
    dark = heat[0, 0, 0].norm()
    bright = (heat[0].norm(dim=-1) - dark).abs() > 1e-3
    assert bright.nonzero().tolist() == [[3, 5]]


@pytest.mark.parametrize("name", TOWERS)
def test_features_that_do_not_fit_the_grid_are_refused(name: str) -> None:
    encoder = tiny(name)
    with pytest.raises(ValueError, match=r"features have 7 .*the grid makes"):
        encoder.feature_maps(torch.zeros(7, 4), [[1, 4, 6]])


def tile_features(tiles: int, h: int, w: int) -> Tensor:
    """Return [tiles, 1+h*w, 3]: (tile, y, x) per row, and -1 in the class token's row."""
    codes = torch.tensor(list(itertools.product(range(tiles), range(h), range(w))))
    return torch.cat((torch.full((tiles, 1, 3), -1), codes.view(tiles, h * w, 3)), dim=1)


def tile_tokens(tiles: int, h: int, w: int, version: str) -> Tensor:
    """Return [tokens, 3]: (tile, y, x) per token in the order of pixel shuffle ``version``."""
    codes = torch.tensor(list(itertools.product(range(tiles), range(h // 2), range(w // 2))))
    codes = codes.view(tiles, h // 2, w // 2, 3)
    return (codes.transpose(1, 2) if version == "v1" else codes).reshape(-1, 3)


def test_tiles_lose_their_class_token_and_keep_their_raster() -> None:
    maps = tiny("intern_vit_300m").feature_maps(
        torch.cat((tile_features(2, 4, 6), tile_features(1, 4, 6))), [[2, 4, 6], [1, 4, 6]]
    )
    assert [tuple(item.shape) for item in maps] == [(2, 4, 6, 3), (1, 4, 6, 3)]
    assert maps[0][1, 3, 5].tolist() == [1, 3, 5]
    assert maps[1][0, 2, 4].tolist() == [0, 2, 4]


@pytest.mark.parametrize("thumbnail", [True, False])
def test_tiles_of_an_image_are_stitched_and_the_thumbnail_is_dropped(thumbnail: bool) -> None:
    """Tiles of 4x4 patches in 3 columns and 2 rows make one map of 8x12."""
    count = 6 + thumbnail
    [joined] = tiny("intern_vit_300m").feature_maps(
        tile_features(count, 4, 4), [[count, 4, 4]], [(3, 2, thumbnail)]
    )
    assert joined.shape == (1, 8, 12, 3)
    for y, x in itertools.product(range(8), range(12)):
        assert joined[0, y, x].tolist() == [y // 4 * 3 + x // 4, y % 4, x % 4]


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_tokens_of_an_image_are_stitched_in_either_shuffle_order(version: str) -> None:
    """Pixel shuffle v1 lists tokens by column; the map has rows and columns in place."""
    family = BY_NAME["intern_vit_300m"]
    encoder = build_encoder(family, {**family.tiny, "ps_version": version})
    [joined] = encoder.feature_maps(tile_tokens(3, 4, 8, version), [[3, 4, 8]], [(1, 2, True)])
    assert joined.shape == (1, 4, 4, 3)
    for y, x in itertools.product(range(4), range(4)):
        assert joined[0, y, x].tolist() == [y // 2, y % 2, x]
    [apart] = encoder.feature_maps(tile_tokens(3, 4, 8, version), [[3, 4, 8]])
    assert apart[2, 1, 3].tolist() == [2, 1, 3]


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_pixel_shuffle_puts_a_patch_into_the_token_over_it(version: str) -> None:
    """Only the token that covers the one bright patch changes."""
    family = BY_NAME["intern_vit_300m"]
    encoder = build_encoder(family, {**family.tiny, "ps_version": version})
    for key, weight in encoder.named_parameters():
        if "layers" in key:
            weight.zero_()
    grids = [[1, 8, 8]]
    pixels = torch.zeros(1, 3, 112, 112)
    dark = encoder(pixels, grids).pooler_output
    pixels[:, :, 14 * 2 : 14 * 3, 14 * 7 :] = 1.0
    bright = encoder(pixels, grids).pooler_output
    [heat] = encoder.feature_maps((bright - dark).abs().sum(-1, keepdim=True), grids)
    assert (heat[0, :, :, 0] > 1e-3).nonzero().tolist() == [[1, 3]]


def test_a_clip_beside_images_keeps_its_frames() -> None:
    maps = tiny("intern_vit_300m").feature_maps(
        tile_features(5, 4, 4), [[2, 4, 4], [3, 4, 4]], [(2, 1, False), (1, 1, False)]
    )
    assert [tuple(item.shape) for item in maps] == [(1, 4, 8, 3), (3, 4, 4, 3)]


def test_a_layout_that_makes_other_tiles_is_refused() -> None:
    encoder = tiny("intern_vit_300m")
    with pytest.raises(ValueError, match=r"3x2 tiles and a thumbnail are 7, .* 6"):
        encoder.feature_maps(tile_features(6, 4, 4), [[6, 4, 4]], [(3, 2, True)])
    with pytest.raises(ValueError, match=r"tiles has 2 items, and grid_thw 1"):
        encoder.feature_maps(tile_features(6, 4, 4), [[6, 4, 4]], [(3, 2, False)] * 2)
