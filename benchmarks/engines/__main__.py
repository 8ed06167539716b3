"""Time to the first token in vLLM with its vision tower, eager and with CUDA graphs, and with ours.

    python -m benchmarks.engines --json benchmarks/results/engines_h200.json
    python -m benchmarks.engines --models Qwen3-VL-8B --modes stock,ours --layers 4
    python -m benchmarks.engines --check --json benchmarks/results/engines_check_h200.json

An engine is vLLM with one of the three towers, in a process of its own with its share of the GPU
memory; it works while the others wait. All engines of a model get the same requests, one engine
after the other in a new random order per request, so that changes on the host over time do not look
like differences between engines. The results of a cell (model and image sizes) are written as soon
as they are measured. vLLM makes the weights at random (``load_format="dummy"``); every request has
new random images and asks for one token. ``benchmarks/engines/check.py`` compares tokens, KV blocks
and memory, and ``benchmarks/engines/processor.py`` measures the preprocessing, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines.check import PARTS
from benchmarks.engines.measure import CELLS, MODES, describe, measure, recorder
from benchmarks.engines.models import MODELS


def run_apart(options: argparse.Namespace, module: str, given: dict[str, Any]) -> None:
    """Run a measurement in a process of its own, so that the next one finds the GPU's memory free.

    Args:
        options: the options of the command line.
        module: name of the module to run with ``python -m``.
        given: arguments of the measurement, which are passed to the module as JSON.
    """
    print(f"# {given}", flush=True)
    command = [sys.executable, "-m", module, "--one", json.dumps(given)]
    command += ["--json", str(options.json)] if options.json else []
    began = time.perf_counter()
    done = subprocess.run(command, check=False)
    print(f"# ended with {done.returncode}, {time.perf_counter() - began:.0f} s", flush=True)


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--layers", default="4", help="layers of the language model, or all")
    parser.add_argument("--runners", default="0,1", help="of --check: V2 model runner off, on")
    parser.add_argument("--eager-language-model", action="store_true", help="compile nothing")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure engines, or check their tokens, as the command line says."""
    options = read_options(arguments)
    if options.one:
        return measure(**options.one, record=recorder(options.json, describe))
    layers = None if options.layers == "all" else int(options.layers)
    models = options.models.split(",")
    if options.check:
        for runner in options.runners.split(","):
            for model in models:
                for part in PARTS:
                    given = {"model": model, "part": part, "layers": layers, "runner": runner}
                    run_apart(options, "benchmarks.engines.check", given)
        return None
    compiled = not options.eager_language_model
    modes, cells = options.modes.split(","), options.cells.split(",")
    for model in models:
        given = {"model": model, "modes": modes, "cells": cells, "layers": layers}
        run_apart(options, "benchmarks.engines", {**given, "compiled": compiled})
    return None


if __name__ == "__main__":
    main()
