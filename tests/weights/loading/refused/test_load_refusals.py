"""What is no sound checkpoint of a tower is refused, with the value, the rule and the fix."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.hub.checkpoints import INDEX, edit_config, edit_tensors, read_json
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder

NORM = "model.visual.blocks.0.norm1.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_seeded_checkpoint(tmp_path / "qwen3", "qwen3_vl", width=64)


def refused(folder: Path | str, *parts: str) -> str:
    with pytest.raises(CheckpointError) as info:
        load_encoder(folder)
    message = str(info.value)
    for part in (str(folder), *parts):
        assert part in message, message
    return message


def test_missing_tensor_is_listed_with_the_nearest_key(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({NORM + "s": t.pop(NORM)}))
    refused(
        folder,
        f"missing (1): {NORM} (nearest present: {NORM}s)",
        f"unexpected (1): {NORM}s (nearest expected: {NORM})",
        "layout qwen, prefix 'model.visual.'",
    )


def test_missing_tensor_inside_a_joined_one_is_listed(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "qwen2_5_omni", width=64)
    edit_tensors(folder, lambda t: t.pop("thinker.visual.blocks.1.attn.k.bias"))
    refused(folder, "missing (1): thinker.visual.blocks.1.attn.k.bias")


def test_parts_of_unequal_rows_are_wrong_shapes(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "qwen2_5_omni", width=64)
    name = "thinker.visual.blocks.1.attn.k.bias"
    edit_tensors(folder, lambda t: t.update({name: torch.zeros(32, dtype=torch.bfloat16)}))
    refused(folder, f"wrong shape (1): {name} is [32], the config makes [64]")


def test_unexpected_tensor_under_the_prefix_is_listed(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"model.visual.extra.weight": torch.zeros(1)}))
    refused(folder, "unexpected (1): model.visual.extra.weight")


def test_unexpected_tensor_under_the_projector_is_listed(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "intern_vit_300m", width=64)
    edit_tensors(folder, lambda t: t.update({"mlp1.4.weight": torch.zeros(1)}))
    refused(folder, "unexpected (1): mlp1.4.weight")


def test_half_a_projector_is_missing_its_other_half(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "intern_vit_300m", width=64)
    edit_tensors(folder, lambda t: [t.pop(f"mlp1.1.{kind}") for kind in ("weight", "bias")])
    refused(folder, "missing (2): mlp1.1.weight", "mlp1.1.bias")


def test_wrong_shape_says_both(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({NORM: torch.zeros(65, dtype=torch.bfloat16)}))
    refused(folder, f"wrong shape (1): {NORM} is [65], the config makes [64]")


def test_a_scalar_in_the_place_of_a_matrix_is_a_wrong_shape(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({NORM: torch.tensor(1.0)}))
    refused(folder, f"{NORM} is [], the config makes [64]")


def test_long_lists_are_cut_and_counted(folder: Path) -> None:
    edit_config(folder, lambda config: config["vision_config"].update(depth=4))
    message = refused(folder, "missing (24)", "and 16 more")
    assert len(message) < 3000


def test_config_of_another_size_is_refused_tensor_by_tensor(folder: Path) -> None:
    edit_config(folder, lambda config: config["vision_config"].update(intermediate_size=320))
    refused(folder, "wrong shape (6)", "blocks.0.mlp.linear_fc1.weight is [256, 64]", "[320, 64]")


def test_llm_width_that_is_not_the_projectors_is_refused(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "intern_vit_300m", width=64)
    edit_config(folder, lambda config: config["llm_config"].update(hidden_size=100))
    refused(folder, "mlp1.3.weight is [96, 96], the config makes [100, 100]")


@pytest.mark.parametrize(
    "odd", [torch.int8, torch.uint8, torch.bool, torch.int64, torch.float8_e4m3fn, torch.complex64]
)
def test_tower_of_another_dtype_is_refused_as_quantised(folder: Path, odd: torch.dtype) -> None:
    edit_tensors(folder, lambda t: t.update({NORM: t[NORM].to(odd)}))
    refused(folder, "quantised", f"wrong dtype (1): {NORM} is ", "use the original repo")


@pytest.mark.parametrize(
    "sibling", ["qweight", "weight_scale", "weight_scale_inv", "weight_packed"]
)
def test_tensors_that_only_quantised_layers_have_are_named(folder: Path, sibling: str) -> None:
    name = f"model.visual.blocks.0.attn.qkv.{sibling}"
    edit_tensors(folder, lambda t: t.update({name: torch.zeros(4)}))
    refused(folder, "the tower is quantised", name)


def test_quantised_language_model_beside_a_plain_tower_is_fine(folder: Path) -> None:
    name = "model.language_model.layers.0.mlp.down_proj.weight_scale"
    edit_tensors(folder, lambda t: t.update({name: torch.zeros(4, dtype=torch.int8)}))
    assert load_encoder(folder) is not None


def lora(name: str) -> dict[str, Tensor]:
    return {f"{name}.lora_{side}.weight": torch.zeros(2, 2) for side in "AB"}


def test_adapter_repo_is_refused_and_its_base_named(tmp_path: Path) -> None:
    save_file(lora("base_model.model.x"), tmp_path / "adapter_model.safetensors")
    base = {"base_model_name_or_path": "Qwen/Qwen2-VL-2B"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(base))
    refused(tmp_path, "LoRA adapter", "Qwen/Qwen2-VL-2B")


def test_checkpoint_of_lora_tensors_alone_is_refused(folder: Path) -> None:
    edit_tensors(folder, lambda t: (t.clear(), t.update(lora("base_model.model.visual.x"))))
    refused(folder, "LoRA adapter", "merge the adapter")


def test_unmerged_adapter_in_the_tower_is_refused(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update(lora("model.visual.blocks.0.attn.qkv")))
    refused(folder, "LoRA adapter")


def test_pickles_are_refused_and_never_opened(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / INDEX]:
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    refused(folder, "only pickle weights (pytorch_model.bin)", "safetensors")
    refused(folder / "pytorch_model.bin", "never opened")


def test_folder_without_weights_or_config(folder: Path, tmp_path: Path) -> None:
    (folder / "config.json").unlink()
    refused(folder, "no config.json beside the weights")
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "no safetensors files (no file at all)")


@pytest.mark.parametrize("stem", ["model", "vision"])
def test_weights_that_are_there_twice_are_refused(folder: Path, tmp_path: Path, stem: str) -> None:
    """The index of the shards was followed, and transformers reads the whole file."""
    other = write_seeded_checkpoint(tmp_path / "other", "qwen3_vl", width=64, seed=1, shards=1)
    (folder / INDEX).rename(folder / f"{stem}.safetensors.index.json")
    (other / "model.safetensors").rename(folder / f"{stem}.safetensors")
    refused(
        folder,
        f"holds weights twice: {stem}.safetensors, and {stem}.safetensors.index.json with the "
        "shards model-00001-of-00002.safetensors, model-00002-of-00002.safetensors",
    )
    assert load_encoder(folder / f"{stem}.safetensors") is not None


def test_an_index_may_name_one_whole_file(folder: Path) -> None:
    edit_tensors(folder, lambda tensors: None)
    files = {"part-1.safetensors": "model.safetensors"}
    (folder / "part-1.safetensors").rename(folder / "model.safetensors")
    index = read_json(folder / INDEX)
    placed = {name: files.get(file, file) for name, file in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": placed}))
    assert load_encoder(folder) is not None


def test_several_files_without_an_index_are_not_guessed_at(folder: Path) -> None:
    (folder / INDEX).unlink()
    refused(folder, "2 files end in .safetensors", "pass the one file")


@pytest.mark.parametrize(
    "text", ["./not/here", "/not/here", "~/not-here", "a/b/c", "model.safetensors", "name"]
)
def test_path_that_is_not_there_is_not_asked_of_the_hub(text: str) -> None:
    refused(text, "no such file or folder")


def test_path_object_that_is_not_there_is_never_a_repo_id() -> None:
    refused(Path("owner/name"), "no such file or folder")


def test_subfolder_must_be_there_and_stay_inside(folder: Path) -> None:
    for subfolder, part in (("no", "has no folder 'no'"), ("../..", "leaves the checkpoint")):
        with pytest.raises(CheckpointError, match=part):
            load_encoder(folder, subfolder=subfolder)


def test_unknown_model_type_says_what_is_supported(folder: Path) -> None:
    edit_config(folder, lambda c: c["vision_config"].update(model_type="vit_next_vision"))
    refused(folder, "model_type 'vit_next_vision' is not supported", "qwen2_5_vl", "intern_vit_6b")


def test_unknown_timm_architecture_says_what_is_supported(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "intern_vit_timm", width=64)
    edit_config(folder, lambda c: c.update(architecture="vit_base_patch16_224"))
    refused(folder, "'vit_base_patch16_224' is not supported", "vit_intern300m_patch14_448")


def test_language_model_alone_has_no_tower(folder: Path) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".visual." in name]:
            del tensors[name]

    edit_tensors(folder, drop)
    refused(folder, "no qwen3_vl vision tower among its 10 tensors", "lm_head")


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", INDEX, "config.json"])
def test_a_pointer_of_git_lfs_is_called_one(folder: Path, name: str) -> None:
    content = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 4988\n"
    (folder / name).write_text(content)
    refused(
        folder, f"{name}: a Git LFS pointer, not the file itself: run git lfs pull in the clone"
    )


def test_two_towers_are_not_chosen_between(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({"visual.blocks.0.norm1.weight": t[NORM]}))
    refused(folder, "several towers, under 'model.visual.' and 'visual.'")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "config.json: not valid JSON"),
        ("[1, 2]", "a JSON list, must be an object"),
        ("\udcff", "not valid JSON (UnicodeDecodeError"),
        ('{"a": ' * 100_000, "not valid JSON (RecursionError"),
        ('{"model_type": "a", "model_type": "b"}', "'model_type' occurs twice"),
    ],
)
def test_config_that_is_no_json_object(folder: Path, text: str, part: str) -> None:
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    refused(folder, part)


@pytest.mark.parametrize(
    ("field", "value"),
    [("depth", 10**9), ("hidden_size", 10**12), ("num_heads", -1), ("depth", "2"), ("depth", 1.5)],
)
def test_absurd_sizes_are_refused_before_anything_is_built(
    folder: Path, field: str, value: Any
) -> None:
    edit_config(folder, lambda config: config["vision_config"].update({field: value}))
    refused(folder, f"config.json: config field {field}=")


@pytest.mark.parametrize("bad", ["../x.safetensors", "/etc/x.safetensors", "a\\..\\x.safetensors"])
def test_shard_names_that_leave_the_checkpoint_are_refused(folder: Path, bad: str) -> None:
    index = read_json(folder / INDEX)
    index["weight_map"][NORM] = bad
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, "leaves the checkpoint")


@pytest.mark.parametrize(
    ("index", "part"),
    [
        ({}, "needs a weight_map"),
        ({"weight_map": [1]}, "needs a weight_map"),
        ({"weight_map": {NORM: 1}}, "needs a weight_map"),
        ({"weight_map": {NORM: "pytorch_model.bin"}}, "not a .safetensors file"),
        ({"weight_map": {NORM: "gone.safetensors"}}, "the folder has no file gone.safetensors"),
    ],
)
def test_index_that_makes_no_sense(folder: Path, index: Any, part: str) -> None:
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, part)


def test_index_and_shard_must_tell_the_same_story(folder: Path) -> None:
    index = read_json(folder / INDEX)
    shards = sorted(set(index["weight_map"].values()))
    index["weight_map"][NORM] = shards[-1]
    (folder / INDEX).write_text(json.dumps(index))
    refused(folder, "disagree about 1 tensor, ", NORM)


def shard_of(folder: Path) -> Path:
    return folder / read_json(folder / INDEX)["weight_map"][NORM]


def rewrite_header(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


@pytest.mark.parametrize(
    ("edit", "part"),
    [
        (lambda h: h[NORM].update(data_offsets=[0, 128]), "overlaps the one before"),
        (lambda h: h[NORM].update(data_offsets=[128, 0]), "needs dtype, shape and two rising"),
        (lambda h: h[NORM].update(data_offsets=[-128, 0]), "needs dtype, shape and two rising"),
        (lambda h: h[NORM].update(data_offsets=[10**12, 10**12 + 128]), "leaves a gap"),
        (lambda h: h[NORM].update(shape=[63]), "of shape [63] and dtype BF16 needs 126 bytes"),
        (lambda h: h[NORM].update(shape=[True]), "needs dtype, shape"),
        (lambda h: h[NORM].update(dtype="F32"), "dtype F32 needs 256 bytes"),
        (lambda h: h[NORM].update(dtype="F31"), "unknown dtype 'F31'"),
        (lambda h: h.update({NORM: None}), "needs dtype, shape"),
        (lambda h: h.pop(NORM), "leaves a gap"),
    ],
)
def test_forged_headers_are_refused(
    folder: Path, edit: Callable[[dict[str, Any]], object], part: str
) -> None:
    rewrite_header(shard_of(folder), edit)
    refused(folder, part)


@pytest.mark.parametrize(
    ("cut", "part"),
    [
        (lambda raw: raw[:-1], "truncated or damaged"),
        (lambda raw: raw + b"x", "truncated or damaged"),
        (lambda raw: raw[:100], "the header claims"),
        (lambda raw: raw[:7], "7 bytes is too short"),
        (lambda raw: b"", "0 bytes is too short"),
        (lambda raw: struct.pack("<Q", 10**9) + raw[8:], "the format allows 100000000"),
        (lambda raw: raw[:8] + b"x" * len(raw[8:]), "not valid JSON"),
    ],
)
def test_damaged_files_are_refused(folder: Path, cut: Callable[[bytes], bytes], part: str) -> None:
    path = shard_of(folder)
    path.write_bytes(cut(path.read_bytes()))
    refused(folder, part)


def test_remote_code_of_a_config_is_never_run(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path / "chat", "intern_vit_300m", width=64)
    (folder / "modeling_internvl_chat.py").write_text("raise SystemExit('this was run')")
    (folder / "configuration_internvl_chat.py").write_text("raise SystemExit('this was run')")
    assert load_encoder(folder) is not None
