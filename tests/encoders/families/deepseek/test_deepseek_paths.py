"""DeepSeek's encoders of several views against references: the joined tokens."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from encoders import PartialOutput, VisionInputs
from encoders.streams.calls import split_inputs
from graphwrap import GraphedEncoder
from tests.oracles import NO_LIFT, LiftFloat32, distance
from tests.oracles.references.deepseek_vl2 import VL2Reference
from tests.support.towers.deepseek import (
    FAMILIES,
    OCR_TILES,
    TILES,
    VL2_TILES,
    build,
    build_reference,
    draw_inputs,
    tokens_of,
)

BOUNDS = {torch.float32: 1e-5, torch.float64: 1e-10}


def lift_for(dtype: torch.dtype) -> Any:
    return LiftFloat32() if dtype == torch.float64 else NO_LIFT


def lists(inputs: VisionInputs) -> tuple[list[int], list[list[int]]]:
    """Tiles per image, and their (columns, rows), as transformers takes them."""
    tilings = inputs.tiles or []
    counts = [columns * rows if tiled else 0 for columns, rows, tiled in tilings]
    return counts, [[columns, rows] for columns, rows, _ in tilings]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_ocr_tokens_match_transformers(dtype: torch.dtype) -> None:
    """Its UnlimitedOcrModel is the same encoder before another language model."""
    encoder, lift = build("deepseek_ocr", dtype), lift_for(dtype)
    reference = build_reference("deepseek_ocr", encoder, dtype, lift)
    inputs = draw_inputs(encoder, OCR_TILES, dtype)
    with lift:
        theirs = reference.get_image_features(
            inputs.pixel_values, inputs.paths["tiles"].pixel_values, *lists(inputs)
        ).pooler_output
    ours = encoder(inputs)
    assert [len(item.pooler_output) for item in ours] == [len(item) for item in theirs]
    assert distance(tokens_of(ours), torch.cat(theirs)) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_hybrid_tokens_match_transformers(dtype: torch.dtype) -> None:
    encoder, lift = build("deepseek_vl_hybrid", dtype), lift_for(dtype)
    reference = build_reference("deepseek_vl_hybrid", encoder, dtype, lift)
    inputs = draw_inputs(encoder, TILES["deepseek_vl_hybrid"], dtype)
    high = inputs.paths["high"].pixel_values
    with lift:
        theirs = reference.get_image_features(inputs.pixel_values, high)
    ours = encoder(inputs)
    assert distance(tokens_of(ours), theirs.pooler_output.flatten(0, 1)) <= BOUNDS[dtype]
    hidden = torch.cat([item.last_hidden_state for item in ours])
    both = (theirs.high_res_vision_last_hidden_state, theirs.last_hidden_state)
    assert distance(hidden, torch.cat(both, dim=-1)) <= BOUNDS[dtype]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
def test_vl2_tokens_match_the_twin(dtype: torch.dtype) -> None:
    encoder = build("deepseek_vl2", dtype)
    reference: VL2Reference = build_reference("deepseek_vl2", encoder, dtype)
    inputs = draw_inputs(encoder, VL2_TILES, dtype)
    views = inputs.pixel_values.split(inputs.grid_thw[:, 0].tolist())
    for item, pixels, (columns, rows, _) in zip(encoder(inputs), views, VL2_TILES, strict=True):
        theirs = reference.sequence(pixels, columns, rows)
        assert distance(item.pooler_output, theirs) <= BOUNDS[dtype]
        hidden = torch.stack([reference.view(view)[0].flatten(0, 1) for view in pixels])
        assert distance(item.last_hidden_state, hidden) <= BOUNDS[dtype]


@pytest.mark.parametrize("name", FAMILIES)
def test_items_together_match_items_alone(name: str) -> None:
    encoder = build(name)
    inputs = draw_inputs(encoder, TILES[name])
    together = encoder(inputs)
    for whole, alone in zip(together, split_inputs(inputs, encoder.paths), strict=True):
        (output,) = encoder(alone)
        assert distance(whole.pooler_output, output.pooler_output) <= 2e-6
        assert distance(whole.last_hidden_state, output.last_hidden_state) <= 2e-6


def test_an_image_without_tiles_runs_one_path_only() -> None:
    encoder = build("deepseek_ocr")
    ran: list[int] = []
    encoder.projector.register_forward_hook(lambda module, args, out: ran.append(len(args[0])))
    encoder(draw_inputs(encoder, [(1, 1, False), (1, 1, False)]))
    assert ran == [2]
    encoder(draw_inputs(encoder, [(1, 1, False), (3, 1, True)]))
    assert ran == [2, 2, 3]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_field_that_a_path_leaves_out_is_left_out(name: str) -> None:
    """Graphs of the paths return the fields that they were asked for."""
    encoder = build(name)
    inputs = draw_inputs(encoder, TILES[name])
    outputs = {
        path: encoder.paths[path](*entries[:2])
        for path, entries in inputs.paths.items()
        if len(entries.grid_thw)
    }
    whole = encoder.join(outputs, inputs)
    for field in ("last_hidden_state", "pooler_output"):
        missing: dict[str, Any] = {field: None, "deepstack_features": None}
        partial = {
            path: PartialOutput(*output)._replace(**missing) for path, output in outputs.items()
        }
        for item, full in zip(encoder.join(partial, inputs), whole, strict=True):
            assert getattr(item, field) is item.deepstack_features is None
            for other in {"last_hidden_state", "pooler_output"} - {field}:
                assert torch.equal(getattr(item, other), getattr(full, other))


@pytest.mark.parametrize("entries", [0, 1, 3])
def test_hybrid_items_need_a_view_in_both_paths(entries: int) -> None:
    encoder = build("deepseek_vl_hybrid")
    inputs = draw_inputs(encoder, [(1, 1, False)] * 2)
    other = draw_inputs(encoder, [(1, 1, False)] * entries).paths["high"]
    message = rf"path 'high' (has )?{entries} (entries|of)"
    with pytest.raises(ValueError, match=message):
        encoder(inputs._replace(other_paths={"high": other}))


@pytest.mark.parametrize("name", ["deepseek_vl2", "deepseek_ocr"])
def test_tiles_that_do_not_make_the_views_are_refused(name: str) -> None:
    encoder = build(name)
    inputs = draw_inputs(encoder, [(2, 1, True), (1, 2, True)])
    for tiles in ([(2, 2, True), (1, 2, True)], [(1, 2, True), (3, 1, True)]):
        with pytest.raises(ValueError, match=r"item( \d)? has [23] views.*pass what preprocess"):
            encoder(inputs._replace(tiles=tiles))


@pytest.mark.parametrize("name", ["deepseek_vl2", "deepseek_ocr"])
def test_graphs_of_one_path_take_whole_inputs_alone(name: str) -> None:
    """The output of the path has no newlines and no separator."""
    encoder, tiles = build(name), VL2_TILES
    if name == "deepseek_ocr":
        encoder, tiles = encoder.at_mode("base"), [(1, 1, False)] * 2
        encoder.paths = {"image": encoder.paths["image"].at(128)}
    inputs = draw_inputs(encoder, tiles)
    graphed = GraphedEncoder(encoder, backend="eager")
    with pytest.raises(ValueError, match="has the paths image: pass the whole result"):
        graphed(inputs.pixel_values, inputs.grid_thw)
    assert len(tokens_of(graphed(inputs))) == len(tokens_of(encoder(inputs)))


# --- modules -----------------------------------------------------------------------------------


def test_paths_of_the_hybrid_follow_casts_copies_and_new_weights() -> None:
    """Its paths are modules of their own, not views of one tower."""
    name = "deepseek_vl_hybrid"
    encoder, other = build(name), build(name, torch.float64)
    inputs = draw_inputs(encoder, TILES[name])
    before = tokens_of(encoder(inputs))
    copied = copy.deepcopy(encoder)
    copied.to(torch.float64).load_state_dict(
        {key: 0.9 * value for key, value in other.state_dict().items()}, assign=True
    )
    after = tokens_of(copied(inputs.to(dtype=torch.float64)))
    assert after.dtype == torch.float64
    assert distance(after.float(), before) > 1e-3
    assert torch.equal(tokens_of(encoder(inputs)), before)
