"""``DataParallelEncoder`` over NCCL: two GPUs give the bits of the same shares on one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from graphwrap import GraphedEncoder
from tests.gpu.gpu_towers import GRAPHED, calls_of, new_tower, pixels_for
from tests.support.processes.ranks import Ranks
from vitgraph import DataParallelEncoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    two = Ranks(2, tmp_path_factory.mktemp("store") / "store", timeout=120, backend="nccl")
    yield two
    two.close()


def compare_with_shares(rank: int, name: str, graphs: bool, table: str) -> list[str]:
    """The calls whose results are not those of the same shares on this GPU alone."""
    encoder = new_tower(name)
    wrapped: Any = encoder
    if graphs:
        wrapped = GraphedEncoder(encoder, [256, 1024, 2048])
        if rank == 0:
            wrapped.capture(progress=False).save_table(table)
        dist.barrier()
        if rank != 0:  # with the table all ranks take the same graphs and kernels
            wrapped.load_table(table)
            wrapped.capture(progress=False)
    parallel = DataParallelEncoder(wrapped)
    wrong = []
    for call, grids in {**calls_of(name), "nothing": []}.items():
        pixels = pixels_for(encoder, grids) if grids else torch.zeros(0, *encoder.row_shape)
        for given in (pixels, pixels.to("cuda", torch.bfloat16)):
            found = parallel(given, grids)
            assert found.last_hidden_state is None
            assert found.pooler_output is not None
            assert found.pooler_output.device == torch.device("cuda", rank)
            items = encoder.split(found, grids)
            shares = parallel._assign_grids(grids)
            for share in shares.by_rank:
                theirs = shares._replace(own_items=share)
                output = wrapped(theirs.select(given), theirs.own_grids)
                alone = encoder.split(output, theirs.own_grids)
                for item, wanted in zip(share, alone, strict=True):
                    one, other = items[item].pooler_output, wanted.pooler_output
                    assert one is not None
                    assert other is not None
                    if not torch.equal(one, other):
                        wrong.append(f"{call}, item {item}")
    return wrong


def fail_then_encode(rank: int) -> tuple[str, int]:
    """Rank 1 passes pixels of a wrong width; the message on this rank, and tokens afterwards."""
    encoder = new_tower("qwen3_vl")
    parallel = DataParallelEncoder(encoder)
    grids = [[1, 8, 8]] * 4
    pixels = pixels_for(encoder, grids)
    try:
        parallel(pixels if rank == 0 else pixels[:, :-1], grids)
    except ValueError as error:
        output = parallel(pixels, grids).pooler_output
        assert output is not None
        return str(error), len(output)
    raise AssertionError("no error")


def end_before_the_call(rank: int) -> None:
    """Rank 1 ends without a word."""
    encoder = new_tower("qwen3_vl")
    parallel = DataParallelEncoder(encoder)
    if rank == 1:
        os._exit(7)
    parallel(pixels_for(encoder, [[1, 8, 8]]), [[1, 8, 8]])


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("name", GRAPHED)
def test_two_gpus_give_the_bits_of_the_same_shares_on_one(
    ranks: Ranks, tmp_path: Path, name: str, graphs: bool
) -> None:
    assert ranks(compare_with_shares, name, graphs, str(tmp_path / "table.json")) == [[], []]


def test_an_error_on_one_gpu_is_raised_on_both(ranks: Ranks) -> None:
    (first, tokens), (second, others) = ranks(fail_then_encode)
    assert tokens == others == 64
    assert first == f"rank 1 of 2: {second}"


def test_a_process_that_ended_is_an_error_on_the_other_gpu(tmp_path: Path) -> None:
    pair = Ranks(2, tmp_path / "store", timeout=60, backend="nccl")
    raised, code = pair(end_before_the_call)
    pair.close()
    assert code == 7
    assert isinstance(raised, RuntimeError)
    assert "heard nothing from another rank: one has ended" in str(raised)
