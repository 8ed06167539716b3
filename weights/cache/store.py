"""The folders that hold what was fetched, by repo and commit.

They lie beside the Hub client's own cache, which knows whole files only::

    <root>/towers/models--owner--name/<commit>/
        tower/      config.json, the processor files and model.safetensors (see kept_tower.py)
        partial/    a fetch of the tower that has not finished
        answers     JSON files of a repo whose shards are in the client's cache, and a CRC-32
    <root>/towers/models--owner--name/<commit>-text/
        the same of the text half, with the files of its tokenizer
    <root>/towers/models--owner--name/refs/     the commit of each branch when it was last seen

``tower`` appears by one rename, whole or not at all. The header of its tensor file lists and
checksums all that belongs to it, so what an interrupted removal leaves is not taken for a tower.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeAlias
from zlib import crc32

import huggingface_hub
from huggingface_hub.utils import WeakFileLock

from ..errors import DamagedError
from ..files.writing import write_atomic
from ..threads import log_if_slow

Part: TypeAlias = Literal["vision tower", "text half"]
"""The part of a checkpoint that is read, and kept in a folder of its own."""
TOWERS_FOLDER = "towers"
TEXT_SUFFIX = "-text"
"""The end of the name of a folder that holds the text half of a checkpoint."""


def cache_root(cache_dir: str | Path | None = None) -> Path:
    """Return the folder of everything that this package keeps on the disk.

    It is the folder ``vitgraph`` in ``cache_dir`` or, without one, in HF_HOME: there it lies beside
    the cache of the Hub's client, whose tools report unknown folders inside it as damage. If
    HF_HUB_CACHE moves the client's cache, the folder lies inside that cache all the same.
    """
    constants = huggingface_hub.constants
    if cache_dir is not None:
        return Path(cache_dir).expanduser() / "vitgraph"
    hub, hf_home = Path(constants.HF_HUB_CACHE), Path(constants.HF_HOME)
    return (hf_home if hub == hf_home / "hub" else hub) / "vitgraph"


def repo_folder(root: Path, repo_id: str) -> Path:
    """Return the folder of a repo inside the cache folder ``root``."""
    return root / TOWERS_FOLDER / ("models--" + repo_id.replace("/", "--"))


class Store:
    """The folder in the cache for one repo, or for one subfolder of it, at one commit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tower = folder / "tower"
        self.partial = folder / "partial"
        self.answers = folder / "answers"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the lock of this folder, so that loads in other threads and processes wait."""
        repo = self.folder.parent
        path = repo.parent.parent / ".locks" / repo.name / f"{self.folder.name}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with (
            log_if_slow(f"waiting for another load of {repo.name}") as stop_notice,
            WeakFileLock(path),
        ):
            stop_notice()
            yield

    def keep_answers(self, answers: Mapping[str, bytes | None]) -> None:
        """Write ``answers``: name of a JSON file -> content, None if the repo has no such file."""
        table = {
            name: None if raw is None else raw.decode("latin-1") for name, raw in answers.items()
        }
        text = json.dumps(table).encode()
        write_atomic(self.answers, b"%08x\n" % crc32(text) + text)

    def read_answers(self) -> dict[str, bytes | None]:
        """Return the kept small files: name -> content, None where the repo has no such file.

        The result is empty if nothing was written. A DamagedError is raised if the CRC-32 does not
        match.
        """
        try:
            sum_, _, text = self.answers.read_bytes().partition(b"\n")
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise DamagedError(f"{self.answers}: cannot be read ({error.strerror})") from error
        if sum_ != b"%08x" % crc32(text):
            raise DamagedError(f"{self.answers}: not what was downloaded")
        table: dict[str, str | None] = json.loads(text)
        return {name: None if raw is None else raw.encode("latin-1") for name, raw in table.items()}
