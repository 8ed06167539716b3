"""Time of preprocessing here and in both Hugging Face backends: medians on one thread.

    python -m benchmarks.preprocess_cpu --json benchmarks/results/preprocess_cpu.json  (in a clone)

All take the same images in interleaved order. A ratio is our median over the median of the *faster*
backend; below 1 we are faster. A/A is the median of a second series of ours over the first, which
shows the noise of the machine.
Images are photographs (scikit-learn's, matplotlib's). Hugging Face's video processors have one
backend, torchvision.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import warnings
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
warnings.simplefilter("ignore")

import matplotlib.cbook  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from PIL import Image  # noqa: E402
from sklearn.datasets import load_sample_images  # noqa: E402

from benchmarks.towers import milliseconds  # noqa: E402
from encoders.inputs.patches import PatchPreprocessor  # noqa: E402
from encoders.inputs.processor_files import HALF, IMAGENET_MEAN, IMAGENET_STD  # noqa: E402
from encoders.inputs.tiles import TilePreprocessor  # noqa: E402

Case = dict[str, Callable[[], torch.Tensor]]


def photographs() -> dict[str, list[Any]]:
    """Return the images that each workload passes in one call, by its name."""
    china, flower = (Image.fromarray(array) for array in load_sample_images().images)
    with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
        hopper = Image.open(file).convert("RGB")
    large = china.resize((1920, 1080))
    array = np.array(large)
    return {
        "1 photo 640x427": [china],
        "1 icon 64x64": [hopper.resize((64, 64))],
        "1 photo 1920x1080": [large],
        "1 array 1920x1080": [array],
        "1 tensor 1920x1080": [torch.from_numpy(array).permute(2, 0, 1).contiguous()],
        "4 photos, mixed sizes": [china, flower.crop((0, 0, 500, 400)), hopper, large],
        "8 photos 640x427": [china, flower] * 4,
    }


def clips() -> dict[str, np.ndarray[Any, Any]]:
    """Return video arrays [F, H, W, C] by name, panning over a photograph."""
    china = load_sample_images().images[0]
    return {
        "16 frames 320x240": np.stack([china[n : n + 240, n : n + 320] for n in range(16)]),
        "8 frames 600x400": np.stack([china[n : n + 400, n : n + 600] for n in range(8)]),
    }


def qwen_cases(
    ours: PatchPreprocessor, video_class: Any, settings: dict[str, Any]
) -> dict[str, Case]:
    """Return the workloads of a Qwen family; ``settings`` are the processors' other arguments."""
    size, video_size = (
        {"shortest_edge": rules.min_pixels, "longest_edge": rules.max_pixels}
        for rules in (ours.images, ours.videos)
    )
    fast = transformers.Qwen2VLImageProcessor(size=size, **settings)
    pil = transformers.Qwen2VLImageProcessorPil(size=size, **settings)
    video = video_class(size=video_size, **settings)
    cases: dict[str, Case] = {
        name: {
            "ours": lambda images=images: ours(images).pixel_values,
            "torchvision": lambda images=images: fast(images, return_tensors="pt")["pixel_values"],
            "pil": lambda images=images: pil(images, return_tensors="pt")["pixel_values"],
        }
        for name, images in photographs().items()
    }
    for name, clip in clips().items():
        cases[name] = {
            "ours": lambda clip=clip: ours(videos=[clip]).pixel_values,
            "torchvision": lambda clip=clip: video(
                [clip], return_tensors="pt", do_sample_frames=False, cap_pixels_per_frame=False
            )["pixel_values_videos"],
        }
    return cases


def intern_cases() -> dict[str, Case]:
    """Return the workloads of InternViT: tiles of images, frames of videos."""
    ours = TilePreprocessor()
    settings = {
        "size": {"height": 448, "width": 448},
        "image_mean": list(IMAGENET_MEAN),
        "image_std": list(IMAGENET_STD),
    }
    fast = transformers.GotOcr2ImageProcessor(crop_to_patches=True, **settings)
    pil = transformers.GotOcr2ImageProcessorPil(crop_to_patches=True, **settings)
    video = transformers.InternVLVideoProcessor(**settings)
    cases: dict[str, Case] = {
        name: {
            "ours": lambda images=images: ours(images).pixel_values,
            "torchvision": lambda images=images: fast(images, return_tensors="pt")["pixel_values"],
            "pil": lambda images=images: pil(images, return_tensors="pt")["pixel_values"],
        }
        for name, images in photographs().items()
    }
    for name, clip in clips().items():
        cases[name] = {
            "ours": lambda clip=clip: ours(videos=[clip]).pixel_values,
            "torchvision": lambda clip=clip: video([clip], return_tensors="pt")[
                "pixel_values_videos"
            ][0],
        }
    return cases


def families() -> dict[str, dict[str, Case]]:
    """Return every workload of every family."""
    sizes = {"temporal_patch_size": 2, "merge_size": 2}
    half = {"image_mean": list(HALF), "image_std": list(HALF)}
    return {
        "qwen2_vl, qwen2_5_vl": qwen_cases(
            PatchPreprocessor.qwen2_vl(patch_size=14, **sizes),
            transformers.Qwen2VLVideoProcessor,
            {"patch_size": 14, **sizes},
        ),
        "qwen3_vl, qwen3_5": qwen_cases(
            PatchPreprocessor.qwen3_vl(patch_size=16, **sizes),
            transformers.Qwen3VLVideoProcessor,
            {"patch_size": 16, **sizes, **half},
        ),
        "intern_vit": intern_cases(),
    }


def compare(case: Case, repeats: int) -> dict[str, Any]:
    """Return medians, the ratio to the faster backend, and whether the pixels are equal."""
    ours, reference = case["ours"](), case["torchvision"]()
    times = milliseconds({**case, "ours again": case["ours"]}, repeats)
    medians = {name: statistics.median(values) for name, values in times.items()}
    rival = min(
        (name for name in ("torchvision", "pil") if name in medians), key=medians.__getitem__
    )
    return {
        "ms": {name: round(value, 3) for name, value in medians.items()},
        "ms_range": {n: [round(min(v), 3), round(max(v), 3)] for n, v in times.items()},
        "faster_backend": rival,
        "ratio": round(medians["ours"] / medians[rival], 3),
        "a_a": round(medians["ours again"] / medians["ours"], 3),
        "equal_to_torchvision": torch.equal(ours, reference),
    }


def cpu_name() -> str:
    """Return the name of this CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "cpu": cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "repeats": options.repeats,
        "families": {},
    }
    print(*(f"{key}: {value}" for key, value in results.items() if key != "families"), sep="\n")
    for family, cases in families().items():
        print(f"\n{family}\n{'':24}   ours ms  torchvision      pil  ratio    A/A  equal")
        found = {name: compare(case, options.repeats) for name, case in cases.items()}
        for name, row in found.items():
            ms = row["ms"]
            pil = f"{ms['pil']:8.2f}" if "pil" in ms else "       -"
            print(
                f"{name:24} {ms['ours']:9.2f} {ms['torchvision']:12.2f} {pil} {row['ratio']:6.3f}"
                f" {row['a_a']:6.3f}  {row['equal_to_torchvision']}"
            )
        mean = math.exp(statistics.fmean(math.log(row["ratio"]) for row in found.values()))
        print(f"{'geometric mean':24} {'':31} {mean:6.3f}")
        results["families"][family] = {"geometric_mean_ratio": round(mean, 3), "cases": found}
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
