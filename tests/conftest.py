"""Shared by the tests: the default tier, tests in processes of their own, and fixtures."""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from PIL import Image

from encoders import Encoder
from tests.support.commands.command_line import Cli, Run
from tests.support.commands.embed_jobs import run_job
from tests.support.families.one_family import family_of
from tests.support.hub.checkpoints import Written
from tests.support.hub.client import point_client_at
from tests.support.hub.loopback import keep_on_loopback
from tests.support.hub.server import HubServer
from vitgraph.cli import main
from vitgraph.seeded import SEEDED, write_seeded_checkpoint
from vitgraph.video import write_video
from weights import extract_encoder, load_encoder
from weights.published import family_names

OWN_PROCESS = "VITGRAPH_TEST_IN_OWN_PROCESS"
"""The environment variable of a process that runs one test of a third-party package."""

settings.register_profile("vitgraph", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("vitgraph")


def pytest_configure(config: pytest.Config) -> None:
    """Run the fast tier by default; ``-m slow``, ``-m gpu``, ``-m integrations`` ask for others.

    Without a GPU, Triton kernels run in Triton's interpreter, on CPU tensors. Triton reads the
    variable when it is first imported, which no import above does.

    A shell starts a background job with Ctrl-C ignored, and the job's processes inherit that. The
    processes that tests interrupt do not ignore it.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    if not config.option.markexpr:
        config.option.markexpr = "not slow and not gpu and not integrations and not engines"


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--family NAME`` runs the tests of one family; ``make family`` passes it on."""
    parser.addoption("--family", metavar="NAME", help="run the tests of one family alone")


@pytest.hookimpl(tryfirst=True)  # before pytest reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests with a slow tower as slow, and leave out the tests of other families.

    A test is one of a slow tower if a parameter of it is the name. Three tests have the towers
    themselves as parameters, and so are fast with all of them: parity in float64
    (``test_parity_towers.py``), a forward in half precision (``test_contract_forward.py``), a
    packed pair (``test_parity_packed.py``). Without ``--family``, tests of every family stay.
    """
    if OWN_PROCESS not in os.environ:
        begin_with_own_processes(items)
    named = [(item, set(named_by(item))) for item in items]
    if any(names & {*family_names(), *SEEDED} for _, names in named):
        slow = slow_towers()
        for item, names in named:
            if names & slow:
                item.add_marker(pytest.mark.slow)
    family = config.option.family
    if family is None:
        return
    if family not in family_names():
        raise pytest.UsageError(f"--family {family}: must be one of {', '.join(family_names())}")
    kept = [item for item in items if family_of(id_of(item)) == family]
    config.hook.pytest_deselected(items=list(set(items).difference(kept)))
    items[:] = kept


def begin_with_own_processes(items: list[pytest.Item]) -> None:
    """Move the tests of third-party packages to the front, and leave their fixtures out here.

    Of several processes, the first then runs all of them: pytest-xdist steals from the end of what
    a process has left, and a second process would run all such tests of a folder once more.
    Fixtures are made in the tests' own process.
    """
    items.sort(key=lambda item: item.get_closest_marker("integrations") is None)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("integrations"):
            item.fixturenames.clear()


def slow_towers() -> set[str]:
    """The names of slow towers, and of their checkpoints in the form of transformers."""
    from tests.oracles import FAMILIES  # with transformers, which few tests import

    slow = [family.name for family in FAMILIES if family.slow]
    return {*slow, *(f"{name}_hf" for name in slow)}


def named_by(item: pytest.Item) -> list[str]:
    """The parameters of a test that are names, of towers or of anything else."""
    if not isinstance(item, pytest.Function) or "callspec" not in vars(item):
        return []
    return [value for value in item.callspec.params.values() if isinstance(value, str)]


def id_of(item: pytest.Item) -> str:
    """The id of a parametrised test, nothing for another."""
    return item.name.partition("[")[2].removesuffix("]")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect tests without collecting garbage, and leave out later what was imported for them.

    A full collection looks at each of 850,000 objects, nearly all of them modules, which takes half
    a second: 25 seconds of CPU per run of the fast tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Let the interpreter free the modules again as it ends: Triton's report what is left."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test of a third-party package in another process, with all such of its folder.

    What such a package patches, starts or leaves behind then reaches no test of the library. To
    start a process takes longer than most of these tests, so those of ``tests/vitgraph``, of
    ``tests/documents`` and of ``tests/package`` share one each.
    """
    if not pyfuncitem.get_closest_marker("integrations") or OWN_PROCESS in os.environ:
        return None
    folder = top_folder(pyfuncitem)
    items = [item for item in pyfuncitem.session.items if top_folder(item) == folder]
    ids = tuple(item.nodeid for item in items if item.get_closest_marker("integrations"))
    said = in_own_process(pyfuncitem.config.rootpath, ids)
    lines = said.splitlines()
    if f"PASSED {pyfuncitem.nodeid}" in lines:
        return True
    file = pyfuncitem.nodeid.partition("::")[0]
    skipped = [line for line in lines if line.startswith("SKIPPED") and f" {file}:" in line]
    if skipped and not any(line.startswith(("FAILED", "ERROR")) for line in lines):
        pytest.skip("; ".join(skipped))
    pytest.fail(said, pytrace=False)


def top_folder(item: pytest.Item) -> str:
    """The folder of ``tests`` in which the file of a test lies, however deep."""
    return item.nodeid.split("/")[1]


@functools.cache
def in_own_process(root: Path, ids: tuple[str, ...]) -> str:
    """Run tests in a process of their own, and return what it said, with a line per test."""
    command = [sys.executable, "-m", "pytest", "-m", "integrations", "-rA", *ids]
    environment = {**os.environ, OWN_PROCESS: "1"}
    run = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    return run.stdout + run.stderr


@pytest.fixture(scope="session", autouse=True)
def on_loopback_alone() -> Iterator[None]:
    """Refuse the sockets of all tests, of GPUs, too, another machine; see ``keep_on_loopback``.

    Engines' tests run without this file, in an environment of their own.
    """
    with pytest.MonkeyPatch.context() as patch:
        keep_on_loopback(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_tables_of_the_user(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep tables of times in a folder of this run; ``tests/gpu`` gives every test its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITGRAPH_TABLES", str(tmp_path_factory.mktemp("tables")))
        yield


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A hub on loopback that the Hub client talks to."""
    with HubServer() as server:
        point_client_at(server, monkeypatch, tmp_path)
        yield server


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A ``cache_dir`` with nothing in it."""
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small checkpoint: shards that hold the tower, and one that does not."""
    return write_seeded_checkpoint(tmp_path / "repo", "qwen3_vl", width=64, decoy_shards=1)


@pytest.fixture
def qwen3(tmp_path: Path) -> Path:
    """A small checkpoint of Qwen3-VL, which a test may change."""
    return write_seeded_checkpoint(tmp_path / "qwen3", "qwen3_vl", width=64)


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    """A small checkpoint of InternVL in its own layout, which a test may change."""
    return write_seeded_checkpoint(tmp_path / "chat", "intern_vit_300m", width=64)


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Writes a small checkpoint, by name and depth, once per process; no test changes it."""
    parent = tmp_path_factory.mktemp("written")

    @functools.cache
    def write(name: str, depth: int = 2) -> Path:
        return write_seeded_checkpoint(parent / f"{name}-{depth}", name, width=64, depth=depth)

    return write


@pytest.fixture(scope="session")
def extracted(tmp_path_factory: pytest.TempPathFactory, written: Written) -> Written:
    """Extracts the tower of a checkpoint of ``written`` once per process; no test changes it."""
    parent = tmp_path_factory.mktemp("extracted")

    @functools.cache
    def extract(name: str, depth: int = 2) -> Path:
        return extract_encoder(written(name, depth), parent / f"{name}-{depth}")

    return extract


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint that no test changes: two shards with the tower, two without."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return write_seeded_checkpoint(folder, "qwen3_vl", width=64, decoy_shards=2)


@pytest.fixture(scope="session")
def repo(written: Written) -> Path:
    """A small checkpoint of Qwen3-VL that no test changes."""
    return written("qwen3_vl")


@pytest.fixture(scope="module")
def encoder(repo: Path) -> Encoder:
    """The encoder of ``repo`` in float32, which no test changes."""
    return load_encoder(repo, dtype=torch.float32, progress=False)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of twelve small photographs, three of them equal."""
    from tests.support.photographs import china

    folder = tmp_path_factory.mktemp("photos")
    for number in range(12):
        left = 0 if number in (3, 7) else 20 * number
        china().crop((left, 0, left + 70, 70)).save(folder / f"{number:02d}.png")
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seeded checkpoint of Qwen3-VL that no test changes."""
    return write_seeded_checkpoint(tmp_path_factory.mktemp("checkpoint"), "qwen3_vl")


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """An image file of random pixels."""
    pixels = np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    return tmp_path / "photo.png"


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """A video file of six grey frames."""
    frames = torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 3, 64, 96) * 30
    write_video(tmp_path / "clip.mp4", frames.contiguous(), 3)
    return tmp_path / "clip.mp4"


@pytest.fixture
def command(repo: Path, photos: Path, tmp_path: Path) -> list[str]:
    """The arguments that embed the photographs in shards of two."""
    out = str(tmp_path / "out")
    options = ["--out", out, "--shard-items", "2", "--dtype", "float32", "--workers", "1"]
    return ["embed", str(repo), str(photos), *options, "--no-progress"]


@pytest.fixture
def embed(repo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., int]:
    """Embeds a source into a folder of ``tmp_path``, ``out`` by default; returns the exit code."""

    def run(source: object, *arguments: object, out: str = "out") -> int:
        return run_job(repo, source, tmp_path / out, *arguments)

    return run


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs ``vitgraph`` in this process; the result holds its exit code and what it printed."""

    def run(*arguments: object) -> Run:
        code = main([str(argument) for argument in arguments])
        return Run(code, *capsys.readouterr())

    return run


@pytest.fixture
def fused_in_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerated encoders run their fused blocks on the CPU, too, the kernels interpreted."""
    for module in ("encoders.accelerated", "encoders.accelerated.accelerator"):
        monkeypatch.setattr(f"{module}.obstacle", lambda device, dtype: None)
    monkeypatch.setattr("encoders.accelerated.fp8_obstacle", lambda device, dtype: None)
    monkeypatch.setattr("encoders.accelerated.attention.choices.TRIALS", ((3, 40),))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch, fused_in_interpreter: None) -> None:
    """The same, with torch's own steps in the places of the element-wise kernels."""
    from tests.support.accelerated.cases import (  # with transformers
        copy_weights_in_numpy,
        run_steps_in_torch,
    )

    run_steps_in_torch(monkeypatch)
    copy_weights_in_numpy(monkeypatch)
