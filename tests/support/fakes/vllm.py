"""The few names of vLLM that its plug-in imports, for tests without vLLM."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from torch import nn


class LinearBase(nn.Linear):
    """A stand-in for vLLM's linear layer, which knows how it is quantised."""

    def __init__(self, quant_method: object) -> None:
        super().__init__(4, 4)
        self.quant_method = quant_method


class UnquantizedLinearMethod:
    """A stand-in for vLLM's method of layers that are not quantised."""


class StageMissingLayer(nn.Module):
    """A stand-in for the module that vLLM puts in place of a tower that is not needed."""


def fake_vllm(version: str) -> dict[str, ModuleType]:
    """Return stand-ins for the modules of vLLM that the plug-in imports, by module name."""
    ranks = SimpleNamespace(rank_in_group=0, barrier=lambda: None)
    contents: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        "vllm.distributed": {"get_tp_group": lambda: ranks},
        "vllm.model_executor": {},
        "vllm.model_executor.layers": {},
        "vllm.model_executor.layers.linear": {
            "LinearBase": LinearBase,
            "UnquantizedLinearMethod": UnquantizedLinearMethod,
        },
        "vllm.model_executor.models": {},
        "vllm.model_executor.models.utils": {"StageMissingLayer": StageMissingLayer},
    }
    modules = {name: ModuleType(name) for name in contents}
    for name, module in modules.items():
        module.__dict__.update(contents[name])
    return modules
