"""An export leaves nothing behind, and embeds patches by a product, not by a convolution."""

from __future__ import annotations

import pytest
import torch

from tests.oracles import TILE_TOWERS, TOWERS, draw_pixels, tiny


@pytest.mark.parametrize("name", TOWERS)
def test_an_export_has_the_encoders_bits_and_no_convolution(name: str) -> None:
    encoder = tiny(name)
    # No other test has this size, so that nothing was computed for it before.
    grids = [[3, 8, 8]] if name in TILE_TOWERS else [[1, 26, 4]]
    pixels = draw_pixels(encoder, grids)
    program = torch.export.export(encoder, (pixels, grids))
    output, exported = encoder(pixels, grids), program.module()(pixels, grids)
    assert torch.equal(output.pooler_output, exported.pooler_output)
    called = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert not [name for name in called if "conv" in name]
