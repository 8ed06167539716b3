"""Start a vLLM per model of ``tiny_towers``, and ask it with and without a store of features.

    python tests/engines/feed_others.py REQUESTS.json ANSWERS.json

``REQUESTS.json`` has per model ``model``, ``store`` and ``images``, paths, and ``mark``, the text
that stands for an image. Engines run in this process one after the other, and nothing of them is
changed but that calls which encode images are counted.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors.torch import load_file, save_file

QUESTIONS = {"one": ((0,), "What is it?"), "two": ((1, 2), "Compare.")}
"""By name: the numbers of the images, and the text after them."""


def ask(images: list[Image.Image], mark: str, uuids: list[str] | None) -> dict[str, dict[str, Any]]:
    """The questions with their images and, if given, with the keys of their features."""
    prompts: dict[str, dict[str, Any]] = {}
    for name, (numbers, text) in QUESTIONS.items():
        prompts[name] = {"prompt": mark * len(numbers) + text}
        prompts[name]["multi_modal_data"] = {"image": [images[n] for n in numbers]}
        if uuids is not None:
            prompts[name]["multi_modal_uuids"] = {"image": [uuids[n] for n in numbers]}
    return prompts


def run(request: dict[str, Any]) -> dict[str, Any]:
    """Answers of one model: with its own tower, and with the features of the store."""
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from vitgraph.integrations.vllm import content_key

    paths = [Path(path) for path in request["images"]]
    images = [Image.open(path).convert("RGB") for path in paths]
    keys = [content_key(path.read_bytes()) for path in paths]
    sampling = SamplingParams(
        temperature=0.0, max_tokens=12, logprobs=0, ignore_eos=True, detokenize=False
    )
    transfer = {
        "ec_connector": "ECExampleConnector",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": {"shared_storage_path": request["store"]},
    }
    try:
        engine = LLM(
            request["model"],
            dtype="float32",
            max_model_len=4096,
            max_num_seqs=8,
            enforce_eager=True,
            gpu_memory_utilization=0.2,
            enable_prefix_caching=False,
            limit_mm_per_prompt={"image": 4},
            ec_transfer_config=transfer,
        )
        calls: list[int] = []
        engine.apply_model(lambda model: count(model, calls))
        found = {}
        blank = [write_blank(Path(request["store"]), key) for key in keys]
        for name, uuids in (("own", None), ("store", keys), ("blank", blank)):
            before, prompts = len(calls), ask(images, request["mark"], uuids)
            outputs = engine.generate([*prompts.values()], sampling, use_tqdm=False)
            answers = {
                question: [list(one.outputs[0].token_ids), one.outputs[0].cumulative_logprob]
                for question, one in zip(prompts, outputs, strict=True)
            }
            found[name] = {"answers": answers, "calls": len(calls) - before}
        del engine
    except (ValueError, RuntimeError) as error:
        traceback.print_exc()
        return {"error": str(error)}
    finally:
        cleanup_dist_env_and_memory()
    return found


def write_blank(store: Path, key: str) -> str:
    """Add the features of an item with zeros in the place of all numbers, and return their key."""
    file = "encoder_cache.safetensors"
    (store / f"{key}-blank").mkdir()
    tokens = load_file(store / key / file)
    save_file({name: 0 * rows for name, rows in tokens.items()}, store / f"{key}-blank" / file)
    return f"{key}-blank"


def count(model: Any, calls: list[int]) -> None:
    """Note in ``calls`` each call of a model's method that encodes images."""
    encode = model.embed_multimodal

    def counted(**batch: Any) -> Any:
        calls.append(1)
        return encode(**batch)

    model.embed_multimodal = counted


def main() -> None:
    """Ask every model, and write the answers by the models' names."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    answers = {}
    for name, request in json.loads(Path(sys.argv[1]).read_text()).items():
        print(f"### {name}", flush=True)
        answers[name] = run(request)
        Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
