"""CUDA graphs on a GPU: streams and threads, memory, failures at capture, the measured table."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from graphwrap import GraphedEncoder
from tests.gpu.gpu_towers import (
    GRAPHED,
    NEEDS_CUDA,
    TILE_PATCHES,
    Moment,
    any_sync_is_an_error,
    budgets_of,
    calls_of,
    fail_at,
    new_tower,
    on_gpu,
    replaying,
    tower,
)
from tests.support.graphs.outputs import (
    EVERY_FIELD,
    assert_same_bits,
    copy_of,
    fields,
    worst_distance,
)

pytestmark = NEEDS_CUDA


@pytest.fixture(scope="module", params=GRAPHED)
def family(request: pytest.FixtureRequest) -> Iterator[tuple[str, GraphedEncoder]]:
    """A family and its captured graphs, which tests share, given back afterwards."""
    graphed = replaying(tower(request.param), budgets_of(request.param))
    yield request.param, graphed
    graphed.release()


# --- streams, threads -----------------------------------------------------------------------------


def test_a_warm_call_waits_for_nothing(family: tuple[str, GraphedEncoder]) -> None:
    name, graphed = family
    calls = [(on_gpu(graphed.encoder, grids), grids) for grids in calls_of(name).values()]
    answers = [copy_of(graphed(*call)) for call in calls]
    with any_sync_is_an_error():
        outputs = [graphed(*call) for call in calls]
    for output, answer in zip(outputs, answers, strict=True):
        assert_same_bits(output, answer)


def test_a_grid_not_seen_before_waits_for_nothing_either() -> None:
    encoder = tower("qwen2_5_vl")
    graphed = replaying(encoder, [256])
    grids = [[1, 18, 22], [1, 6, 10]]
    pixels = on_gpu(encoder, grids)
    with any_sync_is_an_error():
        output = graphed(pixels, grids)
    assert_same_bits(output, graphed(pixels, grids))
    graphed.release()


def test_calls_on_other_streams_are_ordered_without_a_device_sync(
    family: tuple[str, GraphedEncoder],
) -> None:
    """Pixels are made late on each stream, so a call that did not wait would read garbage."""
    name, graphed = family
    calls = [
        (on_gpu(graphed.encoder, grids, seed), grids)
        for seed, grids in enumerate(calls_of(name).values())
    ]
    answers = [copy_of(graphed(*call)) for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    buffers = [torch.empty_like(pixels) for pixels, _ in calls]
    for _ in range(5):
        for buffer in buffers:
            buffer.fill_(float("nan"))
        outputs = []
        with any_sync_is_an_error():
            for stream, buffer, (pixels, grids) in zip(streams, buffers, calls, strict=True):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(2_000_000)
                    buffer.copy_(pixels)
                    outputs.append(graphed(buffer, grids))
        torch.cuda.synchronize()
        for output, answer in zip(outputs, answers, strict=True):
            assert_same_bits(output, answer)


def test_eight_threads_on_streams_of_their_own_get_right_answers(
    family: tuple[str, GraphedEncoder],
) -> None:
    name, graphed = family
    calls = [
        (on_gpu(graphed.encoder, grids, seed), grids)
        for seed, grids in enumerate(calls_of(name).values())
    ]
    answers = [copy_of(graphed(*call)) for call in calls]
    torch.cuda.synchronize()

    def work(seed: int) -> None:
        draw = random.Random(seed)
        with torch.cuda.stream(torch.cuda.Stream() if seed % 2 else torch.cuda.current_stream()):
            for _ in range(40):
                number = draw.randrange(len(calls))
                assert_same_bits(graphed(*calls[number]), answers[number])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8)))


def test_two_objects_in_one_process_do_not_disturb_each_other() -> None:
    encoder = tower("qwen2_5_vl")
    one, other = replaying(encoder, [64, 256]), replaying(encoder, [128, 1024])
    call = (on_gpu(encoder, [[1, 16, 26]]), [[1, 16, 26]])
    answers = [copy_of(graphed(*call)) for graphed in (one, other)]
    for _ in range(20):
        other._poison()
        assert_same_bits(one(*call), answers[0])
        one._poison()
        assert_same_bits(other(*call), answers[1])
    one.release()
    assert_same_bits(other(*call), answers[1])
    other.release()


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GRAPHED)
def test_ten_budgets_cost_about_what_the_largest_costs(name: str) -> None:
    unit = budgets_of(name)[0] if name in TILE_PATCHES else 256
    ten = [unit * step for step in range(1, 11)]
    held = []
    for budgets in (ten, ten[-1:]):
        graphed = replaying(tower(name), budgets)
        stats = graphed.stats()
        held.append((stats.pool_bytes, stats.arena_bytes))
        graphed.release()
    (pool, arena), (pool_alone, arena_alone) = held
    print(
        f"{name}: pool {pool / 2**20:.1f} MiB, alone {pool_alone / 2**20:.1f}; "
        f"arena {arena / 2**20:.1f} MiB, alone {arena_alone / 2**20:.1f}"
    )
    assert pool <= 1.15 * pool_alone
    assert arena <= 1.05 * arena_alone


@pytest.mark.parametrize("name", GRAPHED)
def test_release_returns_all_of_it(name: str) -> None:
    encoder = tower(name)
    grids = calls_of(name)["images and a clip"]
    pixels = on_gpu(encoder, grids)
    encoder(pixels, grids)  # kernels' own workspaces stay with the process
    replaying(encoder, budgets_of(name)[:1], kernels="flash2").release()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    graphed = replaying(encoder, budgets_of(name), kernels="flash2")
    answer = copy_of(graphed(pixels, grids))
    assert torch.cuda.memory_reserved() > before[1]
    kept = sum(value.nbytes for value in fields(answer).values())
    graphed.release()
    assert torch.cuda.memory_allocated() <= before[0] + kept + 2**20
    assert torch.cuda.memory_reserved() <= before[1] + 2 * kept + 24 * 2**20
    again = replaying(encoder, budgets_of(name), kernels="flash2")
    assert_same_bits(again(pixels, grids), answer)
    again.release()


# --- failure --------------------------------------------------------------------------------------


def out_of_memory() -> None:
    torch.empty(2**50, dtype=torch.uint8, device="cuda")


def allocator_assertion() -> None:
    raise RuntimeError("NVML_SUCCESS == r INTERNAL ASSERT FAILED at CUDACachingAllocator.cpp:1016")


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("fail", [out_of_memory, allocator_assertion])
@pytest.mark.parametrize(("moment", "lost"), [("run", 1024), ("capture", 1024), ("capture", 256)])
def test_a_budget_that_fails_is_dropped_and_the_rest_serve(
    moment: Moment, fail: Callable[[], None], lost: int
) -> None:
    encoder = new_tower("qwen3_vl")
    fail_at(encoder, 4 * lost, moment, fail)
    # One shape per token count (one frame per replay), so that one budget fails.
    with pytest.warns(UserWarning, match=rf"budget {lost} .* is dropped") as caught:
        graphed = replaying(encoder, [64, 256, 1024], max_frames_per_batch=1)
    assert len(caught) == 1, [str(warning.message) for warning in caught]
    kept = [budget.tokens for budget in graphed.stats().budgets]
    assert kept == [tokens for tokens in (64, 256, 1024) if tokens != lost]
    for grids in ([[1, 16, 16]], [[1, 30, 32]], [[1, 8, 8]]):
        pixels = on_gpu(encoder, grids)
        output = graphed(pixels, grids)
        assert worst_distance(output, tower("qwen3_vl")(pixels, grids)) <= 2e-2
        graphed._poison()
        assert_same_bits(graphed(pixels, grids), output)
    assert graphed.stats().eager_items == 0
    graphed.release()
    assert bool((torch.ones(8, device="cuda") * 2 == 2).all())


@pytest.mark.parametrize(
    ("moment", "fail"),
    [("run", out_of_memory), ("capture", out_of_memory), ("capture", torch.cuda.synchronize)],
    ids=["warming up", "capturing", "capture invalidated"],
)
def test_a_failed_capture_leaks_no_pool(moment: Moment, fail: Callable[[], None]) -> None:
    encoder = new_tower("qwen3_vl")
    replaying(encoder, [64]).release()
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        fail_at(encoder, 4 * 1024, moment, fail)
        with pytest.warns(UserWarning, match="budget 1024 .* is dropped") as caught:
            graphed = replaying(encoder, [64, 1024], max_frames_per_batch=1)
        assert len(caught) == 1, [str(warning.message) for warning in caught]
        graphed.release()
        assert torch.cuda.memory_reserved() <= before + 24 * 2**20


@pytest.mark.parametrize(("moment", "lost"), [("run", 1024), ("capture", 256)])
def test_an_interrupted_capture_leaves_a_usable_object(moment: Moment, lost: int) -> None:
    encoder = new_tower("qwen3_vl")
    fail_at(encoder, 4 * lost, moment, interrupt)
    graphed = GraphedEncoder(encoder, [64, 256, 1024], outputs=EVERY_FIELD, backend="cudagraph")
    with pytest.raises(KeyboardInterrupt):
        graphed.capture(progress=False)
    grids = [[1, 16, 16]]
    pixels = on_gpu(encoder, grids)
    assert worst_distance(graphed(pixels, grids), tower("qwen3_vl")(pixels, grids)) <= 2e-2
    assert {budget.tokens for budget in graphed.stats().budgets} == {64, 256, 1024}
    graphed.release()


# --- the measured table ---------------------------------------------------------------------------


def test_measuring_takes_none_of_the_callers_random_numbers() -> None:
    before = torch.cuda.get_rng_state()
    GraphedEncoder(tower("qwen3_vl"), [64, 256]).capture(progress=False).release()
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_a_saved_table_makes_the_same_choices_without_measuring(tmp_path: Path) -> None:
    encoder = tower("qwen2_5_vl")
    first = GraphedEncoder(encoder, [64, 256, 1024]).capture(progress=False)
    first.save_table(tmp_path / "table.json")
    second = GraphedEncoder(encoder, [64, 256, 1024])
    second.load_table(tmp_path / "table.json")
    second.capture(progress=False)
    for grids in calls_of("qwen2_5_vl").values():
        pixels = on_gpu(encoder, grids)
        assert_same_bits(first(pixels, grids), second(pixels, grids))
    counts = [
        ([budget.hits for budget in stats.budgets], dict(stats.eager_reasons))
        for stats in (first.stats(), second.stats())
    ]
    assert counts[0] == counts[1]
    other = GraphedEncoder(encoder, [64, 512])
    other.load_table(tmp_path / "table.json")
    with pytest.raises(ValueError, match="has no times for budgets"):
        other.capture(progress=False)
    for graphed in (first, second, other):
        graphed.release()


def test_budgets_captured_at_first_use_give_the_same_bits(tmp_path: Path) -> None:
    """Graphs captured earlier stay valid, and the pool does not grow beyond that of one capture."""
    encoder = tower("qwen2_5_vl")
    whole, lazy = (GraphedEncoder(encoder, [64, 256, 1024], outputs=EVERY_FIELD) for _ in range(2))
    whole.capture(progress=False).save_table(tmp_path / "table.json")
    lazy.load_table(tmp_path / "table.json")
    calls = list(calls_of("qwen2_5_vl").values())
    for number, grids in enumerate([*calls, *reversed(calls)]):
        pixels = on_gpu(encoder, grids)
        assert_same_bits(lazy(pixels, grids), whole(pixels, grids))
        if not number:
            assert len(lazy.stats().budgets) < len(whole.stats().budgets)
    lazy.capture(progress=False)
    stats = [graphed.stats() for graphed in (lazy, whole)]
    assert len(stats[0].budgets) == len(stats[1].budgets)
    assert stats[0].arena_bytes == stats[1].arena_bytes
    assert stats[0].pool_bytes <= 1.1 * stats[1].pool_bytes
    assert stats[0].pool_bytes == sum(budget.graph_bytes for budget in stats[0].budgets)
    for graphed in (lazy, whole):
        graphed.release()


def test_a_second_encoder_reads_what_the_first_has_kept(tmp_path: Path) -> None:
    encoder = tower("qwen2_5_vl")
    for _ in range(2):
        GraphedEncoder(encoder, [64, 1024]).capture(progress=False).release()
        (file,) = (tmp_path / "kept-tables").iterdir()
    assert file.name.startswith("Qwen2_5VLEncoder-")


def test_every_budget_is_timed_and_counted() -> None:
    graphed = GraphedEncoder(tower("intern_vit"), [256, 1024]).capture(progress=False)
    stats = graphed.stats()
    assert stats.backend == "cudagraph"
    assert all(budget.replay_ms and budget.replay_ms > 0 for budget in stats.budgets)
    assert stats.pool_bytes == sum(budget.graph_bytes for budget in stats.budgets) > 0
    graphed.release()
