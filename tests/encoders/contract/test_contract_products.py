"""Layers without hooks and wrappers are taken as products, with the results of a call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.utils.prune as prune
from torch import Tensor, nn

from encoders import Qwen3VLEncoder
from encoders.layers.products import patch_product
from encoders.layers.torch_internals import is_plain
from tests.oracles import draw_pixels, grids_for, tiny
from tests.support.accelerated.wrapped_layers import Halved, Lora


def drawn_rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def test_the_position_table_is_called_with_the_bits_of_indexing() -> None:
    encoder, grids = tiny("qwen3_vl", torch.bfloat16), grids_for("qwen3_vl")
    assert isinstance(encoder, Qwen3VLEncoder)
    metadata = encoder.prepare_encoder_metadata(grids)
    pixels = draw_pixels(encoder, grids).bfloat16()
    taps, weights = metadata["pos_embed_index"], metadata["pos_embed_weight"]
    table = encoder.pos_embed.weight
    positions = table[taps[:, 0]] * weights[:, :1]
    for tap in (1, 2, 3):
        positions = torch.addcmul(positions, table[taps[:, tap]], weights[:, tap, None])
    expected = encoder.patch_embed(pixels) + positions.bfloat16()
    assert torch.equal(encoder.embed_patches(pixels, metadata), expected)


def test_a_layer_is_plain_until_something_is_added_to_it() -> None:
    linear = nn.Linear(4, 4)
    assert is_plain()
    assert is_plain(linear, nn.Conv2d(3, 4, 2), nn.Conv3d(3, 4, 2))
    added: list[Callable[[nn.Linear], object]] = [
        lambda layer: layer.register_forward_hook(lambda *_: None),
        lambda layer: layer.register_forward_pre_hook(lambda *_: None),
        lambda layer: layer.register_full_backward_hook(lambda *_: None),
        lambda layer: layer.register_full_backward_pre_hook(lambda *_: None),
        lambda layer: setattr(layer, "forward", layer.forward),
        lambda layer: nn.utils.parametrize.register_parametrization(layer, "weight", nn.Tanh()),
        lambda layer: prune.identity(layer, "weight"),
        lambda layer: layer._parameters.update(weight=layer.weight.as_subclass(Halved)),
    ]
    for add in added:
        layer = nn.Linear(4, 4)
        add(layer)
        assert not is_plain(layer)
        assert not is_plain(linear, layer)
    assert not is_plain(type("Other", (nn.Linear,), {})(4, 4))
    assert not is_plain(nn.LayerNorm(4))


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_patch_product_is_its_convolution_whoever_makes_it(rows: int) -> None:
    torch.manual_seed(0)
    conv = nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4)).double().requires_grad_(False)
    for shape in ((rows, 96), (rows, 3, 96)):
        x = drawn_rows(*shape)
        product = patch_product(conv, x, (3, 2, 4, 4))
        called = patch_product(Lora(conv, 0.0), x, (3, 2, 4, 4))
        assert product.shape == called.shape == (*shape[:-1], 8)
        torch.testing.assert_close(product, called)
