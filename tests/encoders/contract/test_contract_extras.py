"""Outputs of blocks in ``extras`` are what the blocks, their attention and their MLP return."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from encoders import Encoder
from encoders.deepseek.sam import SamBlock
from tests.oracles import TOWERS, draw_pixels, grids_for, tiny
from tests.support.towers import deepseek
from tests.support.towers.step3_paths import IMAGES, shared

BRANCHES = ("", ".attn", ".mlp")


@contextmanager
def results_of(modules: dict[str, nn.Module]) -> Iterator[dict[str, Tensor]]:
    """Yield the results of modules by name, which plain forward hooks keep."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda module, inputs, result: seen.__setitem__(name, result)

    hooks = [module.register_forward_hook(keep(name)) for name, module in modules.items()]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def modules_of(blocks: nn.ModuleList, stack: str = "") -> dict[str, nn.Module]:
    """Return the blocks, their attention and their MLP by the names of their outputs."""
    named: dict[str, Any] = {f"{stack}blocks.{n}": block for n, block in enumerate(blocks)}
    for name, block in list(named.items()):
        children = dict(block.named_children())
        named[f"{name}.attn"] = children.get("attn", children.get("self_attn"))
        named[f"{name}.mlp"] = children["mlp"]
    return named


@pytest.mark.parametrize("name", TOWERS)
@torch.no_grad()
def test_extras_are_what_plain_hooks_see(name: str) -> None:
    encoder, grids = tiny(name), grids_for(name)
    pixels, metadata = draw_pixels(encoder, grids), encoder.prepare_encoder_metadata(grids)
    names = [f"{block}{branch}" for block in ("blocks.0", "blocks.1") for branch in BRANCHES]
    modules = modules_of(encoder.blocks)
    with results_of({name: modules[name] for name in names}) as seen:
        plain = encoder(pixels, grids)
    output = encoder.with_extras(names)(pixels, grids)
    for extra in names:
        assert torch.equal(output[extra], encoder.in_input_order(seen[extra], metadata)), extra
    assert torch.equal(output.pooler_output, plain.pooler_output)
    assert output.extras.keys() == {*plain.extras, *names}
    states = encoder.forward_intermediates(pixels, grids, [0, 1])
    assert all(torch.equal(output[f"blocks.{n}"], state) for n, state in enumerate(states))


@pytest.mark.parametrize("name", ["clip", "dinov3", "c_radio", "llama4"])
@torch.no_grad()
def test_rows_before_patches_are_what_plain_hooks_see(name: str) -> None:
    encoder, grids = tiny(name), grids_for(name)
    pixels, count = draw_pixels(encoder, grids), encoder.prefix_rows
    names = [f"blocks.1{branch}" for branch in BRANCHES]
    modules = modules_of(encoder.blocks)
    with results_of({name: modules[name] for name in names}) as seen:
        encoder(pixels, grids)
    output = encoder.with_extras([f"{name}.prefix" for name in names])(pixels, grids)
    starts = encoder.prepare_encoder_metadata(grids)["cu_seqlens"][:-1].tolist()
    for extra in names:
        rows = seen[extra].flatten(0, -2)
        expected = torch.stack([rows[start : start + count] for start in starts])
        assert torch.equal(output[f"{extra}.prefix"], expected), extra
        assert extra not in output.extras
    parts = [item["blocks.1.prefix"] for item in encoder.split(output, grids)]
    assert torch.equal(torch.cat(parts), output["blocks.1.prefix"])


@torch.no_grad()
def test_inner_stacks_and_paths_have_extras_of_their_own() -> None:
    encoder = deepseek.build("deepseek_ocr")
    inputs = deepseek.draw_inputs(encoder, deepseek.OCR_TILES)
    names = (
        "tiles.blocks.2",
        "blocks.1",
        "sam.blocks.0.attn",
        "tiles.sam.blocks.1",
        "blocks.0.mlp",
    )
    items = encoder.with_extras(names)(inputs)
    of_tiles = [item["tiles.blocks.2"] for item in items if "tiles.blocks.2" in item.extras]
    states = encoder.forward_intermediates(inputs, indices=[1, 2])
    assert torch.equal(torch.cat(of_tiles), states["tiles"][1])
    assert torch.equal(torch.cat([item["blocks.1"] for item in items]), states["image"][0])
    assert [len(item.extras) for item in items] == [3, 5, 5, 3]
    block, path = encoder.paths["image"].inner_stacks["sam"].blocks[0], inputs.paths["image"]
    assert isinstance(block, SamBlock)
    assert block.window
    hidden = encoder.paths["image"].inner_stacks["sam"].embed_patches(path.pixel_values)
    attended = block.cut_views(block.attn, block.norm1(hidden))
    assert torch.equal(torch.cat([item["sam.blocks.0.attn"] for item in items]), attended)


@torch.no_grad()
def test_extras_of_tiles_and_whole_images_stay_apart() -> None:
    encoder = shared("step3_vl")
    inputs = encoder.preprocess(IMAGES)
    items = encoder.with_extras(["blocks.1", "tiles.blocks.1"])(inputs)
    assert [len(item["blocks.1"]) for item in items] == [1] * 4
    assert [len(item.extras.get("tiles.blocks.1", ())) for item in items] == [12, 0, 4, 0]


@torch.no_grad()
def test_extras_are_added_to_those_that_an_encoder_gives() -> None:
    encoder = tiny("qwen2_vl")
    pixels, grids = draw_pixels(encoder, grids_for("qwen2_vl")), grids_for("qwen2_vl")
    names = ["blocks.0", "blocks.1.mlp"]
    wanted = encoder.with_extras(names)(pixels, grids).extras
    first = encoder.with_extras(names[:1])
    found = first.with_extras([*names[1:], *names])(pixels, grids).extras
    assert list(found) == list(wanted) == names
    assert all(torch.equal(found[name], wanted[name]) for name in names)
    assert list(first(pixels, grids).extras) == names[:1]
    several = shared("step3_vl").with_extras(["tiles.blocks.1"]).with_extras(["blocks.1"])
    items = several(several.preprocess(IMAGES))
    assert {*items[0].extras} == {"blocks.1", "tiles.blocks.1"}


@torch.no_grad()
def test_both_resolutions_have_extras_in_every_item() -> None:
    encoder = deepseek.build("deepseek_vl_hybrid")
    inputs = deepseek.draw_inputs(encoder, deepseek.TILES["deepseek_vl_hybrid"])
    items = encoder.with_extras(["high.blocks.1.attn", "blocks.0"])(inputs)
    low = encoder.forward_intermediates(inputs, indices=[0])["image"][0]
    assert torch.equal(torch.cat([item["blocks.0"] for item in items]), low)
    assert all(item["high.blocks.1.attn"].shape[:1] == (1,) for item in items)


@torch.no_grad()
def test_paths_have_rows_before_patches_of_their_own() -> None:
    encoder = shared("step3_vl")
    plain = deepseek.build("deepseek_ocr")
    for name in ("sam.blocks.0.prefix", "tiles.sam.blocks.1.prefix"):
        with pytest.raises(ValueError, match=r"as blocks\.0\.prefix"):
            plain.with_extras([name])
    with pytest.raises(ValueError, match="no output"):
        encoder.with_extras(["blocks.0.prefix"])
    inputs = deepseek.draw_inputs(plain, deepseek.OCR_TILES)
    items = plain.with_extras(["tiles.blocks.2", "tiles.blocks.2.prefix"])(inputs)
    tiled = [item for item in items if item.extras]
    assert tiled
    for item in tiled:
        assert torch.equal(item["tiles.blocks.2.prefix"], item["tiles.blocks.2"][:, :1])


@pytest.mark.parametrize(
    "name", ["blocks.9", "blocks.-1", "blocks.01", "tiles.blocks.0", "blocks.0.norm1", "blocks"]
)
def test_an_unknown_extra_is_refused_with_the_names(name: str) -> None:
    with pytest.raises(ValueError, match=r"blocks\.0 to blocks\.2.*blocks\.0\.attn"):
        tiny("qwen2_vl").with_extras([name])


def test_one_name_of_an_extra_is_not_read_by_its_letters() -> None:
    with pytest.raises(ValueError, match=r"names='blocks\.0': must be a list of names"):
        tiny("qwen2_vl").with_extras("blocks.0")


def test_blocks_that_no_forward_runs_give_no_extras() -> None:
    encoder: Encoder = tiny("llava")
    assert encoder.config.select_layer == -2
    with pytest.raises(ValueError, match=r"blocks\.0 to blocks\.1,"):
        encoder.with_extras(["blocks.2"])


def test_hooks_see_and_change_a_block_with_extras() -> None:
    encoder, grids = tiny("qwen3_vl"), grids_for("qwen3_vl")
    pixels = draw_pixels(encoder, grids)
    giving = encoder.with_extras(["blocks.1", "blocks.1.attn"])
    hook = encoder.blocks[1].attn.register_forward_hook(lambda module, inputs, result: 0 * result)
    with torch.no_grad():
        output = giving(pixels, grids)
    hook.remove()
    assert not output["blocks.1.attn"].any()
    assert output["blocks.1"].isfinite().all()


def test_gradients_flow_through_extras() -> None:
    encoder, grids = tiny("qwen2_5_vl"), grids_for("qwen2_5_vl")
    pixels = draw_pixels(encoder, grids).requires_grad_()
    encoder.with_extras(["blocks.0"])(pixels, grids)["blocks.0"].sum().backward()
    assert pixels.grad is not None
    assert pixels.grad.any()
