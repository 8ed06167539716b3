"""Start one engine in a process of its own, answer the requests of a file, write what it says.

python tests/engines/drive.py REQUEST.json ANSWER.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"


def prompts(wanted: list[str]) -> list[dict[str, Any]]:
    """Requests by name: text alone, one image, two images, a clip."""
    from PIL import Image

    dice = np.random.default_rng(0)

    def image(width: int, height: int) -> Image.Image:
        return Image.fromarray(dice.integers(0, 256, (height, width, 3), dtype=np.uint8))

    frames = dice.integers(0, 256, (6, 64, 96, 3), dtype=np.uint8)
    about = {
        "fps": 2.0,
        "total_num_frames": 6,
        "frames_indices": [*range(6)],
        "duration": 3.0,
        "video_backend": "opencv",
        "do_sample_frames": False,
    }
    known = {
        "text": {"prompt": "What is a graph?"},
        "image": {"prompt": f"{IMAGE}What is this?", "multi_modal_data": {"image": image(96, 64)}},
        "images": {
            "prompt": f"{IMAGE}{IMAGE}Compare.",
            "multi_modal_data": {"image": [image(64, 96), image(160, 128)]},
        },
        "clip": {"prompt": f"{VIDEO}Tell.", "multi_modal_data": {"video": [(frames, about)]}},
    }
    return [known[name] for name in wanted]


def main() -> None:
    """Answer, and write tokens and log-probabilities."""
    request = json.loads(Path(sys.argv[1]).read_text())
    from vllm import LLM, SamplingParams

    engine = LLM(**request["engine"])
    sampling = SamplingParams(
        temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True, detokenize=False
    )
    outputs = engine.generate(prompts(request["prompts"]), sampling, use_tqdm=False)
    answers = [
        {"tokens": list(one.outputs[0].token_ids), "logprob": one.outputs[0].cumulative_logprob}
        for one in outputs
    ]
    Path(sys.argv[2]).write_text(json.dumps(dict(zip(request["prompts"], answers, strict=True))))


if __name__ == "__main__":
    main()
