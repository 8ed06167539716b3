"""Engines in processes of their own, and how long their requests take to the first token.

Every engine has its share of the GPU, and answers while the others wait. The engines of a model get
the same requests, one engine after the other in a new random order per request, so that nothing
that changes on the host between two requests is taken for a difference between engines.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
CELLS = {
    "1x224": (1, 224, 224),
    "1x448": (1, 448, 448),
    "1x1024": (1, 1024, 1024),
    "8x448": (8, 448, 448),
    "1x1920x1080": (1, 1920, 1080),
}
"""Cell -> images per request, their width and height."""
MODES = {
    "stock": "vLLM's tower, eagerly",
    "graphs": "vLLM's tower, its own encoder graphs",
    "ours": "vitgraph's tower",
}
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**32)}
"""Variables that make glibc keep what is freed. By default it gives large blocks back and each
request faults them in anew, or not, as the process's heap happens to lie: the same preprocessing
took 16 ms in one process and 24 ms in another."""
CAPTURED = [1, 2, 4, 8, 16, 128, 256, 512]
"""Tokens of the language model's graphs. An engine of 256 sequences, vLLM's default, captures many
sizes up to 512, which takes longer; prompts of more tokens run without a graph either way."""
WARM, RUNS = 5, 41
"""Requests per cell that are not timed, and that are. With 21, the host's noise moved the median of
a first token of 30 ms by 2 ms."""


class AnswersRequests(Protocol):
    """An engine, or what is measured in its place."""

    def answer(self, requests: Sequence[dict[str, Any]], tokens: int) -> list[Any]: ...

    def stages(self) -> dict[str, float]: ...


class Engine:
    """A vLLM engine inside this process."""

    def __init__(self, folder: Path, mode: str, *, compiled: bool, **more: Any) -> None:
        os.environ |= {
            "VITGRAPH_VLLM": "1" if mode == "ours" else "0",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # an optional package; sampling is greedy
        }
        # vLLM's second model runner has no times of the tower (0.26).
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        from vllm import LLM

        self.llm = LLM(**{**settings(folder, mode, compiled=compiled), **more})

    def answer(
        self, requests: Sequence[dict[str, Any]], tokens: int, logprobs: int | None = None
    ) -> list[Any]:
        """Send requests at once, each for ``tokens`` greedy tokens, and return their outputs.

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
        """Return the seconds of preprocessing and of the tower since the last call, as vLLM
        counts.
        """
        from vllm.benchmarks.mm_processor import get_timing_stats_from_engine

        found = get_timing_stats_from_engine(self.llm.llm_engine).values()
        return {
            "encoder": sum(one.get("encoder_forward_secs", 0.0) for one in found),
            "preprocess": sum(one.get("preprocessor_total_secs", 0.0) for one in found),
        }


def settings(folder: Path, mode: str, *, compiled: bool) -> dict[str, Any]:
    """Return the arguments of ``vllm.LLM`` for a mode such as "stock" or "ours"."""
    compilation: dict[str, Any] = {} if compiled else {"mode": 0, "cudagraph_mode": "NONE"}
    if mode == "graphs":  # its manager works only beside the graphs of the language model
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
    """Make a prompt with new random images of a workload."""
    count, width, height = CELLS[cell]
    pixels = dice.integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    images = [Image.fromarray(one) for one in pixels]
    return {"prompt": IMAGE * count + "What is this?", "multi_modal_data": {"image": images}}


def time_request(engine: AnswersRequests, cell: str, number: int) -> dict[str, float]:
    """Return the seconds of a request to its first token and of its stages, and page faults."""
    request = request_of(cell, np.random.default_rng(number))
    faults, began = getrusage(RUSAGE_SELF).ru_minflt, time.perf_counter()
    (output,) = engine.answer([request], tokens=1)
    seconds = {"wall": time.perf_counter() - began}
    seconds["page_faults"] = getrusage(RUSAGE_SELF).ru_minflt - faults
    seconds["first_token"] = output.metrics.first_token_latency
    return {**seconds, **engine.stages()}


def serve(
    pipe: Connection, start: Callable[..., AnswersRequests], *about: Any, **more: Any
) -> None:
    """Start an engine, report the seconds that took, and time requests until the pipe closes."""
    began = time.perf_counter()
    engine = start(*about, **more)
    pipe.send(round(time.perf_counter() - began, 1))
    with suppress(EOFError):
        while True:
            pipe.send(time_request(engine, *pipe.recv()))


class Apart:
    """An engine in a process of its own; calls raise EOFError if that process has ended.

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
        start: Callable[..., AnswersRequests] = Engine,
        allocator: Mapping[str, str] = ALLOCATOR,
    ) -> None:
        for name in ALLOCATOR:
            os.environ.pop(name, None)
        os.environ |= allocator  # the process that is started inherits them
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        more = {"compiled": compiled, "gpu_memory_utilization": share}
        self._process = context.Process(
            target=serve, args=(theirs, start, folder, mode), kwargs=more
        )
        self._process.start()
        theirs.close()
        self.start_seconds: float = self._pipe.recv()

    def ask(self, cell: str, number: int) -> dict[str, float]:
        """Return the seconds of a request, whose images depend on its number alone."""
        self._pipe.send((cell, number))
        return dict(self._pipe.recv())

    def end(self) -> None:
        """End the process, and wait until it has given the GPU back."""
        self._pipe.close()
        self._process.join()


def measure_cell(
    engines: dict[str, Apart], cell: str, runs: int | None = None
) -> dict[str, dict[str, float]]:
    """Return medians and quartile distances in milliseconds by mode; engines that end have none."""
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
    """Return the medians in milliseconds, and the quartile distance of the times of the host.

    ``first_token_to_stock`` is the median over requests of the time to the first token divided by
    that of the engine "stock" for the same request; likewise for the other engines, and for
    preprocessing.
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
    """Measure a model's engines in every workload; each row is recorded when it is done."""
    with tempfile.TemporaryDirectory() as folder:
        place = write_model(Path(folder), model, layers)
        engines: dict[str, Apart] = {}
        for mode in modes:  # one after the other, since each looks how much memory is free
            try:
                engines[mode] = start(place, mode, compiled=compiled, share=0.9 / len(modes))
            except EOFError:
                print(f"# the engine {mode} did not start", flush=True)
        common = {"model": model, "layers": layers or "all", "compiled": compiled}
        common["flash"] = version_of("flash-attn-4", EXTRAS["flash-attn-4"]) is not None
        for cell in cells:
            for mode, row in measure_cell(engines, cell, runs).items():
                seconds = engines[mode].start_seconds
                record({**common, "mode": mode, "cell": cell, **row, "start_seconds": seconds})
        for engine in engines.values():
            engine.end()


def recorder(path: Path | None, about: Callable[[], dict[str, Any]]) -> Callable[[Any], None]:
    """Return a function that prints a row and puts it into a file, in place of one with its key."""

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
    """Write a result file with a line per row."""
    lines = ",\n".join(f"  {json.dumps(row)}" for row in rows)
    path.write_text(f'{{"about": {json.dumps(about, indent=1)},\n "rows": [\n{lines}\n]}}\n')


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the key of a row; of two rows with equal keys the later one counts."""
    return tuple(
        row.get(name) for name in ("model", "layers", "mode", "compiled", "cell", "runner", "part")
    )


def describe() -> dict[str, Any]:
    """Return the machine, the versions of packages, and the way a workload is measured."""
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
