"""Layers that are more than their weights take effect in accelerated encoders, and are counted."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.prune as prune
from torch import Tensor, nn

from encoders.base.vision_encoder import VisionEncoder
from graphwrap import GraphedEncoder
from tests.oracles import BY_NAME, build_encoder, distances, draw_pixels, slow
from tests.support.accelerated.cases import (
    CLOSE,
    FEW_ROWS,
    OURS,
    assert_close,
    assert_fused,
    fresh,
    grids_for,
    needs_interpreter,
    needs_triton,
    relative,
    run,
)
from tests.support.accelerated.wrapped_layers import Lora

pytestmark = [
    needs_triton,
    needs_interpreter,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
]
fused = pytest.mark.usefixtures("fused")


def both(encoder: VisionEncoder, fast: VisionEncoder, name: str, layers_called: int) -> float:
    """Hold the accelerated output against the reference's; the distance to the untouched tower."""
    truth = run(encoder, name)
    assert_close(run(fast, name), truth)
    assert_fused(fast, layers_called)
    return max(distances(truth, run(fresh(name), name)).values())


def linears(module: nn.Module) -> dict[str, nn.Linear]:
    return {key: layer for key, layer in module.named_modules() if type(layer) is nn.Linear}


def put(parent: nn.Module, key: str, layer: nn.Module) -> None:
    """Set a submodule by its dotted name."""
    *path, last = key.split(".")
    setattr(parent.get_submodule(".".join(path)), last, layer)


@fused
@pytest.mark.parametrize("name", OURS)
def test_lora_around_each_layer_takes_effect(name: str) -> None:
    """One layer at a time, then all of them."""
    encoder = fresh(name)
    fast, block = encoder.accelerated(), encoder.blocks[1]
    for key, layer in linears(block).items():
        put(block, key, Lora(layer, 0.3))
        assert both(encoder, fast, name, 1) > 1e-3, key
        put(block, key, layer)
    for key, layer in linears(block).items():
        put(block, key, Lora(layer, 0.3))
    both(encoder, fast, name, len(linears(fresh(name).blocks[1])))


@fused
@pytest.mark.parametrize("name", OURS)
def test_hooks_on_each_module_of_a_block_fire(name: str) -> None:
    """On the block, its attention, its MLP, and every layer and norm."""
    encoder = fresh(name)
    fast, block = encoder.accelerated(), encoder.blocks[1]
    for key, module in block.named_modules():
        fired = []
        hooks = [
            module.register_forward_pre_hook(lambda *_, fired=fired: fired.append("before")),
            module.register_forward_hook(lambda module, args, out: 1.1 * out + 0.1),
        ]
        assert both(encoder, fast, name, 1) > 1e-4, key
        assert fired == ["before", "before"], key
        for hook in hooks:
            hook.remove()
    both(encoder, fast, name, 0)


@fused
@pytest.mark.parametrize("together", [False, True], ids=["each alone", "all together"])
@pytest.mark.parametrize("name", OURS)
def test_what_a_hook_keeps_is_not_written_over(name: str, together: bool) -> None:
    """Inputs and outputs of each module in a block: hooks elsewhere change which steps are fused.

    Hooks on the block, its attention or its MLP would have the block called as a module.
    """
    encoder = fresh(name)
    fast, block = encoder.accelerated(), encoder.blocks[1]
    whole = (block, block.attn, block.mlp)
    hooked = [module for module in block.modules() if module not in whole]
    for modules in [hooked] if together else [[module] for module in hooked]:
        kept: list[tuple[Tensor, Tensor]] = []

        def keep(module: nn.Module, args: Any, out: Any, kept: list[Any] = kept) -> None:
            kept.extend((x, x.clone()) for x in (*args, out) if isinstance(x, Tensor))

        handles = [module.register_forward_hook(keep) for module in modules]
        run(fast, name)
        for handle in handles:
            handle.remove()
        for tensor, at_the_time in kept:
            assert torch.equal(tensor, at_the_time), modules


@pytest.mark.usefixtures("fused_in_interpreter")
@pytest.mark.parametrize("name", ["qwen2_5_vl", slow("qwen3_vl")])
def test_a_hook_may_return_columns_in_memory_order(name: str) -> None:
    """The same values in other strides: the kernels read rows."""
    encoder = fresh(name)
    for layer in linears(encoder.blocks[1]).values():
        layer.register_forward_hook(lambda module, args, out: out.mT.contiguous().mT)
    truth = run(encoder, name, grids=FEW_ROWS)
    assert_close(run(encoder.accelerated(), name, grids=FEW_ROWS), truth)


@fused
@pytest.mark.parametrize("name", OURS)
def test_a_forward_set_on_a_module_is_called(name: str) -> None:
    """As accelerate does to bring weights in from elsewhere."""
    encoder = fresh(name)
    fast, block = encoder.accelerated(), encoder.blocks[1]
    parts = block.parts()
    for module in (block, block.attn, block.mlp, parts.proj, parts.norm2):
        plain = module.forward
        module.forward = lambda *args, plain=plain: 1.1 * plain(*args) + 0.1
        assert both(encoder, fast, name, 1) > 1e-3
        del module.forward


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


@fused
@pytest.mark.parametrize("name", OURS)
def test_parametrised_and_pruned_layers_are_called(name: str) -> None:
    changes: list[Callable[[nn.Module], object]] = [
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", Doubled()),
        lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
        lambda layer: nn.utils.parametrizations.weight_norm(layer),
    ]
    for change in changes:
        encoder = fresh(name)
        fast = encoder.accelerated()
        run(fast, name)
        change(encoder.blocks[0].parts().qkv)
        change(list(linears(encoder.blocks[2].mlp).values())[-1])
        both(encoder, fast, name, 2)


@fused
@pytest.mark.parametrize("name", OURS)
def test_dynamically_quantised_layers_are_called(name: str) -> None:
    from torch.ao.quantization import quantize_dynamic

    encoder = fresh(name)
    count = len(linears(encoder.blocks))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch will move quantisation to another package
        quantised = quantize_dynamic(encoder, {nn.Linear}, dtype=torch.qint8)
        fast = quantised.accelerated()
        ours, truth = run(fast, name), run(quantised, name)
    # Activations are rounded to 8 bits: what differs in the last bit may round to the next step.
    assert_close(ours, truth, 2e-2)
    assert max(distances(truth, run(encoder, name)).values()) > 1e-4
    assert_fused(fast, count)


@fused
@pytest.mark.parametrize("name", OURS)
def test_replaced_modules_are_called(name: str) -> None:
    class Scaled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, *args: Any) -> Tensor:
            return 1.1 * self.inner(*args) + 0.1

    encoder = fresh(name)
    fast, block = encoder.accelerated(), encoder.blocks[1]
    norms = {id(norm) for norm in (block.parts().norm1, block.parts().norm2)}
    names = [name for name, child in block.named_children() if id(child) in norms]
    for part in ("attn", "mlp", *names):
        plain = getattr(block, part)
        setattr(block, part, Scaled(plain))
        assert both(encoder, fast, name, 1) > 1e-4, part
        setattr(block, part, plain)
    encoder.blocks[1] = Scaled(block)
    assert both(encoder, fast, name, 1) > 1e-3
    for number in (0, 2):
        encoder.blocks[number] = Scaled(encoder.blocks[number])
    assert_close(run(fast, name), run(encoder, name))
    assert "or was replaced" in fast.kernel_choices()["reference_because"]


@fused
@pytest.mark.parametrize("name", OURS)
def test_a_layer_may_lose_its_bias(name: str) -> None:
    encoder = fresh(name)
    fast = encoder.accelerated()
    for key, layer in linears(encoder.blocks[1]).items():
        run(fast, name)
        kept, layer.bias = layer.bias, None
        assert_close(run(fast, name), run(encoder, name))
        layer.bias = kept
        assert layer is encoder.blocks[1].get_submodule(key)
    assert_close(run(fast, name), run(encoder, name))


@fused
@pytest.mark.parametrize("width", [92, 96, 64, 3])
def test_any_inner_width_of_a_gated_mlp_is_right(width: int) -> None:
    """Widths that are no multiple of 8 are padded; others are not."""
    family = BY_NAME["qwen2_5_vl"]
    encoder = build_encoder(family, {**family.tiny, "intermediate_size": width})
    fast = encoder.accelerated()
    assert_close(run(fast, family.name), run(encoder, family.name))
    assert_fused(fast)


@fused
def test_a_wrapped_position_table_is_called() -> None:
    encoder = fresh("qwen3_vl")
    encoder.pos_embed.register_forward_hook(lambda module, args, out: 1.1 * out)
    assert both(encoder, encoder.accelerated(), "qwen3_vl", 0) > 1e-3


@fused
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen2_5_vl"])
def test_edits_by_hooks_act_alike_in_every_form(name: str) -> None:
    encoder = fresh(name)
    fast, attn = encoder.accelerated(), encoder.blocks[1].attn
    width = attn.proj.in_features // attn.num_heads

    def ablate(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        rows = args[0].clone()
        rows[..., width : 2 * width] = 0
        return (rows,)

    def patch(module: nn.Module, args: Any, state: Tensor) -> Tensor:
        return state.flip(-1)

    graphed = GraphedEncoder(encoder, budgets=[64], backend="static")
    for register in (
        lambda: attn.proj.register_forward_pre_hook(ablate),
        lambda: encoder.blocks[0].register_forward_hook(patch),
    ):
        handle = register()
        assert both(encoder, fast, name, 1) > 1e-4
        truth = run(encoder, name)
        graphed.release()
        grids = grids_for(name)
        output = graphed(draw_pixels(encoder, grids), grids)
        assert relative(output.pooler_output, truth.pooler_output) <= CLOSE
        handle.remove()
