"""Checkpoints that hold a known tower under another name, loaded as their publishers name them.

Each is compared with the class that transformers or timm has for it, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from einops import rearrange
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import QianfanOCRConfig, QianfanOCRModel

from tests.oracles import LiftFloat32, distance, distances, draw_pixels
from tests.oracles.keys import intern_keys, renamed
from tests.oracles.references.intern_vit import intern_output
from tests.oracles.references.qwen import qwen2_5_output, qwen_output, qwen_reference
from tests.support.hub.checkpoints import edit_config, edit_tensors, read_json, same_weights
from vitgraph.seeded import SEEDED, write_seeded_checkpoint
from weights import CheckpointError, inspect_checkpoint, load_encoder
from weights.configs import build_config
from weights.files import vision_section

FLOAT64 = 1e-10
GRIDS = [[2, 4, 6], [1, 10, 6]]
QWEN: dict[str, tuple[Callable[[Any], nn.Module], Any]] = {
    "qwen4_exp": (
        qwen_reference("qwen4_exp", "Qwen4ExpVisionModel"),
        qwen_output,
    ),
    "qwen_drive": (
        qwen_reference("qwen3_5", "Qwen3_5VisionModel"),
        qwen_output,
    ),
    "cohere_compass": (
        qwen_reference("cohere_compass", "CohereCompassVisionModel"),
        qwen_output,
    ),
    "exaone4_5": (
        qwen_reference("exaone4_5", "Exaone4_5_VisionModel"),
        qwen2_5_output,
    ),
}
"""Recipe -> how transformers' class is built and run."""


def written(folder: Path, recipe: str, **sizes: Any) -> Path:
    return write_seeded_checkpoint(folder, recipe, width=64, dtype=torch.float64, **sizes)


def stored(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


@pytest.mark.parametrize("recipe", QWEN)
@torch.no_grad()
def test_alias_of_a_qwen_tower_equals_transformers(tmp_path: Path, recipe: str) -> None:
    build, run = QWEN[recipe]
    folder = written(tmp_path, recipe, depth=4)
    encoder = load_encoder(folder)
    section = dict(vision_section(read_json(folder / "config.json"))[0])
    prefix = SEEDED[recipe].model.prefix
    pixels = draw_pixels(encoder, GRIDS, dtype=torch.float64)
    with LiftFloat32() as lift:
        reference = build({"vision_config": section}).double().eval()
        state = {n.removeprefix(prefix): x for n, x in stored(folder).items() if prefix in n}
        reference.load_state_dict(state, strict=True)
        theirs = run(reference, pixels, torch.tensor(GRIDS))
    assert lift.lifted
    worst = distances(encoder(pixels, GRIDS), theirs)
    assert max(worst.values()) <= FLOAT64, worst
    assert len(worst) == 2 + 2 * (recipe == "cohere_compass")


def test_qianfan_ocr_equals_transformers(tmp_path: Path) -> None:
    folder = written(tmp_path, "qianfan_ocr")
    encoder = load_encoder(folder)
    config = read_json(folder / "config.json")
    text = {
        "model_type": "qwen3",
        "hidden_size": 96,
        "num_hidden_layers": 1,
        "vocab_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    wrapped = QianfanOCRConfig(vision_config=config["vision_config"], text_config=text)
    reference = QianfanOCRModel(wrapped).double().eval()
    reference.language_model = nn.Identity()
    rules = [(r"^vision_tower\.encoder\.layer\.", "vision_tower.layers.")]
    reference.load_state_dict(renamed(intern_keys(encoder.state_dict()), rules), strict=True)
    grids = [[2, 32, 32]]
    pixels = draw_pixels(encoder, grids, dtype=torch.float64)
    with torch.no_grad():
        worst = distances(
            encoder(pixels, grids), intern_output(reference, pixels, torch.tensor(grids))
        )
    assert max(worst.values()) <= FLOAT64, worst


# --- timm ----------------------------------------------------------------------------------------


def patches_of(image: Tensor) -> tuple[Tensor, list[list[int]]]:
    """Cut an image [3, H, W] into patches of one frame [P, 3*16*16], and return their grid."""
    pattern = "c (r a p) (s b q) -> (r s a b) (c p q)"
    _, height, width = image.shape
    rows = rearrange(image, pattern, a=2, b=2, p=16, q=16)
    return rows, [[1, height // 16, width // 16]]


def timm_model(folder: Path) -> nn.Module:
    timm = pytest.importorskip("timm")
    config = read_json(folder / "config.json")
    with LiftFloat32():  # timm computes rotary frequencies when the model is made
        model = timm.create_model(config["architecture"], **config["model_args"]).double().eval()
    model.load_state_dict(stored(folder), strict=True)
    return model


@torch.no_grad()
def test_timm_tower_equals_timm(tmp_path: Path) -> None:
    folder = written(tmp_path, "qwen3_timm")
    encoder, model = load_encoder(folder), timm_model(folder)
    image = torch.randn(3, 96, 160, dtype=torch.float64)
    pixels, grid = patches_of(image)
    with LiftFloat32():
        features, tokens = model.forward_features(image[None]), model(image[None])
    ours = encoder(pixels, grid)
    assert ours.deepstack_features == ()
    assert distance(ours.pooler_output, tokens[0]) <= FLOAT64
    (map_,) = encoder.feature_maps(ours.last_hidden_state, grid)
    assert distance(map_, features) <= FLOAT64


@torch.no_grad()
def test_timm_tower_encodes_images_as_the_original_does(tmp_path: Path) -> None:
    from timm.models import qwen3_vit

    original = load_encoder(written(tmp_path / "original", "qwen3_vl"))
    folder = written(tmp_path / "timm", "qwen3_timm")
    published = stored(tmp_path / "original")
    folded = qwen3_vit.checkpoint_filter_fn_encoder(published, timm_model(folder))

    def refill(tensors: dict[str, Tensor]) -> None:
        assert tensors.keys() == folded.keys()
        tensors.update({name: value.contiguous() for name, value in folded.items()})

    edit_tensors(folder, refill)
    edit_config(folder, lambda c: c["model_args"].update(mlp_ratio=4.0))
    photo = torch.randint(0, 256, (3, 320, 480), dtype=torch.uint8)
    (ours,) = load_encoder(folder).encode(photo)
    (theirs,) = original.encode(photo)
    assert len(theirs.deepstack_features) == 1
    assert distance(ours.pooler_output, theirs.pooler_output) <= FLOAT64
    assert distance(ours.last_hidden_state, theirs.last_hidden_state) <= FLOAT64


def test_timm_tower_refuses_videos_and_says_why(tmp_path: Path) -> None:
    encoder = load_encoder(written(tmp_path, "qwen3_timm"))
    message = "only images, without DeepStack features.*load the original Qwen repo for videos"
    with pytest.raises(CheckpointError, match=message):
        encoder.encode(videos=[torch.zeros(4, 3, 64, 64, dtype=torch.uint8)])


def test_saved_timm_tower_keeps_the_shapes_that_timm_reads(tmp_path: Path) -> None:
    encoder = load_encoder(written(tmp_path / "repo", "qwen3_timm"))
    saved = encoder.save_pretrained(tmp_path / "saved")
    assert same_weights(load_encoder(saved), encoder)
    timm_model(saved)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("pos_embed", (2304, 64)),
        ("pos_embed", (2, 1152, 64)),
        ("patch_embed.proj.weight", (64, 3, 1, 16, 16)),
        ("patch_embed.proj.weight", (64, 3, 16, 8)),
    ],
)
def test_timm_tensor_of_another_shape_is_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...]
) -> None:
    folder = written(tmp_path, "qwen3_timm")
    edit_tensors(folder, lambda t: t.update({name: torch.zeros(shape, dtype=torch.float64)}))
    with pytest.raises(CheckpointError, match=rf"wrong shape \(1\): {name} is \[|config.json: "):
        load_encoder(folder)


def test_timm_classifier_with_the_merger_loads_from_its_encoder(tmp_path: Path) -> None:
    folder = written(tmp_path / "merge", "qwen3_timm", prefix="encoder.")
    edit_config(folder, lambda config: config.update(architecture="qwen3_vit_416m_merge"))
    encoder = load_encoder(written(tmp_path / "enc", "qwen3_timm"))
    assert same_weights(load_encoder(folder), encoder)


def test_timm_classifier_without_a_merger_is_not_supported(tmp_path: Path) -> None:
    folder = written(tmp_path, "qwen3_timm")
    edit_config(folder, lambda config: config.update(architecture="qwen3_vit_416m"))
    with pytest.raises(CheckpointError, match=r"'qwen3_vit_416m' is not supported.*_416m_enc"):
        load_encoder(folder)


# --- derivatives that have the config of a known tower -------------------------------------------

DERIVATIVES: dict[str, tuple[str, str | None, dict[str, Any], dict[str, Any]]] = {
    "Qwen/Qwen3-VL-Embedding-2B": ("qwen3_vl", None, {"model_type": "qwen3_vl"}, {}),
    "Qwen/Qwen3-VL-Reranker-2B": ("qwen3_vl", None, {"model_type": "qwen3_vl"}, {}),
    "TomoroAI/tomoro-colqwen3-embed-8b": (
        "qwen3_vl",
        "vlm.model.visual.",
        {"model_type": "colqwen3", "embed_dim": 320},
        {},
    ),
    "OpenSearch-AI/Ops-Colqwen3-4B": (
        "qwen3_vl",
        "visual.",
        {"model_type": "ops_colqwen3", "dims": 2560},
        {},
    ),
    "jinaai/jina-reranker-m0": ("qwen2_vl", None, {"architectures": ["JinaVLForRanking"]}, {}),
    "nvidia/Cosmos-Reason1-7B": ("qwen2_5_vl", None, {}, {}),
    "nvidia/Cosmos-Reason2-8B": ("qwen3_vl", None, {}, {}),
    "Hcompany/Holo1.5-7B": ("qwen2_5_vl", None, {}, {}),
    "Hcompany/Holo2-8B": ("qwen3_vl", None, {}, {}),
    "xlangai/OpenCUA-7B": (
        "qwen2_5_vl",
        "vision_tower.",
        {"model_type": "opencua", "media_placeholder_token_id": 151664},
        {},
    ),
    "XiaomiMiMo/MiMo-VL-7B-RL": ("qwen2_5_vl", None, {}, {"intermediate_size": 3456}),
    "internlm/Intern-S1": (
        "intern_vit_hf",
        "model.vision_tower.",
        {"model_type": "interns1"},
        {"model_type": "interns1_vision", "drop_path_rate": 0.0},
    ),
    "nvidia/Alpamayo2-Super": (
        "qwen3_vl",
        "vlm.model.visual.",
        {"model_type": "alpamayo2_super"},
        {"model_type": "qwen3_vl"},
    ),
    "internlm/Intern-S1-Pro": (
        "qwen3_vl_moe",
        None,
        {"model_type": "interns1_pro"},
        {"model_type": "qwen3_vl_moe"},
    ),
    "Cloudflare/clef-flash": (
        "qwen3_5",
        None,
        {"model_type": "clef_flash"},
        {"model_type": "qwen3_5"},
    ),
    "google/embeddinggemma-2": (
        "gemma4_e2b",
        "vision_tower.",
        {"model_type": "embedding_gemma2"},
        {},
    ),
    "google/diffusiongemma-26B-A4B-it": (
        "gemma4",
        "model.encoder.vision_tower.",
        {"model_type": "diffusion_gemma"},
        {},
    ),
    "stepfun-ai/Step-5-Preview": (
        "step3_vl",
        None,
        {"model_type": "step5", "architectures": ["Step5ForConditionalGeneration"]},
        {},
    ),
    "internlm/Intern-S2-Preview": (
        "qwen3_5",
        None,
        {"model_type": "intern_s2_preview"},
        {"model_type": "intern_s2_preview"},
    ),
    "internlm/Intern-S2-Mobius": (
        "qwen3_5",
        None,
        {"model_type": "interns2_mobius"},
        {"model_type": "interns2_mobius"},
    ),
}
"""Repo -> recipe of the tower, prefix if another, what the config and its vision part change."""


@pytest.mark.parametrize("repo", DERIVATIVES)
def test_derivative_loads_as_the_tower_it_is(tmp_path: Path, repo: str) -> None:
    recipe, prefix, outer, inner = DERIVATIVES[repo]
    plain = load_encoder(write_seeded_checkpoint(tmp_path / "plain", recipe, width=64))
    folder = write_seeded_checkpoint(tmp_path / "derived", recipe, width=64, prefix=prefix)
    small = {name: value for name, value in inner.items() if name != "intermediate_size"}
    edit_config(folder, lambda c: (c.update(outer), c["vision_config"].update(small)))
    assert inspect_checkpoint(folder).family == SEEDED[recipe].family.name
    assert same_weights(load_encoder(folder), plain)


@pytest.mark.parametrize("repo", DERIVATIVES)
def test_config_of_a_derivative_is_that_of_its_tower(repo: str) -> None:
    recipe, _, outer, inner = DERIVATIVES[repo]
    family, published = SEEDED[recipe].family, SEEDED[recipe].model.config
    section = {**published["vision_config"], **inner}
    config = build_config(family, {**published, **outer, "vision_config": section}, None, repo)
    plain = build_config(family, published, None, repo)
    mlp = inner.get("intermediate_size", plain.intermediate_size)
    assert config == replace(plain, intermediate_size=mlp)


@pytest.mark.parametrize(
    ("model_type", "reason"), [("NVLM_D", "projector has no biases"), ("h2ovl_chat", "MSAC")]
)
def test_a_model_that_differs_around_its_intern_vit_is_refused(
    tmp_path: Path, model_type: str, reason: str
) -> None:
    folder = written(tmp_path, "intern_vit")
    edit_config(folder, lambda config: config.update(model_type=model_type))
    with pytest.raises(CheckpointError, match=f"'{model_type}' is not supported: .*{reason}"):
        load_encoder(folder)
    with pytest.raises(CheckpointError, match=reason):
        load_encoder(folder, family="intern_vit")


@pytest.mark.parametrize(
    ("recipe", "outer", "inner", "reason"),
    [
        ("qwen3_vl", "bailing_moe_v3_vl", "qwen3_moe_vit", "its merger has only a norm"),
        ("kimi_vl", "locateanything", "moonvit", "normalises the 2x2 patches of a token together"),
    ],
)
def test_a_tower_with_another_projector_is_refused(
    tmp_path: Path, recipe: str, outer: str, inner: str, reason: str
) -> None:
    folder = written(tmp_path, recipe)
    edit_config(
        folder,
        lambda c: (c.update(model_type=outer), c["vision_config"].update(model_type=inner)),
    )
    with pytest.raises(CheckpointError, match=f"is not supported: .*{reason}"):
        load_encoder(folder)


# --- Unlimited-OCR -------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", ["vision", None])
def test_unlimited_ocr_is_the_tower_of_deepseek_ocr(tmp_path: Path, inner: str | None) -> None:
    plain = load_encoder(write_seeded_checkpoint(tmp_path / "plain", "deepseek_ocr", width=32))
    folder = write_seeded_checkpoint(tmp_path / "other", "unlimited_ocr", width=32)
    edit_config(folder, lambda config: config["vision_config"].update(model_type=inner))
    assert same_weights(load_encoder(folder), plain)


def test_unlimited_ocr_cuts_one_image_into_up_to_32_tiles_and_several_not(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "unlimited_ocr", width=32, depth=1)
    page = torch.zeros(3, 5120, 2560, dtype=torch.uint8)
    encoder = load_encoder(folder)
    assert encoder.preprocess(page).tiles == [(4, 8, True)]
    assert encoder.preprocess([page, page]).tiles == [(1, 1, False)] * 2
    assert encoder.preprocess([page, page], max_tiles=32).tiles == [(4, 8, True)] * 2
    base = encoder.at_mode("base")
    assert base.preprocess([page, page]).tiles == [(1, 1, False)] * 2
    assert base.at_mode("gundam").preprocess([page]).tiles == [(4, 8, True)]


# --- configs with fields left out ---------------------------------------------------------------


def test_exaone_has_eight_key_value_heads_unless_the_config_says() -> None:
    config = SEEDED["exaone4_5"].model.config["vision_config"]
    read = SEEDED["exaone4_5"].family.config.from_hf
    assert read({k: v for k, v in config.items() if k != "num_key_value_heads"}) == read(config)
    assert read(config).num_key_value_heads == 8
    assert read({**config, "num_key_value_heads": 4}).num_key_value_heads == 4


def test_key_value_heads_must_divide_the_heads() -> None:
    config = SEEDED["exaone4_5"].model.config["vision_config"]
    with pytest.raises(
        ValueError, match="num_heads=32 must be a multiple of num_key_value_heads=5"
    ):
        SEEDED["exaone4_5"].family.config.from_hf({**config, "num_key_value_heads": 5})


@pytest.mark.parametrize("kind", ["qwen4_exp_vision", "intern_s2_preview", "interns2_mobius"])
def test_some_towers_like_qwen3_vl_have_no_deepstack_by_default(kind: str) -> None:
    read = SEEDED["qwen3_vl"].family.config.from_hf
    assert read({"model_type": kind}).deepstack_visual_indexes == ()
    assert read({"model_type": "cohere_compass_vision"}).deepstack_visual_indexes == (8, 16, 24)


def test_qianfan_has_biases_in_attention_by_default() -> None:
    read = SEEDED["qianfan_ocr"].family.config.from_hf
    assert read({"model_type": "qianfan_ocr_vision"}).qkv_bias
    assert not read({"model_type": "internvl_vision"}).qkv_bias
