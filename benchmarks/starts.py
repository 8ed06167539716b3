"""Seconds until the graphs of a tower can be used, each in a process of its own.

    python -m benchmarks.starts --json benchmarks/results/starts_h200.json

Towers of published size with random weights in bfloat16. Every tower begins with empty caches of
compiled kernels (Triton's, flash-attn-4's, the driver's) and an empty folder of kept tables:

- ``cold``: the first ``capture()`` on a machine, which compiles kernels, measures, and keeps both.
  A photograph is then encoded, untimed, as the first user of a machine does: that compiles the
  kernels that resize images, which ``capture()`` does not run.
- ``warm``: the compiled kernels are cached, but no table is kept (``VITGRAPH_TABLES=off``).
- ``kept``: a later process, with the table as well.
- ``first_call``: instead of a capture, ``GraphedEncoder(encoder).encode([photo])`` with a
  photograph of 640x480, as in a notebook; then the same call again.

A measurement begins when the weights are on the device, so it contains what is imported later.
``parts`` says where the time went: ``kernels`` compiles, checks and times attention kernels,
``fit`` runs the tower once to see which budgets fit memory, ``prepare`` makes metadata and buffers,
``graphs`` warms up and captures, ``check`` times three replays of a kept table again, ``measure``
times replays and eager runs; none of them contains another's seconds, and ``rest`` is all else.
The whole takes about six minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image

from benchmarks.measuring.results import write_results
from benchmarks.measuring.tables import markdown
from encoders import Encoder
from graphwrap import GraphedEncoder
from weights import FAMILIES, build_config
from weights.published import PUBLISHED

TOWERS = {
    "Qwen3-VL-8B": "Qwen/Qwen3-VL-8B-Instruct",
    "Qwen2.5-VL-7B": "Qwen/Qwen2.5-VL-7B-Instruct",
    "InternViT-300M": "OpenGVLab/InternVL3-1B",
    "Qwen2-VL-7B": "Qwen/Qwen2-VL-7B-Instruct",
}
"""The Hugging Face repo of each tower, by its name."""
STAGES = ("cold", "warm", "kept", "first_call")
CACHES = ("TRITON_CACHE_DIR", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", "CUDA_CACHE_PATH")
"""The environment variables that name the folders of compiled kernels."""
PARTS = {
    "graphwrap.capture.Capturer._fit_memory": "fit",
    "graphwrap.capture.Capturer._prepare": "prepare",
    "graphwrap.capture.Capturer._capture": "graphs",
    "graphwrap.capture.still_hold": "check",
    "graphwrap.capture.measure": "measure",
    "encoders.accelerated.attention.choices.KernelChoices.pick": "kernels",
}
"""The functions whose seconds are counted, and the name of their part."""
PHOTO = (640, 480)


class Parts:
    """Counts the seconds inside functions, without those inside other counted functions."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._began: list[float] = []

    @contextmanager
    def counting(self, functions: Mapping[str, str]) -> Iterator[None]:
        """Count the seconds of functions, named by their paths, as those of parts."""
        with ExitStack() as stack:
            for path, part in functions.items():
                stack.enter_context(patch(path, self._counted(resolve_name(path), part)))
            yield

    def _counted(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(function)
        def counted(*args: Any, **settings: Any) -> Any:
            self._began.append(time.perf_counter())
            try:
                return function(*args, **settings)
            finally:
                seconds = time.perf_counter() - self._began.pop()
                self.seconds[part] += seconds
                # The seconds inside are no seconds of the function around this one.
                self._began = [began + seconds for began in self._began]

        return counted


def build(repo_id: str, device: str) -> Encoder:
    """Build the tower of a published repo with random weights."""
    model = next(model for model in PUBLISHED if model.repo_id == repo_id)
    family = FAMILIES[model.family]
    config = build_config(family, model.config, None, repo_id)
    torch.manual_seed(0)
    with torch.device(device):
        encoder = family.encoder(config)
    return encoder.to(torch.bfloat16).eval().requires_grad_(False)


def measure(encoder: Encoder, stage: str, **settings: Any) -> dict[str, Any]:
    """Measure one stage in this process; ``settings`` are those of :class:`GraphedEncoder`."""
    parts, photo = Parts(), Image.effect_noise(PHOTO, 64).convert("RGB")
    seconds = dict[str, float]()

    def run(name: str, call: Callable[[], object]) -> None:
        began = time.perf_counter()
        call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds[name] = time.perf_counter() - began

    graphed = GraphedEncoder(encoder, **settings)
    with parts.counting(PARTS):
        if stage == "first_call":
            run("seconds", lambda: graphed.encode([photo]))
        else:
            run("seconds", lambda: graphed.capture(progress=False))
    if stage == "cold":
        graphed.encode([photo])
    if stage == "first_call":
        run("again_seconds", lambda: graphed.encode([photo]))
    rest = seconds["seconds"] - sum(parts.seconds.values())
    budgets = len(graphed.stats().budgets)
    return {**seconds, "parts": {**parts.seconds, "rest": rest}, "budgets": budgets}


def environment(folder: Path, stage: str) -> dict[str, str]:
    """Return the environment of a stage's process, whose caches lie in ``folder``."""
    caches = {name: str(folder / name.lower()) for name in CACHES}
    tables = "off" if stage == "warm" else str(folder / "tables")
    return {**os.environ, **caches, "VITGRAPH_TABLES": tables}


def in_own_process(tower: str, stage: str, folder: Path) -> dict[str, Any]:
    """Measure one stage of a tower in a new process."""
    command = [sys.executable, "-m", "benchmarks.starts", "--stage", stage, "--towers", tower]
    run = subprocess.run(
        command, env=environment(folder, stage), stdout=subprocess.PIPE, text=True, check=True
    )
    return dict(json.loads(run.stdout.splitlines()[-1]))


def table(results: Mapping[str, Any]) -> str:
    """Return the seconds of each tower and host by stage, as a table in Markdown."""
    seconds = {(r["tower"], r["host"], r["stage"]): r["seconds"] for r in results["starts"]}
    header = (
        "tower",
        "host",
        "first on a machine",
        "kernels cached",
        "times kept, too",
        "first call",
    )
    rows = []
    for tower, host in dict.fromkeys(key[:2] for key in seconds):
        cells = [seconds.get((tower, host, stage)) for stage in STAGES]
        rows.append((tower, host, *("-" if cell is None else f"{cell:.1f} s" for cell in cells)))
    return f"{results['about']['gpu']}, without flash-attn-4:\n\n{markdown(header, rows)}"


def main(
    arguments: Sequence[str] | None = None,
    stage_of: Callable[[str, str, Path], dict[str, Any]] = in_own_process,
) -> None:
    """Measure all stages of the towers, print a line for each, and write JSON for ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--towers", nargs="+", choices=TOWERS, default=list(TOWERS))
    parser.add_argument("--stage", choices=STAGES, help="measure this one, in this process")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args(arguments)
    if options.stage:
        encoder = build(TOWERS[options.towers[0]], options.device)
        print(json.dumps(measure(encoder, options.stage)))
        return
    rows = []
    for tower in options.towers:
        with tempfile.TemporaryDirectory() as folder:
            for stage in STAGES:
                row = {"tower": tower, "stage": stage, **stage_of(tower, stage, Path(folder))}
                rows.append(row)
                parts = ", ".join(f"{name} {s:.2f}" for name, s in row["parts"].items())
                print(f"{tower:<15} {stage:<10} {row['seconds']:6.2f} s  ({parts})", flush=True)
    if options.json:
        from benchmarks.measuring.machine import about  # imports transformers

        write_results(options.json, {"about": about(1), "starts": rows})


if __name__ == "__main__":
    main()
