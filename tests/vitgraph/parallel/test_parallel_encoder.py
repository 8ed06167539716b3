"""``DataParallelEncoder``: the bits of one process, on every rank, and errors on all at once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from encoders.contract import EncoderItemSpec, EncoderOutput, VisionInputs
from graphwrap import GraphedEncoder
from tests.support.graphs.outputs import EVERY_FIELD, assert_same_bits
from tests.support.photographs import panning_clip, photographs
from tests.support.processes import ranks as cases
from tests.support.processes.ranks import CALLS, Ranks, pixels_of
from tests.support.towers.streams import tower
from tests.support.towers.toy_encoder import ToyEncoder
from vitgraph import DataParallelEncoder
from vitgraph.parallel.shares import Shares, assign_items, cost_of


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    three = Ranks(3, tmp_path_factory.mktemp("store") / "store")
    yield three
    three.close()


# --- results --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [pytest.param("encoder", marks=pytest.mark.slow), "graphed"])
def test_every_rank_returns_the_bits_of_one_process(ranks: Ranks, form: str) -> None:
    alone = ToyEncoder()
    for found in ranks(cases.call_all, form):
        for name, grids in CALLS.items():
            wanted = alone(pixels_of(grids), grids)._replace(last_hidden_state=None)
            assert_same_bits(found[name], wanted)


def test_a_group_of_some_ranks_shares_out_among_them(ranks: Ranks) -> None:
    grids = CALLS["videos among images"]
    for found in ranks(cases.call_in_pairs):
        assert_same_bits(found, ToyEncoder()(pixels_of(grids), grids))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["intern_vit_300m", "qwen2_5_vl", "qwen3_vl"])
def test_results_have_the_bits_of_the_same_shares_run_alone(ranks: Ranks, name: str) -> None:
    encoder = tower(name)
    inputs = encoder.preprocess(photographs()[:4], [panning_clip(5)])
    specs = encoder.item_specs(inputs.grid_thw)
    of_ranks = assign_items([cost_of(spec) for spec in specs], 3)
    wanted = {}
    for share in of_ranks:
        shares = Shares(inputs.grid_thw.tolist(), specs, of_ranks, share)
        output = encoder(shares.select(inputs.pixel_values), shares.own_grids)
        wanted |= dict(zip(share, encoder.split(output, shares.own_grids), strict=True))
    for found in ranks(cases.encode_media, name, 4, 1):
        assert len(found) == 5
        for item, output in enumerate(found):
            assert_same_bits(output, wanted[item]._replace(last_hidden_state=None))


@pytest.mark.slow
@pytest.mark.parametrize("images", [0, 1, 5])
@pytest.mark.parametrize(("name", "pool"), [("qwen3_vl", "mean"), ("intern_vit_300m", "cls")])
def test_vectors_are_those_of_one_process(ranks: Ranks, name: str, pool: str, images: int) -> None:
    alone = tower(name).embed(photographs()[:images], [panning_clip(5)] * (images > 1), pool=pool)
    for found in ranks(cases.encode_media, name, images, int(images > 1), pool):
        assert len(found) == len(alone)
        for one, other in zip(found, alone, strict=True):
            assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scatter", [True, False])
def test_streams_give_what_one_process_gives(ranks: Ranks, scatter: bool) -> None:
    encoder, images = tower("qwen3_vl"), [photographs()[n % 3].resize((120, 90)) for n in range(5)]
    wanted = torch.stack([output.pooler_output.amax(0) for output in encoder.encode(images)])
    for rank, (outputs, vectors) in enumerate(ranks(cases.stream_images, encoder, images, scatter)):
        own = wanted if scatter else wanted[rank:]
        found = torch.stack([output.pooler_output.amax(0) for output in outputs])
        assert torch.allclose(found, own, rtol=1e-5, atol=1e-6)
        assert torch.allclose(torch.stack(vectors), own, rtol=1e-5, atol=1e-6)


def test_a_stream_keeps_an_error_that_all_ranks_have(ranks: Ranks) -> None:
    items = [photographs()[0].resize((120, 90)), "/nowhere.jpg"]
    for first, second in ranks(cases.keep_errors, [items] * 3):
        assert isinstance(first, torch.Tensor)
        assert "/nowhere.jpg: there is no such file" in second


def test_a_stream_ends_on_all_ranks_where_items_differ(ranks: Ranks) -> None:
    good = photographs()[0].resize((120, 90))
    for other in ([good, "/nowhere.jpg"], [good]):
        for raised in ranks(cases.keep_errors, [[good, good], [good, good], other]):
            assert isinstance(raised, ValueError)
            assert "ranks 0 and 2 made different calls" in str(raised)


def test_the_result_of_preprocess_gives_a_list_of_items(ranks: Ranks) -> None:
    grids = CALLS["videos among images"]
    inputs = VisionInputs(pixels_of(grids), torch.tensor(grids))
    alone = ToyEncoder()
    wanted = alone.split(alone(inputs.pixel_values, grids), grids)
    for (found,) in ranks(cases.call_with_inputs, ToyEncoder(), [inputs], False, EVERY_FIELD):
        for one, other in zip(found, wanted, strict=True):
            assert_same_bits(one, other)


def test_each_rank_receives_its_own_items_alone(ranks: Ranks) -> None:
    for rank, (output, vectors) in enumerate(ranks(cases.call_with_own_items)):
        grids = [(1, 2, 2 + 2 * n) for n in range(rank)]
        wanted = ToyEncoder()(pixels_of(grids, seed=rank), grids)
        assert_same_bits(output, wanted._replace(last_hidden_state=None))
        assert len(vectors) == rank


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (ValueError("a bad grid"), ValueError, "rank 2 of 3: a bad grid"),
        (RuntimeError("no kernel"), RuntimeError, "rank 2 of 3: RuntimeError: no kernel"),
        (ValueError("b\udcff.jpg: no file"), ValueError, "rank 2 of 3: b?.jpg: no file"),
        (KeyError("x" * 5000), RuntimeError, "rank 2 of 3: KeyError: 'xxx"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all(
    ranks: Ranks, error: Exception, kind: type[Exception], message: str
) -> None:
    grids = CALLS["equal items"]
    for rank, (raised, after) in enumerate(ranks(cases.fail_on_one, 2, error)):
        if rank == 2:
            assert (type(raised), str(raised)) == (type(error), str(error))
        else:
            assert type(raised) is kind
            assert str(raised).startswith(message)
        wanted = ToyEncoder()(pixels_of(grids), grids)
        assert_same_bits(after, wanted._replace(last_hidden_state=None))


def test_a_file_that_one_rank_cannot_read_is_an_error_on_all(ranks: Ranks, tmp_path: Path) -> None:
    photographs()[0].save(tmp_path / "good.png")
    for raised in ranks(cases.read_on_all_but_one, str(tmp_path / "good.png")):
        assert isinstance(raised, ValueError)
        assert "/nowhere.jpg: there is no such file" in str(raised)


def test_calls_that_differ_between_ranks_are_an_error_on_all(ranks: Ranks) -> None:
    for raised in ranks(cases.call_with_other_items):
        assert isinstance(raised, ValueError)
        assert "ranks 0 and 1 made different calls" in str(raised)


@pytest.mark.parametrize("name", ["qwen3_vl", "step3_vl"])
@pytest.mark.parametrize(
    "other", [{"pool": "max"}, {"pool": "mean", "normalize": True}], ids=["pool", "normalize"]
)
def test_vectors_of_other_kinds_are_an_error_on_all(
    ranks: Ranks, name: str, other: dict[str, Any]
) -> None:
    of_ranks = [{"pool": "mean"}, {"pool": "mean"}, other]
    for raised in ranks(cases.embed_with_own_options, name, of_ranks):
        assert isinstance(raised, ValueError)
        assert "ranks 0 and 2 made different calls" in str(raised)


def test_pixels_that_are_no_tensor_are_refused(ranks: Ranks) -> None:
    for raised in ranks(cases.call_with_an_array):
        assert isinstance(raised, ValueError)
        assert "pixel_values is a ndarray with grid_thw" in str(raised)


@pytest.mark.slow  # two more processes
@pytest.mark.parametrize("end", [cases.end_before_the_call, cases.end_before_the_exchange])
def test_a_rank_that_ended_is_an_error_on_the_others(
    tmp_path: Path, end: Callable[[int], EncoderOutput]
) -> None:
    pair = Ranks(2, tmp_path / "store")
    raised, code = pair(end)
    pair.close()
    assert code == 7
    assert isinstance(raised, RuntimeError)
    assert "rank 0 of 2 heard nothing from another rank: one has ended" in str(raised)


@pytest.mark.slow  # two more processes
def test_a_rank_that_ended_before_the_second_group_is_an_error(tmp_path: Path) -> None:
    pair = Ranks(2, tmp_path / "store", timeout=3, backend="relay")
    raised, code = pair(cases.end_before_the_object)
    pair.close()
    assert code == 7
    assert isinstance(raised, RuntimeError)
    assert "rank 0 of 2 heard nothing from another rank: one has ended" in str(raised)


@pytest.mark.slow  # two more processes
def test_a_rank_that_is_late_ends_in_the_timeout_of_the_group(tmp_path: Path) -> None:
    # On a busy machine, one process may start seconds after the other.
    pair = Ranks(2, tmp_path / "store", timeout=5)
    raised, _ = pair(cases.come_too_late, 12.0)
    pair.close()
    assert isinstance(raised, RuntimeError)
    assert "took 5 seconds longer than this one, the timeout of the group" in str(raised)


def test_without_a_group_the_error_says_how_to_make_one() -> None:
    with pytest.raises(ValueError, match=r"start the program with torchrun, and call torch"):
        DataParallelEncoder(ToyEncoder())


def test_what_cannot_be_shared_out_is_refused(tmp_path: Path) -> None:
    graphed = GraphedEncoder(ToyEncoder(), [4], outputs=["pooler_output"], backend="static")
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        with pytest.raises(ValueError, match="the graphs leave out deepstack_features"):
            DataParallelEncoder(graphed)
        with pytest.raises(ValueError, match="'tokens'"):
            DataParallelEncoder(ToyEncoder(), outputs=["tokens"])
        with pytest.raises(ValueError, match="scatter='no'"):
            DataParallelEncoder(ToyEncoder(), scatter="no")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="ToyEncoder has no encode: prepare the pixels"):
            DataParallelEncoder(ToyEncoder()).encode(photographs()[:1])
        alone = DataParallelEncoder(graphed, outputs=["pooler_output"])
        with pytest.raises(ValueError, match="pixel_values has 3 rows, grid_thw describes 4"):
            alone(torch.zeros(3, 3), [(1, 2, 2)])
    finally:
        torch.distributed.destroy_process_group()


# --- shares ---------------------------------------------------------------------------------------


def test_shares_hold_every_item_once_and_are_balanced() -> None:
    dice = random.Random(0)
    for _ in range(200):
        costs = [dice.uniform(1, 100) for _ in range(dice.randrange(40))]
        count = dice.randint(1, 9)
        shares = assign_items(costs, count)
        assert sorted(item for share in shares for item in share) == list(range(len(costs)))
        loads = [sum(costs[item] for item in share) for share in shares]
        # The last item of the fullest rank went to the rank with the least: Graham's bound.
        assert max(loads) - min(loads) <= max(costs, default=0) + 1e-9
        assert shares == assign_items(list(costs), count)


def test_more_ranks_than_items_leave_shares_empty() -> None:
    assert assign_items([5.0, 1.0], 4) == [[0], [1], [], []]


def test_a_long_segment_costs_more_than_its_rows() -> None:
    short, long = EncoderItemSpec(8 * 784, 8 * 196, 8, 784), EncoderItemSpec(6272, 1568, 1, 6272)
    windows = long._replace(windows=98)
    assert cost_of(windows) == 6272 < cost_of(short) < cost_of(long)


def test_rows_of_all_ranks_are_found_in_their_order() -> None:
    grids = [(1, 1, 2), (1, 1, 6), (1, 1, 4)]
    shares = Shares(grids, ToyEncoder().item_specs(grids), [[1], [0, 2]], [1])
    assert shares.row_indices(shares.counts("last_hidden_state")).tolist() == [
        *(6, 7),
        *range(6),
        *(8, 9, 10, 11),
    ]
