"""``prepare_encoder_metadata``: what it holds, and every keyword for every family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoders.contract import Metadata
from tests.oracles import (
    BY_NAME,
    EVERY_TOWER,
    MERGING_TOWERS,
    TOWERS,
    Family,
    Grids,
    grids_for,
    tiny,
)
from tests.support.towers.capacities import CAPACITIES, kind

EMPTY: Grids = []


def prepare(name: str, grids: Any, **capacities: Any) -> Metadata:
    return tiny(name).prepare_encoder_metadata(grids, **capacities)


def lengths(name: str, grids: Grids) -> list[int]:
    if BY_NAME[name].segment_rows > 1:  # up to four frames are one segment
        return [t * h * w for t, h, w in grids]
    rows = tiny(name).prefix_rows
    return [rows + h * w for t, h, w in grids for _ in range(t)]


# --- what it holds -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOWERS)
def test_offsets_are_the_segments_of_the_grid(name: str) -> None:
    grids = grids_for(name)
    metadata = prepare(name, grids)
    sizes = lengths(name, grids)
    offsets = metadata["cu_seqlens"]
    assert offsets.dtype == torch.int32
    assert offsets.tolist() == [sum(sizes[:n]) for n in range(len(sizes) + 1)]
    assert int(metadata["max_seqlen"]) == max(sizes)


@pytest.mark.parametrize("name", TOWERS)
def test_the_longest_segment_is_a_plain_number_on_the_host(name: str) -> None:
    for device in (None, "cpu", "meta"):
        longest = prepare(name, grids_for(name), device=device)["max_seqlen"]
        assert (longest.device.type, longest.ndim, longest.dtype) == ("cpu", 0, torch.int32)


@pytest.mark.parametrize("name", TOWERS)
def test_everything_else_goes_to_the_device_asked_for(name: str) -> None:
    metadata = prepare(name, grids_for(name), device="meta")
    on_host = {key for key, value in metadata.items() if value.device.type == "cpu"}
    assert on_host <= {"max_seqlen", "max_window_seqlen"}


@pytest.mark.parametrize("name", TOWERS)
def test_a_default_device_changes_no_metadata(name: str) -> None:
    plain = prepare(name, grids_for(name), **CAPACITIES[kind(name)])
    with torch.device("meta"):
        found = prepare(name, grids_for(name), **CAPACITIES[kind(name)])
    assert plain.keys() == found.keys()
    for key, value in plain.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("name", TOWERS)
def test_metadata_is_plain_tensors(name: str) -> None:
    for key, value in prepare(name, grids_for(name)).items():
        assert isinstance(key, str)
        assert type(value) is torch.Tensor
        assert not value.requires_grad


ROTARY = [name for name in MERGING_TOWERS if name not in ("lfm2_vl", "hunyuan_vl", "nemotron")]
"""All but those that have a table alone."""


@pytest.mark.parametrize("name", ROTARY)
def test_rotary_tables_are_float32_or_the_encoders_own_float64(name: str) -> None:
    for dtype, expected in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        encoder = tiny(name, dtype)
        metadata = encoder.prepare_encoder_metadata([[1, 4, 6]])
        size = encoder.config.head_size
        pairs = 3 * (size // 3 // 2) if name == "minimax_m3" else size // 2  # of three axes
        for key in ("rotary_pos_emb_cos", "rotary_pos_emb_sin"):
            assert metadata[key].dtype == expected
            assert metadata[key].shape == (24, pairs)


def test_qwen3_taps_are_those_of_the_worked_example() -> None:
    """A 4x6 grid reads a 48x48 table at (r, c), (r, c+1), (r+1, c) and (r+1, c+1)."""
    metadata = prepare("qwen3_vl", [[1, 4, 6]])
    index, weight = metadata["pos_embed_index"], metadata["pos_embed_weight"]
    assert index[:3].tolist() == [[0, 1, 48, 49], [9, 10, 57, 58], [720, 721, 768, 769]]
    expected = [[1, 0, 0, 0], [0.6, 0.4, 0, 0], [1 / 3, 0, 2 / 3, 0], [0.2, 2 / 15, 0.4, 4 / 15]]
    torch.testing.assert_close(weight[:4], torch.tensor(expected), rtol=0, atol=1e-5)
    torch.testing.assert_close(weight.sum(1), torch.ones(24), rtol=0, atol=1e-6)


def test_qwen2_5_windows_are_those_of_the_worked_examples() -> None:
    """The cases are 6x10 tokens with windows of 4x4, divisible frames, and two frames."""
    ragged = prepare("qwen2_5_vl", [[1, 12, 20]])
    assert ragged["cu_window_seqlens"].tolist() == [0, 64, 128, 160, 192, 224, 240]
    assert ragged["window_index"].tolist()[:20] == [
        0,
        1,
        2,
        3,
        10,
        11,
        12,
        13,
        20,
        21,
        22,
        23,
        30,
        31,
        32,
        33,
        4,
        5,
        6,
        7,
    ]
    even = prepare("qwen2_5_vl", [[1, 16, 16]])
    assert even["cu_window_seqlens"].tolist() == [0, 64, 128, 192, 256]
    frames = prepare("qwen2_5_vl", [[2, 12, 8]])
    assert frames["cu_window_seqlens"].tolist() == [0, 64, 96, 160, 192]
    assert frames["window_index"].tolist() == list(range(48))


# --- capacities --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("keyword", ["max_batch_size", "max_frames_per_batch"])
def test_a_capacity_repeats_the_last_offset(name: str, keyword: str) -> None:
    grids = grids_for(name)
    plain = prepare(name, grids)["cu_seqlens"].tolist()
    padded = prepare(name, grids, **{keyword: 7})["cu_seqlens"].tolist()
    assert padded == plain + [plain[-1]] * (8 - len(plain))


@pytest.mark.parametrize("name", TOWERS)
def test_frames_win_over_items(name: str) -> None:
    metadata = prepare(name, grids_for(name), max_batch_size=2, max_frames_per_batch=5)
    assert len(metadata["cu_seqlens"]) == 6


@pytest.mark.parametrize("name", TOWERS)
def test_a_capacity_met_exactly_pads_nothing(name: str) -> None:
    grids = grids_for(name)
    exact = prepare(name, grids, max_batch_size=len(lengths(name, grids)))
    assert torch.equal(exact["cu_seqlens"], prepare(name, grids)["cu_seqlens"])


@pytest.mark.parametrize("name", TOWERS)
def test_more_segments_than_the_capacity_is_an_error_with_both_numbers(name: str) -> None:
    count = len(lengths(name, grids_for(name)))
    with pytest.raises(ValueError, match=f"{count} segments do not fit max_batch_size={count - 1}"):
        prepare(name, grids_for(name), max_batch_size=count - 1)
    with pytest.raises(ValueError, match=f"{count} segments do not fit max_frames_per_batch=1"):
        prepare(name, grids_for(name), max_batch_size=9, max_frames_per_batch=1)


@pytest.mark.parametrize("name", TOWERS)
def test_an_override_of_the_longest_segment_is_kept_and_checked(name: str) -> None:
    grids = grids_for(name)
    longest = max(lengths(name, grids))
    for override in (longest, longest + 1, 1000):
        assert int(prepare(name, grids, max_seqlen_override=override)["max_seqlen"]) == override
    with pytest.raises(
        ValueError, match=rf"max_seqlen_override={longest - 1}: .*least {longest}, the rows"
    ):
        prepare(name, grids, max_seqlen_override=longest - 1)


@pytest.mark.parametrize("family", EVERY_TOWER, ids=lambda family: family.name)
def test_more_rows_than_max_input_size_names_both_numbers(family: Family) -> None:
    name = family.name
    rows = sum(spec.input_size for spec in tiny(name).item_specs(grids_for(name)))
    fewer = rows - (1 if kind(name) == "tiles" else 4)
    prepare(name, grids_for(name), max_input_size=rows)
    with pytest.raises(ValueError, match=rf"{rows} rows.*max_input_size={fewer}"):
        prepare(name, grids_for(name), max_input_size=fewer)


@pytest.mark.parametrize("name", MERGING_TOWERS)
def test_room_for_part_of_a_token_is_an_error(name: str) -> None:
    with pytest.raises(ValueError, match=r"max_input_size=161: must be a multiple of 4"):
        prepare(name, [[1, 4, 6]], max_input_size=161)


def test_windows_count_against_their_own_capacity_only() -> None:
    """Two frames have 12 windows; 2 segments fit a capacity of 2, 12 windows one of 12."""
    grids = [[2, 12, 20]]
    metadata = prepare("qwen2_5_vl", grids, max_frames_per_batch=2, max_windows_per_batch=15)
    assert len(metadata["cu_seqlens"]) == 3
    windows = metadata["cu_window_seqlens"].tolist()
    assert len(windows) == 16
    assert windows[12:] == [480] * 4
    with pytest.raises(
        ValueError, match=r"12 windows do not fit max_windows_per_batch=11: raise it to 12"
    ):
        prepare("qwen2_5_vl", grids, max_windows_per_batch=11)


@pytest.mark.parametrize("name", TOWERS)
def test_padding_is_finite_and_has_exactly_the_given_rows(name: str) -> None:
    capacities = CAPACITIES[kind(name)]
    for grids in (EMPTY, grids_for(name)):
        metadata = prepare(name, grids, **capacities)
        rows = capacities["max_input_size"]
        if kind(name) == "tiles" and "rotary_pos_emb_cos" in metadata:
            # Its tiles share the angles of one.
            rows = tiny(name).prefix_rows + 64
            assert len(metadata["rotary_pos_emb_cos"]) == rows
            assert len(metadata["rotary_pos_emb_sin"]) == rows
        before = capacities["max_frames_per_batch"] * tiny(name).prefix_rows
        for key, value in metadata.items():
            if value.is_floating_point() and key != "frame_table":  # one row per number of a frame
                assert bool(value.isfinite().all()), key
                packed = kind(name) == "patches" and key.startswith("rotary")
                shared = 4 if key.startswith("window_") else rows  # SAM 3's windows are of 2x2
                assert value.shape[0] == shared + (before if packed else 0), key
            elif key in ("prefix_index", "packed_index"):
                assert value.numel() == before + (rows if key == "packed_index" else 0)
            elif key.endswith("_index"):
                assert value.shape[0] in (rows, rows // 4), key


@pytest.mark.parametrize("grids", [EMPTY, [[2, 4, 6], [1, 10, 6]]], ids=["empty", "items"])
def test_index_tables_map_pad_rows_to_pad_rows(grids: Grids) -> None:
    metadata = prepare("qwen2_5_vl", grids, max_input_size=160)
    real = sum(t * h * w for t, h, w in grids) // 4
    for key in ("window_index", "reverse_index"):
        index = metadata[key]
        assert sorted(index.tolist()) == list(range(40))
        assert min(index[real:].tolist()) == real
    forward, back = metadata["window_index"], metadata["reverse_index"]
    assert torch.equal(forward[back], torch.arange(40))


ANY_GRIDS = {
    "tiles": st.lists(st.integers(1, 2), max_size=3).map(lambda ts: [[t, 8, 8] for t in ts]),
    "patches": st.lists(
        st.tuples(st.integers(1, 2), st.sampled_from([2, 4]), st.sampled_from([2, 4, 6])).map(list),
        max_size=3,
    ),
}


@pytest.mark.parametrize("name", TOWERS)
@given(data=st.data())
@settings(max_examples=15)
def test_shapes_depend_on_the_capacities_alone(name: str, data: st.DataObject) -> None:
    capacities = CAPACITIES[kind(name)]
    grids = data.draw(ANY_GRIDS[kind(name)])
    empty, full = prepare(name, EMPTY, **capacities), prepare(name, grids, **capacities)
    assert empty.keys() == full.keys()
    for key, value in full.items():
        assert value.shape == empty[key].shape, key
        assert value.dtype == empty[key].dtype, key
        assert value.device == empty[key].device, key


# --- empty -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize(
    "empty", [[], torch.zeros(0, 3, dtype=torch.int64)], ids=["list", "tensor"]
)
def test_an_empty_grid_gives_valid_metadata_and_zero_tokens(name: str, empty: Any) -> None:
    encoder = tiny(name)
    metadata = encoder.prepare_encoder_metadata(empty)
    assert metadata["cu_seqlens"].tolist() == [0]
    assert int(metadata["max_seqlen"]) == 0
    pixels = torch.zeros(0, *encoder.row_shape)
    for output in (encoder(pixels, empty), encoder(pixels, encoder_metadata=metadata)):
        assert output.last_hidden_state.shape[0] == 0
        assert output.last_hidden_state.shape[-1] == encoder.config.hidden_size
        assert output.pooler_output.shape == (0, encoder.config.out_hidden_size)
        assert all(len(layer) == 0 for layer in output.deepstack_features)
    assert encoder.item_specs(empty) == []
    assert encoder.split(encoder(pixels, empty), empty) == []
