"""One vector per item, and calls that are bounded by ``max_tokens_per_call``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from encoders.contract import EncoderOutput, VisionInputs
from encoders.streams.calls import ItemEncoder, ResultSettings
from encoders.streams.item_parts import plan_calls
from encoders.streams.pooling import pool
from graphwrap import GraphedEncoder
from graphwrap.encoder_forms import OnePath
from tests.oracles import BY_NAME, build_pair, draw_pixels, grids_for
from tests.support.comparisons import assert_all_equal
from tests.support.photographs import china, flower, hopper, panning_clip
from tests.support.towers.streams import TOWERS, NumberEncoder, tower
from tests.support.towers.toy_encoder import ToyEncoder

IMAGES = [china().resize((120, 90)), hopper().resize((200, 230)), flower().resize((64, 200))]
CLIP = panning_clip(6)


def whole(output: EncoderOutput) -> Tensor:
    assert output.pooler_output is not None
    return output.pooler_output


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("name", TOWERS)
def test_a_pool_takes_all_tokens_of_each_item(name: str) -> None:
    encoder = tower(name)
    tiled = {"max_tiles": 2} if name == "intern_vit_300m" else {}
    outputs = encoder.encode(IMAGES[:2], [CLIP], **tiled)
    means, most = (encoder.embed(IMAGES[:2], [CLIP], pool=how, **tiled) for how in ("mean", "max"))
    for mean, largest, output in zip(means, most, outputs, strict=True):
        assert torch.equal(mean, whole(output).mean(0))
        assert torch.equal(largest, whole(output).max(0).values)


def test_cls_is_the_mean_of_the_class_tokens_of_all_tiles() -> None:
    encoder = tower("intern_vit_300m")
    image = china().resize((600, 300))
    (output,) = encoder.encode([image], max_tiles=2)
    (vector,) = encoder.embed([image], max_tiles=2, pool="cls")
    assert output.last_hidden_state is not None
    assert len(output.last_hidden_state) == 3  # two tiles and the thumbnail
    assert torch.allclose(vector, output.last_hidden_state[:, 0].mean(0))


def test_cls_is_refused_before_the_tower_runs_where_there_is_none() -> None:
    encoder = tower("qwen3_vl")
    with pytest.raises(ValueError, match="has no class token; take pool='mean' or 'max'"):
        encoder.embed(["no such file"], pool="cls")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_averaged_in_float32(dtype: torch.dtype) -> None:
    tokens = torch.full((5000, 2), 0.1, dtype=dtype)
    tokens[0] = 300
    output = EncoderOutput(None, tokens, ())
    vector = pool(output, "mean")
    assert vector.dtype == torch.float32
    assert torch.allclose(vector, tokens.double().mean(0).float())


def test_float64_stays_float64() -> None:
    output = EncoderOutput(None, torch.rand(4, 3, dtype=torch.float64), ())
    for how in ("mean", "max"):
        assert pool(output, how).dtype == torch.float64


def test_normalized_vectors_have_length_one_and_the_same_direction() -> None:
    encoder = tower("qwen3_vl")
    plain = encoder.embed(IMAGES, pool="mean")
    unit = encoder.embed(IMAGES, pool="mean", normalize=True)
    for one, other in zip(unit, plain, strict=True):
        assert one.norm().item() == pytest.approx(1, abs=1e-6)
        assert torch.allclose(one * other.norm(), other, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pool": "avg"}, "pool='avg': must be one of 'mean', 'max', 'cls', 'head'"),
        ({"pool": "none"}, "pool='none': must be one of 'mean', 'max', 'cls', 'head'"),
        ({"normalize": 1}, "normalize=1: must be True or False"),
        ({"max_tokens_per_call": 0}, "max_tokens_per_call=0: must be a positive number"),
        ({"max_tokens_per_call": 1.5}, "max_tokens_per_call=1.5: must be a positive number"),
        ({"max_tokens_per_call": "9"}, "max_tokens_per_call='9': must be a positive number"),
        ({"max_tokens_per_call": -5}, "max_tokens_per_call=-5: must be a positive number"),
    ],
)
def test_impossible_arguments_are_refused_before_anything_is_read(
    arguments: dict[str, object], message: str
) -> None:
    encoder = tower("qwen3_vl")
    with pytest.raises(ValueError, match=message):
        encoder.embed(["no such file"], **arguments)
    with pytest.raises(ValueError, match=message):
        encoder.embed_many(["no such file"], **arguments)


def test_graphed_encoder_pools_as_its_encoder_does() -> None:
    encoder = tower("qwen2_5_vl")
    graphed = GraphedEncoder(encoder, budgets=[64, 256], backend="static")
    for how in ("mean", "max"):
        ours = graphed.embed(IMAGES, [CLIP], pool=how, normalize=True)
        theirs = encoder.embed(IMAGES, [CLIP], pool=how, normalize=True)
        for one, other in zip(ours, theirs, strict=True):
            assert distance(one, other) <= 2e-6


def test_a_field_that_the_wrapper_leaves_out_is_named() -> None:
    encoder = tower("intern_vit_300m")
    graphed = GraphedEncoder(encoder, backend="eager", outputs=["last_hidden_state"])
    with pytest.raises(ValueError, match="reads pooler_output"):
        graphed.embed(IMAGES, pool="mean")


@pytest.mark.parametrize("backend", ["eager", "static"])
@pytest.mark.parametrize("name", ["intern_vit_300m", "llama4"])
def test_graphs_of_default_outputs_pool_the_class_token(name: str, backend: Any) -> None:
    encoder = build_pair(BY_NAME[name], BY_NAME[name].tiny)[0]
    grids = grids_for(name)
    inputs = VisionInputs(draw_pixels(encoder, grids), torch.tensor(grids))
    graphed = GraphedEncoder(encoder, backend=backend)
    settings = ResultSettings("cls")
    ours = graphed.item_encoder().embed(lambda: inputs, settings)
    theirs = encoder.item_encoder().embed(lambda: inputs, settings)
    assert len(ours) == len(theirs) == len(grids)
    for one, other, output in zip(ours, theirs, encoder(inputs), strict=True):
        assert distance(one, other) <= 2e-6
        assert torch.equal(other, output["prefix"][:, 0].mean(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_no_items_give_no_vectors_of_the_same_width(dtype: torch.dtype) -> None:
    encoder = tower("intern_vit_300m", dtype)
    graphed = GraphedEncoder(encoder, backend="static", max_budget=512)
    for caller in (encoder, graphed):
        for how, width in (("mean", encoder.out_features), ("cls", encoder.num_features)):
            vectors = caller.embed(pool=how)
            assert vectors.shape == (0, width)
            assert vectors.dtype == torch.promote_types(dtype, torch.float32)


@pytest.mark.parametrize("name", ["step3_vl", "deepseek_ocr", "deepseek_vl_hybrid"])
def test_no_items_give_no_vectors_of_several_paths(name: str) -> None:
    encoder = tower(name)
    assert encoder.embed().shape == (0, encoder.out_features)
    assert encoder.encode() == []


@pytest.mark.parametrize("pool", ["encode", "encode_many"])
def test_features_are_not_pooled(pool: str) -> None:
    for made in (tower("qwen3_vl"), GraphedEncoder(tower("qwen3_vl"), backend="eager")):
        with pytest.raises(TypeError, match="unexpected keyword argument 'pool'"):
            getattr(made, pool)([], pool="mean")


@pytest.mark.parametrize("backend", ["eager", "static"])
def test_embed_of_one_call_is_a_tensor_of_all_items(backend: Any) -> None:
    encoder = tower("qwen3_vl")
    graphed = GraphedEncoder(encoder, backend=backend, max_budget=512)
    wanted = torch.stack([whole(output).mean(0) for output in encoder.encode(IMAGES, [CLIP])])
    for made in (encoder, encoder.accelerated(), graphed):
        assert distance(made.embed(IMAGES, [CLIP]), wanted) <= 2e-6
        stream = list(made.embed_many([*IMAGES, CLIP], progress=False))
        assert distance(torch.stack(stream), wanted) <= 2e-6


# --- max_tokens_per_call -----------------------------------------------------------------------


@pytest.mark.parametrize("name", TOWERS)
def test_items_in_parts_equal_items_in_one_call(name: str) -> None:
    encoder = tower(name)
    tiled = {"max_tiles": 2} if name == "intern_vit_300m" else {}
    images = [china(), *IMAGES[:2]]
    outputs = encoder.encode(images, [CLIP, CLIP[:3]], **tiled)
    largest = max(len(whole(output)) for output in outputs)
    for limit in (1, largest // 3, largest - 1, 10 * largest):
        parts = encoder.encode(images, [CLIP, CLIP[:3]], max_tokens_per_call=limit, **tiled)
        for one, other in zip(parts, outputs, strict=True):
            assert one.last_hidden_state is not None
            assert other.last_hidden_state is not None
            assert distance(one.last_hidden_state, other.last_hidden_state) <= 2e-6
            assert distance(whole(one), whole(other)) <= 2e-6
            assert one.deepstack_features is not None
            for a, b in zip(one.deepstack_features, other.deepstack_features or (), strict=True):
                assert distance(a, b) <= 2e-6


def test_a_call_exceeds_the_limit_only_by_one_segment() -> None:
    encoder = ToyEncoder()
    grids = [(5, 2, 4), (1, 2, 2), (1, 1, 2), (3, 6, 6), (1, 2, 2)]  # 20, 2, 1, 54 and 2 tokens
    calls = plan_calls(grids, encoder.item_specs, 9)
    assert [[(part.item, part.grid[0], part.tokens) for part in call] for call in calls] == [
        [(0, 2, 8)],
        [(0, 2, 8)],
        [(0, 1, 4), (1, 1, 2), (2, 1, 1)],
        [(3, 1, 18)],
        [(3, 1, 18)],
        [(3, 1, 18)],
        [(4, 1, 2)],
    ]
    assert [part.item for call in calls for part in call if part.last] == [0, 1, 2, 3, 4]
    (call,) = plan_calls(grids, encoder.item_specs, 79)
    assert [part.grid for part in call] == grids


def test_parts_of_a_wrapper_that_returns_views_survive_the_next_call() -> None:
    encoder = tower("qwen3_vl")
    graphed = GraphedEncoder(encoder, budgets=[64], backend="static", clone=False)
    ours = graphed.encode(IMAGES, [CLIP], max_tokens_per_call=40)
    for one, other in zip(ours, encoder.encode(IMAGES, [CLIP]), strict=True):
        assert distance(whole(one), whole(other)) <= 2e-6


def test_results_of_several_calls_share_no_memory_with_the_batch() -> None:
    for limit in (None, 200):
        for output in tower("qwen3_vl").encode(IMAGES, max_tokens_per_call=limit):
            tokens = whole(output)
            assert tokens.untyped_storage().nbytes() == tokens.nbytes


@pytest.mark.parametrize(
    ("raised", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), MemoryError),
        (MemoryError(), MemoryError),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), MemoryError),
    ],
)
def test_running_out_of_memory_names_the_limit(raised: Exception, kind: type[Exception]) -> None:
    encoder = NumberEncoder(lambda number: 50)
    encoder.poison, encoder.error = {3}, raised
    with pytest.raises(kind, match=r"50 output tokens ran out of memory.*max_tokens_per_call=25"):
        encoder.encode([3])


def test_another_runtime_error_stays_as_it_is() -> None:
    encoder = NumberEncoder()
    encoder.poison, encoder.error = {3}, RuntimeError("shape mismatch")
    with pytest.raises(RuntimeError, match=r"^shape mismatch$"):
        encoder.encode([3])


def test_an_encoding_needs_no_encoder_of_ours() -> None:
    paths = {"image": ToyEncoder()}
    item_encoder = ItemEncoder(OnePath(paths["image"]), paths, paths, torch.device("cpu"))  # type: ignore[arg-type]
    pixels = torch.from_numpy(np.random.default_rng(0).normal(size=(40, 3))).float()
    grid = torch.tensor([[5, 1, 6], [1, 1, 10]])
    inputs = VisionInputs(pixels, grid)
    one, other = (item_encoder.encode(lambda: inputs, n) for n in (None, 7))
    assert_all_equal(map(whole, one), map(whole, other))
