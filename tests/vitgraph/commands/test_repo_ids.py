"""Repo ids on the command line: a wrong one is answered before torch is imported."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.hub.client import REPO
from tests.support.hub.server import HubServer
from vitgraph.cli import main

CODE = """
import sys
from vitgraph.cli import main
code = main(sys.argv[1:])
print(code, "torch" in sys.modules)
"""


def answer(cache: Path, *arguments: str) -> str:
    """Run a command that must fail, with a Hub that nobody serves; return its error."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen: connections are refused
        address = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-c", CODE, *arguments],
            env={**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(cache)},
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.split() == ["2", "False"]
    return done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("encode", "Qwen/Qwen3-VL-2B-Instrukt", "a.jpg", "--out", "f.safetensors"),
        ("embed", "Qwen3-VL-2B-Instruct", "photos", "--out", "vectors"),
        pytest.param(("inspect", "Qwen/Qwen3-VL-2B-Instrukt"), marks=pytest.mark.slow),
        pytest.param(("extract", "Qwen/Qwen3-VL-2B-Instrukt", "tower"), marks=pytest.mark.slow),
    ],
)
def test_a_wrong_repo_id_without_a_network_is_answered_without_torch(
    tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    said = answer(tmp_path, *arguments)
    assert "names like it: Qwen/Qwen3-VL-2B-Instruct" in said
    assert said.count("\n") == 1


def test_a_repo_of_another_name_is_asked_for_once_more(
    hub: HubServer, folder: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.push(REPO, folder)
    assert main(["inspect", REPO, "--json", "--cache-dir", str(cache)]) == 0
    assert json.loads(capsys.readouterr().out)["family"] == "qwen3_vl"
    asked = [request for request in hub.requests if request.path.endswith("/main/config.json")]
    assert len(asked) == 2


def test_what_is_on_this_disk_is_not_asked_for(
    hub: HubServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert main(["inspect", folder.name]) == 0
    assert hub.requests == []
