"""Loading a tower from a folder or a file: what may differ and still be right."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.support.hub.checkpoints import (
    INDEX,
    LAYOUTS,
    edit_config,
    edit_tensors,
    read_json,
    same_weights,
)
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, inspect_checkpoint, load_encoder


@pytest.mark.parametrize("family", LAYOUTS)
def test_encoder_is_ready_to_use(tmp_path: Path, family: str) -> None:
    encoder = load_encoder(write_seeded_checkpoint(tmp_path, family, width=64))
    tensors = [*encoder.parameters(), *encoder.buffers()]
    assert not encoder.training
    assert not any(tensor.requires_grad for tensor in tensors)
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
    assert {tensor.dtype for tensor in tensors} == {torch.bfloat16}
    (output,) = encoder.encode(images=[torch.zeros(3, 448, 448, dtype=torch.uint8)])
    assert output.pooler_output is not None
    assert output.pooler_output.isfinite().all()


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_an_encoder_loaded_in_inference_mode_can_be_trained(
    qwen3: Path, dtype: torch.dtype | None
) -> None:
    """Casting failed there, and without a cast the parameters were inference tensors."""
    with torch.inference_mode():
        encoder = load_encoder(qwen3, dtype=dtype)
    tensors = [*encoder.parameters(), *encoder.buffers()]
    assert not any(tensor.is_inference() for tensor in tensors)
    encoder.requires_grad_(True)
    pixels = torch.randn(16, *encoder.row_shape)
    encoder(pixels, [[1, 4, 4]]).pooler_output.float().sum().backward()
    assert next(encoder.parameters()).grad is not None


def test_nothing_is_left_on_meta_when_the_default_device_is_another(qwen3: Path) -> None:
    encoder = load_encoder(qwen3, device="cpu")
    assert all(parameter.device.type == "cpu" for parameter in encoder.parameters())


def test_a_path_object_a_string_and_a_subfolder_are_the_same(qwen3: Path) -> None:
    first = load_encoder(qwen3)
    assert same_weights(first, load_encoder(str(qwen3)))
    assert same_weights(first, load_encoder(qwen3.parent, subfolder="qwen3"))


def test_relative_folder_wins_over_a_repo_id_of_its_name(
    qwen3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (qwen3.parent / "Qwen").mkdir()
    qwen3.rename(qwen3.parent / "Qwen" / "Qwen3-VL-8B")
    monkeypatch.chdir(qwen3.parent)
    assert load_encoder("Qwen/Qwen3-VL-8B", local_files_only=True) is not None


def test_one_file_with_its_config_beside_it(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "qwen2_5_vl", width=64, shards=1)
    odd = folder / "tower-only.safetensors"
    (folder / "model.safetensors").rename(odd)
    (folder / "other.safetensors").write_bytes(b"not this one")
    assert load_encoder(odd).config.hidden_size == 64


def test_files_may_have_any_name(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path / "one", "qwen2_vl", width=64, shards=1)
    expected = load_encoder(folder)
    (folder / "model.safetensors").rename(folder / "diffusion_pytorch_model.safetensors")
    assert same_weights(expected, load_encoder(folder))
    folder = write_seeded_checkpoint(tmp_path / "two", "qwen2_vl", width=64)
    edit_tensors(folder, lambda tensors: None)
    (folder / INDEX).rename(folder / "weights.safetensors.index.json")
    assert same_weights(expected, load_encoder(folder))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 6), st.randoms(use_true_random=False))
def test_shards_may_hold_tensors_in_any_order(chat: Path, count: int, rng: random.Random) -> None:
    tensors = {}
    for path in chat.glob("model-*.safetensors"):
        tensors |= load_file(path)
    expected = load_encoder(chat)
    shuffled = Path(tempfile.mkdtemp(dir=chat.parent))
    placed = {name: f"{rng.randrange(count)}.safetensors" for name in tensors}
    for file in set(placed.values()):
        names = [name for name in tensors if placed[name] == file]
        rng.shuffle(names)
        save_file({name: tensors[name] for name in names}, shuffled / file)
    (shuffled / INDEX).write_text(json.dumps({"weight_map": placed}))
    for name in ("config.json", "preprocessor_config.json"):
        (shuffled / name).write_bytes((chat / name).read_bytes())
    assert same_weights(expected, load_encoder(shuffled))


def test_names_on_the_ignore_list_do_not_matter(qwen3: Path) -> None:
    expected = load_encoder(qwen3)

    def add(tensors: dict[str, Any]) -> None:
        tensors["model.visual.rotary_pos_emb.inv_freq"] = torch.ones(8, dtype=torch.int64)

    edit_tensors(qwen3, add)
    assert same_weights(expected, load_encoder(qwen3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_stored_dtype_is_kept_or_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write_seeded_checkpoint(tmp_path, "qwen2_5_omni", width=64, dtype=dtype)
    kept = load_encoder(folder)
    assert {parameter.dtype for parameter in kept.parameters()} == {dtype}
    for target in (torch.float16, torch.float32):
        cast = load_encoder(folder, dtype=target)
        assert same_weights(kept.to(target), cast)
        kept = load_encoder(folder)


def test_mixed_dtypes_become_the_one_with_most_bytes(qwen3: Path) -> None:
    def mix(tensors: dict[str, Any]) -> None:
        for name in tensors:
            if "norm" in name:
                tensors[name] = tensors[name].float()

    edit_tensors(qwen3, mix)
    encoder = load_encoder(qwen3)
    assert {parameter.dtype for parameter in encoder.parameters()} == {torch.bfloat16}
    info = inspect_checkpoint(qwen3)
    assert info.dtype == "bfloat16"
    assert list(info.bytes_by_dtype) == ["BF16", "F32"]


def test_dtype_that_no_encoder_runs_in_is_refused(qwen3: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype=torch.int8: an encoder runs in one of torch.bfl"):
        load_encoder(qwen3, dtype=torch.int8)


def test_sparse_qwen2_vl_config_is_completed_from_the_tensors(tmp_path: Path) -> None:
    """Qwen2-VL-2B publishes four fields; derivatives leave out even ``hidden_size``."""
    folder = write_seeded_checkpoint(tmp_path, "qwen2_vl", width=512, depth=1)
    full = load_encoder(folder).config
    for kept in (("hidden_size", "in_chans", "spatial_patch_size"), ("in_chans",)):
        heads = full.num_heads  # 16: the class default, since no shape shows it
        edit_config(
            folder,
            lambda c, kept=kept: c.update(vision_config={k: c["vision_config"][k] for k in kept}),
        )
        assert load_encoder(folder).config == full
        assert heads == 16


def test_sparse_internvl_config_is_completed_from_the_tensors(chat: Path) -> None:
    full = load_encoder(chat).config
    kept = ("num_attention_heads", "model_type")

    def thin(config: dict[str, Any]) -> None:
        config["vision_config"] = {name: config["vision_config"][name] for name in kept}
        del config["llm_config"]

    edit_config(chat, thin)
    assert load_encoder(chat).config == full


def test_aliased_field_names_are_the_same_config(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "qwen2_5_vl", width=64)
    full = load_encoder(folder).config

    def rename(config: dict[str, Any]) -> None:
        vision = config["vision_config"]
        for old, new in (
            ("depth", "num_hidden_layers"),
            ("num_heads", "num_attention_heads"),
            ("in_chans", "in_channels"),
        ):
            vision[new] = vision.pop(old)
        del vision["patch_size"]  # spatial_patch_size says it too

    edit_config(folder, rename)
    assert load_encoder(folder).config == full


@pytest.mark.parametrize("family", ["intern_vit_300m", "intern_vit_hf", "qwen2_vl", "qwen3_vl"])
def test_config_without_any_model_type_goes_by_the_tensors(tmp_path: Path, family: str) -> None:
    folder = write_seeded_checkpoint(tmp_path, family, width=64)
    full = load_encoder(folder)

    def strip(config: dict[str, Any]) -> None:
        config.pop("model_type")
        config["vision_config"].pop("model_type", None)

    edit_config(folder, strip)
    assert type(load_encoder(folder)) is type(full)


@pytest.mark.parametrize("kind", ["qwen3_vl_vision", "qwen3_vl_moe", "qwen3_5_moe_vision"])
def test_model_type_of_the_tower_comes_in_several_spellings(qwen3: Path, kind: str) -> None:
    edit_config(qwen3, lambda config: config["vision_config"].update(model_type=kind))
    assert load_encoder(qwen3) is not None


def test_colqwen_keeps_its_tower_two_levels_down(tmp_path: Path) -> None:
    folder = write_seeded_checkpoint(tmp_path, "qwen2_vl", width=64, prefix="vlm.model.visual.")
    inner = read_json(folder / "config.json")
    (folder / "config.json").write_text(json.dumps({"model_type": "colqwen2", "vlm_config": inner}))
    assert load_encoder(folder).config.hidden_size == 64


def test_projector_is_there_exactly_when_its_tensors_are(chat: Path) -> None:
    assert load_encoder(chat).config.out_hidden_size == 96

    def drop(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.startswith("mlp1.")]:
            del tensors[name]

    edit_tensors(chat, drop)
    encoder = load_encoder(chat)
    assert encoder.config.out_hidden_size is None
    assert not any(name.startswith("mlp1.") for name in encoder.state_dict())


def test_processor_files_of_the_repo_set_the_preprocessing(qwen3: Path) -> None:
    path = qwen3 / "preprocessor_config.json"
    content = read_json(path)
    content["size"] = {"shortest_edge": 4096, "longest_edge": 32 * 32 * 9}
    path.write_text(json.dumps(content))
    inputs = load_encoder(qwen3).preprocess(images=[torch.zeros(3, 800, 800, dtype=torch.uint8)])
    assert inputs.grid_thw.tolist() == [[1, 6, 6]]


def test_processor_file_that_disagrees_with_the_tower_is_an_error(qwen3: Path) -> None:
    path = qwen3 / "preprocessor_config.json"
    path.write_text(json.dumps(read_json(path) | {"patch_size": 14}))
    with pytest.raises(CheckpointError, match=r"processor files: .*patch_size"):
        load_encoder(qwen3)


def test_inspect_says_what_is_there(chat: Path) -> None:
    info = inspect_checkpoint(chat)
    encoder = load_encoder(chat)
    assert (info.family, info.encoder, info.layout) == ("intern_vit", "InternViT", "internvl")
    assert info.config == encoder.config
    assert info.parameters == sum(parameter.numel() for parameter in encoder.parameters())
    assert info.bytes == 2 * info.parameters
    assert info.tensors == len(encoder.state_dict())
    assert info.checkpoint_tensors > info.tensors
    assert json.loads(json.dumps(info.to_dict()))["shards"] == list(info.shards)


GROWTH = """
import sys, threading
import huggingface_hub, torch
from weights import load_encoder  # the package is lazy: naming the loader imports it

def resident():
    lines = open("/proc/self/status").read().splitlines()
    return sum(int(x.split()[1]) for x in lines if x.startswith(("RssAnon", "RssFile"))) * 1024

def watch():
    while not done.wait(0.001):
        peak[0] = max(peak[0], resident())

start = resident()
peak, done = [start], threading.Event()
thread = threading.Thread(target=watch)
thread.start()
encoders = [load_encoder(folder) for folder in sys.argv[1:]]
done.set()
thread.join()
tower = sum(value.nbytes for encoder in encoders for value in encoder.state_dict().values())
print(tower, max(peak[0], resident()) - start)
"""


def growth(*folders: Path) -> tuple[int, int]:
    """Bytes of the towers, and of a fresh process's growth from after the imports to the peak."""
    shell = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[3]))
    command = [sys.executable, "-c", GROWTH, *map(str, folders)]
    done = subprocess.run(command, env=shell, capture_output=True, text=True, check=True)
    tower, grown = done.stdout.split()
    return int(tower), int(grown)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_vl"])
def test_loading_needs_hardly_more_memory_than_the_tower(tmp_path: Path, family: str) -> None:
    """The first joins queries, keys and values; the second is the largest of one file a tensor."""
    folder = write_seeded_checkpoint(tmp_path, family, depth=8, width=1280)
    tower, grown = growth(folder)
    assert tower > 3e8
    assert grown <= 1.15 * tower


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status")
def test_loading_has_a_small_fixed_cost_in_memory(tmp_path: Path) -> None:
    """The towers are tiny: what grows is the loader's own, such as modules imported late."""
    families = ("intern_vit_300m", "qwen2_5_omni", "qwen3_vl")
    tower, grown = growth(
        *(write_seeded_checkpoint(tmp_path / family, family, width=64) for family in families)
    )
    assert tower < 4e6
    assert grown <= 24 << 20


@pytest.mark.parametrize("device", ["mps", "hpu", "xla"])
def test_a_device_that_is_not_there_is_named_in_one_line(qwen3: Path, device: str) -> None:
    told = rf"device='{device}' is not one of this machine \(\w.*\): pass one that is"
    with pytest.raises(ValueError, match=told) as raised:
        load_encoder(qwen3, device=device)
    assert len(str(raised.value)) < 300
