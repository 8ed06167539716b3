"""Every published layout loads, and its names are those of the published models."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn

from tests.oracles import BY_NAME
from tests.support.hub.checkpoints import LAYOUTS, edit_tensors, same_weights
from vitgraph.seeded import SEEDED, seeded_tower, small_config, write_seeded_checkpoint
from weights import FAMILIES, Family, inspect_checkpoint, load_encoder
from weights.configs import build_config
from weights.errors import CheckpointError
from weights.families.family import FamilyConfig
from weights.files.checkpoint import Checkpoint
from weights.files.index import Contents
from weights.layouts import Layout, Prefix
from weights.match import find_family
from weights.published import PUBLISHED, PublishedModel
from weights.strict_json import JsonObject


def stored(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in a checkpoint by name."""
    shapes = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def find_layout(family: str, name: str) -> Layout:
    return next(layout for layout in FAMILIES[family].layouts if layout.name == name)


PLACED = [
    pytest.param(
        name,
        prefix.full,
        id=f"{name}-{prefix.full or 'bare'}",
        marks=() if name in LAYOUTS else pytest.mark.slow,
    )
    for name, recipe in SEEDED.items()
    for prefix in recipe.layout.prefixes
]


@pytest.mark.parametrize("counts", [{"shards": 0}, {"shards": -1}, {"decoy_shards": -1}], ids=str)
def test_a_checkpoint_in_no_file_is_refused(tmp_path: Path, counts: dict[str, int]) -> None:
    (name, value), *_ = counts.items()
    with pytest.raises(ValueError, match=f"{name}={value}.*at least 1"):
        write_seeded_checkpoint(tmp_path / "new", "qwen3_vl", **counts)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("family", "prefix"), PLACED)
def test_every_layout_at_every_place_gives_the_same_tower(
    tmp_path: Path, family: str, prefix: str
) -> None:
    recipe = SEEDED[family]
    folder = write_seeded_checkpoint(tmp_path, family, width=64, prefix=prefix)
    config = small_config(recipe.family, recipe.model.config, 2, 64)
    expected = seeded_tower(recipe.family, config, 0, torch.bfloat16)
    encoder = load_encoder(folder)
    state = encoder.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    info = inspect_checkpoint(folder)
    assert (info.layout, info.prefix) == (recipe.layout.name, prefix)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("intern_vit_300m", "intern_vit_hf"),
        ("intern_vit_hf", "intern_vit_hf_early"),
        ("intern_vit", "intern_vit_timm"),
        ("qwen2_5_vl", "qwen2_5_omni"),
        ("qwen3_vl", "qwen3_omni"),
    ],
)
def test_layouts_of_one_family_give_the_same_outputs(tmp_path: Path, one: str, other: str) -> None:
    encoders = [
        load_encoder(write_seeded_checkpoint(tmp_path / name, name, width=64), dtype=torch.float32)
        for name in (one, other)
    ]
    grid = encoders[0].grid_for(4)
    specs = encoders[0].item_specs([grid])
    pixels = torch.randn(specs[0].input_size, *encoders[0].row_shape)
    first, second = (encoder(pixels, [grid]) for encoder in encoders)
    assert torch.equal(first.last_hidden_state, second.last_hidden_state)
    assert torch.equal(first.pooler_output, second.pooler_output)
    assert len(first.deepstack_features) == len(second.deepstack_features)


@pytest.mark.parametrize("name", SEEDED)
def test_every_name_translates_to_published_and_back(name: str) -> None:
    recipe = SEEDED[name]
    layout, config = recipe.layout, small_config(recipe.family, recipe.model.config, 4, 32)
    tower = seeded_tower(recipe.family, config, 0, torch.float32)
    seen = set()
    for ours in tower:
        published = layout.published_names(ours)
        slots = [layout.to_slot(name) for name in published]
        assert [(slot.name, slot.chunk, slot.chunks) for slot in slots if slot] == [
            (ours, part, len(published)) for part in range(len(published))
        ]
        assert not seen & set(published)
        seen.update(published)


def test_our_own_names_are_not_taken_for_published_ones() -> None:
    layout = find_layout("intern_vit", "internvl-hf")
    assert layout.to_slot("layers.0.norm1.weight") is None
    assert layout.to_slot("encoder.layer.0.attention.qkv.weight") is not None  # odd, but unexpected
    assert layout.to_slot("encoder.layer.00.layernorm_before.weight") != layout.to_slot(
        "encoder.layer.0.layernorm_before.weight"
    )


def test_ignored_names_are_whole_words_at_their_place() -> None:
    qwen = find_layout("qwen2_vl", "qwen")
    assert qwen.is_ignored("rotary_pos_emb.inv_freq")
    assert qwen.is_ignored("attn_pool.latent")
    assert not qwen.is_ignored("attn_pooling.weight")
    assert not qwen.is_ignored("blocks.0.attn_pool.latent")


@pytest.mark.parametrize("name", ["blocks.0.rotary_pos_emb.inv_freq", "embeddings.position_ids"])
def test_buffers_of_old_versions_are_ignored_in_every_layout(qwen3: Path, name: str) -> None:
    before = load_encoder(qwen3)
    edit_tensors(qwen3, lambda t: t.update({f"model.visual.{name}": torch.arange(4)}))
    assert same_weights(load_encoder(qwen3), before)


def test_projector_names_follow_the_root_and_tower_names_the_prefix() -> None:
    layout, prefix = find_layout("intern_vit", "internvl-hf"), Prefix("model.", "vision_tower.")
    projector = "model.multi_modal_projector.linear_1.bias"
    assert layout.local_name(prefix, projector) == "multi_modal_projector.linear_1.bias"
    assert layout.local_name(prefix, "model.vision_tower.x") == "x"
    assert layout.local_name(prefix, "model.language_model.x") is None
    assert layout.local_name(prefix, "multi_modal_projector.linear_1.bias") is None


def reference_shapes(build: Callable[[], nn.Module]) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        return {name: tuple(value.shape) for name, value in build().state_dict().items()}


QWEN = [
    name
    for name, recipe in SEEDED.items()
    if name in BY_NAME and recipe.model.repo_id.startswith("Qwen/")
]


@pytest.mark.parametrize("family", QWEN)
def test_qwen_names_and_shapes_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    folder = write_seeded_checkpoint(tmp_path, family, width=64, depth=4)
    config = json.loads((folder / "config.json").read_text())
    prefix = SEEDED[family].model.prefix
    written = {n.removeprefix(prefix): s for n, s in stored(folder).items() if n.startswith(prefix)}
    assert written == reference_shapes(lambda: BY_NAME[family].reference(config))


def test_internvl_hf_names_and_shapes_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import InternVLConfig
    from transformers.models.internvl import modeling_internvl as m

    folder = write_seeded_checkpoint(tmp_path, "intern_vit_hf", width=64)
    config = InternVLConfig(**json.loads((folder / "config.json").read_text()))
    written = {n: s for n, s in stored(folder).items() if not n.startswith("language_model.")}
    tower = reference_shapes(lambda: m.InternVLVisionModel(config.vision_config))
    projector = reference_shapes(lambda: m.InternVLMultiModalProjector(config))
    expected = {f"vision_tower.{name}": shape for name, shape in tower.items()}
    assert written == expected | {f"multi_modal_projector.{n}": s for n, s in projector.items()}


def test_timm_names_and_shapes_are_those_of_timm(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    folder = write_seeded_checkpoint(tmp_path, "intern_vit_timm", width=64)
    config = json.loads((folder / "config.json").read_text())
    name, arguments = config["architecture"], config["model_args"]
    written = stored(folder)
    assert written == reference_shapes(lambda: timm.create_model(name, num_classes=0, **arguments))


def test_remote_code_names_are_the_published_ones(tmp_path: Path) -> None:
    """The names are copied from the index of InternVL2_5-8B and the class of InternViT-6B."""
    layer = "vision_model.encoder.layers.1."
    large = stored(write_seeded_checkpoint(tmp_path, "intern_vit_6b", width=64))
    for name, shape in {
        "vision_model.embeddings.class_embedding": (1, 1, 64),
        "vision_model.embeddings.position_embedding": (1, 1025, 64),
        "vision_model.embeddings.patch_embedding.weight": (64, 3, 14, 14),
        "vision_model.embeddings.patch_embedding.bias": (64,),
        f"{layer}norm1.weight": (64,),
        f"{layer}attn.qkv.weight": (192, 64),
        f"{layer}attn.q_norm.weight": (64,),
        f"{layer}attn.k_norm.weight": (64,),
        f"{layer}attn.proj.bias": (64,),
        f"{layer}ls1": (64,),
        f"{layer}ls2": (64,),
        f"{layer}mlp.fc1.weight": (256, 64),
        f"{layer}mlp.fc2.bias": (64,),
        "mlp1.0.weight": (256,),
        "mlp1.1.weight": (96, 256),
        "mlp1.3.bias": (96,),
    }.items():
        assert large[name] == shape, name
    assert f"{layer}attn.qkv.bias" not in large
    assert f"{layer}norm1.bias" not in large


@cache
def sizes_of(family: str, config: FamilyConfig) -> dict[str, int]:
    """Count the entries of every tensor; many published models share a config."""
    state = FAMILIES[family].on_meta(config).state_dict()
    return {name: value.numel() for name, value in state.items()}


def parameters(model: PublishedModel) -> tuple[int, int]:
    """Count the parameters of the tower and of the projector that a config makes."""
    config = build_config(FAMILIES[model.family], model.config, None, model.repo_id)
    layout = find_layout(model.family, model.layout)
    sizes = sizes_of(model.family, config)
    beside = {
        name for name in sizes if layout.published_names(name)[0].startswith(layout.projector)
    }
    projector = sum(sizes[name] for name in beside) if model.projector_parameters else 0
    return sum(sizes.values()) - projector, projector


@pytest.mark.parametrize("model", PUBLISHED, ids=lambda model: model.repo_id)
def test_published_model_builds_with_exactly_its_parameters(model: PublishedModel) -> None:
    assert parameters(model) == (model.parameters, model.projector_parameters)
    layout = find_layout(model.family, model.layout)
    assert model.prefix in {prefix.full for prefix in layout.prefixes}


def test_projector_parameters_are_the_published_counts() -> None:
    counts = {m.repo_id.split("/")[1]: m.projector_parameters for m in PUBLISHED}
    assert counts["InternVL2_5-1B"] == 4_482_816
    assert counts["InternVL2_5-8B"] == 33_570_816
    assert counts["InternVL2_5-38B"] == 91_786_240
    assert counts["InternVL2_5-78B"] == 172_008_448


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_the_parts_of_a_family_record_agree(family: Family) -> None:
    layouts = {layout.name for layout in family.layouts}
    published = {model.repo_id: model for model in family.facts.published}
    assert len(layouts) == len(family.layouts)
    assert all(Prefix("", "") in layout.prefixes for layout in family.layouts)  # of a tower alone
    assert {model.family for model in family.facts.published} == {family.name}
    assert {model.layout for model in family.facts.published} <= layouts
    assert family.facts.small
    for small in family.facts.small.values():
        assert (small.layout or published[small.repo_id].layout) in layouts
    assert any(small.title for small in family.facts.small.values())
    assert family.facts.replays.keys() == {"image", "video"}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
def test_every_renamed_layer_is_found_by_its_published_name(family: Family) -> None:
    for layout in family.layouts:
        for published in layout.renames:
            assert layout.to_slot(f"{published.replace('.N', '.3')}.weight"), (layout, published)


@pytest.mark.parametrize("part", ["signs", "timm"])
def test_families_share_no_name(part: str) -> None:
    names = [name for family in FAMILIES.values() for name in vars(family)[part]]
    assert len(set(names)) == len(names)


def contents(config: JsonObject, names: Iterable[str]) -> Contents:
    """A checkpoint with a config and the names of tensors, and no file."""
    checkpoint = Checkpoint(Path("nowhere"), "model.safetensors")
    return Contents(checkpoint, config, dict.fromkeys(names, "model.safetensors"))


def test_families_of_one_model_type_are_told_apart_by_their_tensors() -> None:
    for family in FAMILIES.values():
        layouts = {layout.name: layout for layout in family.layouts}
        model = family.facts.published[0]
        config = build_config(family, model.config, None, model.repo_id)
        names = [
            published
            for ours in family.on_meta(config).state_dict()
            for published in layouts[model.layout].published_names(ours)
        ]
        assert find_family(contents(model.config, names)) is family


def test_a_shared_model_type_with_other_tensors_is_refused() -> None:
    names = ["model.sam_model.net_3.weight", "model.other_model.queries.weight"]
    config = {"model_type": "deepseek_vl_v2", "vision_config": {"model_type": "vision"}}
    with pytest.raises(CheckpointError, match="'vision', with tensors of no known tower"):
        find_family(contents(config, names))
