"""Build the vision half of vLLM's model classes, and encode one batch with vLLM's tower and ours.

    python tests/engines/halves.py JOBS.json ANSWERS.json

This is for models whose language model does not run on a CPU: a module without layers stands for
it. A job has the folder of a checkpoint and the names of the tower's tensors there, the model class
and where its module has the language model, a batch as ``embed_multimodal`` takes it, in a file,
and the options of our tower, or None for vLLM's. An answer is the name of a file with the features
of each image or clip.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from drive import inspect_here, set_sizes
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.functional import rms_norm
from vllm.model_executor.models.utils import WeightsMapper

from vitgraph.seeded import TEXT_WIDTH


class NoLayers(nn.Module):
    """Stands for a language model."""

    supports_pp = True

    def __init__(self, **_: object) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.logits_processor = SimpleNamespace(scale=1.0)
        self.config = SimpleNamespace(dtype=torch.float32)
        self.hf_to_vllm_mapper = WeightsMapper()

    @property
    def model(self) -> NoLayers:
        """The layers without the head of the language model."""
        return self

    def make_empty_intermediate_tensors(self, *_: object) -> None:
        """Return nothing, as there is no layer before which a pipeline could end."""

    def process_weights_after_loading(self) -> None:
        """Do nothing; Kimi-K3's class calls it."""

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return a row of zeros for each token, as wide as the small language models."""
        return torch.zeros(len(input_ids), TEXT_WIDTH)

    @property
    def embed_tokens(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """The same for Nemotron's class, which puts text between the frames of a clip."""
        return self.embed_input_ids

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Take weights, and fill nothing."""
        return {name for name, _ in weights}

    def forward(self, *, intermediate_tensors: None = None) -> None:
        """Return nothing; vLLM reads the names of the arguments."""


def encode(job: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The features of the batch of a job, by the number of the image or clip."""
    from vllm import ModelRegistry
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    if job["ours"] is not None:
        from vitgraph.integrations.vllm_plugin import register

        os.environ |= {"VITGRAPH_VLLM": "1", "VITGRAPH_VLLM_OPTIONS": json.dumps(job["ours"])}
        register()
    names = {"architectures": [job["architecture"]]}
    options = {"dtype": "float32", "enforce_eager": True, "trust_remote_code": True}
    options["enable_prefix_caching"] = False
    config = EngineArgs(model=job["model"], hf_overrides=names, **options).create_engine_config()
    with set_current_vllm_config(config):
        made, _ = ModelRegistry.resolve_model_cls([job["architecture"]], config.model_config)
        start_ranks()
        module, language = job["language"]
        setattr(import_module(module), language, NoLayers)
        set_sizes({f"{module}:{name}": sizes for name, sizes in job["sizes"].items()})
        torch.set_default_dtype(torch.float32)
        model = made(vllm_config=config).eval()
        known = load_file(Path(job["model"]) / "model.safetensors")
        model.load_weights((name, known[name]) for name in job["tensors"])
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
        if job["ours"] is not None:
            assert model.vision_tower_ours
        with torch.inference_mode():
            found = model.embed_multimodal(**nested(load_file(job["batch"])))
    return {str(number): rows.contiguous() for number, rows in enumerate(found)}


def nested(entries: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The inputs of a batch: those whose names end in numbers, such as "pixel_values.1.0", are
    lists of tensors, or of lists of them, and those whose names end in "list" lists of numbers."""
    found: dict[str, Any] = {}
    for name in sorted(entries):
        if name.endswith(".list"):
            found[name.removesuffix(".list")] = entries[name].tolist()
            continue
        holder: Any = found
        *outer, last = [int(part) if part.isdigit() else part for part in name.split(".")]
        for part in outer:
            if part not in (holder if isinstance(holder, dict) else range(len(holder))):
                holder.append([]) if isinstance(holder, list) else holder.update({part: []})
            holder = holder[part]
        holder.append(entries[name]) if isinstance(holder, list) else holder.update(
            {last: entries[name]}
        )
    return found


def norm_heads(
    q: torch.Tensor, k: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the heads of queries and keys, in place of a kernel of vLLM that needs Triton."""
    width = q.shape[-1:]
    return rms_norm(q, width, q_weight, eps), rms_norm(k, width, k_weight, eps)


def start_ranks() -> None:
    """Start vLLM's process groups for this process alone, once."""
    from vllm.distributed import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        place = "tcp://127.0.0.1:0"
        parallel_state.init_distributed_environment(1, 0, place, 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1, backend="gloo")


class Float32:
    """Stands for ``torch`` in a module whose class projects in bfloat16 whatever the dtype is."""

    bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def mend() -> None:
    """Replace what vLLM's classes do not do on a CPU, or in float32."""
    import_module("vllm.models.glm5next.common.multimodal").fused_q_kv_rmsnorm = norm_heads
    whole = import_module("vllm.models.deepseek_v4.common.vl_model")
    name = "DeepseekV4ForConditionalGeneration"
    setattr(import_module("vllm.models.deepseek_v4"), name, getattr(whole, name))
    # oneDNN takes no transposed rows, which the aligner of DeepSeek-V4 makes.
    import_module("vllm._custom_ops")._supports_onednn = False
    import_module("vllm.model_executor.models.nano_nemotron_vl").torch = Float32()


def main() -> None:
    """Run every job, and write the features and the names of their files."""
    inspect_here()
    mend()
    answers: dict[str, str] = {}
    for name, job in json.loads(Path(sys.argv[1]).read_text()).items():
        print(f"### {name}", flush=True)
        file = Path(sys.argv[2]).with_name(f"{name}.safetensors")
        save_file(encode(job), file)
        answers[name] = str(file)
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
