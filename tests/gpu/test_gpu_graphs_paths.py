"""CUDA graphs of encoders with several paths: each path replays, with all guarantees."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy

import pytest
import torch

from encoders import PathsEncoder
from graphwrap import GraphedEncoder
from tests.gpu.gpu_towers import NEEDS_CUDA, replaying
from tests.support.graphs.outputs import (
    EVERY_FIELD,
    Output,
    assert_same_bits,
    copy_of,
    fields,
    worst_distance,
)
from tests.support.towers.deepseek import build
from tests.support.towers.step3_paths import IMAGES, NAMES, shared

pytestmark = NEEDS_CUDA
CALLS = [IMAGES, IMAGES[::-1], IMAGES[:1], IMAGES[-1:]]


@pytest.fixture(
    scope="module", params=[*NAMES, "deepseek_vl_hybrid", "deepseek_ocr", "deepseek_ocr2"]
)
def encoder(request: pytest.FixtureRequest) -> PathsEncoder:
    """A small encoder of several paths on the GPU, in bfloat16 and accelerated."""
    name = request.param
    small = deepcopy(shared(name)) if name in NAMES else build(name)
    return small.to("cuda", torch.bfloat16).accelerated()


@pytest.fixture(scope="module")
def graphed(encoder: PathsEncoder) -> Iterator[GraphedEncoder]:
    """Its captured graphs, which tests share, given back afterwards."""
    captured = replaying(encoder, None, max_graphs=6)
    yield captured
    captured.release()


def assert_all_same(ours: Sequence[Output], theirs: Sequence[Output]) -> None:
    assert len(ours) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert_same_bits(one, other)


def test_every_path_replays_with_the_bits_of_padded_eager(
    encoder: PathsEncoder, graphed: GraphedEncoder
) -> None:
    static = GraphedEncoder(encoder, max_graphs=6, outputs=EVERY_FIELD, backend="static")
    graphed.reset_stats()
    for images in CALLS:
        assert_all_same(graphed.encode(images), static.encode(images))
    assert graphed.stats().eager_items == 0
    assert {budget.path for budget in graphed.stats().budgets if budget.hits} == set(encoder.paths)


def test_nan_in_buffers_of_all_paths_changes_no_bit(graphed: GraphedEncoder) -> None:
    answers = [[copy_of(one) for one in graphed.encode(images)] for images in CALLS]
    for images, answer in zip(CALLS[::-1], answers[::-1], strict=True):
        graphed._poison()
        outputs = graphed.encode(images)
        assert all(bool(x.isfinite().all()) for one in outputs for x in fields(one).values())
        assert_all_same(outputs, answer)


def test_replays_among_eager_calls_keep_their_first_answers(
    encoder: PathsEncoder, graphed: GraphedEncoder
) -> None:
    inputs = [encoder.preprocess(images) for images in CALLS]
    answers = [[copy_of(one) for one in graphed(one)] for one in inputs]
    draw = random.Random(0)
    for step in range(100):
        number = draw.randrange(len(inputs))
        if step % 5 == 0:
            encoder(inputs[draw.randrange(len(inputs))])
        assert_all_same(graphed(inputs[number]), answers[number])


def test_a_path_may_run_eagerly_beside_one_that_replays(encoder: PathsEncoder) -> None:
    first = next(iter(encoder.paths))
    few = {
        name: [path.budget_range[0]] if name != first else None
        for name, path in encoder.paths.items()
    }
    graphed = replaying(encoder, few, max_graphs=6)
    for images in CALLS:
        for ours, theirs in zip(graphed.encode(images), encoder.encode(images), strict=True):
            assert worst_distance(ours, theirs) <= 2e-2
    graphed.release()


def test_threads_get_right_answers_of_all_paths(graphed: GraphedEncoder) -> None:
    answers = [[copy_of(one) for one in graphed.encode(images)] for images in CALLS]
    torch.cuda.synchronize()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(10):
                number = draw.randrange(len(CALLS))
                assert_all_same(graphed.encode(CALLS[number]), answers[number])
            torch.cuda.current_stream().synchronize()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_release_returns_the_memory_of_all_paths(encoder: PathsEncoder) -> None:
    encoder.encode(IMAGES)  # kernels' own workspaces stay with the process
    replaying(encoder, None, max_graphs=2).release()
    before = torch.cuda.memory_allocated()
    graphed = replaying(encoder, None, max_graphs=6)
    assert torch.cuda.memory_allocated() > before
    graphed.release()
    assert torch.cuda.memory_allocated() <= before + 2**20
