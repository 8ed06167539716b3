"""CPU time of what a graphed call does on the host besides launches, on any machine.

- ``pack_ms``: milliseconds to pack 10,000 items, images of random sizes, into 48 budgets.
- ``check_us``: microseconds of the check for changes after capture, Qwen3-VL-8B's tower.
- ``check_tensors_us``: the same without classes, forwards and plain values of modules.

    python -m benchmarks.host --json host.json  (in a clone)
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.measuring.results import write_results
from encoders import Qwen3VLEncoder
from encoders.qwen.qwen3_vl import Qwen3VLConfig
from graphwrap.budgets import choose_budgets, read_specs
from graphwrap.changes import WeightGuard, all_modules, plain_values
from graphwrap.costs import Costs
from graphwrap.packing import Packer


def seconds(call: Callable[[], object], times: int) -> float:
    """Return the least CPU time of a call."""
    taken = []
    for _ in range(times):
        start_time = time.process_time()
        call()
        taken.append(time.process_time() - start_time)
    return min(taken)


def measure(times: int = 1000) -> dict[str, float]:
    """Return the times by name; see the docstring of the module."""
    with torch.device("meta"):
        encoder = Qwen3VLEncoder(Qwen3VLConfig.from_hf({"out_hidden_size": 4096}))
    draw = random.Random(0)
    grids = [(1, 2 * draw.randint(4, 89), 2 * draw.randint(4, 89)) for _ in range(10_000)]
    specs = read_specs(encoder, grids)
    packer = Packer(Costs.unmeasured(choose_budgets(encoder).budgets), 64, 16_384)
    values = plain_values(all_modules({"": encoder}))
    guard = WeightGuard({"": encoder}, values=values, hooks=True)
    of_tensors = WeightGuard({"": encoder}, hooks=True)
    return {
        "pack_ms": 1e3 * seconds(lambda: packer.pack(specs), max(times // 100, 1)),
        "check_us": 1e6 * seconds(guard.check, times),
        "check_tensors_us": 1e6 * seconds(of_tensors.check, times),
    }


def main() -> None:
    """Measure, print, and write the JSON that ``--json`` names."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="a file to write")
    arguments = parser.parse_args()
    result = measure()
    print(json.dumps(result, indent=1))
    if arguments.json is not None:
        write_results(arguments.json, result)


if __name__ == "__main__":
    main()
