"""The client's progress bars, its environment, and its requests in a fresh process."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import are_progress_bars_disabled

from tests.support.hub.client import REPO, environment
from tests.support.hub.server import TOKEN, HubServer
from weights import load_encoder


def test_progress_bars_follow_the_keyword_and_only_while_loading(
    hub: HubServer, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.push(REPO, sharded)
    hidden = []

    @functools.wraps(huggingface_hub.hf_hub_download)
    def download(*arguments: Any, **keywords: Any) -> str:
        hidden.append(keywords["tqdm_class"](disable=False).disable)
        return huggingface_hub.hf_hub_download(*arguments, **keywords)

    monkeypatch.setattr("weights.hub.downloads.hf_hub_download", download)
    for progress in (False, True):
        load_encoder(REPO, cache_dir=tmp_path / str(progress), progress=progress, fetch="shards")
        assert set(hidden) == {not progress}
        assert not are_progress_bars_disabled()
        hidden.clear()


@pytest.mark.slow
def test_no_bar_and_no_warning_though_the_client_shall_show_bars(
    hub: HubServer, sharded: Path, tmp_path: Path
) -> None:
    """The client warns where its switch is set and a caller asks for the contrary."""
    hub.push(REPO, sharded)
    call = f"load_encoder({REPO!r}, dtype='bfloat16', progress=False, fetch='shards')"
    code = f"import weights; weights.{call}"
    shell = environment(hub, tmp_path) | {"HF_HUB_DISABLE_PROGRESS_BARS": "0"}
    done = run(code, shell, "-W", "error")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_environment_of_the_client_is_honoured(sharded: Path, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_HOME, HF_TOKEN and HF_HUB_OFFLINE, as in a user's shell."""
    code = f"import weights; weights.load_encoder({REPO!r}); print('loaded')"
    with HubServer() as server:
        server.push(REPO, sharded, private=True)
        shell = dict(os.environ, HF_ENDPOINT=server.endpoint, HF_HOME=str(tmp_path / "home"))
        shell |= {"HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(Path(__file__).parents[3])}
        online = run(code, shell | {"HF_TOKEN": TOKEN})
        assert online.stdout == "loaded\n", online.stderr
    offline = run(code, shell | {"HF_HUB_OFFLINE": "1"})
    assert offline.stdout == "loaded\n", offline.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("fetch", "kept"), [("ranges", False), ("shards", True)])
def test_a_fresh_process_asks_once_for_a_branch_only(
    hub: HubServer, sharded: Path, tmp_path: Path, fetch: str, kept: bool
) -> None:
    """The client would ask which agents there are before its first request; ours do not."""
    commit = hub.push(REPO, sharded)
    shell = environment(hub, tmp_path / "home")  # where the client of this process caches
    load_encoder(REPO, fetch=fetch, progress=False)
    load = f"weights.load_encoder({REPO!r}, fetch={fetch!r}"
    local = f"{load}, revision={commit!r}); {load}, local_files_only=True)"
    hub.requests.clear()
    assert run(f"import weights; {local if kept else f'{load})'}", shell).returncode == 0
    assert len(hub.requests) == (0 if kept else 1), hub.requests


def run(code: str, shell: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, env=shell, capture_output=True, text=True, timeout=120)
