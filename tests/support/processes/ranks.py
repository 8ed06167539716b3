"""Processes that form a process group on loopback, and the calls that they make in tests."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from encoders.contract import EncoderOutput, GridLike, OutputField, PartialOutput, VisionInputs
from encoders.streams import ItemError
from graphwrap import GraphedEncoder
from vitgraph import DataParallelEncoder

from ..graphs.outputs import EVERY_FIELD
from ..photographs import panning_clip, photographs
from ..towers.streams import tower
from ..towers.toy_encoder import WIDTH, ToyEncoder
from .own import started_once

SECONDS = 120.0
"""How long the tests wait for a process before they fail."""


class Ranks:
    """Processes of one process group, which all run the same function with their rank.

    Args:
        size: number of processes.
        store: a file that does not exist, through which they find one another.
        timeout: timeout of the process group in seconds.
        backend: backend of the process group; with NCCL each process has a GPU of its own, and
            "relay", gloo by another name, needs a second group for errors as NCCL does.
    """

    def __init__(self, size: int, store: Path, timeout: float = 30, backend: str = "gloo") -> None:
        context = started_once()
        pipes = [context.Pipe() for _ in range(size)]
        self.pipes = [ours for ours, _ in pipes]
        self.processes = [
            context.Process(target=_serve, args=(theirs, rank, size, str(store), timeout, backend))
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run a function on every rank, and return what it returned or raised on each."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers = []
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            try:
                assert pipe.poll(SECONDS), f"a rank hangs in {function.__name__}"
                answers.append(pipe.recv())
            except EOFError:
                process.join(SECONDS)
                answers.append(process.exitcode)
        return answers

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            if process.is_alive():
                pipe.send(None)
            process.join(SECONDS)
            process.kill()


def _serve(pipe: Any, rank: int, size: int, store: str, timeout: float, backend: str) -> None:
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    if backend == "relay":
        dist.Backend.register_backend("relay", dist.ProcessGroupGloo, devices=["cpu"])
    # A group that was waited for in vain cannot be destroyed in order: the process just ends.
    dist.init_process_group(
        backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout),
        device_id=device,
    )
    while (task := pipe.recv()) is not None:
        function, arguments = task
        try:
            pipe.send(function(rank, *arguments))
        except (ValueError, RuntimeError) as error:
            pipe.send(error)
    pipe.close()
    os._exit(0)


# --- encoders -------------------------------------------------------------------------------------


class FailingEncoder(ToyEncoder):
    """A toy encoder that raises ``error`` in its next call."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.error = error

    def forward(
        self,
        pixel_values: Tensor,
        grid_thw: GridLike | None = None,
        *,
        encoder_metadata: Any = None,
    ) -> EncoderOutput:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return super().forward(pixel_values, grid_thw, encoder_metadata=encoder_metadata)


CALLS = {
    "no item": [],
    "one item": [(1, 2, 2)],
    "two items": [(1, 1, 2), (1, 4, 4)],
    "videos among images": [(1, 2, 4), (5, 2, 2), (1, 1, 2), (2, 3, 4), (1, 6, 2)],
    "one item of many times the others' size": [(1, 1, 2), (1, 8, 8), (1, 1, 2), (1, 1, 4)],
    "equal items": [(1, 2, 2)] * 7,
}


def pixels_of(grids: Sequence[Sequence[int]], seed: int = 0) -> Tensor:
    rows = sum(t * h * w for t, h, w in grids)
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def wrapped(form: str) -> Any:
    encoder = ToyEncoder()
    return encoder if form == "encoder" else GraphedEncoder(encoder, [4, 32], backend="static")


# --- what ranks do --------------------------------------------------------------------------------


def call_all(rank: int, form: str) -> dict[str, PartialOutput]:
    """Encode the items of every entry of ``CALLS`` with a parallel encoder."""
    outputs: tuple[OutputField, ...] = ("pooler_output", "deepstack_features")
    parallel = DataParallelEncoder(wrapped(form), outputs=outputs)
    return {name: parallel(pixels_of(grids), grids) for name, grids in CALLS.items()}


def call_in_pairs(rank: int) -> PartialOutput:
    """Make a call in a smaller group: of ranks 0 and 1, or of rank 2 alone."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2])]
    group: Any = groups[0] if rank < 2 else groups[1]
    parallel = DataParallelEncoder(ToyEncoder(), group, outputs=EVERY_FIELD)
    assert parallel.size == (2 if rank < 2 else 1)
    grids = CALLS["videos among images"]
    return parallel(pixels_of(grids), grids)


def call_with_own_items(rank: int) -> tuple[PartialOutput, Tensor]:
    """Encode r items and r photographs on rank r, without exchanging results."""
    parallel = DataParallelEncoder(ToyEncoder(), scatter=False)
    grids = [(1, 2, 2 + 2 * n) for n in range(rank)]
    output = parallel(pixels_of(grids, seed=rank), grids)
    towers = DataParallelEncoder(tower("qwen3_vl"), scatter=False)
    return output, towers.embed(photographs()[:rank], pool="mean")


def encode_media(
    rank: int, name: str, images: int, clips: int, pool: Any = None
) -> list[PartialOutput] | Tensor:
    """Encode photographs and clips with a parallel small tower, to vectors if ``pool`` is given."""
    parallel = DataParallelEncoder(tower(name))
    items = photographs()[:images], [panning_clip(5)] * clips
    return parallel.embed(*items, pool=pool) if pool else parallel.encode(*items)


def fail_on_one(rank: int, where: int, error: Exception) -> tuple[Any, PartialOutput]:
    """Raise an error on rank ``where``; return the error that this rank gets, and the next
    output.
    """
    parallel = DataParallelEncoder(FailingEncoder(error if rank == where else None))
    grids = CALLS["equal items"]
    try:
        parallel(pixels_of(grids), grids)
    except (ValueError, RuntimeError, KeyError) as raised:
        return raised, parallel(pixels_of(grids), grids)
    raise AssertionError("no error")


def read_on_all_but_one(rank: int, good: str) -> Tensor:
    """Encode a file that rank 1 cannot read, though the other ranks can."""
    parallel = DataParallelEncoder(tower("qwen3_vl"))
    return parallel.embed([good if rank != 1 else "/nowhere.jpg"], pool="mean")


def call_with_other_items(rank: int) -> PartialOutput:
    """Call a parallel encoder to which rank 1 passes one item more than the others."""
    parallel = DataParallelEncoder(ToyEncoder())
    grids = [(1, 2, 2)] * (3 if rank == 1 else 2)
    return parallel(pixels_of(grids), grids)


def embed_with_own_options(rank: int, name: str, of_ranks: Sequence[dict[str, Any]]) -> Tensor:
    """Encode the same photographs on every rank, with options that differ between ranks."""
    return DataParallelEncoder(tower(name)).embed(photographs()[:2], **of_ranks[rank])


def call_with_an_array(rank: int) -> PartialOutput:
    """Call a parallel encoder with an array instead of a tensor on every rank."""
    pixels: Any = pixels_of([(1, 2, 2)]).numpy()
    return DataParallelEncoder(ToyEncoder())(pixels, [(1, 2, 2)])


def end_before_the_object(rank: int) -> None:
    """Make a parallel encoder after rank 1 has ended its process."""
    if rank == 1:
        os._exit(7)
    DataParallelEncoder(ToyEncoder())


def end_before_the_call(rank: int) -> PartialOutput:
    """Call a parallel encoder after rank 1 has ended its process."""
    parallel = DataParallelEncoder(ToyEncoder())
    if rank == 1:
        os._exit(7)
    return parallel(pixels_of([(1, 2, 2)]), [(1, 2, 2)])


def end_before_the_exchange(rank: int) -> PartialOutput:
    """End rank 1 after it has reported success, before rows are exchanged."""
    parallel: Any = DataParallelEncoder(ToyEncoder())
    if rank == 1:
        parallel._gather = lambda part: os._exit(7)
    return parallel(pixels_of([(1, 2, 2)]), [(1, 2, 2)])


def come_too_late(rank: int, seconds: float) -> PartialOutput:
    """Call a parallel encoder to which rank 1 comes later than the timeout."""
    parallel = DataParallelEncoder(ToyEncoder())
    if rank == 1:
        time.sleep(seconds)
    return parallel(pixels_of([(1, 2, 2)]), [(1, 2, 2)])


# --- encoders of several paths --------------------------------------------------------------------


def form_of(encoder: Any, graphed: bool, outputs: Sequence[OutputField]) -> Any:
    if not graphed:
        return encoder
    return GraphedEncoder(encoder, outputs=outputs, backend="static", max_graphs=2)


def call_with_inputs(
    rank: int,
    encoder: Any,
    calls: Sequence[VisionInputs],
    graphed: bool,
    outputs: Sequence[OutputField],
) -> list[list[PartialOutput]]:
    """Encode every entry of ``calls``, with the same items on all ranks."""
    parallel = DataParallelEncoder(form_of(encoder, graphed, outputs), outputs=outputs)
    return [parallel(inputs) for inputs in calls]


def call_with_own_inputs(
    rank: int, encoder: Any, of_ranks: Sequence[VisionInputs], graphed: bool
) -> list[PartialOutput]:
    """Encode items that only this rank has, without exchanging results."""
    wrapped = form_of(encoder, graphed, EVERY_FIELD)
    parallel = DataParallelEncoder(wrapped, scatter=False, outputs=EVERY_FIELD)
    return parallel(of_ranks[rank])


def encode_images(
    rank: int,
    encoder: Any,
    images: Sequence[Any],
    pool: Any = None,
    scatter: bool = True,
    graphed: bool = False,
) -> list[PartialOutput] | Tensor:
    parallel = DataParallelEncoder(form_of(encoder, graphed, EVERY_FIELD), scatter=scatter)
    return parallel.embed(images, pool=pool) if pool else parallel.encode(images)


def stream_images(
    rank: int, encoder: Any, images: Sequence[Any], scatter: bool = True
) -> tuple[list[PartialOutput], list[Tensor]]:
    """Encode a stream of images in small batches, of which rank r gets another part by
    ``scatter=False``.
    """
    parallel = DataParallelEncoder(encoder, scatter=scatter)
    items = images if scatter else images[rank:]
    outputs = parallel.encode_many(items, batch_tokens=100, progress=False)
    vectors = parallel.embed_many(items, pool="max", batch_tokens=100, progress=False)
    return list(outputs), list(vectors)


def keep_errors(rank: int, of_ranks: Sequence[Sequence[Any]]) -> list[Tensor | str]:
    """Encode a stream of each rank's own items, and return the texts of kept errors."""
    parallel = DataParallelEncoder(tower("qwen3_vl"))
    stream = parallel.embed_many(
        of_ranks[rank], batch_tokens=100, on_error="keep", workers=1, progress=False
    )
    return [str(one.error) if isinstance(one, ItemError) else one for one in stream]


def call_with_a_bad_one(
    rank: int, encoder: Any, given: Sequence[Any], good: VisionInputs
) -> tuple[ValueError, list[PartialOutput]]:
    """Pass each rank its own entry of ``given``; return the error raised, and the next output."""
    parallel = DataParallelEncoder(encoder)
    try:
        parallel(given[rank])
    except ValueError as raised:
        return raised, parallel(good)
    raise AssertionError("no error")


def call_each_with_its_encoder(
    rank: int, encoders: Sequence[Any], images: Sequence[Any]
) -> list[PartialOutput]:
    """Encode images with an encoder that differs between ranks."""
    return DataParallelEncoder(encoders[rank]).encode(images)
