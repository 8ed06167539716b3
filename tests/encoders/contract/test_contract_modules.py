"""Encoders are ordinary modules: every layer is called, or read as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.oracles import TOWERS, draw_pixels, fields_of, grids_for
from tests.support.accelerated.wrapped_layers import (
    PATCHED,
    Halved,
    Lora,
    fresh,
    replace_layers,
    run,
    worst,
)


@pytest.mark.parametrize("name", TOWERS)
def test_lora_around_every_layer_is_the_merged_weight_and_gets_gradients(name: str) -> None:
    plain, wrapped, merged = run(fresh(name), name), fresh(name), fresh(name)
    replace_layers(wrapped, lambda layer: Lora(layer, 0.3))
    for layer in merged.modules():
        if type(layer) in PATCHED:
            adapter = Lora(layer, 0.3)
            layer.weight.add_((adapter.up @ adapter.down).view_as(layer.weight))
    output = run(wrapped, name)
    assert worst(output, run(merged, name)) <= 1e-12
    assert worst(output, plain) > 1e-3
    sum(x.pow(2).sum() for x in fields_of(output).values()).backward()
    for key, part in wrapped.named_modules():
        if isinstance(part, Lora):
            for weight in (part.up, part.down):
                assert weight.grad is not None, key
                assert weight.grad.abs().max() > 0, key


@pytest.mark.parametrize("name", TOWERS)
def test_a_wrapper_that_adds_nothing_changes_nothing(name: str) -> None:
    encoder = fresh(name)
    replace_layers(encoder, lambda layer: Lora(layer, 0.0))
    assert worst(run(encoder, name), run(fresh(name), name)) <= 1e-12


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # of a layer fed by pixels
@pytest.mark.parametrize("name", TOWERS)
def test_hooks_fire_on_every_leaf(name: str) -> None:
    """Hooks run before and after each layer and in the backward pass."""
    encoder = fresh(name).requires_grad_(True)
    leaves = {key: leaf for key, leaf in encoder.named_modules() if not list(leaf.children())}
    fired: dict[str, set[str]] = {"before": set(), "after": set(), "backward": set()}
    for key, leaf in leaves.items():
        leaf.register_forward_pre_hook(lambda *_, key=key: fired["before"].add(key))
        leaf.register_forward_hook(lambda *_, key=key: fired["after"].add(key))
    expected = run(fresh(name), name)
    output = run(encoder, name)
    assert fired["before"] == fired["after"] == set(leaves)
    assert worst(output, expected) <= 1e-12
    encoder = fresh(name).requires_grad_(True)
    for key in leaves:
        encoder.get_submodule(key).register_full_backward_hook(
            lambda *_, key=key: fired["backward"].add(key)
        )
    sum(x.pow(2).sum() for x in fields_of(run(encoder, name)).values()).backward()
    assert fired["backward"] == set(leaves)


@pytest.mark.parametrize("name", TOWERS)
def test_a_hook_may_change_a_layers_result(name: str) -> None:
    for kind in PATCHED:
        encoder = fresh(name)
        layers = [layer for layer in encoder.modules() if type(layer) is kind]
        for layer in layers:
            # A factor or a summand could be lost: a norm behind the layer takes them out.
            layer.register_forward_hook(lambda module, args, out: out + 0.3 * out.flip(1))
        changed = worst(run(encoder, name), run(fresh(name), name)) > 1e-3
        assert changed == bool(layers)


@pytest.mark.parametrize("name", TOWERS)
def test_a_forward_set_on_a_layer_is_called(name: str) -> None:
    """accelerate uses such hooks to bring in weights that lie elsewhere."""
    encoder, called = fresh(name), set()
    leaves = {key: leaf for key, leaf in encoder.named_modules() if not list(leaf.children())}

    def watched(key: str, old: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def forward(*args: Tensor) -> Tensor:
            called.add(key)
            return old(*args)

        return forward

    for key, leaf in leaves.items():
        leaf.forward = watched(key, leaf.forward)
    assert worst(run(encoder, name), run(fresh(name), name)) <= 1e-12
    assert called == set(leaves)


@pytest.mark.parametrize("name", TOWERS)
def test_a_quantised_weight_is_read_by_its_layer(name: str) -> None:
    encoder = fresh(name)
    for layer in encoder.modules():
        if type(layer) in PATCHED:
            half = (layer.weight / 2).as_subclass(Halved)
            del layer.weight
            layer.weight = half
    assert worst(run(encoder, name), run(fresh(name), name)) <= 1e-12


@pytest.mark.slow
def test_a_wrapped_tower_compiles_into_one_graph() -> None:
    torch.compiler.reset()
    name = "qwen2_5_vl"
    encoder, grids = fresh(name), grids_for(name)
    replace_layers(encoder, lambda layer: Lora(layer, 0.3))
    metadata = encoder.prepare_encoder_metadata(grids)
    compiled = torch.compile(encoder.forward, fullgraph=True, backend="aot_eager")
    output = compiled(draw_pixels(encoder, grids), encoder_metadata=metadata)
    assert worst(output, run(encoder, name)) <= 1e-12
