"""Start a vLLM that reads a feature store, and answer the same questions with and without features.

    python tests/engines/feed.py REQUEST.json ANSWERS.json

``REQUEST.json`` has ``model``, ``store`` and ``images``, paths. The engine runs in this process, so
that the calls of its own tower are counted; nothing of it is changed.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

FILE = "encoder_cache.safetensors"
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
QUESTIONS = {"one": ((0,), f"{IMAGE}What is this?"), "two": ((1, 2), f"{IMAGE}{IMAGE}Compare.")}
"""By name: the numbers of the images, and the prompt."""
FRAMES = np.random.default_rng(0).integers(0, 256, (6, 64, 96, 3), dtype=np.uint8)
CLIP = {"fps": 2.0, "total_num_frames": 6, "frames_indices": [*range(6)], "duration": 3.0,
        "video_backend": "opencv", "do_sample_frames": False}  # fmt: skip
TIMES = [[0.25, 1.25, 2.25]]


class Engine:
    """A vLLM with a store, and how often its tower was called."""

    def __init__(self, model: str, store: str) -> None:
        from vllm import LLM
        from vllm.model_executor.models import qwen3_vl

        self.calls = 0
        tower = qwen3_vl.Qwen3_VisionTransformer
        forward = tower.forward

        def counted(module: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return forward(module, *args, **kwargs)

        tower.forward = counted
        self.llm = LLM(
            model,
            dtype="float32",
            max_model_len=2048,
            enforce_eager=True,
            enable_mm_embeds=True,
            enable_prefix_caching=False,
            disable_log_stats=True,
            ec_transfer_config={
                "ec_connector": "ECExampleConnector",
                "ec_role": "ec_consumer",
                "ec_connector_extra_config": {"shared_storage_path": store},
            },
        )

    def answer(self, prompts: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """Tokens and log-probability of each, and the calls of the tower that all took."""
        from vllm import SamplingParams

        before = self.calls
        sampling = SamplingParams(
            temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True, detokenize=False
        )
        found = self.llm.generate([*prompts.values()], sampling, use_tqdm=False)
        answers = {
            name: [list(one.outputs[0].token_ids), one.outputs[0].cumulative_logprob]
            for name, one in zip(prompts, found, strict=True)
        }
        return {"answers": answers, "calls": self.calls - before}


def ask(images: list[Image.Image], uuids: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """The questions with their images and, if given, with the keys of their features."""
    prompts: dict[str, dict[str, Any]] = {}
    for name, (numbers, text) in QUESTIONS.items():
        prompts[name] = {"prompt": text}
        prompts[name]["multi_modal_data"] = {"image": [images[n] for n in numbers]}
        if uuids is not None:
            prompts[name]["multi_modal_uuids"] = {"image": [uuids[n] for n in numbers]}
    return prompts


def dynamo_prompts(model: str, paths: list[Path], llm: Any) -> dict[str, Any]:
    """The questions as Dynamo's driver and adapter make them of our encoder for Dynamo."""
    from dynamo.vllm.multimodal_utils.custom_encoder import (
        AsyncVisionEncoder,
        create_custom_encoder_adapter,
    )

    from vitgraph.integrations.dynamo import Encoder

    os.environ |= {"VITGRAPH_DYNAMO_DEVICE": "cpu", "VITGRAPH_DYNAMO_DTYPE": "float32"}
    files = [base64.b64encode(path.read_bytes()).decode() for path in paths]
    driver = AsyncVisionEncoder(Encoder())
    driver.load(model)
    made = asyncio.run(driver.encode([f"data:image/png;base64,{file}" for file in files]))
    driver.shutdown()
    adapter = create_custom_encoder_adapter(driver._backend, llm.model_config, None)
    tokenize = llm.get_tokenizer().encode
    return {
        name: adapter.prepare_prompt(tokenize(text), [made[number] for number in numbers])
        for name, (numbers, text) in QUESTIONS.items()
    }


def main() -> None:
    """Ask in every way, and write the answers."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vitgraph.integrations.vllm import content_key, multi_modal_data
    from weights import load_encoder

    request = json.loads(Path(sys.argv[1]).read_text())
    paths, store = [Path(path) for path in request["images"]], Path(request["store"])
    images = [Image.open(path).convert("RGB") for path in paths]
    keys = [content_key(path.read_bytes()) for path in paths]
    encoder = load_encoder(request["model"], dtype=torch.float32, progress=False)
    made = {
        name: {"prompt": text,
               "multi_modal_data": multi_modal_data(encoder, [images[n] for n in numbers])}
        for name, (numbers, text) in QUESTIONS.items()
    }  # fmt: skip
    clip = {"clip": {"prompt": f"{VIDEO}Tell.", "multi_modal_data": {"video": [(FRAMES, CLIP)]}}}
    made_clip = multi_modal_data(encoder, videos=[FRAMES], timestamps=TIMES, num_frames=6)
    engine = Engine(request["model"], request["store"])
    found = {"its own tower": engine.answer({**ask(images), **clip})}
    found["the store"] = engine.answer(ask(images, keys))
    known = ask(images, keys)
    for name, (numbers, _) in QUESTIONS.items():
        grids = encoder.preprocess([images[n] for n in numbers]).grid_thw
        known[name]["multi_modal_data"] = {"image": {"image_grid_thw": grids}}
    found["grids alone"] = engine.answer(known)
    made["clip"] = {"prompt": f"{VIDEO}Tell.", "multi_modal_data": made_clip}
    found["multi_modal_data"] = engine.answer(made)
    found["Dynamo's prompts"] = engine.answer(dynamo_prompts(request["model"], paths, engine.llm))
    blank = load_file(store / keys[0] / FILE)
    (store / "blank").mkdir()
    save_file({name: tokens * 0 for name, tokens in blank.items()}, store / "blank" / FILE)
    found["a blank image"] = engine.answer({"one": ask(images, ["blank", *keys[1:]])["one"]})
    (store / keys[2] / FILE).unlink()
    engine.llm.reset_mm_cache()
    engine.llm.llm_engine.reset_encoder_cache()
    found["one file missing"] = engine.answer(ask(images, keys))
    Path(sys.argv[2]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
