"""Forward with prepared metadata: the bits are those of without, and padding has no effect."""

from __future__ import annotations

import pytest
import torch

from encoders.base.vision_encoder import VisionEncoder
from encoders.contract import EncoderOutput
from tests.oracles import TOWERS, Grids, draw_pixels, fields_of, grids_for, tiny
from tests.support.towers.capacities import CAPACITIES, kind


def assert_same_bits(ours: EncoderOutput, theirs: EncoderOutput) -> None:
    for key, value in fields_of(ours).items():
        assert torch.equal(value, fields_of(theirs)[key]), key


def padded_pixels(
    encoder: VisionEncoder, grids: Grids, rows: int, fill: float
) -> tuple[torch.Tensor, torch.Tensor]:
    pixels = draw_pixels(encoder, grids)
    padded = torch.full((rows, *pixels.shape[1:]), fill)
    padded[: pixels.shape[0]] = pixels
    return pixels, padded


@pytest.mark.parametrize("name", TOWERS)
def test_forward_with_metadata_gives_the_same_bits_as_without(name: str) -> None:
    encoder, grids = tiny(name), grids_for(name)
    pixels = draw_pixels(encoder, grids)
    metadata = encoder.prepare_encoder_metadata(grids)
    plain = encoder(pixels, grids)
    assert_same_bits(plain, encoder(pixels, encoder_metadata=metadata))
    assert_same_bits(plain, encoder(pixels, grids, encoder_metadata=metadata))
    assert_same_bits(plain, encoder(pixels, torch.tensor(grids)))


@pytest.mark.parametrize("name", TOWERS)
def test_forward_leaves_its_inputs_as_they_were(name: str) -> None:
    encoder, grids = tiny(name), grids_for(name)
    pixels = draw_pixels(encoder, grids)
    metadata = encoder.prepare_encoder_metadata(grids)
    before = {key: value.clone() for key, value in metadata.items()}
    kept = pixels.clone()
    encoder(pixels, encoder_metadata=metadata)
    assert torch.equal(pixels, kept)
    assert all(torch.equal(metadata[key], value) for key, value in before.items())


@pytest.mark.parametrize("name", TOWERS)
def test_capacities_alone_change_no_bit(name: str) -> None:
    """The metadata has padded offsets and a larger ``max_seqlen``, and no pad rows."""
    encoder, grids = tiny(name), grids_for(name)
    pixels = draw_pixels(encoder, grids)
    capacities = {k: v for k, v in CAPACITIES[kind(name)].items() if k != "max_input_size"}
    metadata = encoder.prepare_encoder_metadata(grids, **capacities)
    assert_same_bits(encoder(pixels, grids), encoder(pixels, encoder_metadata=metadata))


@pytest.mark.parametrize("name", TOWERS)
def test_pad_rows_leave_the_real_rows_as_they_were(name: str) -> None:
    """The bound is 1e-6, as CPU matrix products may add in another order for other row counts."""
    encoder, grids = tiny(name), grids_for(name)
    capacities = CAPACITIES[kind(name)]
    pixels, padded = padded_pixels(encoder, grids, capacities["max_input_size"], 0.0)
    metadata = encoder.prepare_encoder_metadata(grids, **capacities)
    plain, out = encoder(pixels, grids), encoder(padded, encoder_metadata=metadata)
    for key, value in fields_of(plain).items():
        real = fields_of(out)[key][: value.shape[0]]
        assert float((real - value).norm() / value.norm()) <= 1e-6, key


@pytest.mark.parametrize("name", TOWERS)
def test_nan_in_pad_rows_changes_no_bit_of_the_real_rows(name: str) -> None:
    encoder, grids = tiny(name), grids_for(name)
    capacities = CAPACITIES[kind(name)]
    rows = capacities["max_input_size"]
    metadata = encoder.prepare_encoder_metadata(grids, **capacities)
    outputs = [
        encoder(padded_pixels(encoder, grids, rows, fill)[1], encoder_metadata=metadata)
        for fill in (0.0, float("nan"), float("inf"))
    ]
    items = [encoder.split(output, grids) for output in outputs]
    for clean, *poisoned in zip(*items, strict=True):
        for other in poisoned:
            assert_same_bits(clean, other)


@pytest.mark.parametrize("name", TOWERS)
def test_an_empty_grid_with_capacities_runs_over_padding_alone(name: str) -> None:
    """A graph is captured with an empty grid, whose metadata has the shapes of the capacities."""
    encoder = tiny(name)
    capacities = CAPACITIES[kind(name)]
    rows = capacities["max_input_size"]
    metadata = encoder.prepare_encoder_metadata([], **capacities)
    pixels = draw_pixels(encoder, grids_for(name))
    output = encoder(torch.zeros(rows, *pixels.shape[1:]), encoder_metadata=metadata)
    assert output.last_hidden_state.shape[0] == rows
    assert all(bool(value.isfinite().all()) for value in fields_of(output).values())


@pytest.mark.parametrize("name", TOWERS)
def test_forward_wants_a_grid_or_metadata(name: str) -> None:
    """For tiles, the error states the grid."""
    encoder = tiny(name)
    value = r".*grid_thw is \[\[3, 8, 8\]\]" if kind(name) == "tiles" else ""
    with pytest.raises(ValueError, match="of shape .*: pass grid_thw, or encoder_metadata" + value):
        encoder(draw_pixels(encoder, grids_for(name)))
