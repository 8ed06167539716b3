"""Seconds of vLLM's multi-modal processor with and without our plug-in; no GPU is needed.

    python -m benchmarks.engines.processor --json benchmarks/results/engine_processor_cpu.json

Two processes run with the plug-in and two without, to show how much processes with the same code
differ; a fifth one sends images raw. All get the same images in turn, in a new random order per
request. The processor has the settings of the models' repos. Every workload is measured twice: with
glibc set to keep freed memory, and with its default.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.engines.measure import ALLOCATOR, Apart, describe, measure, recorder
from benchmarks.engines.models import MODELS
from vitgraph.integrations.vllm_plugin import raw_switch

KINDS = ("stock", "ours", "stock again", "ours again", "raw")
CELLS = ("1x448", "8x448", "1x1920x1080")
ALLOCATORS: dict[str, dict[str, str]] = {"keeps memory": ALLOCATOR, "default": {}}
LAYERS = 2
"""The number of language model layers in the config; the language model itself is never built."""


class Processor:
    """vLLM's multi-modal processor for a model, with the methods of ``measure.Engine``."""

    def __init__(self, folder: Path, kind: str, **_: Any) -> None:
        os.environ |= {
            "VITGRAPH_VLLM": "0" if kind.startswith("stock") else "1",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        from vllm.config import ModelConfig
        from vllm.multimodal import MULTIMODAL_REGISTRY
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        config = ModelConfig(
            str(folder),
            dtype="bfloat16",
            max_model_len=16384,
            seed=0,
            limit_mm_per_prompt={"image": 8, "video": 0},
            mm_processor_cache_gb=0,
        )
        if kind == "raw":  # as when vLLM completes the config of an engine
            setattr(config.hf_config, raw_switch.MARK, raw_switch.Mark(raw_switch.FORM))
        self.processor = MULTIMODAL_REGISTRY.create_processor(config)
        self.seconds = 0.0

    def answer(self, requests: Sequence[dict[str, Any]], tokens: int) -> list[Any]:
        """Run the processor on the requests; return an output without tokens for each of them."""
        from vllm.multimodal.processing import TimingContext
        from vllm.multimodal.processing.inputs import ProcessorInputs
        from vllm.utils.torch_utils import set_default_torch_num_threads

        info = self.processor.info
        for request in requests:
            prompt = info.get_tokenizer().encode(request["prompt"])
            timing = TimingContext()
            with set_default_torch_num_threads():
                items = info.parse_mm_data(request["multi_modal_data"])
                self.processor.apply(ProcessorInputs(prompt, items), timing)
            self.seconds = timing.total_secs
        none = SimpleNamespace(first_token_latency=0.0)
        return [SimpleNamespace(metrics=none) for _ in requests]

    def stages(self) -> dict[str, float]:
        """Return the seconds of the processor in the last request, as vLLM reports them."""
        return {"encoder": 0.0, "preprocess": self.seconds}


def main() -> None:
    """Measure the processor of the chosen models, one model after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--cells", default=",".join(CELLS))
    parser.add_argument("--runs", type=int, default=80)
    options = parser.parse_args()
    record = recorder(options.json, lambda: {**describe(), "runs": options.runs})
    for model in options.models.split(","):
        for name, variables in ALLOCATORS.items():

            def record_part(row: dict[str, Any], name: str = name) -> None:
                record({**row, "part": f"allocator: {name}"})

            measure(
                model,
                KINDS,
                options.cells.split(","),
                LAYERS,
                record_part,
                compiled=False,
                runs=options.runs,
                start=partial(Apart, start=Processor, allocator=variables),
            )


if __name__ == "__main__":
    main()
