"""Encoders are ordinary modules, and their outputs own their memory."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.prune as prune
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map

from encoders import Qwen3VLEncoder
from encoders.contract import EncoderOutput
from encoders.layers import is_plain, patch_product
from encoders.vision_encoder import VisionEncoder
from oracles import (
    BY_NAME,
    FEW_FAST,
    TOWERS,
    WHOLE,
    build_encoder,
    distances,
    draw_pixels,
    fields_of,
    grids_for,
    tiny,
)

PATCHED = (nn.Linear, nn.Conv2d, nn.Conv3d)


def fresh(name: str, dtype: torch.dtype = torch.float64) -> VisionEncoder:
    return build_encoder(BY_NAME[name], BY_NAME[name].tiny, dtype)


def run(encoder: VisionEncoder, name: str) -> EncoderOutput:
    grids = grids_for(name)
    return encoder(draw_pixels(encoder, grids), grids)


def worst(ours: EncoderOutput, theirs: EncoderOutput) -> float:
    with torch.no_grad():
        return max(distances(ours, theirs).values())


def replace_layers(encoder: nn.Module, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """Replace every Linear and convolution by ``wrap(layer)``."""
    for parent in list(encoder.modules()):
        for key, layer in list(parent.named_children()):
            if type(layer) in PATCHED:
                setattr(parent, key, wrap(layer))


# --- every layer is called or read as it is ----------------------------------------------------


class Lora(nn.Module):
    """A layer as peft wraps it: ``weight`` is the base layer's; a low-rank part is added."""

    def __init__(self, base: Any, up: float) -> None:
        super().__init__()
        self.base = base
        out, columns = base.weight.shape[0], base.weight[0].numel()
        self.down = nn.Parameter(torch.full((1, columns), 0.5 / columns, dtype=base.weight.dtype))
        self.up = nn.Parameter(torch.full((out, 1), up, dtype=base.weight.dtype))

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self.base.weight
        return weight

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.base, nn.Linear):
            return self.base(x) + F.linear(F.linear(x, self.down), self.up)
        convolve = F.conv2d if isinstance(self.base, nn.Conv2d) else F.conv3d
        down = self.down.view(1, *self.base.weight.shape[1:])
        inner = convolve(x, down, None, self.base.stride, self.base.padding)
        return self.base(x) + inner * self.up.view(-1, *[1] * (x.ndim - 2))


@pytest.mark.parametrize("name", TOWERS)
def test_lora_around_every_layer_is_the_merged_weight_and_gets_gradients(name: str) -> None:
    plain, wrapped, merged = run(fresh(name), name), fresh(name), fresh(name)
    replace_layers(wrapped, lambda layer: Lora(layer, 0.3))
    for layer in merged.modules():
        if type(layer) in PATCHED:
            layer.weight.add_(0.3 * 0.5 / layer.weight[0].numel())
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
            layer.register_forward_hook(lambda module, args, out: 1.1 * out)
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


class Halved(Tensor):
    """A weight that is stored halved and doubled when read, as a quantised weight is scaled."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        calls = {F.linear, F.conv2d, F.conv3d, torch.conv2d, torch.conv3d}

        def read(x: Any) -> Any:
            plain = x.as_subclass(Tensor) if isinstance(x, Halved) else x
            return 2 * plain if isinstance(x, Halved) and function in calls else plain

        return function(*tree_map(read, args), **tree_map(read, kwargs or {}))


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
@pytest.mark.parametrize("name", FEW_FAST)
def test_a_wrapped_tower_compiles_into_one_graph(name: str) -> None:
    torch.compiler.reset()
    encoder, grids = fresh(name), grids_for(name)
    replace_layers(encoder, lambda layer: Lora(layer, 0.3))
    metadata = encoder.prepare_encoder_metadata(grids)
    compiled = torch.compile(encoder.forward, fullgraph=True, backend="aot_eager")
    output = compiled(draw_pixels(encoder, grids), encoder_metadata=metadata)
    assert worst(output, run(encoder, name)) <= 1e-12


@pytest.mark.parametrize("name", FEW_FAST)
def test_a_plain_tower_embeds_patches_without_a_convolution(name: str) -> None:
    torch.compiler.reset()
    encoder, grids, code = tiny(name), grids_for(name), []

    def keep(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        code.append(graph.code)
        return graph.forward

    metadata = encoder.prepare_encoder_metadata(grids)
    compiled = torch.compile(encoder.forward, fullgraph=True, backend=keep)
    compiled(draw_pixels(encoder, grids), encoder_metadata=metadata)
    assert code[0].count("torch.conv") == 0


# --- layers taken as their products --------------------------------------------------------------


def drawn_rows(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("name", FEW_FAST)
def test_a_plain_tower_is_exported_without_a_patch_convolution(name: str) -> None:
    encoder = fresh(name, torch.float32)
    grids = grids_for(name)
    pixels, metadata = draw_pixels(encoder, grids), encoder.prepare_encoder_metadata(grids)
    exported = torch.export.export(encoder, (pixels,), {"encoder_metadata": metadata})
    called = [node for node in exported.graph.nodes if node.op == "call_function"]
    convolutions = [node for node in called if "conv" in str(node.target)]
    assert len(convolutions) == 0
    ours = exported.module()(pixels, encoder_metadata=metadata)
    assert worst(ours, encoder(pixels, encoder_metadata=metadata)) == 0.0


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
    assert torch.equal(encoder._embed(pixels, metadata), expected)


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


# --- transforms of functions -------------------------------------------------------------------


def tokens_of(name: str) -> tuple[Callable[[Tensor], Tensor], list[Tensor]]:
    """Return a float64 tower as a function of pixels alone, and three random inputs."""
    encoder, grids = fresh(name), [[1, 4, 4]] if BY_NAME[name].tiled else [[1, 4, 6]]
    metadata = encoder.prepare_encoder_metadata(grids)

    def tokens(pixels: Tensor) -> Tensor:
        output: EncoderOutput = encoder(pixels, encoder_metadata=metadata)
        return torch.cat([field.flatten() for field in fields_of(output).values()])

    return tokens, [draw_pixels(encoder, grids, seed, torch.float64) for seed in range(3)]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # in torch's own jvp
@pytest.mark.parametrize("name", TOWERS)
def test_forward_mode_derivatives_are_those_of_finite_differences(name: str) -> None:
    tokens, (pixels, direction, _) = tokens_of(name)
    step = 1e-5
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused kernel has no forward-mode derivative
        _, slope = torch.func.jvp(tokens, (pixels,), (direction,))
    ahead, behind = tokens(pixels + step * direction), tokens(pixels - step * direction)
    difference = (ahead - behind) / (2 * step)
    assert (slope - difference).norm() <= 1e-7 * difference.norm()


@pytest.mark.parametrize("name", TOWERS)
def test_vmap_over_pixels_is_a_loop_of_calls(name: str) -> None:
    tokens, every = tokens_of(name)
    with sdpa_kernel(SDPBackend.MATH):  # torch's fused kernel warns that it has no batching rule
        mapped = torch.func.vmap(tokens)(torch.stack(every))
    looped = torch.stack([tokens(pixels) for pixels in every])
    assert (mapped - looped).norm() <= 1e-13 * looped.norm()


# --- memory of their own -----------------------------------------------------------------------


def saved_bytes(item: EncoderOutput) -> int:
    buffer = io.BytesIO()
    torch.save(tuple(item), buffer)
    return buffer.tell()


@pytest.mark.parametrize("name", WHOLE)
def test_every_item_encoded_has_memory_of_its_own(name: str) -> None:
    """A saved item once wrote the memory of all twelve items to the disk."""
    encoder, images = tiny(name), [torch.zeros(3, 56, 56, dtype=torch.uint8)] * 12
    items = encoder.encode(images)
    alone = encoder.encode(images[:1])
    assert saved_bytes(items[5]) < 1.1 * saved_bytes(alone[0])
    for item in items:
        for field in fields_of(item).values():
            assert field.untyped_storage().nbytes() == field.nbytes


@pytest.mark.parametrize("name", WHOLE)
def test_items_of_their_own_still_have_gradients(name: str) -> None:
    encoder = build_encoder(BY_NAME[name], BY_NAME[name].tiny).requires_grad_(True)
    first, second = encoder.encode([torch.zeros(3, 56, 56, dtype=torch.uint8)] * 2)
    weight = next(p for key, p in encoder.named_parameters() if "qkv.weight" in key)
    for item in (first, second):
        [gradient] = torch.autograd.grad(item.pooler_output.sum(), weight, retain_graph=True)
        assert gradient.abs().max() > 0


def test_a_clone_leaves_out_what_was_left_out() -> None:
    rows = torch.arange(6.0).view(3, 2)
    whole = EncoderOutput(rows[:1], rows[1:], (rows[:2],))
    copied = whole.clone()
    assert [x.tolist() for x in fields_of(copied).values()] == [
        x.tolist() for x in fields_of(whole).values()
    ]
    assert EncoderOutput(None, rows, None).clone()[::2] == (None, None)
    assert EncoderOutput(None, None, ()).clone() == (None, None, ())
