"""Requests per second and times to the first token in vLLM under load, by number of clients.

    python -m benchmarks.engines.load --json benchmarks/results/engines_load_h200.json

Each engine has an API process and a process of its own for the engine, as in ``vllm serve``. A
client sends a request with a new random image of one of :data:`SIZES`, waits for its answer, and
sends the next one. All engines of a model get the same requests, one engine after the other in a
new random order per round. The first round of each warms up.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from PIL import Image

from benchmarks.engines.measure import (
    IMAGE,
    MODES,
    Apart,
    describe,
    recorder,
    settings,
    started,
    variables,
)

SIZES = ((224, 224), (448, 448), (640, 480), (1024, 768), (1280, 720), (1920, 1080))
"""Width and height of the images."""
CLIENTS = (1, 8, 32)
REQUESTS, ROUNDS, TOKENS = 64, 5, 16
"""Requests of a round, timed rounds, and tokens of an answer."""


class Streams(Protocol):
    """A vLLM engine that answers requests of several clients at once."""

    def run(self, work: Coroutine[Any, Any, Any]) -> Any: ...

    async def first_token(self, request: dict[str, Any], name: str) -> float: ...


class Engine:
    """A vLLM engine in a process of its own, with its API in this process."""

    def __init__(self, folder: Path, mode: str, *, compiled: bool, **more: Any) -> None:
        os.environ |= variables(mode)
        from vllm import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        given = {**settings(folder, mode, compiled=compiled), "max_num_seqs": 64, **more}
        self._loop = asyncio.new_event_loop()

        async def start() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**given))

        self._engine = self.run(start())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine in the loop of the engine."""
        return self._loop.run_until_complete(work)

    async def first_token(self, request: dict[str, Any], name: str) -> float:
        """Send a request and wait for its answer; return the seconds to the first token."""
        from vllm import SamplingParams

        greedy = SamplingParams(
            temperature=0.0, max_tokens=TOKENS, ignore_eos=True, detokenize=False
        )
        began, first = time.perf_counter(), 0.0
        async for _ in self._engine.generate(request, greedy, name):
            first = first or time.perf_counter() - began
        return first


def requests(seed: int) -> list[dict[str, Any]]:
    """Make the requests of a round, each with a random image of a random size."""
    dice, made = np.random.default_rng(seed), []
    for _ in range(REQUESTS):
        width, height = SIZES[dice.integers(len(SIZES))]
        pixels = dice.integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        made.append({"prompt": f"{IMAGE}What is this?", "multi_modal_data": {"image": image}})
    return made


def time_round(engine: Streams, clients: str, number: int) -> dict[str, Any]:
    """Return the seconds of a round and those to the first token of each request.

    Args:
        engine: the engine.
        clients: the number of clients, in digits.
        number: seed of the images.
    """
    work = iter(enumerate(requests(number)))  # drawn before the clock starts
    began = time.perf_counter()
    firsts = engine.run(send_all(engine, work, int(clients), number))
    return {"seconds": time.perf_counter() - began, "firsts": firsts}


async def send_all(
    engine: Streams, work: Iterator[tuple[int, dict[str, Any]]], clients: int, number: int
) -> list[float]:
    """Send requests by several clients, each one after the other; see :func:`time_round`."""

    async def client() -> list[float]:
        return [await engine.first_token(one, f"{number}-{index}") for index, one in work]

    parts = await asyncio.gather(*[client() for _ in range(clients)])
    return [first for part in parts for first in part]


def measure_clients(
    engines: Mapping[str, Apart], clients: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Time all engines with a number of clients; return requests per second and percentiles."""
    order = random.Random(0)
    rows: dict[str, list[dict[str, Any]]] = {mode: [] for mode in engines}
    for number in range(1 + rounds):
        for mode in order.sample(list(engines), len(engines)):
            rows[mode].append(engines[mode].ask(str(clients), number))
    return {mode: summarise(timed[1:]) for mode, timed in rows.items()}


def summarise(rounds: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return requests per second, and the percentiles of the times to the first token in ms."""
    firsts = [first for one in rounds for first in one["firsts"]]
    p50, p99 = np.percentile(firsts, [50, 99])
    return {
        "requests_per_second": round(len(firsts) / sum(one["seconds"] for one in rounds), 2),
        "p50_ms": round(1e3 * float(p50), 2),
        "p99_ms": round(1e3 * float(p99), 2),
        "requests": len(firsts),
    }


IN_PROCESSES = partial(Apart, start=Engine, clock=time_round)
"""Starts an engine in a process of its own, and times rounds there."""


def main(
    arguments: Sequence[str] | None = None, start: Callable[..., Apart] = IN_PROCESSES
) -> None:
    """Measure the chosen models and engines, with the chosen numbers of clients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default="Qwen3-VL-8B")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--clients", default=",".join(map(str, CLIENTS)))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(arguments)
    record = recorder(options.json, describe)
    modes = options.modes.split(",")
    for model in options.models.split(","):
        with started(model, modes, options.layers, compiled=True, start=start) as engines:
            for clients in map(int, options.clients.split(",")):
                for mode, row in measure_clients(engines, clients, options.rounds).items():
                    about = {"model": model, "layers": options.layers, "mode": mode}
                    record({**about, "cell": f"{clients} clients", **row})


if __name__ == "__main__":
    main()
