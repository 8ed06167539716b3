"""The speed of one call spread over several GPUs of a host, compared with the call on one GPU.

    python -m benchmarks.data_parallel --json benchmarks/results/data_parallel_h200.json
    python -m benchmarks.data_parallel --device cpu    (a rehearsal: gloo, a small tower, 8 images)

A ``GraphedEncoder`` over a vision tower of real size, with random weights in bfloat16, encodes 64
images of seven sizes; each GPU has the pixels of all of them. Rank 0 captures CUDA graphs and saves
its table of measured times; the other ranks load the table, so that all choose the same graphs and
kernels. Every figure is the median of the runs in milliseconds:

- ``one``: rank 0 encodes all images while the other ranks wait.
- ``all``: ``DataParallelEncoder`` on all ranks, from a barrier until the last rank has all
  features.
- ``slowest share``: the longest time that a rank takes to encode its share of the images.
- ``gather``: the exchange of features between the ranks, with the copies that it needs.
- ``status``: the exchange of messages on the CPU that each call needs; the GPU works meanwhile.

The features are compared bit for bit with the features of the same shares encoded on one GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from benchmarks.measuring.results import write_results
from benchmarks.measuring.tables import markdown
from encoders import VisionEncoder
from encoders.contract import Grid, OutputField, PartialOutput
from graphwrap import GraphedEncoder
from vitgraph import DataParallelEncoder
from vitgraph.parallel.shares import Shares
from vitgraph.timing import spread, synchronize

SIZES = [(640, 480), (480, 640), (1024, 768), (512, 512), (1280, 720), (800, 600), (336, 336)]
FIELDS: tuple[OutputField, ...] = ("pooler_output", "deepstack_features")


def main() -> None:
    """Start one process per GPU; print the times, and write them to the file of ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--gpus", type=int, help="by default all; processes on the CPU: 2")
    parser.add_argument("--tower", default="Qwen3-VL-8B", help="of benchmarks/towers.py")
    parser.add_argument("--images", type=int, help="by default 64; on the CPU 8")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    on_cuda = options.device == "cuda"
    ranks = options.gpus or (torch.cuda.device_count() if on_cuda else 2)
    if ranks < 2:
        parser.error(f"{ranks} GPU: at least two are needed")
    options.images = options.images or (64 if on_cuda else 8)
    with tempfile.TemporaryDirectory() as folder:
        spawn(run_rank, (ranks, folder, vars(options)), nprocs=ranks)
        body = json.loads((Path(folder) / "result.json").read_text())
    print(table(body))
    if options.json:
        write_results(options.json, body)


def table(body: dict[str, Any]) -> str:
    """Return the result of :func:`measure` as a Markdown table."""
    ms = body["ms"]
    head = ("GPUs", "images", "tokens", *(f"{name}, ms" for name in ms), "speed-up")
    medians = [f"{value['median']:.1f}" for value in ms.values()]
    row = (str(body["ranks"]), str(body["images"]), f"{body['tokens']:,}", *medians)
    return markdown(head, [(*row, f"{body['speed-up']:.2f}")])


def run_rank(rank: int, ranks: int, folder: str, options: dict[str, Any]) -> None:
    """Measure as the process with this rank; rank 0 writes the result into ``folder``."""
    on_cuda = options["device"] == "cuda"
    device = torch.device("cuda", rank) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if on_cuda else "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(minutes=5),
        device_id=device if on_cuda else None,
    )
    encoder, grids = build(options["tower"] if on_cuda else None, options["images"])
    for weight in encoder.parameters():
        dist.broadcast(weight.data, 0)
    graphed = capture(encoder, rank, Path(folder) / "table.json")
    body = measure(graphed, grids, device, rank, ranks, options["runs"])
    if rank == 0:
        about = {}
        if on_cuda:
            from benchmarks.measuring.machine import describe_machine

            about = describe_machine()
        tower = options["tower"] if on_cuda else "a small tower"
        body = {"tower": tower, "device": options["device"], **body, "about": about}
        (Path(folder) / "result.json").write_text(json.dumps(body))
    dist.barrier()
    dist.destroy_process_group()


def build(name: str | None, images: int) -> tuple[VisionEncoder, list[Grid]]:
    """Return an encoder, and the patch grids of the images to encode.

    ``name`` is a tower in ``benchmarks/towers.py``, which is built on this process's GPU; None
    builds a small one on the CPU.
    """
    if name is not None:
        from benchmarks.towers import TOWERS

        encoder = TOWERS[name].build()
        sizes = SIZES
    else:
        from vitgraph.seeded import write_seeded_checkpoint
        from weights import load_encoder

        with tempfile.TemporaryDirectory() as folder:
            repo = write_seeded_checkpoint(folder, "qwen3_vl", width=64)
            loaded = load_encoder(repo, dtype=torch.float32, progress=False)
        assert isinstance(loaded, VisionEncoder)
        encoder = loaded
        sizes = [(width // 4, height // 4) for width, height in SIZES]
    several = [torch.zeros(3, height, width, dtype=torch.uint8) for width, height in sizes]
    each = [(t, h, w) for t, h, w in encoder.preprocess(several).grid_thw.tolist()]
    return encoder, [each[number % len(each)] for number in range(images)]


def capture(encoder: VisionEncoder, rank: int, table: Path) -> GraphedEncoder:
    """Capture CUDA graphs, on all ranks with the table of times that rank 0 measured and saved.

    On a device without CUDA graphs nothing is captured.
    """
    graphed = GraphedEncoder(encoder, outputs=FIELDS)
    if graphed.backend != "cudagraph":
        return graphed
    if rank == 0:
        graphed.capture(progress=False).save_table(table)
    dist.barrier()
    if rank != 0:
        graphed.load_table(table)
        graphed.capture(progress=False)
    dist.barrier()
    return graphed


@torch.no_grad()
def measure(
    graphed: GraphedEncoder,
    grids: list[Grid],
    device: torch.device,
    rank: int,
    ranks: int,
    runs: int,
) -> dict[str, Any]:
    """Return all times, which are the same on every rank; rank 0 also times encoding alone."""
    encoder: Any = graphed.encoder
    specs = encoder.item_specs(grids)
    rows = sum(spec.input_size for spec in specs)
    dice = torch.Generator().manual_seed(0)
    dtype = next(encoder.parameters()).dtype
    pixels = torch.randn(rows, *encoder.row_shape, generator=dice).to(device, dtype)
    parallel = DataParallelEncoder(graphed, outputs=FIELDS)
    shares = parallel._assign_grids(grids)
    own_rows = shares.select(pixels)
    part = parallel._result(shares, graphed(own_rows, shares.own_grids))

    def alone() -> None:
        if rank == 0:
            graphed(pixels, grids)

    calls: dict[str, Callable[[], object]] = {
        "one": alone,
        "all": lambda: parallel(pixels, grids),
        "slowest share": lambda: graphed(own_rows, shares.own_grids),
        "gather": lambda: parallel._gather(part),
        "status": lambda: parallel._status.attempt(lambda: part, lambda part: part.description),
    }
    found = {name: time_call(call, device, runs) for name, call in calls.items()}
    costs = [sum(specs[item].input_size for item in share) for share in shares.by_rank]
    ms = {name: spread(times) for name, times in found.items()}
    equal = same_bits(graphed, parallel(pixels, grids), shares, pixels)
    assert equal, f"rank {rank}: the results are not those of the same shares on one GPU"
    sent = sum(
        row.numel() // max(len(row), 1) * row.itemsize * max(sum(shares.counts(name)), 1)
        for name, row in part.fields
    )
    return {
        "ranks": ranks,
        "images": len(grids),
        "tokens": sum(spec.output_tokens for spec in specs),
        "rows of each rank": costs,
        "bytes of all features": sent,
        "ms": ms,
        "speed-up": round(ms["one"]["median"] / ms["all"]["median"], 3),
        "equal bits": equal,
    }


def time_call(call: Callable[[], object], device: torch.device, runs: int) -> list[float]:
    """Return the milliseconds of each run, from a barrier until the last rank has finished.

    Two untimed warm-up runs come before.
    """
    times = []
    for _ in range(runs + 2):
        synchronize(device)
        dist.barrier()
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        milliseconds = torch.tensor([(time.perf_counter() - began) * 1e3], device=device)
        dist.all_reduce(milliseconds, dist.ReduceOp.MAX)
        times.append(milliseconds.item())
    return times[2:]


def same_bits(
    graphed: GraphedEncoder, found: PartialOutput, shares: Shares, pixels: Tensor
) -> bool:
    """Return whether ``found`` equals, bit for bit, the outputs of all shares run on this GPU."""
    encoder: Any = graphed.encoder
    items = encoder.split(found, shares.grids)
    for share in shares.by_rank:
        rank_shares = shares._replace(own_items=share)
        output = graphed(rank_shares.select(pixels), rank_shares.own_grids)
        for item, wanted in zip(share, encoder.split(output, rank_shares.own_grids), strict=True):
            pairs = [(items[item].pooler_output, wanted.pooler_output)]
            pairs += zip(items[item].deepstack_features, wanted.deepstack_features, strict=True)
            if not all(torch.equal(one, other) for one, other in pairs):
                return False
    return True


if __name__ == "__main__":
    main()
