"""The folder of a tower alone: what its config says, and who reads it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from encoders import (
    Cosmos3EdgeEncoder,
    Ernie4_5VLEncoder,
    Llama4Encoder,
    LlavaEncoder,
    MoonViTEncoder,
    NemotronEncoder,
    PaddleOCRVLEncoder,
    PathsEncoder,
    PixtralEncoder,
)
from encoders.base.patch_encoder import PatchEncoder
from encoders.base.vision_encoder import VisionEncoder
from tests.oracles import slow
from tests.oracles.references.c_radio import unnormalised
from tests.oracles.references.minicpm_v import side_by_side
from tests.oracles.references.nemotron import packed_output
from tests.oracles.references.pixtral import in_merge_order, pixtral_states
from tests.oracles.references.siglip import siglip2_inputs
from tests.oracles.versions import STEP_ROTATION, skip_without
from tests.support.hub.checkpoints import (
    INDEX,
    LAYOUTS,
    Written,
    edit_config,
    read_json,
    same_weights,
)
from tests.support.hub.transformers_towers import (
    AUTO,
    RENAMED,
    RESAVED,
    ROWS,
    TRANSFORMERS_TOWERS,
    misread,
    stored_in,
    transformers_class,
)
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, extract_encoder, inspect_checkpoint, load_encoder
from weights.files.tower_folder import PROJECTOR

TOWER = "model.safetensors"

REFUSED_LATER = [slow(x) if isinstance(x, str) and x not in AUTO else x for x in LAYOUTS]
"""The first refusal imports the configs of all models of transformers, which takes two seconds."""


@pytest.mark.parametrize("family", LAYOUTS)
def test_extracted_tower_loads_as_the_original(
    written: Written, extracted: Written, tmp_path: Path, family: str
) -> None:
    folder, out = written(family), extracted(family)
    whole, tower = load_encoder(folder), load_encoder(out)
    assert same_weights(whole, tower)
    assert whole.preprocessor == tower.preprocessor
    assert whole.config == tower.config
    assert len(stored_in(out)) == inspect_checkpoint(folder).tensors
    again = extract_encoder(out, tmp_path / "again")
    assert {path.name: path.read_bytes() for path in again.iterdir()} == {
        path.name: path.read_bytes() for path in out.iterdir()
    }


@pytest.mark.filterwarnings("default")  # of transformers
@pytest.mark.parametrize("family", TRANSFORMERS_TOWERS)
def test_transformers_class_of_the_tower_reads_it_whole(extracted: Written, family: str) -> None:
    """Under its outer prefix not one name matched, and the class stayed silently random."""
    out = extracted(family, 4)
    model, info = transformers_class(family).from_pretrained(out, output_loading_info=True)
    stored = load_file(out / TOWER)
    assert not misread(info, family), info
    state = model.state_dict()
    if family in RENAMED:
        return  # what it computes is compared below
    assert state.keys() == stored.keys()
    assert all(torch.equal(value, stored[name]) for name, value in state.items())


@pytest.mark.filterwarnings("default")  # of transformers
@pytest.mark.parametrize("family", REFUSED_LATER)
def test_automodel_builds_the_tower_or_refuses(
    extracted: Written, tmp_path: Path, family: str
) -> None:
    """It built the whole model with a random language model: 18 GB for a tower of 0.6."""
    out = extracted(family, 4)
    config = json.loads((out / "config.json").read_text())
    if family in AUTO:
        model, info = AutoModel.from_pretrained(out, output_loading_info=True)
        assert not misread(info, family), info
        assert config["architectures"] == [type(model).__name__]
        state, stored = model.state_dict(), load_file(out / TOWER)
        if family not in RENAMED:
            assert all(torch.equal(state[name], value) for name, value in stored.items())
    elif "timm" in family:  # its wrapper needs what published configs have, and small ones have not
        out = Path(shutil.copytree(out, tmp_path / "tower"))
        published = {"num_classes": 0, "num_features": 64, "pretrained_cfg": {}}
        edit_config(out, lambda config: config.update({**published, **config}))
        model, info = AutoModel.from_pretrained(out, output_loading_info=True)
        assert not misread(info, family), info
        assert type(model).__name__ == "TimmWrapperModel"
    else:
        with pytest.raises(ValueError, match=r"does not recognize this|Unrecognized conf"):
            AutoModel.from_pretrained(out)


@pytest.mark.filterwarnings("default")  # of transformers
@pytest.mark.parametrize("family", TRANSFORMERS_TOWERS)
def test_transformers_computes_what_the_encoder_does(extracted: Written, family: str) -> None:
    if family.startswith("step3"):
        skip_without(*STEP_ROTATION)
    out = extracted(family, 4)
    model = transformers_class(family).from_pretrained(out, dtype=torch.float32).eval()
    encoder = load_encoder(out, dtype=torch.float32)
    image = encoder.paths["image"] if isinstance(encoder, PathsEncoder) else encoder
    assert isinstance(image, VisionEncoder)
    grid = [image.grid_for(1)]
    rows = sum(spec.input_size for spec in image.item_specs(grid))
    pixels = torch.randn(rows, *image.row_shape, generator=torch.Generator().manual_seed(0))
    hidden, pooled, *_ = image(pixels, grid)
    naflex = family in ("siglip2", "lfm2_vl", "lfm2_5_vl")
    with torch.no_grad():
        siglip = family in ("siglip", "gemma3", "paligemma", "colpali", "modernvbert")
        if siglip or naflex or family in ("idefics3", "smolvlm", "llava_onevision"):
            inputs = siglip2_inputs(pixels, torch.tensor(grid)) if naflex else {}
            out = model(**(inputs or {"pixel_values": pixels}), output_hidden_states=True)
            found, wanted = out.hidden_states[-1].flatten(0, 1), hidden.view(-1, 64)
            if (head := image.pooling_head) is not None:
                torch.testing.assert_close(head.apply([pooled]), out.pooler_output)
        elif isinstance(image, NemotronEncoder):
            taken = torch.cat((unnormalised(pixels[:, :768]), pixels[:, 768:]), 1)
            found, wanted = packed_output(model, taken, torch.tensor(grid)).pooler_output, hidden
        elif (run := ROWS[family].alone) is not None:
            found, wanted = run(model, pixels, torch.tensor(grid)), pooled
        elif isinstance(image, PixtralEncoder):
            found, _ = pixtral_states(model, pixels, [[*grid[0]]], 2)
            found, wanted = in_merge_order(found, [[*grid[0]]], 2), hidden
        elif "gemma4" in family:
            places = torch.cartesian_prod(torch.arange(3), torch.arange(3)).flip(1)[None]
            tokens = model(pixels[None] / 2 + 0.5, places).last_hidden_state
            found, wanted = image.embed_vision(tokens), pooled
        elif isinstance(image, PaddleOCRVLEncoder):
            patches = pixels.view(1, -1, 3, 14, 14)
            found, wanted = model(patches, torch.tensor(grid)).last_hidden_state, image.norm(hidden)
        elif isinstance(image, MoonViTEncoder):
            out = model(pixels.unflatten(1, (3, 14, 14)), torch.tensor(grid))
            found, wanted = out.last_hidden_state, image.norm(hidden)
        elif isinstance(image, Cosmos3EdgeEncoder):
            found, wanted = model(pixels, torch.tensor(grid)).last_hidden_state, image.norm(hidden)
        elif isinstance(image, Ernie4_5VLEncoder):
            found, wanted = model(pixels, torch.tensor(grid)).last_hidden_state, image.ln(hidden)
        elif family == "minicpm_v":
            sizes = torch.tensor(grid)[:, 1:]
            found = model(side_by_side(pixels, 14), target_sizes=sizes).last_hidden_state[0]
            wanted = image.norm(hidden)
        elif isinstance(image, PatchEncoder):
            found, wanted = model(pixels, grid_thw=torch.tensor(grid)).pooler_output, pooled
        elif family in RENAMED:
            found = load_file(out / PROJECTOR).popitem()[1].float()
            found, wanted = model(pixels).last_hidden_state[0] @ found.T, pooled
        elif isinstance(image, LlavaEncoder):
            found, wanted = model(pixels, output_hidden_states=True).hidden_states[-2], hidden
        elif isinstance(image, Llama4Encoder):
            found, wanted = image.projector(model(pixels).last_hidden_state[0]), pooled
        else:
            found, wanted = model(pixels).last_hidden_state, hidden.view(rows, -1, 64)
    assert found.shape == wanted.shape
    assert (found - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.mark.filterwarnings("default")  # of timm
def test_timm_reads_a_tower_in_its_layout(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    folder = write_seeded_checkpoint(tmp_path / "whole", "intern_vit_timm", width=64)
    out = extract_encoder(folder, tmp_path / "tower")
    model = timm.create_model(f"local-dir:{out}", pretrained=True, num_classes=0)
    stored, state = load_file(out / TOWER), model.state_dict()
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[name], stored[name].float()) for name in state)


@pytest.mark.filterwarnings("default")  # of transformers
@pytest.mark.parametrize("family", RESAVED)
def test_a_tower_that_transformers_saved_loads(
    written: Written, extracted: Written, tmp_path: Path, family: str
) -> None:
    """The fields around the tower's survive; the projector's file is copied by hand."""
    folder, out, saved = written(family, 4), extracted(family, 4), tmp_path / "saved"
    transformers_class(family).from_pretrained(out).save_pretrained(saved)
    if (out / PROJECTOR).exists():
        with pytest.raises(
            CheckpointError, match=r"no file projector\.safetensors, .*: copy it from"
        ):
            load_encoder(saved)
        shutil.copy(out / PROJECTOR, saved)
    for path in out.glob("*processor_config.json"):
        shutil.copy(path, saved)
    whole, again = load_encoder(folder), load_encoder(saved)
    assert same_weights(whole, again)
    assert whole.config == again.config
    assert whole.preprocessor == again.preprocessor


@pytest.mark.parametrize("family", LAYOUTS)
def test_a_folder_of_the_old_form_loads(
    written: Written, extracted: Written, tmp_path: Path, family: str
) -> None:
    """Configs as published beside the tower's tensors without their prefix, all in one file."""
    folder, out, old = written(family), extracted(family), tmp_path / "old"
    old.mkdir()
    for path in folder.glob("*.json"):
        if path.name != INDEX:
            shutil.copy(path, old)
    save_file(stored_in(out), old / TOWER)
    whole, again = load_encoder(folder), load_encoder(old)
    assert same_weights(whole, again)
    assert whole.config == again.config
    new = extract_encoder(old, tmp_path / "new")
    assert read_json(new / "config.json") == read_json(out / "config.json")


def test_the_config_of_a_tower_keeps_what_was_published(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path / "omni", "qwen3_omni", width=64)
    published = read_json(folder / "config.json")
    config = read_json(extract_encoder(folder, tmp_path / "tower") / "config.json")
    section = published["thinker_config"].pop("vision_config")
    note = config.pop("vitgraph")
    assert (note["family"], note["config"]) == ("qwen3_vl", published)
    assert config.pop("architectures") == ["Qwen3OmniMoeVisionEncoder"]
    assert config.pop("dtype") == "bfloat16"
    kind = "qwen3_omni_moe_vision_encoder"
    assert config == {**section, "model_type": kind}


def test_code_that_the_config_names_is_not_named_for_the_tower(tmp_path: Path) -> None:
    """With trust_remote_code, AutoModel would take the code of the whole model for it."""
    folder = write_seeded_checkpoint(tmp_path / "chat", "intern_vit_300m", width=64)
    code = {"AutoModel": "owner/name--modeling.WholeModel"}
    edit_config(folder, lambda config: config.update(auto_map=code))
    edit_config(folder, lambda config: config["vision_config"].update(auto_map=code))
    out = extract_encoder(folder, tmp_path / "tower")
    assert "auto_map" not in read_json(out / "config.json")
    with pytest.raises(ValueError, match="does not recognize this"):
        AutoModel.from_pretrained(out, trust_remote_code=True)
    assert same_weights(load_encoder(out), load_encoder(folder))


@pytest.mark.parametrize("note", ["x", [], {}, {"family": []}, {"family": "qwen3_vl", "config": 1}])
def test_a_forged_description_is_refused(qwen3: Path, note: object) -> None:
    edit_config(qwen3, lambda config: config.update(vitgraph=note))
    with pytest.raises(CheckpointError, match=r"config\.json: vitgraph=.*: must name one of"):
        load_encoder(qwen3)
