"""Every output of every tower against transformers (and timm), same weights, float32 and float64.

The fast tests run up to three small grids per tower in float64 with small widths. The slow tests
run 22 grids with small widths: in float32 at the published depth, and in float64 with a few blocks,
one of each kind. Those that interpolate the whole position table run with one to three blocks, and
two small grids at the published widths with as few: what a grid changes, it changes at any width.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache

import pytest
import timm
import torch

from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import EncoderOutput
from tests.oracles import (
    BY_NAME,
    FAMILIES,
    NO_LIFT,
    TOWERS,
    Config,
    Family,
    Grids,
    LiftFloat32,
    add_noise,
    build_encoder,
    build_pair,
    distance,
    distances,
    draw_pixels,
    edited,
    in_tokens_of,
    joined,
    timm_keys,
    tiny,
    window_walk,
)
from weights import FAMILIES as RECORDS

FLOAT32, FLOAT64 = 1e-5, 1e-10

QWEN_FAST: list[Grids] = [
    [[1, 2, 2]],
    [[1, 10, 6]],
    [[2, 4, 6], [1, 2, 64], [1, 8, 8]],
]
QWEN_SLOW: list[Grids] = [
    *QWEN_FAST,
    [[1, 4, 6]],
    [[1, 6, 4]],
    [[1, 2, 30]],
    [[1, 30, 2]],
    [[1, 8, 16]],
    [[1, 10, 10]],
    [[1, 14, 22]],
    [[1, 18, 8]],
    [[1, 12, 20]],
    [[3, 10, 6]],
    [[5, 2, 2]],
    [[2, 16, 16]],
    [[1, 48, 2]],
    [[1, 2, 48]],
    [[1, 60, 4]],
    [[1, 4, 98]],
    [[1, 6, 6], [1, 6, 6], [1, 6, 6]],
    [[1, 4, 6], [1, 26, 18], [3, 2, 10]],
    [[2, 2, 2], [1, 34, 2], [1, 2, 34], [1, 2, 2], [4, 6, 4]],
]
OF_TABLES: list[Grids] = [[[1, 48, 48]], [[1, 52, 50]]]
"""Grids as large as the position table, and larger on both axes."""
WITHOUT_TABLE = (
    *("qwen2_", "exaone4_5", "pixtral", "minimax_m3", "ernie4_5_vl", "gemma4"),
    *("dots_ocr", "deepseek_v4", "minicpm_v"),
)
"""Towers with rotary positions alone, and those whose tables these two grids do not reach (Gemma 4)
or other grids exceed, too (MiniCPM-V)."""

INTERN_FAST: list[Grids] = [[[1, 4, 4]], [[2, 8, 8]], [[1, 6, 10]]]
INTERN_SLOW: list[Grids] = [
    *INTERN_FAST,
    *([[1, side, side]] for side in (6, 10, 12, 14, 16, 18)),
    *([[1, *sides]] for sides in ((4, 10), (12, 6), (10, 14), (16, 8), (6, 18), (20, 4))),
    [[1, 32, 32]],
    [[1, 4, 32]],
    [[1, 32, 4]],
    [[2, 12, 6], [1, 12, 6]],
    [[3, 8, 4], [1, 8, 4], [2, 8, 4]],
    [[5, 4, 4], [4, 4, 4]],
]
INTERN_OF_TABLES: list[Grids] = [[[1, 34, 40]], [[1, 40, 2]]]

OCR2_FAST: list[Grids] = [[[1, 16, 16]], [[2, 12, 12], [1, 12, 12]], [[1, 5, 30]]]
OCR2_SLOW: list[Grids] = [
    *OCR2_FAST,
    *([[1, *sides]] for sides in ((8, 32), (32, 8), (4, 64), (64, 4), (4, 36), (36, 4), (7, 29))),
    *(
        [[1, *sides]]
        for sides in ((9, 9), (10, 12), (11, 9), (13, 16), (14, 14), (15, 13), (3, 34))
    ),
    [[3, 16, 16], [1, 16, 16], [2, 16, 16]],
    [[1, 12, 12], [4, 12, 12]],
    [[2, 4, 36], [1, 4, 36]],
]
"""Views of 9 or of 16 cells, for which the small DeepSeek-OCR-2 has queries."""


def test_the_slow_tier_has_twenty_grids_a_family() -> None:
    assert len(QWEN_SLOW) >= 20
    assert len(INTERN_SLOW) >= 20
    assert len(OCR2_SLOW) >= 20


def grids_of(family: Family, tier: str) -> list[Grids]:
    if family.variant and not family.tiled and tier == "fast":
        return QWEN_FAST[:2]
    if family.name == "deepseek_ocr2":
        return {"fast": OCR2_FAST, "slow": OCR2_SLOW, "wide": [[[1, 12, 12]]], "table": []}[tier]
    if family.name.startswith(WITHOUT_TABLE) and tier == "table":
        return []
    lists = {
        (False, "fast"): QWEN_FAST,
        (False, "slow"): QWEN_SLOW,
        (False, "wide"): [[[1, 10, 6], [1, 2, 2]]],
        (False, "table"): OF_TABLES,
        (True, "fast"): INTERN_FAST,
        (True, "slow"): INTERN_SLOW,
        (True, "wide"): [[[2, 4, 4]]],
        (True, "table"): INTERN_OF_TABLES,
    }
    return lists[family.tiled, tier]


ROWS_OF_A_CALL = 1500


def in_calls(family: Family, grid_lists: list[Grids], rows: int) -> list[list[Grids]]:
    """Join lists of grids for calls of up to ``rows`` rows; tiles of one call have one size."""
    calls: list[list[Grids]] = []
    for grids in grid_lists:
        joined = [*calls[-1], grids] if calls and not family.tiled else []
        if joined and sum(t * h * w for each in joined for t, h, w in each) <= rows:
            calls[-1] = joined
        else:
            calls.append([grids])
    return calls


def parts_of(
    encoder: VisionEncoder, output: EncoderOutput, grid_lists: list[Grids]
) -> list[EncoderOutput]:
    """Cut the output of one call into an output per list of grids."""
    if len(grid_lists) == 1:
        return [output]
    items = iter(encoder.split(output, [grid for grids in grid_lists for grid in grids]))
    return [joined([next(items) for _ in grids]) for grids in grid_lists]


def worst_distances(
    family: Family,
    changes: Config,
    grid_lists: list[Grids],
    dtype: torch.dtype = torch.float32,
    lift: AbstractContextManager[object] = NO_LIFT,
    rows: int = 0,
) -> dict[str, float]:
    """Return each field's largest relative L2 over all lists of grids.

    Args:
        family: the tower.
        changes: its sizes.
        grid_lists: lists of grids, of which each is compared by itself.
        dtype: of weights and pixels.
        lift: for the reference.
        rows: lists share a call of up to so many rows, which saves most of the time of deep towers.
    """
    encoder, reference = build_pair(family, changes, dtype, lift, shared=True)
    if not family.tiled and not family.ragged:
        grid_lists = [in_tokens_of(encoder, grids) for grids in grid_lists]
    worst: dict[str, float] = {}
    for number, lists in enumerate(in_calls(family, grid_lists, rows)):
        every = [grid for grids in lists for grid in grids]
        pixels, grid_thw = draw_pixels(encoder, every, number, dtype), torch.tensor(every)
        ours = encoder(pixels, grid_thw)
        with lift:
            theirs = family.output(reference, pixels, grid_thw)
        pairs = (parts_of(encoder, output, lists) for output in (ours, theirs))
        for mine, truth in zip(*pairs, strict=True):
            for field, value in distances(mine, truth).items():
                worst[field] = max(worst.get(field, 0.0), value)
    return worst


def assert_within(worst: dict[str, float], bound: float) -> None:
    assert max(worst.values()) <= bound, worst


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_published_widths_match_transformers(family: Family) -> None:
    """On few rows, because all grids run at the published depth."""
    assert_within(worst_distances(family, family.shallow, grids_of(family, "wide")), FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_published_depth_matches_transformers_on_every_grid(family: Family) -> None:
    grids = grids_of(family, "slow")
    worst = worst_distances(family, family.narrow, grids, rows=ROWS_OF_A_CALL)
    assert_within(worst, FLOAT32)
    if large := grids_of(family, "table"):  # a table is read before the blocks: few of them do
        changes = {**family.narrow, **family.shallow}
        assert_within(worst_distances(family, changes, large), FLOAT32)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_float64_matches_transformers_with_its_float32_casts_lifted(family: Family) -> None:
    lift = LiftFloat32()
    worst = worst_distances(family, family.tiny, grids_of(family, "fast"), torch.float64, lift)
    assert_within(worst, FLOAT64)
    usual = () if family.tiled else (("float",), ("arange",))
    for casts in usual if family.casts is None else family.casts:
        seen = sum(lift.lifted[cast] for cast in casts)
        assert seen > 0, f"the reference's cast by {' or '.join(casts)} was not seen"
    if family.name in ("intern_vit_6b", "qwen2_5_vl", "qwen2_5_omni"):
        assert lift.lifted["to"] > 0, "the reference's RMS norm casts were not seen"


@pytest.mark.parametrize(
    "name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "intern_vit_6b", "step3_vl", "siglip2"]
)
def test_without_the_lift_the_reference_is_a_float32_away(name: str) -> None:
    """The bound of 1e-10 fails without the lift, so it can fail and the lift is needed."""
    family = BY_NAME[name]
    worst = worst_distances(family, family.tiny, grids_of(family, "fast"), torch.float64)
    assert max(worst.values()) > 10 * FLOAT64


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_float64_matches_transformers_on_every_grid(family: Family) -> None:
    grids, lift = grids_of(family, "slow"), LiftFloat32()
    worst = worst_distances(family, family.tiny, grids, torch.float64, lift, ROWS_OF_A_CALL)
    assert_within(worst, FLOAT64)


def test_float64_matches_eager_attention_too() -> None:
    """The softmax of eager attention asks for float32 and gets float64 from the lift."""
    family, lift, grid_thw = BY_NAME["qwen3_vl"], LiftFloat32(), torch.tensor([[1, 6, 4]])
    encoder, reference = build_pair(family, family.tiny, torch.float64, lift)
    reference.set_attn_implementation("eager")
    pixels = draw_pixels(encoder, grid_thw.tolist(), dtype=torch.float64)
    with lift:
        theirs = family.output(reference, pixels, grid_thw)
    assert lift.lifted["softmax"] > 0
    assert_within(distances(encoder(pixels, grid_thw), theirs), FLOAT64)


# --- InternViT's variants ----------------------------------------------------------------------


@cache
def timm_tower() -> torch.nn.Module:
    model = timm.create_model("vit_intern300m_patch14_448", pretrained=False, depth=2)
    return model.eval().requires_grad_(False)


@pytest.mark.slow
def test_intern_vit_matches_timm_at_the_native_size() -> None:
    """timm antialiases interpolated positions and the published model does not; 448 needs none."""
    family = BY_NAME["intern_vit_300m"]
    encoder = build_encoder(family, family.shallow)
    model = timm_tower()
    model.load_state_dict(timm_keys(encoder.state_dict()), strict=True)
    pixels = draw_pixels(encoder, [[1, 32, 32]])
    with torch.no_grad():
        ours = encoder(pixels, [[1, 32, 32]]).last_hidden_state
        theirs = model.forward_features(pixels)
    assert distance(ours, theirs) <= FLOAT32


@pytest.mark.parametrize("layer", [-1, -2, -4, 1, 2])
def test_intern_vit_takes_the_hidden_state_that_select_layer_names(layer: int) -> None:
    family = BY_NAME["intern_vit_300m"]
    changes = {**family.tiny, "select_layer": layer}
    assert_within(worst_distances(family, changes, INTERN_FAST[:1]), FLOAT32)


def test_blocks_after_select_layer_are_not_run() -> None:
    family = BY_NAME["intern_vit_300m"]
    encoder = build_encoder(family, {**family.tiny, "select_layer": -2})
    pixels = draw_pixels(encoder, [[1, 4, 4]])
    before = encoder(pixels, [[1, 4, 4]])
    for parameter in encoder.layers[-1].parameters():
        parameter.fill_(float("nan"))
    after = encoder(pixels, [[1, 4, 4]])
    assert torch.equal(before.last_hidden_state, after.last_hidden_state)
    assert torch.equal(before.pooler_output, after.pooler_output)


def test_pixel_shuffle_v1_gives_the_tokens_of_v2_transposed() -> None:
    family = BY_NAME["intern_vit_300m"]
    outputs = {}
    for version in ("v1", "v2"):
        encoder = build_encoder(family, {**family.tiny, "ps_version": version})
        pixels = draw_pixels(encoder, [[2, 6, 10]])
        outputs[version] = encoder(pixels, [[2, 6, 10]]).pooler_output
    v2 = outputs["v2"].unflatten(0, (2, 3, 5))
    v1 = outputs["v1"].unflatten(0, (2, 5, 3))
    torch.testing.assert_close(v1.transpose(1, 2), v2, rtol=0, atol=1e-5)


# --- DeepStack's variants ----------------------------------------------------------------------


@pytest.mark.parametrize("indexes", [[2, 0], [1, 1], [2, 0, 1]], ids=str)
def test_deepstack_mergers_follow_the_order_of_the_config(indexes: list[int]) -> None:
    """A block's merger has the index of the block in the config's list."""
    family = BY_NAME["qwen3_vl"]
    changes = {**family.tiny, "deepstack_visual_indexes": indexes}
    assert_within(worst_distances(family, changes, QWEN_FAST[:2]), FLOAT32)


# --- the comparisons can fail ------------------------------------------------------------------


@pytest.mark.parametrize("name", TOWERS)
def test_every_parameter_moves_an_output_by_more_than_the_bound(name: str) -> None:
    """A dropped, swapped or default tensor would show with these weights."""
    family = BY_NAME[name]
    encoder = build_encoder(family, family.tiny)
    grids = [[1, 6, 4]]
    pixels = draw_pixels(encoder, grids)
    before = encoder(pixels, grids)
    for key, parameter in encoder.named_parameters():
        kept = parameter.clone()
        add_noise(parameter, share=0.01)
        moved = max(distances(encoder(pixels, grids), before).values())
        parameter.copy_(kept)
        assert moved > 5 * FLOAT32, f"{key} moved the outputs by {moved:.1e} only"


def test_windows_follow_the_reference_walk() -> None:
    """The first case is a frame of 6x10 tokens with windows of 4x4."""
    encoder = tiny("qwen2_5_vl")
    for grids in ([[1, 12, 20]], [[2, 12, 8], [1, 10, 6]]):
        metadata = encoder.prepare_encoder_metadata(grids)
        assert metadata["window_index"].tolist() == window_walk(grids)


def test_every_family_has_a_tower_in_the_table() -> None:
    encoders = {family.encoder_class for family in FAMILIES}
    assert encoders == {record.encoder for record in RECORDS.values()}


def test_reference_configs_are_the_published_ones() -> None:
    """``edited`` without changes returns an equal config."""
    for family in FAMILIES:
        assert family.config_class.from_hf(family.config) == family.config_class.from_hf(
            edited(family.config)
        )
