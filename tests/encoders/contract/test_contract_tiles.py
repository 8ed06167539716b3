"""Metadata of tiles is compared with the pixels as far as the host can read it."""

from __future__ import annotations

import pytest
import torch

from tests.oracles import BY_NAME, TILE_TOWERS, build_encoder, distance, draw_pixels, tiny


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", TILE_TOWERS)
def test_metadata_of_other_tiles_is_refused_on_any_device(name: str, device: str) -> None:
    """The check reads host values only; a meta tensor has no values."""
    encoder = build_encoder(BY_NAME[name], BY_NAME[name].tiny).to(device)
    pixels = draw_pixels(tiny(name), [[3, 8, 8]]).to(device)
    metadata = encoder.prepare_encoder_metadata([[3, 4, 4]])
    small, large = (encoder.prefix_rows + rows for rows in (16, 64))
    words = rf"at most {small} rows, and these pixels make segments of {large}.*grid_thw of these"
    with pytest.raises(ValueError, match=words):
        encoder(pixels, encoder_metadata=metadata)


@pytest.mark.parametrize("compiled", [False, True])
def test_padded_metadata_of_other_tiles_is_refused_on_the_cpu(compiled: bool) -> None:
    """Only the offsets show the mistake, and they are read on the CPU alone."""
    torch.compiler.reset()
    encoder = tiny("intern_vit_300m")
    pixels, run = draw_pixels(encoder, [[3, 8, 8]]), encoder.forward
    if compiled:
        run = torch.compile(run, fullgraph=True, backend="aot_eager")
    for grids, words in (
        ([[3, 4, 4]], r"a segment of 17 rows, and these pixels make segments of 65: pass what"),
        ([[4, 8, 8]], r"these pixels make 195 rows, and cu_seqlens end at 260: pass what"),
        ([[3, 16, 16]], r"make 195 rows, and cu_seqlens end at 771"),
    ):
        metadata = encoder.prepare_encoder_metadata(
            grids, max_frames_per_batch=6, max_seqlen_override=300
        )
        with pytest.raises(ValueError, match=words):
            run(pixels, encoder_metadata=metadata)


@pytest.mark.parametrize(
    "capacities",
    [
        {"max_input_size": 5},
        {"max_batch_size": 5},
        {"max_frames_per_batch": 5},
        {"max_batch_size": 3, "max_input_size": 5},
        {"max_frames_per_batch": 4, "max_input_size": 5, "max_seqlen_override": 200},
    ],
    ids=str,
)
def test_tiles_of_padding_are_legal_whatever_the_capacities(capacities: dict[str, int]) -> None:
    encoder = tiny("intern_vit_300m")
    pixels = draw_pixels(encoder, [[5, 8, 8]])
    expected = encoder(pixels[:3], [[3, 8, 8]]).pooler_output
    metadata = encoder.prepare_encoder_metadata([[3, 8, 8]], **capacities)
    output = encoder(pixels, encoder_metadata=metadata)
    assert distance(output.pooler_output[:48], expected) <= 1e-6
    empty = encoder.prepare_encoder_metadata([], **capacities)
    assert encoder(pixels, encoder_metadata=empty).pooler_output.isfinite().all()
