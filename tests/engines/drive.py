"""Start engines one after the other in this process, and write what each says.

    python tests/engines/drive.py JOBS.json ANSWERS.json

A job has the arguments of ``vllm.LLM``, the names of its prompts, and ``ours``: the options of our
tower, or None for vLLM's. Jobs of vLLM's tower come first, because a registered model stays.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

QWEN = (
    "<|vision_start|><|image_pad|><|vision_end|>",
    "<|vision_start|><|video_pad|><|vision_end|>",
)
MARKS = {"internvl": ("<image>", "<video>")}
"""What stands for an image and for a clip in the prompts of a family, if not as in Qwen's."""
FRAMES = 6


def prompts(job: dict[str, Any]) -> list[dict[str, Any]]:
    """Requests of a job by name: text alone, one image, two images, a clip."""
    dice = np.random.default_rng(0)

    def image(width: int, height: int) -> Image.Image:
        return Image.fromarray(dice.integers(0, 256, (height, width, 3), dtype=np.uint8))

    frames = dice.integers(0, 256, (FRAMES, 64, 96, 3), dtype=np.uint8)
    clip = {
        "fps": 2.0,
        "total_num_frames": FRAMES,
        "frames_indices": [*range(FRAMES)],
        "duration": FRAMES / 2,
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
    one, video = job.get("marks") or MARKS.get(job["family"], QWEN)
    images = [image(64, 96), image(160, 128)]
    single = {"prompt": f"{one}What is it?", "multi_modal_data": {"image": image(96, 64)}}
    sizes = [image(300, 250), image(200, 30), image(64, 96), image(31, 33)]
    wide = [image(800, 200), image(31, 33)]
    limits = {"min_pixels": 56 * 56, "max_pixels": 40_000}
    known: dict[str, dict[str, Any]] = {
        "text": {"prompt": "What is a graph?"},
        "image": single,
        "again": single,  # which the processor's cache has
        "other": {"prompt": f"{one}Why?", "multi_modal_data": {"image": images[1]}},
        "images": {"prompt": f"{one}{one}Compare.", "multi_modal_data": {"image": images}},
        "wide": {"prompt": f"{one * 2}Why?", "multi_modal_data": {"image": wide}},
        "clip": {"prompt": f"{video}Tell.", "multi_modal_data": {"video": [(frames, clip)]}},
        "sizes": {"prompt": f"{one * 4}Compare.", "multi_modal_data": {"image": sizes}},
        "limits": {
            "prompt": f"{one}What is it?",
            "multi_modal_data": {"image": image(600, 500)},
            "mm_processor_kwargs": limits,
        },
        "too many": {"prompt": f"{one * 5}Count.", "multi_modal_data": {"image": [*sizes] * 2}},
        "too long": {
            "prompt": f"{one * 2}Why?",
            "multi_modal_data": {"image": [image(64, 64), image(900, 4)]},
        },
    }
    asked = [known[name] for name in job["prompts"]]
    return [as_chunks(one) for one in asked] if job.get("chunks") else asked


def as_chunks(prompt: dict[str, Any]) -> dict[str, Any]:
    """The request in the form of Kimi-K2.5, whose images and clips of four frames are chunks."""
    data = prompt.get("multi_modal_data", {})
    images = data.get("image", [])
    found: list[dict[str, Any]] = [
        {"type": "image", "image": image, "uuid": None}
        for image in (images if isinstance(images, list) else [images])
    ]
    for frames, _ in data.get("video", []):
        clip = [Image.fromarray(frame) for frame in frames[:4]]
        found.append({"type": "video_chunk", "video_chunk": clip, "prompt": "", "video_idx": 0})
    return prompt | {"multi_modal_data": {"vision_chunk": found}} if found else prompt


def prune_on_cpu() -> None:
    """Switch on what follows the pruning of video tokens (EVS) in vLLM's runner for CPUs.

    The runner for GPUs reads the switch from the config when the model is loaded. That for CPUs has
    a ``load_model`` of its own without it (vLLM 0.32), so that rows of pruned clips do not fit.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    load = CPUModelRunner.load_model

    def load_model(self: Any, *args: Any, **options: Any) -> None:
        load(self, *args, **options)
        multimodal = self.model_config.multimodal_config
        self.is_multimodal_pruning_enabled = multimodal.is_multimodal_pruning_enabled()

    CPUModelRunner.load_model = load_model


def inspect_here() -> None:
    """Let vLLM look at model classes in this process.

    To keep a GPU free, it starts another one for each class it sees first, which imports vLLM.
    """
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda look: look()


def hide_numba() -> None:
    """Let vLLM look at all modules of the process after numba was imported, for Kimi-K2.5's pixels.

    Without Triton, vLLM 0.32 reads ``__dict__`` of what modules hold, and the library object of
    llvmlite, which numba imports, answers every attribute with a function.
    """
    from llvmlite.binding import ffi

    known = ffi._lib_wrapper.__getattr__

    def look_up(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return known(self, name)

    ffi._lib_wrapper.__getattr__ = look_up


def replace_kernels_once() -> None:
    """Let vLLM look for Triton's kernels in all modules for the first engine only.

    Modules that are imported later find the kernels for CPUs in the modules that define them.
    """
    from vllm.triton_utils import dispatcher

    replace = dispatcher._rebind_kernels

    def first(overrides: list[Any]) -> None:
        dispatcher._rebind_kernels = lambda overrides: None
        replace(overrides)

    dispatcher._rebind_kernels = first


def count_raw() -> list[int]:
    """The numbers of images that our plug-in cuts in this process, which fill up later."""
    from vitgraph.integrations.vllm_plugin import raw_images

    cut, counts = raw_images.cut_images, []

    def cut_images(pixels: Any, sizes: Any, *more: Any) -> Any:
        counts.append(len(sizes))
        return cut(pixels, sizes, *more)

    raw_images.cut_images = cut_images
    return counts


def collect_seldom() -> Callable[[], int]:
    """Take from vLLM the collection of garbage, which is half of the time of a small engine.

    It collects several times per engine, and looks at all objects of its imports each time.

    Returns:
        What collects the garbage.
    """
    collect = gc.collect
    gc.collect = lambda generation=2: 0
    return collect


def refuse(engine: Any, job: dict[str, Any]) -> list[str]:
    """The errors of requests that vLLM refuses, without addresses of objects."""
    from vllm.exceptions import VLLMValidationError

    errors = []
    for request in prompts(job | {"prompts": job.get("refused", [])}):
        try:
            engine.generate([request], use_tqdm=False)
        except (ValueError, VLLMValidationError) as error:
            errors.append(re.sub("at 0x[0-9A-F]+", "", f"{error!r} {error.__cause__!r}"))
    return errors


class OfSizes:
    """Makes a part of a tower with other sizes than vLLM's code has.

    Args:
        make: makes the part.
        sizes: the sizes by the names of its arguments.
    """

    def __init__(self, make: Callable[..., Any], sizes: dict[str, Any]) -> None:
        self.make, self.sizes = make, sizes

    def __call__(self, *arguments: object, **named: object) -> Any:
        return self.make(*arguments, **(named | self.sizes))


def set_sizes(parts: dict[str, dict[str, Any]]) -> None:
    """Let vLLM make parts of a tower, "module:function", with other sizes than its code has."""
    for place, sizes in parts.items():
        module, name = place.split(":")
        make = getattr(import_module(module), name)
        if not isinstance(make, OfSizes):  # of the job before
            setattr(import_module(module), name, OfSizes(make, sizes))


def generate(engine: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Twelve tokens for each request, and the logarithm of their probability."""
    from vllm import SamplingParams

    sampling = SamplingParams(
        temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True, detokenize=False
    )
    outputs = [one.outputs[0] for one in engine.generate(requests, sampling, use_tqdm=False)]
    return [{"tokens": [*one.token_ids], "logprob": one.cumulative_logprob} for one in outputs]


def embed(engine: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The embeddings of the tokens of each request."""
    outputs = engine.encode(requests, pooling_task="token_embed", use_tqdm=False)
    return [{"rows": one.outputs.data.tolist()} for one in outputs]


def run(job: dict[str, Any], counts: list[int]) -> dict[str, Any]:
    """The answers of one engine, or the error that ended it."""
    from vllm import LLM, ModelRegistry
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    counts.clear()
    if job["ours"] is not None:
        from vitgraph.integrations.vllm_plugin import register

        os.environ |= {"VITGRAPH_VLLM": "1", "VITGRAPH_VLLM_OPTIONS": json.dumps(job["ours"])}
        register()
    try:
        set_sizes(job.get("sizes", {}))
        for architecture, place in job.get("stand_ins", {}).items():
            ModelRegistry.register_model(architecture, place)
        engine = LLM(**job["engine"])
        requests = prompts(job)
        errors = refuse(engine, job)
        answers = embed(engine, requests) if job.get("pooling") else generate(engine, requests)
        del engine
    except (ValueError, RuntimeError) as error:
        traceback.print_exc()
        return {"error": str(error)}
    finally:
        cleanup_dist_env_and_memory()
    found = dict(zip(job["prompts"], answers, strict=True))
    return {**found, "about": {"raw": sum(counts), "errors": errors}}


def main() -> None:
    """Run every job, and write the answers by the jobs' names."""
    jobs = json.loads(Path(sys.argv[1]).read_text())
    answers = {}
    counts = count_raw()
    collect = collect_seldom()
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":  # else this process stays small
        inspect_here()
    prune_on_cpu()
    hide_numba()
    replace_kernels_once()
    for name, job in jobs.items():
        print(f"### {name}", flush=True)
        answers[name] = run(job, counts)
        collect()
        if len(answers) == 1:
            gc.freeze()  # what the next collections need not look at, modules nearly all of it
        Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
