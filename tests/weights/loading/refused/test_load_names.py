"""What is neither a repo id nor a path that is there: what was meant, and how to say it."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pytest

from tests.support.hub.client import REPO, environment, wait_no_longer
from tests.support.hub.server import TOKEN, Fault, HubServer
from weights import CheckpointError, extract_encoder, inspect_checkpoint, load_encoder

PULL = "https://huggingface.co/Q/X/tree/refs%2Fpr%2F3/a/b?not-for-all-audiences=true#top"


@pytest.mark.parametrize(
    ("address", "scheme", "instead"),
    [
        ("https://huggingface.co/Q/X", "https://huggingface.co/", "'Q/X'"),
        ("https://huggingface.co/Q/X/", "https://huggingface.co/", "'Q/X'"),
        ("https://huggingface.co/Q/X.git", "https://huggingface.co/", "'Q/X'"),
        ("huggingface.co/Q/X", "huggingface.co/", "'Q/X'"),
        ("https://hf.co/Q/X", "https://hf.co/", "'Q/X'"),
        ("http://mirror.example:8080/Q/X", "http://mirror.example:8080/", "'Q/X'"),
        ("hf://Q/X", "hf://", "'Q/X'"),
        (
            "https://huggingface.co/Q/X/tree/main",
            "https://huggingface.co/",
            "'Q/X', revision='main'",
        ),
        (
            "https://huggingface.co/Q/X/blob/main/config.json",
            "https://huggingface.co/",
            "'Q/X', revision='main'",
        ),
        (
            "https://huggingface.co/Q/X/resolve/v1/a/model.safetensors",
            "https://huggingface.co/",
            "'Q/X', revision='v1', subfolder='a'",
        ),
        (PULL, "https://huggingface.co/", "'Q/X', revision='refs/pr/3', subfolder='a/b'"),
    ],
)
def test_an_address_of_a_repo_is_turned_into_what_to_pass(
    hub: HubServer, address: str, scheme: str, instead: str
) -> None:
    message = f"{address}: the address of a repo, not its id: drop {scheme} and pass {instead}"
    with pytest.raises(CheckpointError, match=f"^{re.escape(message)}$"):
        load_encoder(address)
    assert hub.requests == []


@pytest.mark.parametrize(
    "address",
    ["https://huggingface.co/Q", "https://huggingface.co/datasets/Q/X", "https://huggingface.co/"],
)
def test_an_address_of_no_repo_of_weights_is_turned_into_nothing(address: str) -> None:
    with pytest.raises(CheckpointError, match="no such file or folder"):
        load_encoder(address)


@pytest.mark.parametrize("revision", ["main", "refs/pr/3"])
def test_a_revision_behind_an_at_sign_is_a_keyword(hub: HubServer, revision: str) -> None:
    message = f"Q/X@{revision}: no such folder here, and a repo id has no @: pass 'Q/X' and"
    with pytest.raises(CheckpointError, match=f"^{message} revision='{revision}'"):
        load_encoder(f"Q/X@{revision}")
    assert hub.requests == []


@pytest.mark.parametrize("value", [None, 3, b"owner/name", ["owner/name"]], ids=str)
def test_what_is_neither_text_nor_a_path_is_named(tmp_path: Path, value: object) -> None:
    message = re.escape(f"repo_id_or_path={value!r}: must be a string or a path: owner/name")
    with pytest.raises(TypeError, match=message):
        load_encoder(value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=message):
        inspect_checkpoint(value)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=message):
        extract_encoder(value, tmp_path / "out")  # type: ignore[arg-type]


def test_offline_a_mistyped_folder_may_be_a_folder(
    hub: HubServer, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = r"^ck/nothere@main: no such folder here, and config\.json is not in the cache and the"
    with pytest.raises(CheckpointError, match=message):
        load_encoder("ck/nothere", cache_dir=cache, local_files_only=True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=message):
        load_encoder("ck/nothere", cache_dir=cache)


@pytest.mark.parametrize("trouble", ["missing", "gated", "private", "busy", "down", "offline"])
def test_the_class_that_a_traceback_shows_is_the_one_to_catch(
    hub: HubServer, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    wait_no_longer(monkeypatch)
    if trouble in ("gated", "private"):
        hub.push(REPO, folder, gated=trouble == "gated", private=trouble == "private")
    if trouble in ("busy", "down"):
        hub.fail("", *[Fault(503) if trouble == "busy" else Fault(silent=True)] * 99)
    with pytest.raises(CheckpointError) as raised:
        load_encoder(REPO, cache_dir=cache, progress=False, local_files_only=trouble == "offline")
    assert type(raised.value) is CheckpointError
    assert (raised.value.__cause__ is None) == (trouble == "offline")
    assert TOKEN not in str(raised.value)


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("Qwen/Qwen3-VL-2B-Instrct", "Qwen/Qwen3-VL-2B-Instruct"),
        ("qwen/qwen3-vl-2b-instruct", "Qwen/Qwen3-VL-2B-Instruct"),
        ("Qwen/Qwen3-VL-2B", "Qwen/Qwen3-VL-2B-Instruct"),
        ("OpenGVLab/InternVL3_5-8", "OpenGVLab/InternVL3_5-8B"),
        ("Qwen3-VL-2B-Instruct", "Qwen/Qwen3-VL-2B-Instruct"),
    ],
)
@pytest.mark.parametrize("offline", [True, False])
def test_a_wrong_repo_id_is_answered_with_the_nearest_names(
    hub: HubServer, cache: Path, asked: str, meant: str, offline: bool
) -> None:
    with pytest.raises(CheckpointError, match=f"; published names like it: {meant}(,|$)"):
        load_encoder(asked, cache_dir=cache, local_files_only=offline)


@pytest.mark.parametrize("asked", ["Qwen/Qwen3-VL-2B-Instruct", "nobody/zzzz"])
def test_a_published_or_strange_repo_id_is_answered_without_names(
    hub: HubServer, cache: Path, asked: str
) -> None:
    with pytest.raises(CheckpointError) as raised:
        load_encoder(asked, cache_dir=cache, local_files_only=True)
    assert "published names" not in str(raised.value)


def test_a_wrong_repo_id_without_a_network_is_answered_after_two_tries(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen: connections are refused
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
        monkeypatch.setattr(
            "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
            address + "/{repo_id}/resolve/{revision}/{filename}",
        )
        message = r"cannot be reached \(2 tries, .* names like it: Qwen/Qwen3-VL-2B-Instruct"
        with pytest.raises(CheckpointError, match=message):
            load_encoder("Qwen/Qwen3-VL-2B-Instrct", cache_dir=cache)


@pytest.mark.parametrize("function", ["inspect_checkpoint(name)", "extract_encoder(name, 'out')"])
def test_an_unknown_name_is_refused_before_torch_is_imported(
    hub: HubServer, tmp_path: Path, function: str
) -> None:
    code = f"""
import sys
from weights import CheckpointError, extract_encoder, inspect_checkpoint
name = "Qwen/Qwen3-VL-8B-Instuct"
try:
    {function}
except CheckpointError as error:
    print(error)
print("torch" in sys.modules)
"""
    command, shell = [sys.executable, "-c", code], environment(hub, tmp_path)
    done = subprocess.run(command, env=shell, cwd=tmp_path, capture_output=True, text=True)
    assert "published names like it: Qwen/Qwen3-VL-8B-Instruct" in done.stdout, done.stderr
    assert done.stdout.endswith("False\n")
