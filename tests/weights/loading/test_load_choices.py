"""Where an encoder goes, in which dtype, and as which family if its type is not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.support.hub.checkpoints import edit_config, edit_tensors, same_weights
from vitgraph.cli import main
from vitgraph.seeded import SEEDED, write_seeded_checkpoint
from weights import (
    FAMILIES,
    CheckpointError,
    cpu_facts,
    extract_encoder,
    inspect_checkpoint,
    load_encoder,
)
from weights.load import (
    _say_that_bfloat16_is_slow,
    _say_that_the_gpu_is_idle,
    default_device,
)

NORM = "model.visual.blocks.0.norm1.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_seeded_checkpoint(tmp_path / "qwen3", "qwen3_vl", width=64)


@pytest.fixture
def newer(folder: Path) -> Path:
    """A checkpoint of a model type that is not known, whose tower is that of Qwen3-VL."""
    edit_config(folder, lambda c: c.update(model_type="qwen5_exp"))
    edit_config(folder, lambda c: c["vision_config"].update(model_type="qwen5_exp_vision"))
    return folder


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float32", "float64"])
def test_a_dtype_may_be_given_by_its_name(folder: Path, name: str) -> None:
    assert load_encoder(folder, dtype=name).dtype == getattr(torch, name)


def test_the_dtype_auto_is_the_stored_one(folder: Path) -> None:
    edit_tensors(folder, lambda t: t.update({k: v.half() for k, v in t.items()}))
    assert load_encoder(folder, dtype="auto").dtype == torch.float16


@pytest.mark.parametrize("name", ["int8", "bf16", "torch.bfloat16", ""])
def test_an_unknown_name_of_a_dtype_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(ValueError, match=f"^dtype={name!r}: an encoder runs in one of .*'auto'"):
        load_encoder(folder, dtype=name)


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"),
    [(False, False, "cpu"), (False, True, "mps"), (True, False, "cuda"), (True, True, "cuda")],
)
def test_the_accelerator_is_cuda_then_mps_then_the_cpu(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert default_device() == torch.device(expected)


def test_the_device_auto_is_the_accelerator(folder: Path) -> None:
    assert load_encoder(folder, device="auto").device.type == default_device().type


def test_an_idle_gpu_is_named_once_in_the_log(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def said(**keywords: str) -> int:
        caplog.clear()
        load_encoder(folder, **keywords)
        return sum("pass device='auto'" in message for message in caplog.messages)

    _say_that_the_gpu_is_idle.cache_clear()
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert said() == 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert said(device="cpu") == 0
    assert said() == 1
    assert said() == 0


@pytest.mark.parametrize(("flag", "count"), [("avx2", 1), ("avx512_bf16", 0), ("amx_bf16", 0)])
def test_slow_bfloat16_on_a_cpu_is_named_once(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    flag: str,
    count: int,
) -> None:
    def said(**keywords: str) -> int:
        caplog.clear()
        load_encoder(folder, **keywords)
        return sum("pass dtype='float32'" in message for message in caplog.messages)

    (tmp_path / "cpuinfo").write_text(f"processor\t: 0\nflags\t\t: fpu {flag} sse\n")
    monkeypatch.setattr(cpu_facts, "_INFO", tmp_path / "cpuinfo")
    edit_tensors(folder, lambda t: t.update({k: v.bfloat16() for k, v in t.items()}))
    _say_that_bfloat16_is_slow.cache_clear()
    assert said(dtype="bfloat16") == said(dtype="float32") == 0
    assert said(dtype="auto") == count
    assert said() == 0


def test_an_unknown_type_that_fits_a_tower_is_told_its_family(newer: Path) -> None:
    message = r"'qwen5_exp_vision' is not supported; its .* fit the Qwen3-VL .* family='qwen3_vl'"
    for load in (load_encoder, inspect_checkpoint):
        with pytest.raises(CheckpointError, match=message):
            load(newer)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_omni", "intern_vit_hf"])
def test_every_family_is_recognised_by_what_it_holds(tmp_path: Path, name: str) -> None:
    folder = write_seeded_checkpoint(tmp_path / name, name, width=64)
    family = inspect_checkpoint(folder).family

    def rename(config: dict[str, Any]) -> None:
        for part in (config, *config.values()):
            if isinstance(part, dict):
                part.pop("model_type", None)
                part.get("vision_config", part)["model_type"] = "vit_next"

    edit_config(folder, rename)
    with pytest.raises(CheckpointError, match=f"pass family='{family}'") as raised:
        load_encoder(folder)
    assert str(raised.value).count("pass family=") == 1


@pytest.mark.parametrize("kind", ["llava_next", "llava_next_but_one"])
def test_another_model_with_a_family_s_tower_is_refused(tmp_path: Path, kind: str) -> None:
    """LLaVA-OneVision's names do not say which layer another LLaVA reads, or how tiles join."""
    folder = write_seeded_checkpoint(tmp_path / "llava", "llava_onevision", width=64)
    known = load_encoder(folder)
    edit_config(folder, lambda config: config.update(model_type=kind))
    with pytest.raises(CheckpointError, match=rf"'siglip_vision_model'.* of a '?{kind}'? model"):
        load_encoder(folder)
    assert same_weights(load_encoder(folder, family="llava_onevision"), known)


def test_a_tower_that_fits_no_family_is_told_none(newer: Path) -> None:
    edit_tensors(newer, lambda t: t.pop(NORM))
    with pytest.raises(CheckpointError, match="is not supported; supported model types"):
        load_encoder(newer)


# timm's configs name no sizes without their architecture.
@pytest.mark.parametrize("name", [name for name in SEEDED if "timm" not in name])
def test_tensors_have_the_signs_of_their_own_family_alone(tmp_path: Path, name: str) -> None:
    """DeepSeek-OCR's CLIP had those of Step3, so that family="deepseek_ocr" was refused."""
    folder = write_seeded_checkpoint(tmp_path / name, name, width=64)
    family = inspect_checkpoint(folder).family

    def strip(config: dict[str, Any]) -> None:
        for part in (config, *config.values()):
            if isinstance(part, dict):
                part.pop("model_type", None)
                part.get("vision_config", {}).pop("model_type", None)

    known = load_encoder(folder)
    edit_config(folder, strip)
    assert same_weights(load_encoder(folder, family=family), known)
    assert inspect_checkpoint(folder).family == family


def test_a_family_loads_an_unknown_type(newer: Path, tmp_path: Path) -> None:
    again = write_seeded_checkpoint(tmp_path / "again", "qwen3_vl", width=64)
    loaded = load_encoder(newer, family="qwen3_vl")
    assert same_weights(loaded, load_encoder(again))
    assert inspect_checkpoint(newer, family="qwen3_vl").family == "qwen3_vl"
    extract_encoder(newer, tmp_path / "tower", family="qwen3_vl")
    assert same_weights(loaded, load_encoder(tmp_path / "tower", family="qwen3_vl"))


def test_a_family_is_as_strict_as_a_known_type(newer: Path) -> None:
    with pytest.raises(CheckpointError, match=r"hidden_act=.* is not implemented"):
        load_encoder(newer, family="qwen2_vl")
    edit_tensors(newer, lambda t: t.pop(NORM))
    with pytest.raises(CheckpointError, match=r"missing \(1\): " + NORM):
        load_encoder(newer, family="qwen3_vl")


def test_a_family_does_not_override_a_known_type(folder: Path) -> None:
    assert type(load_encoder(folder, family="qwen3_vl")).__name__ == "Qwen3VLEncoder"
    with pytest.raises(CheckpointError, match="is of the family 'qwen3_vl', not of family='qwen2"):
        load_encoder(folder, family="qwen2_vl")


def test_an_unknown_family_is_answered_with_all_of_them(folder: Path, tmp_path: Path) -> None:
    message = f"^family='qwen9': must be one of {', '.join(sorted(FAMILIES))}$"
    with pytest.raises(ValueError, match=message):
        load_encoder(folder, family="qwen9")
    with pytest.raises(ValueError, match=message):
        inspect_checkpoint(folder, family="qwen9")
    with pytest.raises(ValueError, match=message):
        extract_encoder(folder, tmp_path / "out", family="qwen9")


@pytest.mark.parametrize("command", ["inspect", "encode", "embed"])
def test_commands_take_the_family_of_an_unknown_type(
    newer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    (tmp_path / "photos").mkdir()
    Image.new("RGB", (64, 64)).save(tmp_path / "photos" / "a.png")
    more = {
        "inspect": [],
        "encode": [tmp_path / "photos" / "a.png", "--out", tmp_path / "f.safetensors"],
        "embed": [tmp_path / "photos", "--out", tmp_path / "shards", "--dtype", "auto"],
    }[command]
    arguments = [command, str(newer), *map(str, more)]
    assert main(arguments) == 2
    assert "--family qwen3_vl" in capsys.readouterr().err
    assert main([*arguments, "--family", "qwen3_vl"]) == 0
