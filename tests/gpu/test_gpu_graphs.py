"""CUDA graphs on a GPU give padded eager's bits, whatever lay in memory, wherever inputs are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from copy import deepcopy

import pytest
import torch
from torch import Tensor

from graphwrap import GraphedEncoder
from graphwrap.encoder_forms import FormKernels
from tests.gpu.gpu_towers import (
    GRAPHED,
    NEEDS_CUDA,
    TILE_PATCHES,
    budgets_of,
    calls_of,
    form,
    forms,
    new_tower,
    on_gpu,
    pixels_for,
    replaying,
    tower,
)
from tests.support.graphs.outputs import (
    EVERY_FIELD,
    Output,
    assert_same_bits,
    copy_of,
    fields,
    worst_distance,
)

pytestmark = NEEDS_CUDA


@pytest.fixture(scope="module", params=GRAPHED)
def family(request: pytest.FixtureRequest) -> Iterator[tuple[str, GraphedEncoder]]:
    """A family and its captured graphs, which tests share, given back afterwards."""
    graphed = replaying(form(request.param, "auto"), budgets_of(request.param))
    yield request.param, graphed
    graphed.release()


@pytest.fixture(scope="module", params=forms(GRAPHED), ids="-".join)
def any_form(request: pytest.FixtureRequest) -> Iterator[tuple[str, GraphedEncoder]]:
    """A family with one attention kernel and its captured graphs, which tests share."""
    name, kernels = request.param
    graphed = replaying(form(name, kernels), budgets_of(name), kernels=as_given(kernels))
    yield name, graphed
    graphed.release()


def as_given(kernels: FormKernels) -> FormKernels:
    """The setting that captures a form as it is."""
    return "reference" if kernels == "reference" else "auto"


# --- exactness ------------------------------------------------------------------------------------


def test_a_replay_is_padded_eager_bit_for_bit(any_form: tuple[str, GraphedEncoder]) -> None:
    name, graphed = any_form
    kernels: FormKernels = "reference" if graphed.encoder.accelerator is None else "auto"
    static = GraphedEncoder(
        graphed.encoder, budgets_of(name), outputs=EVERY_FIELD, backend="static", kernels=kernels
    )
    graphed.reset_stats()
    for seed, grids in enumerate(calls_of(name).values()):
        pixels = on_gpu(graphed.encoder, grids, seed)
        assert_same_bits(graphed(pixels, grids), static(pixels, grids))
    assert graphed.stats().eager_items == static.stats().eager_items == 0
    hits = [[budget.hits for budget in wrapped.stats().budgets] for wrapped in (graphed, static)]
    assert hits[0] == hits[1]


@pytest.mark.parametrize("name", GRAPHED)
def test_blocks_of_a_replay_are_those_of_padded_eager(name: str) -> None:
    names = ("blocks.0", "blocks.1.attn", "blocks.1")
    encoder, grids = form(name, "auto"), calls_of(name)["images"]
    pixels = on_gpu(encoder, grids)
    static = GraphedEncoder(encoder, budgets_of(name), outputs=names, backend="static")
    graphed = replaying(encoder, budgets_of(name), outputs=names)
    replayed, padded = graphed(pixels, grids), static(pixels, grids)
    assert all(torch.equal(replayed.extras[one], padded.extras[one]) for one in names)
    graphed.release()


def test_a_replay_is_as_near_to_float32_as_eager_is(family: tuple[str, GraphedEncoder]) -> None:
    """The rule for bfloat16: pooled error at most 1.1 times eager's own, no call over 1.3 times."""
    name, graphed = family
    exact = deepcopy(graphed.encoder).float()  # the same rounded weights
    replayed: list[float] = []
    eager: list[float] = []
    for seed, grids in enumerate(calls_of(name).values()):
        pixels = on_gpu(graphed.encoder, grids, seed)
        reference = exact(pixels.float(), grids)
        for errors, run in ((replayed, graphed), (eager, graphed.encoder)):
            errors.append(squared_error(run(pixels, grids), reference))
    assert sum(replayed) ** 0.5 <= 1.1 * sum(eager) ** 0.5
    assert all(ours**0.5 <= 1.3 * theirs**0.5 for ours, theirs in zip(replayed, eager, strict=True))


def squared_error(output: Output, reference: Output) -> float:
    return sum(
        float((value.double() - fields(reference)[name].double()).square().sum())
        for name, value in fields(output).items()
    )


def test_a_thousand_replays_keep_their_first_answers(
    family: tuple[str, GraphedEncoder],
) -> None:
    name, graphed = family
    calls = [
        (on_gpu(graphed.encoder, grids, seed), grids)
        for seed, grids in enumerate(calls_of(name).values())
    ]
    answers = [copy_of(graphed(*call)) for call in calls]
    draw = random.Random(0)
    held: list[Tensor] = []
    for step in range(1000):
        number = draw.randrange(len(calls))
        if step % 7 == 0:
            graphed.encoder(*calls[draw.randrange(len(calls))])
        if step % 3 == 0:
            held = [
                *held[-4:],
                torch.full((draw.randint(1, 1 << 22),), float("nan"), device="cuda"),
            ]
        assert_same_bits(graphed(*calls[number]), answers[number])


def test_nan_in_stale_buffers_and_pool_pages_changes_no_bit(
    any_form: tuple[str, GraphedEncoder],
) -> None:
    name, graphed = any_form
    calls = [
        (on_gpu(graphed.encoder, grids, seed), grids)
        for seed, grids in enumerate(calls_of(name).values())
    ]
    answers = [copy_of(graphed(*call)) for call in calls]
    for _ in range(2):
        for call, answer in zip(calls[::-1], answers[::-1], strict=True):
            graphed._poison()
            output = graphed(*call)
            assert all(bool(value.isfinite().all()) for value in fields(output).values())
            assert_same_bits(output, answer)


@pytest.mark.parametrize("name", [name for name in GRAPHED if name not in TILE_PATCHES])
def test_boundaries_that_differ_at_equal_totals_are_not_confused(name: str) -> None:
    encoder = tower(name)
    graphed = replaying(encoder, [1024])
    calls = [[[1, 16, 26], [1, 34, 46]], [[1, 34, 46], [1, 16, 26]], [[1, 46, 34], [1, 26, 16]]]
    pixels = on_gpu(encoder, calls[0])
    answers = [copy_of(graphed(pixels, grids)) for grids in calls]
    noise = max(
        worst_distance(answer, encoder(pixels, grids))
        for grids, answer in zip(calls, answers, strict=True)
    )
    assert noise <= 2e-2
    for grids, answer in zip(calls, answers, strict=True):
        assert_same_bits(graphed(pixels, grids), answer)
    assert worst_distance(answers[0], answers[1]) > 3 * noise
    assert worst_distance(answers[1], answers[2]) > 3 * noise
    graphed.release()


@pytest.mark.parametrize("name", GRAPHED)
def test_weights_updated_in_place_are_seen_and_rebound_ones_are_an_error(name: str) -> None:
    encoder = new_tower(name)
    side = TILE_PATCHES.get(name, 8)
    budgets, grids = budgets_of(name)[:1], [[1, side, side]]
    graphed = replaying(encoder, budgets)
    pixels = on_gpu(encoder, grids)
    before = graphed(pixels, grids)
    for parameter in encoder.parameters():
        parameter.add_(0.05 * torch.randn_like(parameter))
    after = copy_of(graphed(pixels, grids))
    assert worst_distance(after, before) > 5e-2
    assert_same_bits(replaying(encoder, budgets)(pixels, grids), after)
    state = {key: value.clone() for key, value in encoder.state_dict().items()}
    encoder.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match="was rebound or moved after capture"):
        graphed(pixels, grids)
    graphed.release()
    assert_same_bits(replaying(encoder, budgets)(pixels, grids), after)


def test_a_hook_registered_after_capture_is_refused_until_removed() -> None:
    encoder = new_tower("qwen3_vl")
    graphed = replaying(encoder, [64])
    for grids in ([[1, 8, 8]], [[1, 40, 40]]):  # a replay, and an eager run beside the graphs
        pixels = on_gpu(encoder, grids)
        answer = copy_of(graphed(pixels, grids))
        handle = encoder.blocks[0].register_forward_hook(lambda *_: None)
        with pytest.raises(RuntimeError, match="was registered or removed after capture"):
            graphed(pixels, grids)
        handle.remove()
        assert_same_bits(graphed(pixels, grids), answer)
    graphed.release()


def test_the_default_budgets_replay_clips_of_the_design() -> None:
    encoder = tower("qwen3_vl")
    graphed = replaying(encoder, None)
    for clip in ([[16, 28, 28]], [[32, 14, 14]]):
        pixels = on_gpu(encoder, clip)
        assert worst_distance(graphed(pixels, clip), encoder(pixels, clip)) <= 2e-2
    stats = graphed.stats()
    assert stats.eager_items == 0
    assert len(stats.budgets) <= 48
    print(stats)
    graphed.release()


# --- inputs, outputs ------------------------------------------------------------------------------


def test_pixels_from_either_device_give_the_same_bits(
    family: tuple[str, GraphedEncoder],
) -> None:
    name, graphed = family
    for grids in calls_of(name).values():
        plain = pixels_for(graphed.encoder, grids).to(torch.bfloat16)
        answer = graphed(plain.cuda(), grids)
        for pixels in (plain, plain.pin_memory(), plain.float(), plain.float().pin_memory().cuda()):
            output = graphed(pixels, grids)
            assert all(value.is_cuda for value in fields(output).values())
            assert_same_bits(output, answer)


def test_replay_split_and_eager_show_one_face(family: tuple[str, GraphedEncoder]) -> None:
    name, graphed = family
    over = [[9, *[TILE_PATCHES[name]] * 2]] if name in TILE_PATCHES else [[1, 66, 66]]
    shown = set()
    graphed.reset_stats()
    for grids in (*calls_of(name).values(), over, []):
        output = graphed(on_gpu(graphed.encoder, grids), grids)
        shown.add(
            tuple(
                (field, x.dtype, x.device, x.shape[1:], x.is_contiguous(), x.requires_grad)
                for field, x in fields(output).items()
            )
        )
    assert len(shown) == 1
    assert graphed.stats().eager_reasons["over tokens"] == 1


def test_results_survive_later_calls_unless_asked_not_to() -> None:
    encoder = tower("qwen3_vl")
    grids = [[1, 8, 8]]
    for clone in (True, False):
        graphed = replaying(encoder, [64], clone=clone)
        first = graphed(on_gpu(encoder, grids, 1), grids)
        kept = copy_of(first)
        graphed(on_gpu(encoder, grids, 2), grids)
        assert first.pooler_output is not None
        assert kept.pooler_output is not None
        assert torch.equal(first.pooler_output, kept.pooler_output) is clone
        graphed.release()
