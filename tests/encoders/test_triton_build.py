"""The hash of Triton's files is computed once per machine, not once per process."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest

from encoders.triton_build import keep_build_hash


class Folder:
    """A folder of Triton's cache."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get_file(self, filename: str) -> str | None:
        file = self.folder / filename
        return str(file) if file.exists() else None

    def put(self, data: str, filename: str) -> str:
        self.folder.mkdir()
        (self.folder / filename).write_text(data)
        return str(self.folder / filename)


class Machine:
    """A machine with a Triton of a few bytes."""

    def __init__(self, folder: Path) -> None:
        self.files = ("runtime/cache.py", "_C/libtriton.so", "language/extra/libdevice.py")
        self.package, self.kernels = folder / "triton", folder / "kernels"
        self.computed = 0
        self.kernels.mkdir()
        for name in self.files:
            (self.package / name).parent.mkdir(parents=True)
            (self.package / name).write_text(name)

    def process(self) -> ModuleType:
        """Triton's module in a new process, after two modules with kernels were imported."""

        @lru_cache
        def triton_key() -> str:
            self.computed += 1
            return "".join((self.package / name).read_text() for name in self.files)

        cache = ModuleType("cache")
        cache.__file__ = str(self.package / "runtime" / "cache.py")
        vars(cache).update(triton_key=triton_key)
        vars(cache).update(get_cache_manager=lambda key: Folder(self.kernels / key))
        keep_build_hash(cache)
        keep_build_hash(cache)
        return cache


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_second_process_reads_the_hash_of_the_first(machine: Machine) -> None:
    first, second = machine.process(), machine.process()
    hashes = {cache.triton_key() for cache in (first, first, second)}
    assert hashes == {"".join(machine.files)}
    assert machine.computed == 1


@pytest.mark.parametrize("number", range(3))
def test_a_changed_file_of_triton_changes_its_hash(machine: Machine, number: int) -> None:
    before = machine.process().triton_key()
    file = machine.package / machine.files[number]
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    file.write_text(file.read_text().upper())  # as many bytes as before
    os.utime(file, ns=times)
    name = machine.files[number]
    assert machine.process().triton_key() == before.replace(name, name.upper())
    assert machine.computed == 2


def test_a_cache_that_cannot_be_written_is_no_error(machine: Machine) -> None:
    machine.kernels.rmdir()
    assert machine.process().triton_key() == "".join(machine.files)


def test_a_triton_without_that_hash_stays_as_it_is() -> None:
    cache = ModuleType("cache")
    before = dict(vars(cache))
    keep_build_hash(cache)
    assert vars(cache) == before
