"""Seconds to find all near-duplicates among many vectors, as ``vitgraph search DIR --pairs`` does.

    python -m benchmarks.pairs --vectors 50000                     (on the CPU)
    python -m benchmarks.pairs --vectors 1000000 --device cuda

Prints JSON. The vectors are random numbers in memory, of which one in a hundred is nearly another
one. ``seconds`` are the whole call, with the copies to the device and the normalisation;
``cpu_seconds`` are those of all threads of the process, which other processes disturb less. FAISS
(``IndexFlatIP`` and ``range_search``, also exact) is timed on the CPU if it is installed, with as
many threads.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from benchmarks.measuring.machine import cpu_name, describe_machine
from vitgraph.search.pairs import find_duplicates
from vitgraph.search.vectors import Floats

PART = 1 << 14
"""The vectors that are read at a time."""


class Drawn:
    """Random vectors in memory, with the methods of a job's vectors.

    Args:
        count: the number of vectors.
        width: their width.
    """

    def __init__(self, count: int, width: int) -> None:
        draw = np.random.default_rng(0)
        self.count, self.left_out = count, 0
        self.matrix = draw.standard_normal((count, width), np.float32)
        near = draw.integers(0, count, (count // 100, 2))
        noise = 0.1 * draw.standard_normal((len(near), width), np.float32)
        self.matrix[near[:, 0]] = self.matrix[near[:, 1]] + noise

    def scan(self) -> Floats:
        """Return the first vector."""
        return np.asarray(self.matrix[0])

    def rows(self, width: int, label: str, first: int = 0) -> Iterator[tuple[int, Floats]]:
        """Yield the vectors in parts."""
        for start in range(first, self.count, PART):
            yield start, self.matrix[start : start + PART]


def by_faiss(matrix: Floats, threshold: float) -> dict[str, Any]:
    """Time FAISS on the CPU; the pairs are those of two different rows, each counted once."""
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    began, cpu = time.perf_counter(), time.process_time()
    rows = matrix / np.linalg.norm(matrix, axis=1, keepdims=True)
    index = faiss.IndexFlatIP(rows.shape[1])
    index.add(rows)
    limits, _, _ = index.range_search(rows, threshold)
    return {
        "version": faiss.__version__,
        "seconds": round(time.perf_counter() - began, 4),
        "cpu_seconds": round(time.process_time() - cpu, 4),
        "pairs": int(limits[-1] - len(rows)) // 2,
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Find the pairs, and return what was found and how long it took."""
    vectors, device = Drawn(options.vectors, options.width), torch.device(options.device)
    began, cpu = time.perf_counter(), time.process_time()
    found = find_duplicates(vectors, options.threshold, options.max_pairs, device)
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    products = options.vectors**2 * options.width  # each pair once: half, and 2 operations each
    result = {
        "machine": describe_machine(),
        "cpu": cpu_name(),
        "device": options.device,
        "threads": torch.get_num_threads(),
        "vectors": options.vectors,
        "width": options.width,
        "threshold": options.threshold,
        "pairs": found.found,
        "groups": len(found.groups),
        "seconds": round(seconds, 4),
        "cpu_seconds": round(cpu_seconds, 4),
        "GFLOP per second": round(products / seconds / 1e9, 1),
    }
    if device.type == "cpu" and find_spec("faiss"):
        result["FAISS"] = by_faiss(vectors.matrix, options.threshold)
    return result


def main() -> None:
    """Measure, and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vectors", type=int, default=50_000)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--threshold", type=float, default=0.95)
    parser.add_argument("--max-pairs", type=int, default=1_000_000)
    parser.add_argument("--device", default="cpu")
    print(json.dumps(measure(parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()
