"""DINOv2 and DINOv3 agree with timm, their class token and registers with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from PIL import Image
from torch import Tensor
from transformers.initialization import no_init_weights

from encoders import Dinov2Config, Dinov2Encoder, Dinov3Config, Dinov3Encoder, VisionEncoder
from graphwrap import GraphedEncoder
from tests.oracles import BY_NAME, build_pair, distance, draw_pixels, draw_weights, tiny
from tests.oracles.keys import renamed
from tests.oracles.references.dino import dino_output, image_of, split_gates
from vitgraph import attention_maps

GRIDS = [[1, 8, 8], [2, 3, 5], [1, 1, 1], [1, 9, 2]]
NAMES = ["dinov2", "dinov2_registers", "dinov3"]
PREFIXED = [*NAMES, "c_radio"]
PHOTO = Image.effect_noise((640, 480), 64).convert("RGB")


@pytest.mark.parametrize("name", NAMES)
def test_class_token_and_registers_are_those_of_transformers(name: str) -> None:
    encoder, reference = build_pair(BY_NAME[name], BY_NAME[name].tiny)
    pixels = draw_pixels(encoder, GRIDS)
    ours, theirs = encoder(pixels, GRIDS), dino_output(reference, pixels, torch.tensor(GRIDS))
    assert ours.extras["prefix"].shape == (5, encoder.prefix_rows, 64)
    assert distance(ours.extras["prefix"], theirs.extras["prefix"]) <= 1e-5


def in_timm(encoder: Dinov2Encoder) -> Any:
    """timm's model with the weights of an encoder, of images of any size."""
    config = encoder.config
    kind = "reg4_dinov2" if config.registers else "dinov2"
    size = "giant" if config.gated else "base"
    with no_init_weights():
        model: Any = timm.create_model(
            f"vit_{size}_patch14_{kind}",
            img_size=config.image_size,
            embed_dim=config.hidden_size,
            depth=config.depth,
            num_heads=config.num_heads,
            mlp_ratio=config.intermediate_size / config.hidden_size * (2 if config.gated else 1),
            dynamic_img_size=True,
        )
    names = {"pos_embed.weight": "pos_embed", "register_tokens": "reg_token"}
    state = {
        names.get(name, name.replace(".ls1", ".ls1.gamma").replace(".ls2", ".ls2.gamma")): value
        for name, value in encoder.state_dict().items()
    }
    state["pos_embed"] = state["pos_embed"][None]
    model.load_state_dict(state, strict=True)
    return model.eval().requires_grad_(False)


def of_timm(registers: int, gated: bool) -> Dinov2Encoder:
    config = Dinov2Config(
        depth=3,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        prefix_rows=1 + registers,
        gated=gated,
        class_position=not registers,
        mask_token=False,
        image_size=112,
    )
    return draw_weights(Dinov2Encoder(config)).eval().requires_grad_(False)


@pytest.mark.parametrize(
    ("registers", "gated", "grid"),
    [(0, False, (8, 8)), (0, True, (8, 8)), (4, False, (8, 8)), (4, False, (5, 11))],
)
def test_features_are_those_of_timm(registers: int, gated: bool, grid: tuple[int, int]) -> None:
    """Where timm interpolates as transformers: at its own grid, and with registers at any."""
    encoder = of_timm(registers, gated)
    assert_features_of_timm(encoder, in_timm(encoder), grid)


def assert_features_of_timm(encoder: VisionEncoder, model: Any, grid: tuple[int, int]) -> None:
    grids = [[1, *grid]]
    pixels = draw_pixels(encoder, grids)
    image = image_of(pixels, *grid)
    features = model.forward_features(image)[0]
    output = encoder(pixels, grids)
    assert distance(output.extras["prefix"][0], features[: encoder.prefix_rows]) <= 1e-5
    assert distance(output.pooler_output, features[encoder.prefix_rows :]) <= 1e-5
    theirs = model.forward_intermediates(image, norm=False, intermediates_only=True)
    ours = encoder.forward_intermediates(pixels, grids, output_fmt="NCHW")
    for (mine,), layer in zip(ours, theirs, strict=True):
        assert distance(mine, layer) <= 1e-5


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "qkvb"])
@pytest.mark.parametrize("gated", [False, True], ids=["gelu", "gated"])
def test_features_of_dinov3_are_those_of_timm(gated: bool, bias: bool) -> None:
    config = Dinov3Config(3, 64, 256, 4, 5, gated, bias, mask_token=False)
    encoder = draw_weights(Dinov3Encoder(config)).eval().requires_grad_(False)
    grid, size = (5, 11), "small_plus" if gated else "small"
    sizes = {"embed_dim": 64, "depth": 3, "num_heads": 4}
    with no_init_weights():
        model: Any = timm.create_model(
            f"vit_{size}_patch16_dinov3{'_qkvb' if bias else ''}", **sizes, dynamic_img_size=True
        )
    rules = [
        ("register_tokens", "reg_token"),
        (r"\.ls([12])$", r".gamma_\1"),
        (r"\.qkv\.([qv])_bias$", r".\1_bias"),
        (r"gate_proj", "fc1_g"),
        (r"up_proj", "fc1_x"),
        (r"down_proj", "fc2"),
    ]
    model.load_state_dict(renamed(split_gates(encoder.state_dict()), rules), strict=True)
    assert_features_of_timm(encoder, model.eval().requires_grad_(False), grid)


@pytest.mark.parametrize("name", NAMES)
def test_the_class_pool_is_the_pooled_output_of_transformers(name: str) -> None:
    encoder, reference = build_pair(BY_NAME[name], BY_NAME[name].tiny)
    inputs = encoder.preprocess([PHOTO])
    (vector,) = encoder.embed([PHOTO], pool="cls")
    (_, h, w) = inputs.grid_thw[0].tolist()
    theirs = reference(image_of(inputs.pixel_values, h, w)).pooler_output
    assert distance(vector[None], theirs) <= 1e-5
    with pytest.raises(ValueError, match=r"pool='head'.* take pool='cls'"):
        encoder.embed([PHOTO], pool="head")


@pytest.mark.parametrize("name", PREFIXED)
def test_attention_of_the_class_token_is_that_of_each_image(name: str) -> None:
    encoder = tiny(name)
    side = encoder.config.patch_size
    small, wide = PHOTO.resize((5 * side, 7 * side)), PHOTO.resize((10 * side, 3 * side))
    together = attention_maps(encoder, [small, wide], queries="cls", max_pixels=1 << 20)
    assert [maps[0].shape for maps in together] == [(1, 7, 5), (1, 3, 10)]
    for image, (found,) in zip((small, wide), together, strict=True):
        ((alone,),) = attention_maps(encoder, [image], queries="cls", max_pixels=1 << 20)
        assert distance(found, alone) <= 1e-5
        assert 0 < float(found.sum()) < 1  # the rest is on the class token and registers


def test_attention_of_the_class_token_is_that_of_transformers() -> None:
    encoder, reference = build_pair(BY_NAME["dinov2_registers"], BY_NAME["dinov2_registers"].tiny)
    reference.set_attn_implementation("eager")
    inputs = encoder.preprocess([PHOTO], max_pixels=80_000)
    _, h, w = inputs.grid_thw[0].tolist()
    image = image_of(inputs.pixel_values, h, w)
    theirs = reference(image, output_attentions=True).attentions[-1][0, :, 0, 5:]
    ((ours,),) = attention_maps(encoder, [PHOTO], queries="cls", heads="all", max_pixels=80_000)
    assert distance(ours.flatten(1), theirs) <= 1e-5


@pytest.mark.parametrize("name", PREFIXED)
def test_graphs_with_room_for_more_images_give_the_same_class_tokens(name: str) -> None:
    encoder = tiny(name)
    pixels = draw_pixels(encoder, GRIDS)
    graphed = GraphedEncoder(encoder, backend="static", budgets=[256])
    ours, theirs = graphed(pixels, GRIDS), encoder(pixels, GRIDS)
    assert distance(ours.extras["prefix"], theirs.extras["prefix"]) <= 2e-6
    assert distance(ours.pooler_output, theirs.pooler_output) <= 2e-6


@pytest.mark.parametrize("name", PREFIXED)
def test_junk_in_padding_changes_no_class_token(name: str) -> None:
    encoder = tiny(name)
    pixels = draw_pixels(encoder, GRIDS)
    metadata = encoder.prepare_encoder_metadata(
        GRIDS, max_batch_size=9, max_input_size=len(pixels) + 30
    )
    junk: Tensor = torch.full((30, pixels.shape[1]), float("nan"))
    padded = encoder(torch.cat((pixels, junk)), encoder_metadata=metadata)
    plain = encoder(pixels, GRIDS)
    assert distance(padded.extras["prefix"][:5], plain.extras["prefix"]) <= 2e-6
    assert distance(padded.pooler_output[: len(pixels)], plain.pooler_output) <= 2e-6
