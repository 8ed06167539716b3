"""Towers of vLLM that can be built alone, which are the only upstream implementations of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from encoders import DeepseekV4Config, DeepseekV4Encoder, DotsOCRConfig, DotsOCREncoder
from encoders.inputs.processor_files import CLIP_MEAN, CLIP_STD
from vitgraph.seeded import write_seeded_checkpoint
from weights import load_encoder

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


def ready(theirs: Any) -> None:
    """Set what vLLM sets as it loads weights: the product of each linear layer."""
    for module in theirs.modules():
        if "quant_method" in vars(module):
            module.cpu_linear = F.linear


@torch.no_grad()
def test_dots_ocr_computes_what_vllms_tower_does(in_vllm: None) -> None:
    from vllm.model_executor.models.dots_ocr import DotsVisionTransformer
    from vllm.transformers_utils.configs.dotsocr import DotsVisionConfig

    encoder = DotsOCREncoder(DotsOCRConfig.from_hf({"vision_config": SIZES})).eval()
    encoder.load_state_dict(drawn(encoder.state_dict()))
    theirs: Any = DotsVisionTransformer(DotsVisionConfig(**SIZES)).eval()
    theirs.load_state_dict(vllm_names(encoder.state_dict()), strict=True)
    ready(theirs)
    states: list[Tensor] = []
    theirs.blocks[-1].register_forward_hook(lambda *args: states.append(args[2]))
    for grids in [*([grid] for grid in GRIDS), GRIDS]:
        pixels = torch.randn(sum(t * h * w for t, h, w in grids), 588)
        tokens, ours = theirs(pixels, grids), encoder(pixels, grids)
        for mine, wanted in ((ours.last_hidden_state, states.pop()), (ours.pooler_output, tokens)):
            assert (mine - wanted).norm() / wanted.norm() <= 1e-5, grids


V4_CONFIG: dict[str, Any] = {
    "vision_n_layers": 3,
    "vision_dim": 64,
    "vision_n_heads": 4,
    "vision_inter_dim": 176,
    "hidden_size": 48,
}
V4_NAMES = {".attn.qkv.": ".attn.wqkv.", ".attn.proj.": ".attn.wo.", ".fc1.": ".w1."}
V4_NAMES |= {".fc2.": ".w2.", ".gate_up.": ".w1.", ".down.": ".w2."}
V4_NAMES |= {"patch_embed.": "patch_embed.proj."}


@torch.no_grad()
def test_deepseek_v4_computes_what_vllms_tower_does(in_vllm: None) -> None:
    from vllm.models.deepseek_v4.common.vision import DeepseekV4Aligner, DeepseekV4ViT

    encoder = DeepseekV4Encoder(DeepseekV4Config.from_hf(V4_CONFIG)).eval()
    encoder.load_state_dict(drawn(encoder.state_dict()))
    sizes = {"patch_size": 14, "rope_theta": 10000.0, "downsample_ratio": 3}
    config = SimpleNamespace(**V4_CONFIG, **{f"vision_{key}": x for key, x in sizes.items()})
    tower: Any = DeepseekV4ViT(config).eval()
    aligner: Any = DeepseekV4Aligner(config).eval()
    state = {}
    for name, tensor in encoder.state_dict().items():
        for ours, vllms in V4_NAMES.items():
            name = name.replace(ours, vllms)
        state[name] = tensor
    whole: Any = torch.nn.ModuleDict({"tower": tower, "aligner": aligner})
    names = {name: name.removeprefix("tower.") for name in whole.state_dict()}
    whole.load_state_dict({name: state[ours] for name, ours in names.items()}, strict=True)
    ready(whole)
    grids = [*([1, h, w - 1] for h, w in SIDES), [1, 1, 1], [1, 9, 9]]
    pixels = torch.randn(sum(h * w for _, h, w in grids), 588)
    tokens, rows = [], pixels.split([h * w for _, h, w in grids])
    for part, (_, h, w) in zip(rows, grids, strict=True):
        tokens.append(aligner(tower(part, h, w), h, w))
    for item, wanted in zip(encoder.split(encoder(pixels, grids), grids), tokens, strict=True):
        assert (item.pooler_output - wanted).norm() / wanted.norm() <= 1e-5


SIZES_OF_IMAGES = [(1080, 1920), (224, 224), (3, 7), (480, 640), (1500, 1100), (60, 2000)]
SIZES_OF_IMAGES += [(3000, 20), (200, 1600), (201, 1600), (700, 701), (543, 545), (400, 30)]
V41_CONFIG = {"vision_config": {"num_hidden_layers": 1}, "text_config": {"hidden_size": 48}}


@pytest.mark.parametrize(
    ("version", "published"), [("deepseek_v4", V4_CONFIG), ("deepseek_v41", V41_CONFIG)]
)
def test_deepseek_v4_cuts_images_as_vllm_does(version: str, published: dict[str, Any]) -> None:
    theirs: Any = import_module(f"vllm.models.{version}.common.mm_preprocess")
    config = DeepseekV4Config.from_hf(published)
    with torch.device("meta"):
        preprocess = DeepseekV4Encoder(config).preprocessor
    limits = {"max_n_token": config.max_image_tokens, "min_pixels": config.min_pixels}
    for height, width in SIZES_OF_IMAGES:
        image = Image.effect_noise((width, height), 99).convert("RGB")
        pixels, rows, columns, *_ = theirs.load_image(
            image, patch_size=14, downsample_ratio=3, max_wh_ratio=config.max_aspect, **limits
        )
        ours = preprocess([image])
        assert ours.grid_thw.tolist() == [[1, rows, columns]], (height, width)
        assert torch.equal(ours.pixel_values.bfloat16(), pixels.flatten(1)), (height, width)


def test_deepseek_v41_makes_the_sequence_that_vllm_does() -> None:
    theirs: Any = import_module("vllm.models.deepseek_v41.common.vl_cudagraph")
    mixin = theirs.DeepseekV4VLEncoderCudaGraphMixin
    types = import_module("vllm.models.deepseek_v41.common.mm_preprocess").image_token_types(2, 3)
    encoder = DeepseekV4Encoder(DeepseekV4Config.from_hf(V41_CONFIG))
    tokens = torch.randn(6, 48)
    (ours,) = encoder.sequences(tokens, [[1, 5, 7]])
    assert torch.equal(ours, mixin._build_image_span(encoder, tokens, types))


@torch.no_grad()
def test_muse_glimmer_computes_what_vllms_tower_does_for_squares(
    in_vllm: None, tmp_path: Path
) -> None:
    """For other images vLLM reads the table of positions with rows and columns exchanged."""
    from vllm.model_executor.models.utils import AutoWeightsLoader

    theirs: Any = import_module("vllm.model_executor.models.muse_glimmer")
    write_seeded_checkpoint(tmp_path, "muse_glimmer", width=64, shards=1, dtype=torch.float32)
    encoder: Any = load_encoder(tmp_path)
    published = json.loads((tmp_path / "config.json").read_text())
    sizes = {"merge_kernel_size": 2, "output_dim": 256, **published["vision_config"]}
    inner, out = published["projector_hidden_size"], published["text_config"]["hidden_size"]
    config = SimpleNamespace(adapter_dim=inner, **sizes)
    parts: Any = torch.nn.Module()
    parts.vision_encoder = theirs.MuseGlimmerVisionEncoder(config)
    parts.vision_adapter = theirs.MuseGlimmerVisionAdapter(config)
    parts.vision_projection = torch.nn.Linear(inner, out, bias=False)
    known = load_file(tmp_path / "model.safetensors")
    tower = [(name, x) for name, x in known.items() if not x.isnan().any()]
    mapper = theirs.MuseGlimmerForCausalLM.hf_to_vllm_mapper
    filled = AutoWeightsLoader(parts).load_weights(tower, mapper=mapper)
    assert filled == {name for name, _ in parts.named_parameters()}
    ready(parts.eval())
    grids = [[1, side, side] for side in (2, 4, 10, 32, 36)]
    pixels = torch.randn(sum(h * w for _, h, w in grids), 1176)
    parted = pixels.split([h * w for _, h, w in grids])
    images = [
        rows.view(h, w, 2, 3, 14, 14).permute(2, 3, 0, 4, 1, 5).reshape(6, 14 * h, 14 * w)
        for rows, (_, h, w) in zip(parted, grids, strict=True)
    ]
    tokens = parts.vision_projection(parts.vision_adapter(parts.vision_encoder(images)))
    wanted = F.rms_norm(tokens, tokens.shape[-1:], None, 1e-5)
    ours = encoder(pixels, grids).pooler_output
    assert (ours - wanted).norm() / wanted.norm() <= 1e-5


@torch.no_grad()
def test_nemotron_nano_vl_computes_what_vllms_tower_does(
    in_vllm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.activation import ReLUSquaredActivation
    from vllm.model_executor.models.nano_nemotron_vl import NemotronH_Nano_VL_V2
    from vllm.model_executor.models.radio import RadioModel
    from vllm.transformers_utils.configs import radio
    from vllm.transformers_utils.processors.nano_nemotron_vl import video_to_pixel_values

    write_seeded_checkpoint(tmp_path, "nemotron_nano_vl", width=64, shards=1, dtype=torch.float32)
    encoder: Any = load_encoder(tmp_path)
    args = json.loads((tmp_path / "config.json").read_text())["vision_config"]["args"]
    monkeypatch.setitem(radio.VIT_TIMM_DIM_BY_NAME, args["model"], (64, 2, 2, 256))
    theirs: Any = RadioModel(radio.RadioConfig(model_name=args["model"], image_size=768, **args))
    known = load_file(tmp_path / "model.safetensors")
    theirs.load_weights({name.removeprefix("vision_model."): x for name, x in known.items()})
    ready(theirs.eval())
    shuffle = partial(NemotronH_Nano_VL_V2.pixel_shuffle, SimpleNamespace(ps_version="v2"))
    for grid in [[3, 32, 32], *([1, h, w] for h, w in SIDES)]:
        t, h, w = grid
        pixels = torch.randn(t * h * w, 768)
        images = pixels.view(t, h, w, 3, 16, 16).permute(0, 3, 1, 4, 2, 5).reshape(t, 3, 16 * h, -1)
        _, rows = theirs(images)
        squares = shuffle(rows.view(t, h, w, -1)).flatten(0, 2)
        normed = F.rms_norm(squares, (256,), known["mlp1.0.weight"], 1e-5)
        inner = ReLUSquaredActivation().forward_native(normed @ known["mlp1.1.weight"].T)
        tokens, ours = inner @ known["mlp1.3.weight"].T, encoder(pixels, [grid])
        for mine, wanted in (
            (ours.last_hidden_state, rows.flatten(0, 1)),
            (ours.pooler_output, tokens),
        ):
            assert (mine - wanted).norm() / wanted.norm() <= 1e-5, grid
    clip = [torch.randint(0, 256, (3, 300, 400), dtype=torch.uint8) for _ in range(3)]
    frames = torch.stack(clip).permute(0, 2, 3, 1).numpy()
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (CLIP_MEAN, CLIP_STD))
    with torch.compiler.set_stance("force_eager"):
        pixels = video_to_pixel_values(frames, input_size=512, norm_mean=mean, norm_std=std)
    rows = pixels.view(3, 3, 32, 16, 32, 16).permute(0, 2, 4, 1, 3, 5).reshape(-1, 768)
    found = encoder.preprocess(videos=[clip])
    assert found.grid_thw.tolist() == [[3, 32, 32]]
    torch.testing.assert_close(found.pixel_values, rows, rtol=0, atol=1e-5)
