"""Tables of costs that are kept from one process to the next, in a folder of the user's.

A kept table is a cache. It is found again by the fingerprint of what it was measured on, by the
budgets, and by the versions of the packages that its times depend on. Whatever is wrong with a
file, the times are measured again, and several processes may write the same file at once.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from encoders.contract import Accelerator

from .budgets import BudgetSet
from .costs import CostTable, read_tables, write_tables

VARIABLE = "VITGRAPH_TABLES"
"""The environment variable that names the folder of kept tables, or is "off"."""
OFF = "off"
AUTO = "auto"
"""The argument ``table`` of a graphed encoder that asks for the file of :func:`kept_file`."""
PACKAGES = ("vitgraph", "triton", "flash-attn-4")
"""The packages whose versions tell kept tables apart: with another one, kernels are others."""


class KeptTable(NamedTuple):
    """What the command line lists of a kept table."""

    name: str
    """The name of its file in the folder of kept tables, without the suffix."""
    encoder: str
    """The class of the encoder; empty if the file is not a table."""
    dtype: str
    device: str
    budgets: int
    """The number of its budgets, of all input paths together."""
    bytes: int


def tables_folder() -> Path | None:
    """Return the folder of kept tables, which may not exist yet; None if none are to be kept.

    It is what ``VITGRAPH_TABLES`` names, else ``vitgraph/tables`` in ``HF_HOME``, which is found as
    the Hub client finds it.
    """
    named = os.environ.get(VARIABLE)
    if named == OFF:
        return None
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or os.path.join(cache, "huggingface")
    folder = named or os.path.join(home, "vitgraph", "tables")
    return Path(os.path.expandvars(os.path.expanduser(folder)))


def kept_file(
    made_on: Mapping[str, Mapping[str, str]], budget_sets: Mapping[str, BudgetSet]
) -> Path | None:
    """Return the file in which the tables of an encoder are kept; None if none are to be kept.

    Args:
        made_on: the :func:`~graphwrap.measuring.fingerprint` of each input path.
        budget_sets: the budgets of each input path, before any is lowered to fit memory.
    """
    folder = tables_folder()
    if folder is None:
        return None
    budgets = {name: budget_set.budgets for name, budget_set in budget_sets.items()}
    key = json.dumps([made_on, budgets, [_version(package) for package in PACKAGES]])
    encoder = next(iter(made_on.values()))["encoder"]
    return folder / f"{encoder}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def read_kept(
    file: Path,
    made_on: Mapping[str, Mapping[str, str]],
    accelerators: Mapping[str, Accelerator | None],
) -> dict[str, CostTable]:
    """Return the kept table of each input path, or none if the file is missing or of no use here.

    The arguments but ``file`` are those of :meth:`CostTable.apply`, by input path.
    """
    with suppress(ValueError):
        tables = read_tables(file, made_on)
        for name, table in tables.items():
            table.apply(made_on[name], accelerators[name])
        return {name: replace(table, kept=True) for name, table in tables.items()}
    return {}


def keep(file: Path, tables: Mapping[str, CostTable]) -> None:
    """Write tables to ``file``, so that a reader finds all of them or what was there before.

    An OSError is raised if the folder cannot be made or written.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(f".{uuid4().hex}.tmp")
    try:
        write_tables(unfinished, tables)
        os.replace(unfinished, file)
    finally:
        unfinished.unlink(missing_ok=True)


def list_tables() -> list[KeptTable]:
    """Return the kept tables, sorted by name."""
    return sorted(map(_describe, _files()))


def remove_tables(names: Iterable[str] | None = None) -> int:
    """Remove kept tables, and return how many bytes they had.

    Args:
        names: names as :func:`list_tables` returns them; None removes all.

    Raises:
        ValueError: no table has one of the names; then none is removed.
    """
    files = {file.stem: file for file in _files()}
    chosen = list(files) if names is None else list(names)
    if missing := [name for name in chosen if name not in files]:
        kept = ", ".join(sorted(files)) or "none"
        raise ValueError(f"no table {', '.join(missing)} is kept; there are: {kept}")
    sizes = [files[name].stat().st_size for name in dict.fromkeys(chosen)]
    for name in chosen:
        files[name].unlink(missing_ok=True)
    return sum(sizes)


def _files() -> list[Path]:
    folder = tables_folder()
    return [] if folder is None else [file for file in folder.glob("*.json") if file.is_file()]


def _describe(file: Path) -> KeptTable:
    size = file.stat().st_size
    try:
        tables = read_tables(file, json.loads(file.read_text()))
        made_on = next(iter(tables.values())).made_on
    except (OSError, ValueError, TypeError, RecursionError, StopIteration):
        return KeptTable(file.stem, "", "", "", 0, size)
    budgets = sum(len(table.costs.replays) for table in tables.values())
    encoder, dtype, device = (made_on.get(name, "") for name in ("encoder", "dtype", "device"))
    return KeptTable(file.stem, encoder, dtype, device, budgets, size)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
