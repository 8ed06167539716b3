"""An encoder saved as its checkpoint is written, and what reads it back."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.utils import filter_repo_objects
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from encoders import DeepseekOCR2Encoder, Encoder, PathsEncoder, Qwen3VLEncoder, Sam3Encoder
from encoders.base.tile_encoder import TileEncoder
from encoders.base.vision_encoder import VisionEncoder
from tests.support.hub.checkpoints import LAYOUTS, Written, edit_config, same_weights
from tests.support.hub.server import HubServer
from tests.support.hub.transformers_towers import (
    AUTO,
    RENAMED,
    ROWS,
    TRANSFORMERS,
    TRANSFORMERS_TOWERS,
    misread,
    stored_in,
    transformers_class,
)
from vitgraph.seeded import write_seeded_checkpoint
from weights import extract_encoder, load_encoder

TOWER = "model.safetensors"


def seeded(folder: Path, family: str = "qwen3_vl") -> VisionEncoder:
    return load_encoder(write_seeded_checkpoint(folder, family, width=64), progress=False)


def train(encoder: Encoder) -> None:
    """One step of gradient descent on every parameter of every path."""
    encoder.requires_grad_(True)
    dtype = next(encoder.parameters()).dtype
    for path in encoder.paths.values() if isinstance(encoder, PathsEncoder) else [encoder]:
        assert isinstance(path, VisionEncoder)
        # Views and tiles have up to 1024x1024 pixels; DeepSeek-OCR-2 takes no smaller ones, and the
        # windows of SAM 3 have 24 patches a side.
        several = isinstance(encoder, PathsEncoder)
        small = several or isinstance(encoder, TileEncoder)
        small = small and not isinstance(encoder, DeepseekOCR2Encoder)
        patches = 24 if isinstance(encoder, Sam3Encoder) else 8
        grid = [(1, patches, patches) if small else path.grid_for(1 if several else 16)]
        side = patches * path.config.patch_size
        shape = (3, side, side) if small and len(path.row_shape) > 1 else path.row_shape
        rows = sum(spec.input_size for spec in path.item_specs(grid))
        output = path(torch.randn(rows, *shape, dtype=dtype), grid)
        tokens = output.pooler_output
        head = path.pooling_head
        vectors = [head.apply([output[head.reads]])] if head else []
        layers = (tokens, *output[2], *vectors)
        loss = sum(layer.float().square().mean() for layer in layers)
        loss.backward()
    with torch.no_grad():
        for parameter in encoder.parameters():
            if parameter.grad is not None:
                parameter -= 0.01 * parameter.grad.sign()


@pytest.mark.parametrize("family", LAYOUTS)
def test_a_saved_encoder_is_what_extract_writes(
    written: Written, extracted: Written, tmp_path: Path, family: str
) -> None:
    saved = load_encoder(written(family)).save_pretrained(tmp_path / "saved")
    out = extracted(family)
    assert saved == tmp_path / "saved"
    assert {path.name for path in saved.iterdir()} == {
        "README.md",
        *(path.name for path in out.iterdir()),
    }
    mine, theirs = stored_in(saved), stored_in(out)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    for path in out.glob("*.json"):
        assert json.loads((saved / path.name).read_text()) == json.loads(path.read_text())


def loads_back(written: Written, tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    encoder = load_encoder(written(family), progress=False)
    unread = ROWS[family].unread
    read = {
        name: weight for name, weight in encoder.named_parameters() if not name.startswith(unread)
    }
    before = {name: weight.clone() for name, weight in read.items()}
    encoder.to(dtype)
    train(encoder)
    after = dict(encoder.named_parameters())
    changed = [name for name in before if (after[name] != before[name]).any()]
    assert len(changed) > 0.9 * len(before)
    again = load_encoder(encoder.save_pretrained(tmp_path / "saved"), progress=False)
    assert next(again.parameters()).dtype == dtype
    assert same_weights(encoder, again)
    assert (again.config, again.preprocessor) == (encoder.config, encoder.preprocessor)
    third = load_encoder(again.save_pretrained(tmp_path / "third"), progress=False)
    assert same_weights(encoder, third)


@pytest.mark.parametrize("family", LAYOUTS)
def test_a_fine_tuned_encoder_loads_back_to_the_bit(
    written: Written, tmp_path: Path, family: str
) -> None:
    loads_back(written, tmp_path, family, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["intern_vit_300m", "qwen3_vl", "gemma4"])
def test_a_fine_tuned_encoder_loads_back_in_another_dtype(
    written: Written, tmp_path: Path, family: str, dtype: torch.dtype
) -> None:
    """Of tiles, of patches, and with buffers."""
    loads_back(written, tmp_path, family, dtype)


@pytest.mark.filterwarnings("default")  # of transformers
@pytest.mark.parametrize("family", TRANSFORMERS_TOWERS)
def test_transformers_reads_a_fine_tuned_encoder(
    written: Written, tmp_path: Path, family: str
) -> None:
    encoder = load_encoder(written(family, 4), progress=False).float()
    train(encoder)
    saved = encoder.save_pretrained(tmp_path / "saved")
    model, info = transformers_class(family).from_pretrained(saved, output_loading_info=True)
    assert not misread(info, family), info
    stored, state = load_file(saved / TOWER), model.state_dict()
    assert model.dtype == torch.float32
    if family not in RENAMED:
        assert all(torch.equal(value, stored[name]) for name, value in state.items())


@pytest.mark.filterwarnings("default")  # of timm
def test_timm_reads_a_fine_tuned_encoder_in_its_layout(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    encoder = seeded(tmp_path / "whole", "intern_vit_timm").float()
    train(encoder)
    saved = encoder.save_pretrained(tmp_path / "saved")
    model = timm.create_model(f"local-dir:{saved}", pretrained=True, num_classes=0)
    stored, state = load_file(saved / TOWER), model.state_dict()
    assert state.keys() == stored.keys()
    assert all(torch.equal(state[name], stored[name]) for name in state)


def test_an_encoder_of_another_process_keeps_its_form(tmp_path: Path) -> None:
    """Half, copied and pickled, as jobs on several machines do it."""
    encoder = seeded(tmp_path / "whole")
    torch.save(encoder, tmp_path / "encoder.pt")
    again = torch.load(tmp_path / "encoder.pt", weights_only=False)
    saved = again.half().save_pretrained(tmp_path / "saved")
    assert same_weights(load_encoder(saved, progress=False), encoder.half())


def test_a_tower_of_an_unknown_type_loads_by_itself_when_saved(tmp_path: Path) -> None:
    whole = write_seeded_checkpoint(tmp_path / "whole", "qwen3_vl", width=64)
    edit_config(whole, lambda c: c.update(model_type="qwen5_exp"))
    edit_config(whole, lambda c: c["vision_config"].update(model_type="qwen5_exp_vision"))
    encoder = load_encoder(whole, family="qwen3_vl")
    saved = encoder.save_pretrained(tmp_path / "saved")
    out = extract_encoder(whole, tmp_path / "extracted", family="qwen3_vl")
    for folder in (saved, out):
        again = load_encoder(folder)
        assert same_weights(again, encoder)
        assert again.config == encoder.config
        assert same_weights(load_encoder(folder, family="qwen3_vl"), encoder)
        with pytest.raises(ValueError, match="is of the family 'qwen3_vl', not of family='step3'"):
            load_encoder(folder, family="step3")
    assert 'AutoModel.from_pretrained("saved")' in (saved / "README.md").read_text()


@pytest.mark.parametrize("fetch", ["ranges", "shards"])
def test_a_saved_tower_with_a_projector_loads_from_the_hub(
    tmp_path: Path, hub: HubServer, fetch: str
) -> None:
    encoder = seeded(tmp_path / "whole", "intern_vit_hf")
    hub.push("my/tower", encoder.save_pretrained(tmp_path / "saved"))
    for offline in (False, True):
        again = load_encoder("my/tower", progress=False, fetch=fetch, local_files_only=offline)
        assert same_weights(again, encoder)
        assert again.config == encoder.config


def test_a_later_save_replaces_an_earlier_one(tmp_path: Path) -> None:
    encoder = seeded(tmp_path / "whole")
    saved = encoder.save_pretrained(tmp_path / "saved")
    (saved / "README.md").write_text("my own words")
    with torch.no_grad():
        encoder.merger.norm.weight += 1
    encoder.save_pretrained(saved)
    assert same_weights(load_encoder(saved, progress=False), encoder)
    assert (saved / "README.md").read_text() == "my own words"


def test_saving_over_the_whole_model_is_refused(tmp_path: Path) -> None:
    encoder = seeded(tmp_path / "whole")
    before = {path: path.read_bytes() for path in (tmp_path / "whole").iterdir()}
    with pytest.raises(ValueError, match="holds other weights"):
        encoder.save_pretrained(tmp_path / "whole")
    assert {path: path.read_bytes() for path in (tmp_path / "whole").iterdir()} == before
    single = tmp_path / "single"
    single.mkdir()
    save_file({"lm_head.weight": torch.zeros(2)}, single / "other.safetensors")
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        encoder.save_pretrained(single)


def test_an_encoder_without_checkpoint_says_how_to_save_it(tmp_path: Path) -> None:
    loaded = seeded(tmp_path / "whole")
    built = Qwen3VLEncoder(loaded.config)
    with pytest.raises(ValueError, match=r"encoder\.published = loaded\.published"):
        built.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    built.published = loaded.published
    assert same_weights(load_encoder(built.save_pretrained(tmp_path / "saved")), built)


def test_tensors_that_no_checkpoint_holds_are_refused(tmp_path: Path) -> None:
    encoder = seeded(tmp_path / "whole")
    encoder.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"2 tensors more \(adapter\.weight, adapter\.bias\)"):
        encoder.save_pretrained(tmp_path / "saved")
    del encoder.adapter
    encoder.merger.float()
    with pytest.raises(ValueError, match=r"torch\.bfloat16, torch\.float32.*encoder\.float\(\)"):
        encoder.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("family", ["qwen3_vl", "intern_vit_hf"])
def test_parameters_that_are_views_of_one_storage_are_saved(tmp_path: Path, family: str) -> None:
    encoder = seeded(tmp_path / "whole", family)
    vector = parameters_to_vector(encoder.parameters())
    vector_to_parameters(vector + 1, encoder.parameters())
    saved = encoder.save_pretrained(tmp_path / "saved")
    assert same_weights(load_encoder(saved, progress=False), encoder)


def test_tied_and_transposed_parameters_are_saved_each_for_itself(tmp_path: Path) -> None:
    encoder = seeded(tmp_path / "whole")
    first, second = (block.attn.proj for block in encoder.blocks)
    second.weight = first.weight
    first.bias.data = torch.stack([first.bias.data] * 2, dim=1)[:, 0]
    second.bias.data = torch.zeros(1, dtype=second.bias.dtype).expand_as(second.bias)
    saved = encoder.save_pretrained(tmp_path / "saved")
    assert same_weights(load_encoder(saved, progress=False), encoder)


def test_a_folder_name_of_over_255_bytes_is_a_value_error(tmp_path: Path) -> None:
    encoder = seeded(tmp_path / "whole")
    for name in ("n" * 256, "é" * 128):
        with pytest.raises(ValueError, match="256 bytes, and no file system allows more than 255"):
            encoder.save_pretrained(tmp_path / name / "inside")


def test_a_large_encoder_is_saved_in_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = seeded(tmp_path / "whole")
    saving = importlib.import_module("huggingface_hub")
    whole = saving.save_torch_state_dict

    def small(state: dict[str, Any], folder: Path) -> None:
        whole(state, folder, max_shard_size="100KB")

    monkeypatch.setattr(saving, "save_torch_state_dict", small)
    saved = encoder.save_pretrained(tmp_path / "saved")
    assert len(list(saved.glob("*.safetensors"))) > 1
    assert same_weights(load_encoder(saved, progress=False), encoder)
    monkeypatch.undo()
    encoder.save_pretrained(saved)
    assert [path.name for path in saved.glob("*.safetensors")] == [TOWER]
    assert same_weights(load_encoder(saved, progress=False), encoder)


def test_the_model_card_is_one_that_the_hub_reads(tmp_path: Path, hub: HubServer) -> None:
    write_seeded_checkpoint(tmp_path / "whole", "qwen3_vl", width=64)
    hub.push("some/tower", tmp_path / "whole")
    encoder = load_encoder("some/tower", progress=False)
    card = ModelCard.load(encoder.half().save_pretrained(tmp_path / "mine") / "README.md")
    assert card.data.base_model == "some/tower"
    assert card.data.library_name == "vitgraph"
    assert 'load_encoder("mine")' in card.content
    assert "float16" in card.content
    with safe_open(tmp_path / "mine" / TOWER, "pt") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("family", LAYOUTS)
def test_the_model_card_names_what_reads_the_folder(
    written: Written, tmp_path: Path, family: str
) -> None:
    saved = load_encoder(written(family)).save_pretrained(tmp_path / "saved")
    card = (saved / "README.md").read_text()
    assert 'vitgraph.load_encoder("saved")' in card
    if family in TRANSFORMERS:
        name = TRANSFORMERS[family].name
        assert f"`{name}`" in card
        loader = "AutoModel" if family in AUTO else name
        assert f'{loader}.from_pretrained("saved")' in card
        assert f"import {loader}\n" in card
    elif "timm" in family:
        assert 'timm.create_model("hf-hub:saved"' in card
    else:
        assert "No class of transformers reads the tower" in card
    assert not re.search(r"[{}]", card)


@pytest.mark.parametrize("has_card", [False, True])
def test_pushing_uploads_one_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_card: bool
) -> None:
    encoder = seeded(tmp_path / "whole")
    calls: dict[str, Any] = {}

    class Answer:
        repo_id, commit_url = "me/tower", "https://hub.test/me/tower/commit/1"

    def upload(self: HfApi, *, folder_path: Path, **given: Any) -> Answer:
        calls.update(given)
        calls["encoder"] = load_encoder(folder_path, progress=False)
        calls["card"] = (folder_path / "README.md").read_text()
        return Answer()

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo, **given: Answer())
    has = lambda self, repo, name, **given: has_card and name == "README.md"  # noqa: E731
    monkeypatch.setattr(HfApi, "file_exists", has)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    url = encoder.push_to_hub("tower", branch="dev", create_pr=True)
    assert url == Answer.commit_url
    assert same_weights(calls.pop("encoder"), encoder)
    assert 'load_encoder("tower")' in calls.pop("card")
    assert calls == {
        "repo_id": "me/tower",
        "commit_message": "Push model using vitgraph.",
        "revision": "dev",
        "create_pr": True,
        "delete_patterns": calls["delete_patterns"],
        "ignore_patterns": ["README.md"] if has_card else None,
    }
    assert "preprocessor_config.json" in calls["delete_patterns"]


def test_processor_files_of_an_earlier_save_are_removed(tmp_path: Path) -> None:
    saved = seeded(tmp_path / "first").save_pretrained(tmp_path / "saved")
    (saved / "notes.txt").touch()
    second = tmp_path / "second"
    write_seeded_checkpoint(second, "qwen3_vl", width=64)
    (second / "preprocessor_config.json").unlink()
    with pytest.warns(UserWarning, match="defaults are used"):
        encoder = load_encoder(second, progress=False)
    encoder.save_pretrained(saved)
    assert (saved / "notes.txt").exists()
    with pytest.warns(UserWarning, match="defaults are used"):
        again = load_encoder(saved, progress=False)
    assert again.preprocessor == encoder.preprocessor


def test_pushing_into_a_repo_with_an_adapter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Answer:
        repo_id = "me/tower"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo, **given: Answer())
    monkeypatch.setattr(HfApi, "file_exists", lambda self, repo, name, **given: "adapter" in name)
    with pytest.raises(ValueError, match=r"adapter_config\.json"):
        seeded(tmp_path / "whole").push_to_hub("tower")


@pytest.mark.parametrize("stale", ["preprocessor_config.json", "model-00001-of-00002.safetensors"])
def test_pushing_deletes_what_an_earlier_push_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stale: str
) -> None:
    encoder = seeded(tmp_path / "whole")
    deleted: list[str] = []

    class Answer:
        repo_id, commit_url = "me/tower", "https://hub.test/me/tower/commit/1"

    def upload(self: HfApi, *, delete_patterns: list[str], **given: Any) -> Answer:
        present = [stale, "notes.txt", "consolidated.safetensors"]
        deleted.extend(filter_repo_objects(present, allow_patterns=delete_patterns))
        return Answer()

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo, **given: Answer())
    monkeypatch.setattr(HfApi, "file_exists", lambda self, *names, **given: False)
    monkeypatch.setattr(HfApi, "upload_folder", upload)
    encoder.push_to_hub("tower")
    assert deleted == [stale]
