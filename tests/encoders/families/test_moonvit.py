"""MoonViT-3D's clips: segments of four frames, in one item or in several."""

from __future__ import annotations

import pytest
import torch

from encoders import EncoderItemSpec, Video
from tests.oracles import draw_pixels, tiny
from tests.support.graphs.cases import static
from tests.support.graphs.outputs import worst_distance
from tests.support.photographs import china


def test_the_segments_of_a_clip_may_be_items_of_their_own() -> None:
    """transformers' processor makes one item of each."""
    encoder = tiny("moonvit")
    pixels = draw_pixels(encoder, [[10, 4, 6]])
    whole = encoder(pixels, [[10, 4, 6]])
    apart = encoder(pixels, [[4, 4, 6], [4, 4, 6], [2, 4, 6]])
    for one, other in zip(whole[:2], apart[:2], strict=True):
        assert torch.equal(one, other)
    tokens, patches = encoder.feature_maps(whole.pooler_output, [[10, 4, 6]]), whole[0]
    assert tokens[0].shape[:3] == (3, 2, 3)
    [rows] = encoder.feature_maps(patches, [[10, 4, 6]])
    assert torch.equal(rows.flatten(0, 2), patches)


def test_an_items_cost_is_that_of_its_segments() -> None:
    assert tiny("moonvit").item_specs([[10, 4, 6], [1, 2, 4]]) == [
        EncoderItemSpec(240, 18, 3, 96),
        EncoderItemSpec(8, 2, 1, 8),
    ]
    metadata = tiny("moonvit").prepare_encoder_metadata([[10, 4, 6], [1, 2, 4]])
    assert metadata["cu_seqlens"].tolist() == [0, 96, 192, 240, 248]


def test_frames_of_a_segment_attend_to_each_other_and_to_no_others() -> None:
    encoder, grid = tiny("moonvit"), [[6, 2, 4]]
    pixels = draw_pixels(encoder, grid)
    before = encoder(pixels, grid).last_hidden_state.unflatten(0, (6, 8))
    pixels[8:16] += 1  # the second frame
    changed = encoder(pixels, grid).last_hidden_state.unflatten(0, (6, 8)) != before
    assert changed.any((1, 2)).tolist() == [True] * 4 + [False] * 2


def test_a_long_clip_is_cut_between_segments_by_the_limit_on_tokens() -> None:
    encoder, clip = tiny("moonvit"), [Video([china().resize((56, 56))] * 11, 2.0)]
    [whole] = encoder.encode(videos=clip)
    [parts] = encoder.encode(videos=clip, max_tokens_per_call=5)
    assert whole.pooler_output.shape[0] == 12
    assert torch.allclose(whole.pooler_output, parts.pooler_output, atol=1e-5)
    assert torch.allclose(whole.last_hidden_state, parts.last_hidden_state, atol=1e-5)


def test_a_stream_gives_one_result_per_clip() -> None:
    encoder, image = tiny("moonvit"), china().resize((56, 84))
    items = [image, [image] * 9, image]
    results = list(encoder.encode_many(items, progress=False, workers=1))
    assert [len(result.pooler_output) for result in results] == [6, 18, 6]


@pytest.mark.parametrize("name", ["moonvit", "kimi_k3"])
def test_clips_of_uneven_segments_replay_beside_images(name: str) -> None:
    encoder, grids = tiny(name), [[1, 4, 6], [10, 2, 4], [3, 4, 4], [1, 2, 2]]
    graphed = static(encoder, [256], outputs=("last_hidden_state", "pooler_output"))
    pixels = draw_pixels(encoder, grids)
    assert worst_distance(graphed(pixels, grids), encoder(pixels, grids)) <= 2e-6
    assert graphed.stats().eager_items == 0
