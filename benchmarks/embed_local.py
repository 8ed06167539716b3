"""Images per second of ``vitgraph embed`` over local files, and what a list of files takes.

    python -m benchmarks.embed_local                        this clone
    python -m benchmarks.embed_local --against OTHER_CLONE  and another one, by turns

A small tower with random weights embeds JPEG files, so that reading and decoding take most of the
time. Each run is a process of its own. It prints the medians of wall and of CPU time, of which the
CPU time changes less where other processes run, and the peak of the memory that Python allocates
while files are listed, per file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.encode_many import cut_photographs, write_jpegs

ROOT = Path(__file__).parents[1]
_RUN = """
import contextlib, io, json, sys, time
from vitgraph.cli import main
import vitgraph.embedding.job  # torch, before the clock starts
repo, photos, out = sys.argv[1:]
options = ["--workers", "1", "--no-progress", "--shard-items", "200"]
wall, cpu = time.perf_counter(), time.process_time()
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["embed", repo, photos, "--out", out, *options]) == 0
print(json.dumps([time.perf_counter() - wall, time.process_time() - cpu]))
"""


def measure(clone: Path, repo: Path, photos: Path) -> tuple[float, float]:
    """Wall and CPU seconds of one job, in a process of its own."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-c", _RUN, str(repo), str(photos), f"{out}/vectors"]
        environment = {**os.environ, "PYTHONPATH": str(clone), "OMP_NUM_THREADS": "1"}
        run = subprocess.run(
            command, cwd=out, env=environment, stdout=subprocess.PIPE, check=True, text=True
        )
    wall, cpu = json.loads(run.stdout)
    return wall, cpu


def main() -> None:
    """Measure, and print a line per clone."""
    from benchmarks.measure_scale import measure_bytes
    from vitgraph.seeded import write_seeded_checkpoint

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--against", type=Path, help="another clone, measured by turns")
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    clones = [ROOT, *([options.against.resolve()] if options.against else [])]
    times: dict[Path, list[tuple[float, float]]] = {clone: [] for clone in clones}
    with tempfile.TemporaryDirectory() as folder:
        repo = write_seeded_checkpoint(Path(folder) / "repo", "qwen3_vl", width=64)
        photos = Path(folder) / "photos"
        photos.mkdir()
        write_jpegs(photos, cut_photographs([(448, 448)] * options.images))
        for _ in range(options.repeats + 1):  # the first is not counted
            for clone in clones:
                times[clone].append(measure(clone, repo, photos))
    for clone in clones:
        wall, cpu = (statistics.median(column) for column in zip(*times[clone][1:], strict=True))
        print(
            f"{'this clone' if clone == ROOT else 'the other one'}: "
            f"{options.images / wall:,.1f} images per second, "
            f"{options.images / cpu:,.1f} per second of CPU time"
        )
    print(f"listing files takes {measure_bytes(20_000)} bytes of memory per file")


if __name__ == "__main__":
    main()
