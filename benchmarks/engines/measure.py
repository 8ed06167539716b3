"""Runs vLLM engines in separate processes, and measures their times to the first token.

Every engine has its share of the GPU memory, and works while the others wait. All engines of a
model get the same requests, one engine after the other in a new random order per request, so that
changes on the host over time do not look like differences between engines.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any, Protocol

import numpy as np
from PIL import Image

from benchmarks.engines.models import write_model
from benchmarks.measuring.machine import EXTRAS, describe_machine, version_of
from benchmarks.measuring.results import write_results

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
CELLS = {
    "1x224": (1, 224, 224),
    "1x448": (1, 448, 448),
    "1x1024": (1, 1024, 1024),
    "8x448": (8, 448, 448),
    "1x1920x1080": (1, 1920, 1080),
}
"""The workloads by name: (images per request, width, height)."""
MODES = {
    "stock": "vLLM's tower without encoder graphs",
    "graphs": "vLLM's tower with its own encoder graphs",
    "ours": "vitgraph's tower with graphs",
    "raw": "vitgraph's tower with graphs, and images sent raw to the engine",
}
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
"""Environment variables that make glibc keep freed memory. By default it returns large blocks to
the system, and depending on the layout of the heap every request has page faults in them again: the
same preprocessing took 16 ms in one process and 24 ms in another."""
CAPTURED = [1, 2, 4, 8, 16, 128, 256, 512]
"""The token counts for which graphs of the language model are captured. vLLM's default captures
many more sizes up to 512, which takes longer; longer prompts run without a graph in both cases."""
WARM, RUNS = 5, 41
"""The numbers of untimed warm-up requests and of timed requests per workload. With 21, noise of the
host moved the median of a first token of 30 ms by 2 ms."""


class AnswersRequests(Protocol):
    """A vLLM engine, or a part of vLLM that is measured alone, such as its processor."""

    def answer(self, requests: Sequence[dict[str, Any]], tokens: int) -> list[Any]: ...

    def stages(self) -> dict[str, float]: ...


class Engine:
    """A vLLM engine inside this process."""

    def __init__(self, folder: Path, mode: str, *, compiled: bool, **more: Any) -> None:
        os.environ |= variables(mode) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        # vLLM's V2 model runner does not report the tower's times (0.26).
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        from vllm import LLM

        self.llm = LLM(**{**settings(folder, mode, compiled=compiled), **more})

    def answer(
        self, requests: Sequence[dict[str, Any]], tokens: int, logprobs: int | None = None
    ) -> list[Any]:
        """Send all requests at once, each for ``tokens`` greedy tokens, and return vLLM's outputs.

        ``logprobs`` is the number of best tokens whose log-probabilities are returned, too.
        """
        from vllm import SamplingParams

        greedy = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=logprobs,
        )
        return list(self.llm.generate(list(requests), greedy, use_tqdm=False))

    def stages(self) -> dict[str, float]:
        """Return the seconds of preprocessing and of the vision tower since the last call of this
        method, as vLLM reports them.
        """
        from vllm.benchmarks.mm_processor import get_timing_stats_from_engine

        found = get_timing_stats_from_engine(self.llm.llm_engine).values()
        return {
            "encoder": sum(one.get("encoder_forward_secs", 0.0) for one in found),
            "preprocess": sum(one.get("preprocessor_total_secs", 0.0) for one in found),
        }


def variables(mode: str) -> dict[str, str]:
    """Return the environment variables of an engine for a mode, a key of :data:`MODES`.

    Options of our tower that are set already are kept.
    """
    options = json.loads(os.environ.get("VITGRAPH_VLLM_OPTIONS") or "{}")
    return {
        "VITGRAPH_VLLM": "1" if mode in ("ours", "raw") else "0",
        "VITGRAPH_VLLM_OPTIONS": json.dumps({**options, "raw_images": mode == "raw"}),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # an optional package; sampling is greedy
    }


def settings(folder: Path, mode: str, *, compiled: bool) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for a mode, a key of :data:`MODES`.

    ``compiled`` says whether vLLM compiles the language model and captures its graphs.
    """
    compilation: dict[str, Any] = {} if compiled else {"mode": 0, "cudagraph_mode": "NONE"}
    if mode == "graphs":  # vLLM has encoder graphs only together with language model graphs
        graphs = {} if compiled else {"cudagraph_mode": "FULL_DECODE_ONLY"}
        compilation |= {**graphs, "cudagraph_mm_encoder": True}
    return {
        "model": str(folder),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": 16384,
        "max_num_batched_tokens": 16384,
        "max_num_seqs": 16,
        "gpu_memory_utilization": 0.9,
        "limit_mm_per_prompt": {"image": 8, "video": 0},
        "enable_prefix_caching": False,
        "mm_processor_cache_gb": 0,
        "disable_log_stats": False,
        "enable_mm_processor_stats": True,
        "compilation_config": {"cudagraph_capture_sizes": CAPTURED, **compilation},
    }


def request_of(cell: str, dice: np.random.Generator) -> dict[str, Any]:
    """Make a prompt with new random images for a workload (a key of :data:`CELLS`)."""
    count, width, height = CELLS[cell]
    pixels = dice.integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    images = [Image.fromarray(one) for one in pixels]
    return {"prompt": IMAGE * count + "What is this?", "multi_modal_data": {"image": images}}


def time_request(engine: AnswersRequests, cell: str, number: int) -> dict[str, float]:
    """Return the seconds to the first token and of each stage, and the page faults, of a request.

    ``cell`` is a key of :data:`CELLS`; ``number`` is the seed of the request's images.
    """
    request = request_of(cell, np.random.default_rng(number))
    faults, began = getrusage(RUSAGE_SELF).ru_minflt, time.perf_counter()
    (output,) = engine.answer([request], tokens=1)
    seconds = {"wall": time.perf_counter() - began}
    seconds["page_faults"] = getrusage(RUSAGE_SELF).ru_minflt - faults
    seconds["first_token"] = output.metrics.first_token_latency
    return {**seconds, **engine.stages()}


def serve(
    pipe: Connection,
    start: Callable[..., Any],
    clock: Callable[..., dict[str, Any]],
    *about: Any,
    **more: Any,
) -> None:
    """Start an engine, send its startup seconds, and time requests until the pipe is closed."""
    began = time.perf_counter()
    engine = start(*about, **more)
    pipe.send(round(time.perf_counter() - began, 1))
    with suppress(EOFError):
        while True:
            pipe.send(clock(engine, *pipe.recv()))


class Apart:
    """An engine in a process of its own.

    Calls raise EOFError or BrokenPipeError if that process has ended.

    Attributes:
        start_seconds: seconds that the engine took to start.
    """

    def __init__(
        self,
        folder: Path,
        mode: str,
        *,
        compiled: bool,
        share: float,
        start: Callable[..., Any] = Engine,
        clock: Callable[..., dict[str, Any]] = time_request,
        allocator: Mapping[str, str] = ALLOCATOR,
    ) -> None:
        for name in ALLOCATOR:
            os.environ.pop(name, None)
        os.environ |= allocator  # the new process inherits these variables
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        more = {"compiled": compiled, "gpu_memory_utilization": share}
        self._process = context.Process(
            target=serve, args=(theirs, start, clock, folder, mode), kwargs=more
        )
        self._process.start()
        theirs.close()
        self.start_seconds: float = self._pipe.recv()

    def ask(self, cell: str, number: int) -> dict[str, Any]:
        """Time the workload ``cell`` with images of the seed ``number``, by ``clock``."""
        self._pipe.send((cell, number))
        return dict(self._pipe.recv())

    def end(self) -> None:
        """End the process, and wait until its GPU memory is free."""
        self._pipe.close()
        self._process.join()


def measure_cell(
    engines: dict[str, Apart], cell: str, runs: int | None = None
) -> dict[str, dict[str, float]]:
    """Time all engines on one workload; return medians and quartile distances by mode, in ms.

    An engine that has crashed is removed from ``engines`` and has no result.
    """
    order = random.Random(0)
    rows: dict[str, list[dict[str, float]]] = {mode: [] for mode in engines}
    for number in range(WARM + (runs or RUNS)):
        for mode in order.sample(list(engines), len(engines)):
            try:
                rows[mode].append(engines[mode].ask(cell, number))
            except (EOFError, BrokenPipeError):
                print(f"# the engine {mode} has ended at {cell}", flush=True)
                engines.pop(mode).end()
    timed = {mode: rows[mode][WARM:] for mode in engines}
    return {mode: summarise(timed[mode], timed) for mode in engines}


def summarise(
    rows: Sequence[dict[str, float]], timed: Mapping[str, Sequence[dict[str, float]]]
) -> dict[str, float]:
    """Return an engine's medians in milliseconds, and the quartile distances of two of the times.

    ``first_token_to_stock`` is the median over requests of a ratio: this engine's time to the first
    token divided by the time of the engine "stock" for the same request. There is such a ratio to
    every engine, and also for the time of preprocessing (``preprocess_to_stock``, ...).

    Args:
        rows: the seconds of each request in this engine.
        timed: the seconds of the same requests in every engine, by mode.
    """
    result = {f"{name}_ms": 1e3 * statistics.median(row[name] for row in rows) for name in rows[0]}
    result["runs"] = len(rows)
    result["page_faults"] = result.pop("page_faults_ms") / 1e3
    for name in ("first_token", "preprocess"):
        for mode, others in timed.items():
            ratios = [one[name] / other[name] for one, other in zip(rows, others, strict=True)]
            result[f"{name}_to_{mode}"] = statistics.median(ratios)
        low, high = np.percentile([row[name] for row in rows], [25, 75])
        result[f"{name}_iqr_ms"] = 1e3 * float(high - low)
    return {name: round(value, 3) for name, value in result.items()}


def measure(
    model: str,
    modes: Sequence[str],
    cells: Sequence[str],
    layers: int | None,
    record: Callable[[dict[str, Any]], None],
    *,
    compiled: bool,
    runs: int | None = None,
    start: Callable[..., Apart] = Apart,
) -> None:
    """Measure a model's engines in every workload; each result is recorded immediately.

    Args:
        model: name of the model.
        modes: the engines, keys of :data:`MODES`.
        cells: the workloads, keys of :data:`CELLS`.
        layers: number of layers of the language model; None takes all.
        record: writes a result.
        compiled: whether vLLM compiles the language model and captures its graphs.
        runs: number of timed requests; None takes :data:`RUNS`.
        start: starts an engine in a process of its own.
    """
    with started(model, modes, layers, compiled=compiled, start=start) as engines:
        common = {"model": model, "layers": layers or "all", "compiled": compiled}
        common["flash"] = version_of("flash-attn-4", EXTRAS["flash-attn-4"]) is not None
        for cell in cells:
            for mode, row in measure_cell(engines, cell, runs).items():
                seconds = engines[mode].start_seconds
                record({**common, "mode": mode, "cell": cell, **row, "start_seconds": seconds})


@contextmanager
def started(
    model: str,
    modes: Sequence[str],
    layers: int | None,
    *,
    compiled: bool,
    start: Callable[..., Apart],
) -> Iterator[dict[str, Apart]]:
    """Start a model's engines by mode, and end them afterwards; see :func:`measure`."""
    with tempfile.TemporaryDirectory() as folder:
        place = write_model(Path(folder), model, layers)
        engines: dict[str, Apart] = {}
        for mode in modes:  # not in parallel, because each engine checks how much memory is free
            try:
                engines[mode] = start(place, mode, compiled=compiled, share=0.9 / len(modes))
            except EOFError:
                print(f"# the engine {mode} did not start", flush=True)
        yield engines
        for engine in engines.values():
            engine.end()


def recorder(path: Path | None, about: Callable[[], dict[str, Any]]) -> Callable[[Any], None]:
    """Return a function that prints a result and writes it into a JSON file.

    In the file it replaces an older result with the same :func:`key`. Without ``path`` nothing is
    written. ``about`` describes the machine for the head of the file.
    """

    def record(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        if path is None:
            return
        found = json.loads(path.read_text()) if path.exists() else {"rows": []}
        rows = [old for old in found["rows"] if key(old) != key(row)]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_rows(path, about(), [*rows, row])

    return record


def write_rows(path: Path, about: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write a JSON file with one line per result, after a description of the machine."""
    write_results(path, {"about": about, "rows": rows})


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the values that identify a result; a newer result with the same values replaces it."""
    return tuple(
        row.get(name) for name in ("model", "layers", "mode", "compiled", "cell", "runner", "part")
    )


def describe() -> dict[str, Any]:
    """Return a description of the machine, the package versions, and the numbers of requests."""
    try:
        engine = version("vllm")
    except PackageNotFoundError:
        import vllm

        engine = str(vllm.__version__)
    return {
        **describe_machine(),
        "vllm": engine,
        "warm": WARM,
        "runs": RUNS,
        "dtype": "bfloat16",
        "order": "engines in turn",
    }
