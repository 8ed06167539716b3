"""Attention maps: equal to the weights of transformers' eager attention, and laid out as features.

The weights of a reference are caught where its eager attention computes them, in its softmax.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers.models.sam.modeling_sam import SamVisionSdpaAttention
from transformers.models.unlimited_ocr.modeling_unlimited_ocr import (
    UnlimitedOcrSamVisionSdpaAttention,
)

from encoders import Encoder, VisionInputs
from graphwrap import GraphedEncoder
from tests.oracles import BY_NAME, FAMILIES, build_pair, draw_pixels, grids_for, window_walk
from tests.support.photographs import china, hopper
from tests.support.towers.deepseek import build, build_reference
from tests.support.towers.step3_paths import IMAGES as RANDOM_IMAGES
from tests.support.towers.step3_paths import shared
from tests.support.towers.streams import tower
from vitgraph import attention_maps
from vitgraph.analysis import attention as module
from vitgraph.analysis.attention import maps_of_inputs
from vitgraph.seeded import SEEDED, write_seeded_checkpoint
from weights import load_encoder

EAGER = [family.name for family in FAMILIES if family.eager]
"""The towers whose references have an eager attention."""


class Softmax(TorchFunctionMode):
    """Keeps what each softmax returns."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.nn.functional.softmax:
            self.kept.append(out)
        return out


@contextmanager
def eager(reference: nn.Module) -> Iterator[list[Tensor]]:
    for part in reference.modules():
        config = getattr(part, "config", None)
        if config is not None:
            config._attn_implementation = "eager"
        if type(part) in (SamVisionSdpaAttention, UnlimitedOcrSamVisionSdpaAttention):
            part.__class__ = type(part).__base__  # which attention it is, is its class
    with Softmax() as mode, torch.no_grad():
        yield mode.kept


def reference_weights(name: str, encoder: Any, reference: nn.Module, grids: Any) -> list[Tensor]:
    """Return the weights [H, R, R] of each block among all rows in input order."""
    pixels = draw_pixels(encoder, grids)
    with eager(reference) as kept:
        BY_NAME[name].output(reference, pixels, torch.tensor(grids))
    kept = [weights for weights in kept if weights.ndim == 4]  # those of SAM have three axes
    rows = kept[-1].shape[-1] * (kept[-1].shape[0] if BY_NAME[name].tiled else 0)
    rows = rows or sum(t * h * w for t, h, w in grids)
    blocks: list[list[Tensor]] = [[]]
    for weights in kept:
        if sum(len(part[0]) for part in blocks[-1]) == rows:
            blocks.append([])
        blocks[-1] += list(weights)
    whole = [torch.stack([torch.block_diag(*h) for h in zip(*b, strict=True)]) for b in blocks]
    if name == "sam3":  # whose windows lie one after the other
        order = encoder.prepare_encoder_metadata(grids)["reverse_index"]
        tiles = sum(grid[0] for grid in grids)
        place = (torch.arange(tiles)[:, None] * len(order) + order).flatten()
        in_order = zip(whole, blocks, strict=True)
        whole = [w if len(b) == tiles else w[:, place][:, :, place] for w, b in in_order]
    return whole[-encoder.config.depth :]


@pytest.mark.parametrize("name", EAGER)
def test_maps_equal_the_weights_of_eager_attention(name: str) -> None:
    encoder, reference = build_pair(BY_NAME[name], BY_NAME[name].tiny)
    grids = [[1, 4, 6]] if "gemma4" in name else grids_for(name)  # its reference takes one frame
    if name in ("moonvit", "kimi_vl"):  # whose reference takes one segment
        grids = [[2 if name == "moonvit" else 1, 4, 6]]
    inputs = VisionInputs(draw_pixels(encoder, grids), torch.tensor(grids))
    whole = reference_weights(name, encoder, reference, grids)
    order = order_of(name, grids, whole[0].shape[-1])
    points = [(0, 1, 0), (0, 1, 1)]
    for queries in (None, points):
        found = maps_of_inputs(encoder, inputs, blocks=None, queries=queries, heads="all")
        for block, weights in enumerate(whole):
            for item, numbers in enumerate(order):
                rows = numbers.flatten()
                if queries is not None:
                    rows = torch.stack([numbers[point] for point in points])
                wanted = weights[:, rows].mean(1)[:, numbers.flatten()]
                wanted = wanted.unflatten(1, numbers.shape)
                assert (found[item][block] - wanted).abs().max() <= 1e-5
                assert wanted.max() > 1e-3


def order_of(name: str, grids: Any, rows: int) -> list[Tensor]:
    """Return the row of each patch [t, h, w] of each item, among the rows of the reference."""
    order, start = [], 0
    if BY_NAME[name].tiled:
        every = torch.arange(rows).view(sum(grid[0] for grid in grids), -1)
        for t, _, _ in grids:
            side = int(every.shape[1] ** 0.5)
            first = 0 if name == "llama4" else every.shape[1] - side**2  # its class token is last
            patches = every[start : start + t, first : first + side**2]
            order.append(patches.unflatten(1, (side, side)))
            start += t
        return order
    for t, h, w in grids:
        by_row = name in ("pixtral", "moonvit", "kimi_vl") or "gemma4" in name
        side = 1 if by_row else 2
        numbers = torch.arange(start, start + t * h * w).view(t, h // side, w // side, side, side)
        order.append(numbers.transpose(2, 3).reshape(t, h, w))
        start += t * h * w
    if "2_5" in name or "exaone" in name:
        tokens = torch.tensor(window_walk(grids))
        place = (4 * tokens.argsort()[:, None] + torch.arange(4)).flatten()
        order = [place[numbers] for numbers in order]
    return order


@pytest.mark.parametrize("name", ["deepseek_vl_hybrid", "deepseek_ocr"])
@pytest.mark.parametrize("points", [None, [(0, 3, 2), (0, 7, 7)]])
def test_maps_of_windows_with_relative_positions_equal_eager_attention(
    name: str, points: Any
) -> None:
    """SAM: blocks 0 and 2 attend in windows of 5x5 patches, block 1 over the view of 8x8."""
    encoder, path = build(name), "high" if name == "deepseek_vl_hybrid" else "image.sam"
    reference = build_reference(name, encoder)
    inputs = encoder.preprocess([china(), hopper()])
    pixels = inputs.paths[path.partition(".")[0]].pixel_values
    with eager(reference) as kept:
        if path == "high":
            reference.get_high_res_image_features(pixels)
        else:
            reference.vision_tower(pixels)
    kept = [weights for weights in kept if weights.ndim == 3]  # those of CLIP have four axes
    assert len(kept) == 3
    found = maps_of_inputs(encoder, inputs, blocks=None, queries=points, heads="all", path=path)
    asked = points or [(0, row, column) for row in range(8) for column in range(8)]
    for block, weights in enumerate(kept):
        side = 8 if block == 1 else 5
        windows = weights.view(2, -1, 3, side, side, side, side)  # item, window, head, query, key
        across = -(-8 // side)
        for item in range(2):
            wanted = torch.zeros(3, 1, 10, 10)
            for _, row, column in asked:
                window = row // side * across + column // side
                top, left = row // side * side, column // side * side
                given = windows[item, window, :, row % side, column % side]
                wanted[:, 0, top : top + side, left : left + side] += given / len(asked)
            assert (found[item][block] - wanted[..., :8, :8]).abs().max() <= 1e-5


def every() -> list[str]:
    return [
        *("qwen2_5_vl", "intern_vit_300m", "step3", "step3_vl"),
        *("deepseek_vl", "deepseek_vl_hybrid", "deepseek_vl2", "deepseek_ocr"),
    ]


def encoder_of(name: str) -> Encoder:
    if name in ("step3", "step3_vl"):
        return shared(name)
    return build(name) if "deepseek" in name else tower(name)


@pytest.mark.parametrize("name", every())
def test_every_encoder_gives_a_map_per_item_and_block(name: str) -> None:
    encoder = encoder_of(name)
    images = RANDOM_IMAGES[:2]
    maps = attention_maps(encoder, images, blocks=[-1, 0, -1])
    features = encoder.feature_maps(encoder(encoder.preprocess(images)), encoder.preprocess(images))
    for item, laid in zip(maps, features, strict=True):
        assert len(item) == 3
        assert torch.equal(item[0], item[2])
        assert item[0].shape == laid["image"].shape[:3]
        assert 0.3 < item[1].sum() <= 1.0001


@pytest.mark.parametrize("name", ["intern_vit_300m", "step3", "qwen2_5_vl"])
def test_items_together_have_the_maps_of_items_alone(name: str) -> None:
    encoder = encoder_of(name)
    together = attention_maps(encoder, RANDOM_IMAGES[:3], queries=[(0, 1, 2)], heads="all")
    for image, maps in zip(RANDOM_IMAGES, together, strict=False):
        (alone,) = attention_maps(encoder, [image], queries=[(0, 1, 2)], heads="all")
        torch.testing.assert_close(maps[0], alone[0], rtol=0, atol=2e-6)


def test_a_point_of_stitched_tiles_is_seen_by_its_own_tile() -> None:
    encoder = encoder_of("step3_vl")
    whole, none = attention_maps(encoder, RANDOM_IMAGES[:2], queries=[(0, 8, 13)], path="tiles")
    assert whole[0].shape == (1, 18, 24)
    assert none == []
    inside = torch.zeros(1, 18, 24, dtype=torch.bool)
    inside[:, 6:12, 12:18] = True  # tiles of 6x6 patches
    assert whole[0][inside].sum() == pytest.approx(1, abs=1e-5)
    assert not whole[0][~inside].any()


@pytest.mark.parametrize("name", ["image.sam", "tiles.sam"])
def test_sam_inside_of_a_tower_has_maps_of_its_own(name: str) -> None:
    encoder, (path, _, _) = encoder_of("deepseek_ocr"), name.partition(".")
    inputs = encoder.preprocess(RANDOM_IMAGES[:2])
    patches = inputs.paths[path].pixel_values[0, 0].numel() // 16**2
    for item in attention_maps(encoder, RANDOM_IMAGES[:2], blocks=[0, 1, 2], path=name):
        assert len(item) == 3 * bool(item)
        assert all(one.numel() % patches == 0 and one.sum() <= 1.0001 for one in item)
    with pytest.raises(
        ValueError, match=r"path='low.sam': .* 'image', 'tiles', 'image.sam', 'tiles.sam'"
    ):
        attention_maps(encoder, RANDOM_IMAGES[:1], path="low.sam")


def test_class_token_asks_each_tile_and_is_left_out_of_the_map() -> None:
    encoder = encoder_of("intern_vit_300m")
    ((of_class,),) = attention_maps(encoder, [RANDOM_IMAGES[1]], queries="cls")
    assert 0 < of_class.sum() < 1
    every = attention_maps(encoder, [RANDOM_IMAGES[1]], queries="cls", heads="all")[0][0]
    torch.testing.assert_close(every.mean(0), of_class)


def test_a_query_in_one_frame_sees_that_frame_alone() -> None:
    encoder = encoder_of("qwen2_5_vl")
    clip = torch.stack([RANDOM_IMAGES[1]] * 4)
    ((found,),) = attention_maps(encoder, videos=[clip], queries=[(1, 0, 0)])
    assert found.shape[0] == 2
    assert not found[0].any()
    assert found[1].sum() == pytest.approx(1, abs=1e-5)


def test_chunks_of_queries_bound_the_scores_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = encoder_of("qwen2_5_vl")
    (whole,) = attention_maps(encoder, RANDOM_IMAGES[:1], blocks=None)
    monkeypatch.setattr(module, "SCORES_AT_ONCE", 2000)
    sizes = []
    softmax = Tensor.softmax

    def watched(scores: Tensor, dim: int) -> Tensor:
        sizes.append(scores.numel())
        return softmax(scores, dim)

    monkeypatch.setattr(Tensor, "softmax", watched)
    (parts,) = attention_maps(encoder, RANDOM_IMAGES[:1], blocks=None)
    assert max(sizes) <= 2000
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other)


def test_maps_leave_the_encoder_as_it_was() -> None:
    encoder = encoder_of("qwen2_5_vl")
    inputs = encoder.preprocess(RANDOM_IMAGES[:1])
    before = encoder(inputs)[0].pooler_output
    attention_maps(encoder, RANDOM_IMAGES[:1])
    assert torch.equal(encoder(inputs)[0].pooler_output, before)
    assert attention_maps(encoder) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", SEEDED)
def test_every_family_gives_maps_where_it_gives_features(name: str, tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path / name, name, width=64)
    encoder = load_encoder(folder, dtype=torch.float32, progress=False)
    image = RANDOM_IMAGES[1]
    (maps,) = attention_maps(encoder, [image], blocks=None)
    inputs = encoder.preprocess([image])
    (features,) = encoder.feature_maps(encoder(inputs), inputs)
    assert len(maps) == len(encoder.blocks)
    shape = features["image"].shape[:3]
    if name == "minicpm_v":  # whose last rows are windows of 2x2 patches
        shape = torch.Size(inputs.grid_thw[0].tolist())
    assert {one.shape for one in maps} == {shape}
    assert all(0.5 < one.sum() <= 1.0001 for one in maps)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"heads": "max"}, r"heads='max': must be \"mean\" or \"all\""),
    ({"blocks": [9]}, "block 9 does not exist"),
    ({"queries": "cls"}, "queries='cls': this encoder has no class token"),
    ({"queries": "class"}, r"queries='class': must be None, \"cls\" or points"),
    ({"queries": []}, r"queries=\[\]: must be None"),
    ({"queries": [(0, 1)]}, r"queries=\[\(0, 1\)\]: must be None"),
    ({"queries": (0, 1, 1)}, r"queries=\(0, 1, 1\): must be None"),
    ({"queries": [(0, 1, 0.5)]}, "must be None"),
    ({"queries": [(0, 99, 0)]}, r"point \(0, 99, 0\): must be \(frame, row, column\)"),
    ({"queries": [(0, -1, 0)]}, r"point \(0, -1, 0\): must be"),
    ({"path": "tiles"}, "path='tiles': this encoder has attention maps of 'image'"),
]


@pytest.mark.parametrize(("given", "message"), BAD)
def test_arguments_that_cannot_be_are_refused_by_name(given: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        attention_maps(encoder_of("qwen2_5_vl"), RANDOM_IMAGES[:1], **given)


def test_a_path_that_an_encoder_of_several_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match=r"path='high': this encoder .* 'image', 'tiles'"):
        attention_maps(encoder_of("step3_vl"), RANDOM_IMAGES[:1], path="high")


@pytest.mark.parametrize("name", ["qwen2_5_vl", "step3_vl"])
def test_graphs_and_accelerated_encoders_say_that_they_give_no_attention(name: str) -> None:
    encoder = encoder_of(name)
    with pytest.raises(ValueError, match="GraphedEncoder gives no attention maps: pass"):
        attention_maps(GraphedEncoder(encoder, backend="eager"), RANDOM_IMAGES[:1])
    with pytest.raises(ValueError, match=r"accelerated encoder gives no .*accelerated\(\) was"):
        attention_maps(encoder.accelerated(), RANDOM_IMAGES[:1])


def test_attention_that_cannot_be_observed_is_named() -> None:
    encoder = build_pair(BY_NAME["qwen2_vl"], BY_NAME["qwen2_vl"].tiny)[0]
    encoder.blocks[2].attn.forward = lambda x, context: x
    grids = grids_for("qwen2_vl")
    inputs = VisionInputs(draw_pixels(encoder, grids), torch.tensor(grids))
    with pytest.raises(ValueError, match="block 2 of type Block made 0 calls of attention"):
        maps_of_inputs(encoder, inputs)
