"""The script of processes that fetch a tower, and are killed or interrupted."""

from __future__ import annotations

FETCH = """
import os, random, signal, sys, time
from weights.cache.kept_tower import KeptTower
from weights.cache.store import cache_root
from weights.files.index import read_contents
from weights.hub.repo import HubOptions
from weights.hub.hub_checkpoint import open_repo
from weights.files.checkpoint import TowerTensor, PublishedCheckpoint, TowerFiles

def fetch(way="ranges"):
    options = HubOptions(fetch=way, max_workers=3, progress=False)
    checkpoint = open_repo("owner/tower", options)
    contents = read_contents(checkpoint)
    names = [name for name in contents.files if name.startswith("model.visual.")]
    headers = contents.headers({contents.files[name] for name in names})
    prefix = "model.visual."
    tensors = [
        TowerTensor(name, name[len(prefix):], file, headers[file].tensors[name])
        for name, file in contents.files.items()
        if name.startswith(prefix)
    ]
    sizes = {file: header.file_bytes for file, header in headers.items()}
    published = PublishedCheckpoint(prefix, len(contents.files), sizes)
    files = lambda: checkpoint.contents(["config.json", "preprocessor_config.json"])
    return checkpoint.locate(TowerFiles(tensors, published, files))

def whole():
    return [KeptTower(path) for path in cache_root().glob("towers/models--*/*/tower")]

def child():
    number = os.fork()
    if number == 0:
        code = 1
        try:
            fetch()
            code = 0
        finally:
            os._exit(code)
    return number
"""
"""Fetches in forks of a process that has imported everything but torch, so that they start fast."""
