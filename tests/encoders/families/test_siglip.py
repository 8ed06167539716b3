"""SigLIP, SigLIP2 NaFlex and Gemma 3: their heads, position tables, maps and default sizes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from encoders import Gemma3Config, SiglipConfig
from encoders.base.vision_encoder import VisionEncoder
from encoders.layers.table_taps import axis_weights
from graphwrap import GraphedEncoder
from tests.oracles import (
    BY_NAME,
    NO_LIFT,
    LiftFloat32,
    build_encoder,
    build_pair,
    distance,
    draw_pixels,
    tiny,
)
from tests.oracles.references.siglip import SIZES, gemma3_output, siglip2_inputs
from tests.support.photographs import china, flower, hopper

SMALL = {**SIZES, "num_hidden_layers": 2}
PHOTOS = [china(), flower().resize((64, 200)), hopper().resize((300, 90))]


def with_head(name: str, **changes: Any) -> VisionEncoder:
    tower = {**SMALL, **({"image_size": 112} if name == "siglip" else {})}
    return build_encoder(BY_NAME[name], {**tower, **changes})


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.float64, 1e-10)])
def test_the_head_of_naflex_is_that_of_transformers(dtype: torch.dtype, bound: float) -> None:
    lift = LiftFloat32() if dtype == torch.float64 else NO_LIFT
    encoder, reference = build_pair(BY_NAME["siglip2"], SMALL, dtype, lift)
    grids = [[1, 4, 7], [1, 16, 16], [1, 1, 1], [1, 3, 20]]
    pixels = draw_pixels(encoder, grids, dtype=dtype)
    outputs = encoder.split(encoder(pixels, grids), grids)
    assert encoder.pooling_head is not None
    ours = encoder.pooling_head.apply([output.pooler_output for output in outputs])
    with lift:
        theirs = reference(**siglip2_inputs(pixels, torch.tensor(grids))).pooler_output
    assert distance(ours, theirs) <= bound


def test_the_head_of_one_size_is_that_of_transformers() -> None:
    encoder, reference = build_pair(BY_NAME["siglip"], SMALL)
    pixels = draw_pixels(encoder, [[2, 27, 27]])
    tokens = encoder(pixels, [[1, 27, 27]] * 2).pooler_output
    assert encoder.pooling_head is not None
    ours = encoder.pooling_head.apply(tokens.split(27 * 27))
    assert distance(ours, reference(pixels).pooler_output) <= 1e-5


@pytest.mark.parametrize("name", ["siglip", "siglip2"])
@pytest.mark.parametrize("graphed", [False, True])
def test_embed_and_embed_many_pool_by_the_head(name: str, graphed: bool) -> None:
    encoder = with_head(name)
    assert encoder.pooling_head is not None
    tokens = [output.pooler_output for output in encoder.encode(PHOTOS)]
    wanted = torch.stack([encoder.pooling_head.apply([rows])[0] for rows in tokens])
    caller = GraphedEncoder(encoder, backend="static", max_budget=1024) if graphed else encoder
    ours = caller.embed(PHOTOS, pool="head")
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    many = caller.embed_many(PHOTOS, pool="head", normalize=True, progress=False)
    torch.testing.assert_close(torch.stack(list(many)), F.normalize(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl", "intern_vit_300m"])
def test_an_encoder_without_a_head_says_which_have_one(name: str) -> None:
    with pytest.raises(ValueError, match=r"no head .* of SigLIP and SigLIP2 .*SiglipEncoder"):
        tiny(name).embed(["no such file"], pool="head")


def test_a_half_precision_head_gives_float32() -> None:
    encoder = with_head("siglip2").to(torch.bfloat16)
    assert encoder.embed(PHOTOS[:1], pool="head")[0].dtype == torch.float32
    assert encoder.embed(pool="head").shape == (0, encoder.out_features)


@pytest.mark.parametrize("size", [1, 3, 7, 12, 15, 16, 17, 21, 40, 100, 256])
def test_weights_of_positions_are_those_of_antialiased_interpolation(size: int) -> None:
    table = torch.randn(16, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(size))
    rows = table.T[None, :, :, None].expand(-1, -1, -1, 16)
    wanted = F.interpolate(rows, (size, 16), mode="bilinear", antialias=True)[0, :, :, 0].T
    torch.testing.assert_close(axis_weights(16, size) @ table, wanted, rtol=0, atol=1e-12)


def test_positions_of_half_precision_are_rounded_once() -> None:
    encoder = tiny("siglip2", torch.bfloat16)
    metadata = encoder.prepare_encoder_metadata([[1, 5, 9]], max_input_size=50)
    assert {metadata[name].dtype for name in ("pos_embed_rows", "pos_embed_columns")} == {
        torch.float32
    }
    assert not any(metadata[name][45:].any() for name in ("pos_embed_rows", "pos_embed_columns"))


def test_naflex_maps_run_row_by_row() -> None:
    encoder, grids = tiny("siglip2"), [[1, 3, 5], [2, 2, 1]]
    codes = torch.arange(19.0)[:, None]
    first, second = encoder.feature_maps(codes, grids)
    assert torch.equal(first, codes[:15].view(1, 3, 5, 1))
    assert torch.equal(second, codes[15:].view(2, 2, 1, 1))


def test_every_state_of_naflex_is_that_of_transformers() -> None:
    encoder, reference = build_pair(BY_NAME["siglip2"], BY_NAME["siglip2"].tiny)
    grids = [[1, 4, 7], [1, 2, 3]]
    pixels = draw_pixels(encoder, grids)
    inputs = siglip2_inputs(pixels, torch.tensor(grids))
    theirs = reference(**inputs, output_hidden_states=True).hidden_states[1:]
    keep = inputs["pixel_attention_mask"].bool()
    for mine, state in zip(encoder.forward_intermediates(pixels, grids), theirs, strict=True):
        assert distance(mine, state[keep]) <= 1e-5


def test_gemma_projects_a_view_of_the_published_size_as_transformers_does() -> None:
    changes = {**SIZES, "num_hidden_layers": 1, "llm_width": 48}
    encoder, reference = build_pair(BY_NAME["gemma3"], changes)
    pixels, grid = draw_pixels(encoder, [[1, 64, 64]]), torch.tensor([[1, 64, 64]])
    ours, theirs = encoder(pixels, grid), gemma3_output(reference, pixels, grid)
    assert ours.pooler_output.shape == (256, 48)
    assert distance(ours.pooler_output, theirs.pooler_output) <= 1e-5


def test_gemma_norms_with_a_gain_of_one_plus_its_weight() -> None:
    encoder = build_encoder(BY_NAME["gemma3"], BY_NAME["gemma3"].tiny)
    pixels = draw_pixels(encoder, [[1, 8, 8]])
    encoder.projector.norm.fill_(-1)
    assert not encoder(pixels, [[1, 8, 8]]).pooler_output.any()


TIMM = {
    r"^head\.probe$": "attn_pool.latent",
    r"^head\.attention\.out_proj\.": "attn_pool.proj.",
    r"^head\.layernorm\.": "attn_pool.norm.",
    r"^head\.mlp\.": "attn_pool.mlp.",
}


def timm_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for key, value in state.items():
        for pattern, name in TIMM.items():
            key = re.sub(pattern, name, key)
        found[key] = value[None] if key == "pos_embed" else value
    for part in ("weight", "bias"):
        q, kv = found.pop(f"head.attention.in_proj_{part}").tensor_split([64])
        found |= {f"attn_pool.q.{part}": q, f"attn_pool.kv.{part}": kv}
    return found


def test_the_tower_and_its_head_are_those_of_timm() -> None:
    encoder = with_head("siglip")
    sizes = {"embed_dim": 64, "depth": 2, "num_heads": 4, "mlp_ratio": 1.75, "img_size": 112}
    form = {"act_layer": "gelu_tanh", "num_classes": 0}  # timm's default is the exact form
    model = timm.create_model("vit_so400m_patch14_siglip_384", **form, **sizes).eval()
    model.load_state_dict(timm_state(encoder.state_dict()), strict=True)
    pixels = draw_pixels(encoder, [[2, 8, 8]])
    tokens = encoder(pixels, [[2, 8, 8]]).pooler_output
    assert encoder.pooling_head is not None
    with torch.no_grad():
        assert distance(tokens, model.forward_features(pixels).flatten(0, 1)) <= 1e-5
        assert distance(encoder.pooling_head.apply(tokens.split(64)), model(pixels)) <= 1e-5


def test_heads_are_never_guessed_from_shapes() -> None:
    assert SiglipConfig.from_hf({"vision_config": {}}).num_heads == 12
    with pytest.raises(ValueError, match="has no num_attention_heads and there is no"):
        SiglipConfig.from_hf({"vision_config": {"hidden_size": 1152}})


def test_tokens_of_gemma_must_be_a_square_that_divides_the_patches() -> None:
    vision = BY_NAME["gemma3"].config["vision_config"]
    for tokens, message in ((200, "must be a square"), (81, "must be a multiple of")):
        with pytest.raises(ValueError, match=message):
            Gemma3Config.from_hf(
                {"vision_config": vision, "text_config": {"hidden_size": 8}}
                | {"mm_tokens_per_image": tokens}
            )
