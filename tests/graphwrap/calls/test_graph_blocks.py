"""Outputs of blocks from graphs: padded, packed, split and in order like every other output."""

from __future__ import annotations

import pytest
import torch

from graphwrap import GraphedEncoder
from tests.oracles import FEW_FAST
from tests.support.graphs.cases import (
    budgets_hit,
    budgets_of,
    mixes,
    pixels_for,
    static,
    tower,
)
from tests.support.towers import deepseek
from tests.support.towers.toy_encoder import ToyEncoder

NAMES = ("blocks.1", "blocks.0.attn", "pooler_output", "blocks.2.mlp")
EXTRAS = ("blocks.1", "blocks.0.attn", "blocks.2.mlp")


def runs(name: str) -> int:
    """Return the number of blocks that the forward of a tower runs."""
    return len(tower(name)._named_blocks[""])


@pytest.mark.parametrize("name", FEW_FAST)
def test_blocks_of_a_replay_are_padded_eager_bit_for_bit(name: str) -> None:
    encoder, names = tower(name), [n for n in EXTRAS if int(n.split(".")[1]) < runs(name)]
    graphed = static(encoder, budgets_of(name)[-1:], outputs=names)
    grids = mixes(name)["one image"]
    pixels = pixels_for(encoder, grids)
    graphed.capture(progress=False)._poison()
    output = graphed(pixels, grids)
    (budget,) = budgets_hit(graphed)
    rows = torch.zeros(budget.rows, *pixels.shape[1:])
    rows[: len(pixels)] = pixels
    metadata = encoder.prepare_encoder_metadata(
        grids,
        max_frames_per_batch=budget.segments,
        max_seqlen_override=budget.longest_segment,
        max_input_size=budget.rows,
        max_windows_per_batch=budget.windows or None,
    )
    padded = encoder.with_extras(names)(rows, encoder_metadata=metadata)
    for extra in names:
        assert torch.equal(output.extras[extra], padded[extra][: len(pixels)]), extra
    assert (output.last_hidden_state, output.pooler_output) == (None, None)


@pytest.mark.parametrize("backend", ["static", "eager"])
@pytest.mark.parametrize("mix", ["images and a clip", "with one over every budget"])
def test_blocks_of_many_items_come_in_their_order(mix: str, backend: str) -> None:
    encoder = tower("qwen2_5_vl")
    graphed = GraphedEncoder(encoder, budgets_of("qwen2_5_vl"), outputs=NAMES, backend=backend)
    grids = mixes("qwen2_5_vl")[mix]
    pixels = pixels_for(encoder, grids)
    expected = encoder.with_extras(EXTRAS)(pixels, grids)
    output = graphed(pixels, grids)
    for name in EXTRAS:
        ours, theirs = output.extras[name], expected[name]
        assert (ours - theirs).norm() <= 2e-6 * theirs.norm()
    items = encoder.split(output, grids)
    assert [len(item["blocks.1"]) for item in items] == [t * h * w for t, h, w in grids]


@pytest.mark.parametrize("backend", ["static", "eager"])
@pytest.mark.parametrize("name", ["clip", "dinov3"])
def test_rows_before_patches_are_packed_and_split(name: str, backend: str) -> None:
    encoder, names = tower(name), ("blocks.1.prefix", "blocks.0.mlp.prefix", "blocks.1")
    graphed = GraphedEncoder(encoder, budgets_of(name), outputs=names, backend=backend)
    grids = mixes(name)["with one over every budget"]
    pixels = pixels_for(encoder, grids)
    expected, output = encoder.with_extras(names)(pixels, grids), graphed(pixels, grids)
    for extra in names:
        ours, theirs = output.extras[extra], expected[extra]
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= 2e-6 * theirs.norm()
    counts = [spec.segments for spec in encoder.item_specs(grids)]
    items = encoder.split(output, grids)
    assert [len(item["blocks.1.prefix"]) for item in items] == counts


@pytest.mark.parametrize("backend", ["static", "eager"])
def test_blocks_of_several_paths_are_those_of_the_encoder(backend: str) -> None:
    encoder = deepseek.build("deepseek_ocr")
    inputs = deepseek.draw_inputs(encoder, deepseek.OCR_TILES)
    names = ("tiles.blocks.1", "sam.blocks.0.attn", "blocks.2")
    graphed = GraphedEncoder(encoder, outputs=names, backend=backend, max_graphs=2)
    with torch.no_grad():
        expected = encoder.with_extras(names)(inputs)
    for ours, theirs in zip(graphed(inputs), expected, strict=True):
        assert ours.extras.keys() == theirs.extras.keys()
        for name, rows in theirs.extras.items():
            assert (ours.extras[name] - rows).norm() <= 2e-6 * rows.norm()


def test_results_do_not_share_memory_with_one_another() -> None:
    encoder = tower("qwen2_vl")
    names = ("last_hidden_state", "blocks.2", "pooler_output")
    graphed = GraphedEncoder(encoder, outputs=names, backend="eager")
    output = graphed(pixels_for(encoder, [[1, 4, 6]]), [[1, 4, 6]])
    assert output.last_hidden_state is not None
    assert torch.equal(output.last_hidden_state, output["blocks.2"])
    assert output.last_hidden_state.data_ptr() != output["blocks.2"].data_ptr()


def test_unknown_outputs_are_refused_with_the_names() -> None:
    for name in ("blocks.3", "tiles.blocks.1", "blocks.1.norm"):
        with pytest.raises(ValueError, match=r"pooler_output.*blocks\.0 to blocks\.2"):
            static(tower("qwen2_vl"), outputs=[name])
    with pytest.raises(ValueError, match="ToyEncoder has no other outputs"):
        static(ToyEncoder(), outputs=["blocks.1"])
