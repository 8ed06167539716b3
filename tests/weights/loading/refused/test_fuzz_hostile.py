"""Nothing in a checkpoint is trusted: forged repos, from a folder and over the wire."""

from __future__ import annotations

import json
import os
import pickle
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hub.checkpoints import INDEX, edit_config, read_json, same_weights
from tests.support.hub.client import REPO
from tests.support.hub.server import HubServer
from vitgraph.seeded import write_seeded_checkpoint
from weights import CheckpointError, load_encoder

NORM = "model.visual.blocks.0.norm1.weight"
SHARD = "model-00001-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_seeded_checkpoint(tmp_path / "repo", "qwen3_vl", width=64)


def rename_shard(name: str) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        index = read_json(folder / INDEX)
        index["weight_map"][NORM] = name
        (folder / INDEX).write_text(json.dumps(index))

    return edit


def rewrite_header(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        path = folder / read_json(folder / INDEX)["weight_map"][NORM]
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        edit(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return rewrite


def claim_header(length: int) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / SHARD
        path.write_bytes(struct.pack("<Q", length) + path.read_bytes()[8:])

    return edit


def name_twice(folder: Path) -> None:
    path = folder / SHARD
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].rstrip()
    name = next(name for name in json.loads(header) if name != "__metadata__")
    entry = json.dumps(json.loads(header)[name])
    text = header[:-1] + f',"{name}":{entry}}}'.encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def vision(**fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit_config(folder, lambda c: c["vision_config"].update(fields))


def write(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: void((folder / name).write_text(content))


def void(_: object) -> None:
    """For edits that return something."""


FORGERIES: dict[str, tuple[Callable[[Path], None], str]] = {
    "shard name that climbs": (rename_shard("../../outside.safetensors"), "leaves the checkpoint"),
    "shard name with a hidden climb": (rename_shard("a/../../x.safetensors"), "leaves the check"),
    "absolute shard name": (rename_shard("/etc/x.safetensors"), "leaves the checkpoint"),
    "shard name of a drive": (rename_shard("C:x.safetensors"), "leaves the checkpoint"),
    "shard name with a line break": (rename_shard("a\nb.safetensors"), "leaves the checkpoint"),
    "shard that is not there": (rename_shard("gone.safetensors"), "no file gone.safetensors"),
    "shard that is a pickle": (rename_shard("model.bin"), "not a .safetensors file"),
    "header longer than the file": (claim_header(50_000_000), "header"),
    "header over the limit": (claim_header(100_000_001), "the format allows 100000000"),
    "header of 2^63 bytes": (claim_header(1 << 63), "the format allows 100000000"),
    "overlapping offsets": (
        rewrite_header(lambda h: h[NORM].update(data_offsets=[0, 128])),
        "overlaps",
    ),
    "reversed offsets": (
        rewrite_header(lambda h: h[NORM].update(data_offsets=[128, 0])),
        "two rising data_offsets",
    ),
    "offsets out of range": (
        rewrite_header(lambda h: h[NORM].update(data_offsets=[10**15, 10**15 + 128])),
        "a gap",
    ),
    "dtype of another length": (rewrite_header(lambda h: h[NORM].update(dtype="F64")), "needs 512"),
    "shape of 2^60 rows": (rewrite_header(lambda h: h[NORM].update(shape=[1 << 60])), "needs"),
    "name twice": (name_twice, "occurs twice"),
    "config that is not JSON": (write("config.json", "{'a': 1}"), "not valid JSON"),
    "config of nesting": (write("config.json", '{"a":' * 1_000_000), "not valid JSON"),
    "config of more": (write("config.json", '{"a":' * 2_000_000), "2000000 objects and lists"),
    "config of a number of 10^6 digits": (write("config.json", '{"a":%s}' % ("9" * 10**6)), "not "),
    "a billion layers": (vision(depth=10**9), "config field depth=1000000000"),
    "too many taps": (vision(deepstack_visual_indexes=[0] * 50_000), "has 50000 entries"),
    "width of a billion": (vision(hidden_size=10**9), "config field hidden_size"),
    "index of nesting": (write(INDEX, '{"weight_map":' * 10**6), "not valid JSON"),
    "index of numbers": (write(INDEX, '{"weight_map": {"a": 1}}'), "needs a weight_map"),
}


@pytest.mark.parametrize("name", FORGERIES)
@pytest.mark.parametrize("way", ["folder", "ranges"])
def test_a_forgery_is_a_clear_error_and_nothing_is_written(
    hub: HubServer, folder: Path, tmp_path: Path, name: str, way: str
) -> None:
    forge, message = FORGERIES[name]
    forge(folder)
    before = everything(tmp_path)
    tracemalloc.start()
    try:
        source: Path | str = folder
        if way == "ranges":
            hub.push(REPO, folder)
            source = REPO
        with pytest.raises(CheckpointError) as info:
            load_encoder(source, cache_dir=tmp_path / "cache", progress=False, fetch="ranges")
        assert tracemalloc.get_traced_memory()[1] < 100e6
    finally:
        tracemalloc.stop()
    if name == "header longer than the file" and way == "ranges":
        message = "truncated"
    assert message in str(info.value)
    assert len(str(info.value)) < 5000
    assert everything(tmp_path) == before
    assert not list(tmp_path.rglob("tower/model.safetensors"))


def everything(folder: Path) -> set[Path]:
    """All files outside the caches; locks are none of them."""
    return {path for path in folder.rglob("*") if not {"cache", "home"} & set(path.parts)}


def test_a_gigabyte_config_is_refused_unread(folder: Path) -> None:
    with (folder / "config.json").open("r+b") as file:
        file.write(b'{"a":' * 1000)
        file.truncate(1 << 30)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=r"1073741824 bytes, at most 16000000 are read"):
        load_encoder(folder)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6


def test_an_index_without_end_is_not_fetched_to_its_end(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weights.files.checkpoint.MAX_JSON_BYTES", 3_000_000)
    with (folder / INDEX).open("r+b") as file:
        file.truncate(1 << 30)
    hub.push(REPO, folder)
    with pytest.raises(CheckpointError, match="1073741824 bytes, at most 3000000 are read"):
        load_encoder(REPO, cache_dir=tmp_path / "cache", progress=False)
    cached = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in cached) < 1e5


BULK = """
import json, resource, sys
from weights import CheckpointError, load_encoder

parsed, parse = [], json.loads
json.loads = lambda text, **given: parsed.append(len(text)) or parse(text, **given)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    load_encoder(sys.argv[1])
except CheckpointError as error:
    print(sum(parsed), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    print(str(error)[-300:])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss in KiB")
@pytest.mark.parametrize("place", ["header", "index"])
@pytest.mark.parametrize("part", ["[],", '"ab",'])
def test_bulk_is_refused_unparsed_in_little_memory(folder: Path, place: str, part: str) -> None:
    """99 MB of empty lists took 16 s and 2.2 GB; only their own bytes are held now."""
    bulk = part.encode() * (99_000_000 // len(part))
    text = b'{"weight_map":[' + bulk + b"0]}"
    if place == "index":
        (folder / INDEX).write_bytes(text)
    else:
        raw = (folder / SHARD).read_bytes()
        (folder / SHARD).write_bytes(struct.pack("<Q", len(text)) + text + raw)
    shell = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[4]))
    command = [sys.executable, "-c", BULK, str(folder)]
    done = subprocess.run(command, env=shell, capture_output=True, text=True, check=True)
    figures, message = done.stdout.split("\n", 1)
    characters, grown = map(int, figures.split())
    assert "are read: not the file of a published checkpoint" in message
    assert 0 < characters < 1e6  # the other files
    assert grown * 1024 < 350e6


@pytest.mark.parametrize("name", [SHARD, "config.json", INDEX])
def test_a_link_out_of_the_folder_is_not_followed(folder: Path, tmp_path: Path, name: str) -> None:
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    with pytest.raises(CheckpointError, match=rf"{name} is a link that leaves the checkpoint"):
        load_encoder(folder)


def test_links_that_stay_inside_and_those_of_the_hubs_cache_are_followed(
    hub: HubServer, folder: Path, tmp_path: Path
) -> None:
    expected = load_encoder(folder)
    commit = hub.push(REPO, folder)
    load_encoder(REPO, cache_dir=tmp_path / "cache", progress=False, fetch="shards")
    (snapshot,) = (tmp_path / "cache").glob(f"models--*/snapshots/{commit}")
    for path in folder.glob("*.json"):
        (snapshot / path.name).write_bytes(path.read_bytes())
    assert (snapshot / SHARD).is_symlink()
    assert same_weights(expected, load_encoder(snapshot))
    (folder / SHARD).rename(folder / "elsewhere")
    (folder / SHARD).symlink_to("elsewhere")
    assert same_weights(expected, load_encoder(folder))
    whole = write_seeded_checkpoint(tmp_path / "one", "qwen3_vl", width=64, shards=1)
    (tmp_path / "link.safetensors").symlink_to(whole / "model.safetensors")
    for name in ("config.json", "preprocessor_config.json"):
        (tmp_path / name).write_bytes((whole / name).read_bytes())
    assert load_encoder(tmp_path / "link.safetensors") is not None  # the user's own


class Opened:
    """Raises when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('a pickle was opened')",))


@pytest.mark.parametrize("way", ["folder", "ranges", "shards"])
def test_pickles_and_code_beside_the_tower_are_neither_opened_nor_fetched(
    hub: HubServer, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    def refuse(*arguments: object, **keywords: object) -> None:
        raise SystemExit("a pickle was opened")

    for name in ("pytorch_model.bin", "optimizer.pt", "training_args.bin"):
        (folder / name).write_bytes(pickle.dumps(Opened()))
    (folder / "modeling_qwen.py").write_text("raise SystemExit('remote code was run')")
    edit_config(
        folder, lambda c: c.update(auto_map={"AutoModel": "modeling_qwen.Qwen"}, trust=True)
    )
    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    hub.push(REPO, folder)
    source = folder if way == "folder" else REPO
    fetch = "auto" if way == "folder" else way
    assert load_encoder(source, cache_dir=tmp_path / "cache", progress=False, fetch=fetch)
    asked = {request.path.rpartition("/")[2] for request in hub.requests}
    assert not {name for name in asked if name.endswith((".bin", ".pt", ".py"))}
