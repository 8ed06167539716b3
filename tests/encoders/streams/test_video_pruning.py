"""Pruned clips: the rule in plain loops, and the same tokens from eager runs and graphs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import vitgraph
from encoders import EncoderOutput, prune_video_tokens
from tests.oracles import BY_NAME, build_encoder
from tests.support.graphs.cases import pixels_for, static, tower

CLIP = [[4, 8, 12]]
VIDEO_TOWERS = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


def output_of(name: str, grids: list[list[int]]) -> EncoderOutput:
    encoder = tower(name)
    return encoder(pixels_for(encoder, grids), grids)


def kept_by_loops(tokens: Tensor, frames: int, rate: float) -> list[int]:
    """Return the indices of the kept tokens, by the words of the paper."""
    per_frame = len(tokens) // frames
    changes = [math.inf] * per_frame
    for index in range(per_frame, len(tokens)):
        a, b = tokens[index].double(), tokens[index - per_frame].double()
        changes.append(1 - float(a @ b / (a.norm() * b.norm())))
    count = max(per_frame, int(len(tokens) * (1 - rate)))
    return sorted(sorted(range(len(tokens)), key=lambda index: -changes[index])[:count])


def clip(changes: list[list[float]], width: int = 4) -> tuple[EncoderOutput, list[int]]:
    """Return a clip of one row whose tokens are turned by these angles from frame to frame."""
    angles = torch.tensor(changes).cumsum(0).flatten()
    tokens = torch.zeros(len(angles), width)
    tokens[:, 0], tokens[:, 1] = angles.cos(), angles.sin()
    return EncoderOutput(None, tokens, ()), [len(changes), 2, 2 * len(changes[0])]


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.5, 0.74, 0.75, 0.99])
@pytest.mark.parametrize("name", VIDEO_TOWERS)
def test_the_kept_tokens_are_those_of_plain_loops(name: str, rate: float) -> None:
    output = output_of(name, CLIP)
    pruned = prune_video_tokens(output, CLIP, rate)
    kept = kept_by_loops(output.pooler_output, 4, rate)
    assert pruned.mask.nonzero().flatten().tolist() == kept
    assert torch.equal(pruned.tokens, output.pooler_output[kept])
    assert len(pruned.deepstack_features) == len(output.deepstack_features)
    for ours, every in zip(pruned.deepstack_features, output.deepstack_features, strict=True):
        assert torch.equal(ours, every[kept])


@pytest.mark.parametrize("name", VIDEO_TOWERS)
def test_positions_point_to_the_kept_tokens_in_the_map(name: str) -> None:
    encoder, output = tower(name), output_of(name, CLIP)
    pruned = prune_video_tokens(output, CLIP, 0.6)
    (map_,) = encoder.feature_maps(output.pooler_output, CLIP)
    assert torch.equal(map_[tuple(pruned.positions.T)], pruned.tokens)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_replayed_split_and_eager_results_keep_the_same_tokens(name: str) -> None:
    encoder, grids = tower(name), [[1, 4, 6], [4, 6, 8], [3, 4, 4]]
    pixels = pixels_for(encoder, grids)
    graphed = static(encoder)
    replayed = encoder.split(graphed(pixels, grids), grids)
    packed = encoder.split(encoder(pixels, grids), grids)
    start = 0
    for (t, h, w), one, two in zip(grids, replayed, packed, strict=True):
        alone = encoder(pixels[start : start + t * h * w], [[t, h, w]])
        start += t * h * w
        truth = prune_video_tokens(alone, (t, h, w), 0.5)
        for output in (one, two):
            pruned = prune_video_tokens(output, torch.tensor([t, h, w]), 0.5)
            assert torch.equal(pruned.mask, truth.mask)
            assert torch.equal(pruned.positions, truth.positions)
            torch.testing.assert_close(pruned.tokens, truth.tokens)
            torch.testing.assert_close(pruned.deepstack_features, truth.deepstack_features)
    assert graphed.stats().eager_items == 0


def test_grouped_query_attention_replays_and_prunes_as_it_runs_eagerly() -> None:
    encoder = build_encoder(BY_NAME["exaone4_5"], BY_NAME["exaone4_5"].tiny, calm=0.5)
    pixels = pixels_for(encoder, CLIP)
    replayed, eager = static(encoder)(pixels, CLIP), encoder(pixels, CLIP)
    torch.testing.assert_close(replayed.pooler_output, eager.pooler_output)
    pruned = [prune_video_tokens(output, CLIP, 0.5) for output in (replayed, eager)]
    assert torch.equal(pruned[0].mask, pruned[1].mask)


@pytest.mark.parametrize(
    ("frames", "tokens", "rate", "kept"),
    [(10, 10, 0.9, 10), (10, 10, 0.75, 25), (4, 3, 0.5, 6), (7, 5, 0.1, 31), (1, 6, 0.9, 6)],
)
def test_as_many_tokens_are_kept_as_in_vllm(
    frames: int, tokens: int, rate: float, kept: int
) -> None:
    output, grid = clip([[0.1] * tokens] * frames)
    pruned = prune_video_tokens(output, grid, rate)
    assert len(pruned.tokens) == len(pruned.positions) == int(pruned.mask.sum()) == kept


def test_the_tokens_that_turned_most_are_kept() -> None:
    output, grid = clip([[0.0, 0.0, 0.0], [0.1, 1.0, 0.0], [1.2, 0.0, 0.2]])
    pruned = prune_video_tokens(output, grid, 0.4)
    assert pruned.positions.tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 2], [1, 0, 1], [2, 0, 0]]


def test_of_equal_changes_the_earlier_token_is_kept() -> None:
    output, grid = clip([[0.0, 0.0]] * 4)
    assert prune_video_tokens(output, grid, 0.5).positions[:, 0].tolist() == [0, 0, 1, 1]


def test_longer_vectors_alone_are_no_change() -> None:
    output, grid = clip([[0.0, 0.0], [0.0, 0.3]])
    scaled = output.pooler_output * torch.tensor([1.0, 1.0, 50.0, 1.0])[:, None]
    pruned = prune_video_tokens(output._replace(pooler_output=scaled), grid, 0.25)
    assert pruned.mask.tolist() == [True, True, False, True]


def test_half_precision_clips_keep_their_dtype() -> None:
    output = output_of("qwen3_vl", CLIP).to(dtype=torch.bfloat16)
    pruned = prune_video_tokens(output, CLIP, 0.5)
    assert pruned.tokens.dtype == torch.bfloat16
    kept = kept_by_loops(output.pooler_output, 4, 0.5)
    assert pruned.mask.nonzero().flatten().tolist() == kept


def test_features_that_a_graph_leaves_out_stay_out() -> None:
    output = output_of("qwen3_vl", CLIP)._replace(deepstack_features=None)
    assert prune_video_tokens(output, CLIP, 0.5).deepstack_features is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": 1.0}, r"rate=1.0: .* from 0 to below 1"),
        ({"rate": "0.5"}, r"rate='0.5': .* must be a number from 0"),
        ({"rate": None}, r"rate=None: .* must be a number"),
        ({"output": [None]}, "type list: pass the EncoderOutput of one"),
        ({"output": torch.ones(1)}, "type Tensor: pass the EncoderOutput of one clip"),
        ({"rate": -0.1}, r"rate=-0.1"),
        ({"rate": math.nan}, r"rate=nan"),
        ({"grid_thw": [[4, 8, 12], [1, 2, 2]]}, "has 2 items: pass one clip at a time"),
        ({"grid_thw": [3, 8, 12]}, "has 96 rows, which a clip of grid 3x8x12 does not make"),
        ({"grid_thw": [4, 4, 12]}, "does not make"),
        ({"output": EncoderOutput(None, None, None)}, "has no pooler_output.*outputs="),
    ],
    ids=str,
)
def test_what_cannot_be_pruned_is_refused(change: dict[str, Any], message: str) -> None:
    output = EncoderOutput(None, torch.ones(96, 8), ())
    arguments = {"output": output, "grid_thw": CLIP, "rate": 0.5, **change}
    with pytest.raises(ValueError, match=message):
        prune_video_tokens(**arguments)


def test_vitgraph_offers_pruning() -> None:
    assert vitgraph.prune_video_tokens is prune_video_tokens
