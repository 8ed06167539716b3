"""Times of whole vision towers on one GPU: transformers' tower, and ours in several variants.

    python -m benchmarks speed --json benchmarks/results/speed_h200.json
    python -m benchmarks speed --towers Qwen3-VL-8B    (only this tower; the file keeps the others)

Towers have their real size and random weights in bfloat16; inputs lie on the GPU. For each
workload, these variants run in turn in one process:

- ``hf_ms``: transformers' tower (sdpa), called as a user would. It runs only five times in
  workloads of more than 3,500 tokens, and not at all in random workloads and in the towers outside
  the README's table.
- ``hf_flash_ms``: transformers' tower with flash-attention 2, which takes all segments in one call.
  The kernels are those that torch contains; ``--transformers sdpa flash_attention_2`` uses those of
  the package flash-attn instead.
- ``reference_graph_ms``: ``GraphedEncoder(encoder, kernels="reference")``, captured for those
  of the default budgets that the workloads take.
- ``graphed_ms``: ``GraphedEncoder(encoder, kernels=...)`` with the default budgets, for each value
  of ``--kernels``. Choosing a budget, padding, and the copies in and out are included. "fp8" is
  "auto" with ``precision="fp8"``, for GPUs that have fp8.
- ``bare_ms``: a graph of ``encoder.accelerated()`` captured by hand for exactly this shape.
- ``accelerated_ms``: ``encoder.accelerated()`` called with a grid, without graphs.

Each figure is given as minimum, median and maximum of ``--runs`` runs, and of three times as many
for workloads of up to 256 tokens, because noise of the host affects their medians most.

``capture_seconds`` are the times of capturing graphs for the default token budgets: ``cold`` is the
first capture (the caches of compiled kernels start empty, in a folder of this run), ``warm`` the
second in the same process (kernels are timed again), ``saved`` the third, with the table of times
that ``save_table`` wrote. "torch" is captured before "auto", so that the compilation of kernels of
the ``flash`` extra is counted for "auto" alone.

Towers of the README's table also get five random workloads per run; the results have the seed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.graphs import hf_call
from benchmarks.measuring.machine import ROOT, about
from benchmarks.measuring.results import write_results
from benchmarks.speed.measure import (
    Case,
    KernelsOrFp8,
    Setup,
    TheirCall,
    empty_cache,
    head_line,
    measure_tower,
)
from benchmarks.towers import TOWERS, Tower
from benchmarks.traffic.random_workloads import random_workloads
from encoders.base.vision_encoder import VisionEncoder

RESULTS = ROOT / "benchmarks" / "results"
CACHES = ("TRITON_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR")
"""The environment variables for the folders of compiled kernels of Triton and flash-attn-4."""


THEIRS = {"sdpa": "hf_ms", "flash2": "hf_flash_ms", "flash_attention_2": "hf_flash_ms"}
"""The attention implementations of transformers, with the name of the figure that each gives."""


class Beside(NamedTuple):
    """The few workloads and token budgets of a tower that is not in the README's table."""

    workloads: tuple[str, ...]
    max_budget: int
    max_graphs: int


TABLE = ("Qwen3-VL-8B", "Qwen2.5-VL-7B", "Qwen2-VL-7B", "InternViT-300M")
BESIDE = {
    "Qwen3-VL-2B": Beside(("1x448", "8x448"), 2048, 12),
    "Qwen2.5-VL-72B": Beside(("1x448", "8x448"), 2048, 12),
    "Qwen3.5-0.8B": Beside(("1x448", "8x448"), 2048, 12),
    "InternViT-6B": Beside(("1 tile", "13 tiles"), 13 * 256, 48),
}


def cases_of(tower: Tower, seed: int) -> list[Case]:
    """Return a tower's workloads: for a tower of the README's table all fixed workloads and five
    random ones, for another tower a few."""
    beside = BESIDE.get(tower.name)
    if beside is not None:
        return [Case(name, tower.workloads[name]) for name in beside.workloads]
    fixed = [Case(name, grids) for name, grids in tower.workloads.items()]
    drawn = random_workloads(tower, seed)
    return fixed + [Case(name, grids, drawn=True) for name, grids in drawn.items()]


def in_order(kernels: Sequence[KernelsOrFp8]) -> tuple[KernelsOrFp8, ...]:
    """Return the values of ``--kernels`` in the order of capture: at the end "auto", then "fp8"."""
    return tuple(sorted(set(kernels), key=lambda name: (name == "fp8", name == "auto", name)))


def setup_of(tower: Tower, options: argparse.Namespace) -> Setup:
    """Return the settings for a tower; a tower outside the README's table has fewer token budgets,
    and its graphs are captured once.
    """
    kernels = in_order(options.kernels)
    beside = BESIDE.get(tower.name)
    if beside is None:
        return Setup(kernels, options.runs)
    return Setup(
        kernels,
        options.runs,
        ("cold",),
        max_budget=beside.max_budget,
        max_graphs=beside.max_graphs,
    )


def run(tower: Tower, options: argparse.Namespace) -> dict[str, Any]:
    """Build a tower and measure it, and transformers' too if the tower is in the README's table."""
    began = time.perf_counter()
    encoder = tower.build()
    wanted = () if tower.name in BESIDE else options.transformers
    their_calls = {THEIRS[name]: their_call(tower, encoder, name) for name in wanted}
    setup = setup_of(tower, options)
    row = measure_tower(tower.name, encoder, cases_of(tower, options.seed), setup, their_calls)
    row["about"] = {**about(options.runs), "seed": options.seed}
    row["seconds"] = time.perf_counter() - began
    print(f"{tower.name}: {row['seconds']:.0f} s\n", flush=True)
    return row


def their_call(tower: Tower, encoder: VisionEncoder, attention: str) -> TheirCall:
    """Return a function from pixels and grids to a call without arguments of transformers' tower.

    ``attention`` is the attention implementation, a key of :data:`THEIRS`.
    """
    reference = tower.reference(encoder, attention)
    return lambda pixels, grids: hf_call(tower, reference, pixels, grids)


def merge(path: Path | None, towers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the results of this run, together with the results of other towers in a file.

    Raises:
        ValueError: the file was measured on another GPU.
    """
    measured = {tower["tower"]: tower for tower in towers}
    now = towers[-1]["about"] if towers else {}
    if path is not None and path.is_file():
        body = json.loads(path.read_text())
        if now and body["about"].get("gpu") != now.get("gpu"):
            raise ValueError(
                f"{path} was measured on {body['about'].get('gpu')}, this is {now.get('gpu')}: "
                "give another --json"
            )
        now = now or body["about"]
        measured = {tower["tower"]: tower for tower in body["towers"]} | measured
    order = [name for name in (*TABLE, *BESIDE) if name in measured]
    order += [name for name in measured if name not in order]
    return {"about": now, "towers": [measured[name] for name in order]}


def write(path: Path, body: Mapping[str, Any]) -> None:
    """Write the results to a file; this is done after each tower, in case a run is cut off."""
    write_results(path, body)


def measure_all(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure every tower that was asked for, one after another, and yield its results."""
    for name in options.towers:
        yield run(TOWERS[name], options)
        empty_cache()


def default_path() -> Path:
    """Return the path for results of this GPU, such as ``benchmarks/results/speed_h200.json``."""
    words = torch.cuda.get_device_name().lower().split()
    short = next((word for word in words if word[:1] in "abhl" and word[1:].isdigit()), "gpu")
    return RESULTS / f"speed_{short}.json"


def fresh_caches(folder: str) -> None:
    """Set the caches of compiled kernels to empty folders in ``folder``, so that a "cold" capture
    compiles all kernels.
    """
    for name in CACHES:
        os.environ[name] = str(Path(folder) / name.lower())


def read_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line of ``python -m benchmarks speed``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks speed",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, help="results file; towers not measured are kept")
    parser.add_argument("--towers", nargs="*", default=[*TABLE, *BESIDE], choices=list(TOWERS))
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--kernels", nargs="+", default=["auto", "torch", "fp8"])
    parser.add_argument(
        "--transformers", nargs="+", default=["sdpa", "flash2"], choices=list(THEIRS)
    )
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    parser.add_argument("--keep-caches", action="store_true", help="use kernels compiled before")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    """Measure the towers; print a table per tower, and write JSON after each tower."""
    options = read_options(arguments)
    path = options.json or default_path()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        if not options.keep_caches:
            fresh_caches(folder)
        print(f"seed {options.seed}, {about(options.runs)}\n")
        print(head_line(in_order(options.kernels)))
        towers: list[dict[str, Any]] = []
        for tower in measure_all(options):
            towers.append(tower)
            write(path, merge(path, towers))
    print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
