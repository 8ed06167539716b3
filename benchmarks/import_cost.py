"""What ``import encoders`` costs on top of ``import torch``: fresh processes, interleaved, medians.

python -m benchmarks.import_cost  (in a clone)
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
CODE = """
import time, torch
start = time.perf_counter()
import {module}
print((time.perf_counter() - start) * 1000)
"""


def milliseconds_over_torch(module: str) -> float:
    """Time to import ``module`` in a fresh process that has already imported torch."""
    result = subprocess.run(
        [sys.executable, "-c", CODE.format(module=module)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return float(result.stdout)


def measure(modules: list[str], repeats: int) -> dict[str, list[float]]:
    """All times of each module; rounds are interleaved so that drift hits all alike."""
    times: dict[str, list[float]] = {module: [] for module in modules}
    for _ in range(repeats):
        for module in modules:
            times[module].append(milliseconds_over_torch(module))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=["encoders", "weights"])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    print(f"Python {sys.version.split()[0]}, median of {options.repeats} fresh processes")
    for module, times in measure(options.modules, options.repeats).items():
        median, low, high = statistics.median(times), min(times), max(times)
        print(f"import {module:10} {median:6.1f} ms over import torch ({low:.1f} to {high:.1f})")


if __name__ == "__main__":
    main()
