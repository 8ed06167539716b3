"""Towers of vLLM that can be built alone, which are the only upstream implementations of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from encoders import DotsOCRConfig, DotsOCREncoder

pytest.importorskip("vllm")
pytestmark = pytest.mark.engines

SIZES = {
    "embed_dim": 96,
    "hidden_size": 48,
    "intermediate_size": 132,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
}
SIDES = [*((2, 2 * n) for n in range(1, 9)), *((2 * n, 6) for n in range(1, 9)), (26, 18), (4, 98)]
GRIDS = [*([1, h, w] for h, w in SIDES), [1, 60, 4], [2, 4, 6]]


@pytest.fixture
def in_vllm() -> Iterator[None]:
    """The settings and the group of one process in which vLLM's modules can be built."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from vllm.utils.network_utils import get_open_port

    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"tcp://127.0.0.1:{get_open_port()}", 0, "gloo")
        initialize_model_parallel(1, 1)
        yield
        cleanup_dist_env_and_memory()


def drawn(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights that keep the scale of what they take; those of norms are near one."""
    dice = torch.Generator().manual_seed(0)
    values = {}
    for name, tensor in state.items():
        noise = torch.randn(tensor.shape, generator=dice)
        norm = tensor.ndim == 1 and name.endswith("weight")
        values[name] = 1 + 0.2 * noise if norm else noise * tensor[0].numel() ** -0.5
    return values


def vllm_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors of dots.ocr under the names in vLLM, which joins gate and up."""
    names = {"patch_embed.proj": "patch_embed.patchifier.proj", "norm": "post_trunk_norm"}
    names["norm_pre"] = "patch_embed.patchifier.norm"
    found = {}
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        if module.endswith(".fc1"):
            tensor = torch.cat([tensor, state[name.replace("fc1", "fc3")]])
        if not module.endswith(".fc3"):
            found[f"{names.get(module, module).replace('.fc1', '.fc13')}.{kind}"] = tensor
    return found


@torch.no_grad()
def test_dots_ocr_computes_what_vllms_tower_does(in_vllm: None) -> None:
    from vllm.model_executor.models.dots_ocr import DotsVisionTransformer
    from vllm.transformers_utils.configs.dotsocr import DotsVisionConfig

    encoder = DotsOCREncoder(DotsOCRConfig.from_hf({"vision_config": SIZES})).eval()
    encoder.load_state_dict(drawn(encoder.state_dict()))
    theirs: Any = DotsVisionTransformer(DotsVisionConfig(**SIZES)).eval()
    theirs.load_state_dict(vllm_names(encoder.state_dict()), strict=True)
    for module in theirs.modules():
        if "quant_method" in vars(module):
            module.cpu_linear = F.linear  # which vLLM sets as it loads weights
    states: list[Tensor] = []
    theirs.blocks[-1].register_forward_hook(lambda *args: states.append(args[2]))
    for grids in [*([grid] for grid in GRIDS), GRIDS]:
        pixels = torch.randn(sum(t * h * w for t, h, w in grids), 588)
        tokens, ours = theirs(pixels, grids), encoder(pixels, grids)
        for mine, wanted in ((ours.last_hidden_state, states.pop()), (ours.pooler_output, tokens)):
            assert (mine - wanted).norm() / wanted.norm() <= 1e-5, grids
