"""Every file in ``examples`` runs as its first lines say, with a small checkpoint, on the CPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.photographs import china
from vitgraph.features import load_embeddings
from weights import load_encoder

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SECONDS = 240
ROUNDING = 5e-4
"""How far batches of bfloat16 may move a vector; photographs are at least 1.6e-3 apart."""
NAMES = sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh"))


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Six photographs; the fourth file is none."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(6):
        china().crop((20 * number, 0, 20 * number + 80, 70)).save(folder / f"{number}.png")
    (folder / "3.png").write_text("no image")
    return folder


@pytest.fixture
def wanted(repo: Path, photos: Path) -> np.ndarray[Any, Any]:
    """The vectors of the five photographs, of length 1."""
    encoder = load_encoder(repo, progress=False)
    paths = [path for path in sorted(photos.iterdir()) if path.name != "3.png"]
    return encoder.embed(paths, pool="mean", normalize=True).numpy()


def needs(library: str) -> None:
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")


def run(*command: object, **shell: str) -> str:
    """What a command prints on stdout."""
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths, **shell}
    done = subprocess.run(
        [str(each) for each in command],
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_is_listed_and_run_here() -> None:
    listed = (EXAMPLES / "README.md").read_text()
    tested = Path(__file__).read_text()
    for name in NAMES:
        assert f"| `{name}` |" in listed
        assert f'EXAMPLES / "{name}"' in tested


@pytest.mark.integrations
def test_ray_data_writes_the_vectors_of_encode(
    repo: Path, photos: Path, wanted: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    """On a Ray that is started on this machine."""
    needs("ray")
    out = tmp_path / "vectors"
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DATA_DISABLE_PROGRESS_BARS": "1"}
    options = ("--actors", 1, "--gpus", 0, "--cpus", 0.5, "--batch-size", 2)
    command = (sys.executable, EXAMPLES / "ray_data.py", repo, photos, out, *options)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as sockets:
        run(*command, **quiet, RAY_TMPDIR=sockets)
    from pyarrow import parquet

    rows = sorted(parquet.read_table(out).to_pylist(), key=lambda row: row["path"])
    assert [Path(row["path"]).name for row in rows] == [f"{n}.png" for n in range(6)]
    assert "cannot be read as an image" in rows[3]["error"]
    assert np.isnan(rows.pop(3)["embedding"]).all()
    assert all(row["error"] == "" for row in rows)
    found = np.array([row["embedding"] for row in rows], np.float32)
    assert np.allclose(found, wanted, atol=ROUNDING)


@pytest.mark.integrations
def test_datasets_map_adds_the_vectors_of_encode(
    repo: Path, photos: Path, wanted: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    """In two processes; ``test_embed_batch.py`` calls what one process calls, without a rank."""
    needs("datasets")
    from datasets import load_from_disk

    out = tmp_path / "vectors"
    command = (sys.executable, EXAMPLES / "datasets_map.py", repo, photos, out)
    cache = {"HF_DATASETS_CACHE": str(tmp_path / "cache")}
    run(*command, "--processes", 2, "--batch-size", 2, **cache)
    found = load_from_disk(str(out))
    assert {"image", "embedding", "error"} <= set(found.column_names)
    rows = found.select_columns(["embedding", "error"]).to_list()
    assert "cannot be read as an image" in rows[3]["error"]
    assert np.isnan(rows.pop(3)["embedding"]).all()
    vectors = np.array([row["embedding"] for row in rows], np.float32)
    assert np.allclose(vectors, wanted, atol=ROUNDING)


@pytest.mark.slow
def test_data_parallel_prints_the_shape_of_every_image(repo: Path, photos: Path) -> None:
    launch = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", 2)
    local = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0")
    names = [photos / f"{number}.png" for number in (0, 1, 2)]
    said = run(*launch, *local, EXAMPLES / "data_parallel.py", repo, *names)
    encoder = load_encoder(repo, progress=False)
    for name, item in zip(names, encoder.encode(names), strict=True):
        assert f"{name} {tuple(item.pooler_output.shape)}" in said


@pytest.mark.slow
def test_a_slurm_job_writes_and_checks_all_shards(
    repo: Path, photos: Path, wanted: np.ndarray[Any, Any], tmp_path: Path
) -> None:
    """An ``srun`` that starts two tasks stands in for SLURM's."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash")
    programs = tmp_path / "bin"
    programs.mkdir()
    start = 'SLURM_PROCID=$rank SLURM_NTASKS=2 SLURM_LOCALID=$rank "$@" & tasks+=($!)'
    wait = 'for task in "${tasks[@]}"; do wait $task || code=$?; done; exit $code'
    texts = {
        "srun": f"#!{bash}\ncode=0 tasks=()\nfor rank in 0 1; do {start}\ndone\n{wait}\n",
        "vitgraph": f'#!{bash}\nexec {sys.executable} -m vitgraph "$@"\n',
    }
    for name, text in texts.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    out, path = tmp_path / "vectors", f"{programs}{os.pathsep}{os.environ['PATH']}"
    command = (bash, EXAMPLES / "embed_slurm.sh", repo, photos, out, "--shard-items", 2)
    said = run(*command, "--normalize", PATH=path)
    assert "complete, 3 shards with 6 files" in said
    assert "3.png" in (out / "errors.csv").read_text()
    keys, matrix = load_embeddings(out)
    assert keys == [f"{number}.png" for number in (0, 1, 2, 4, 5)]
    assert np.allclose(matrix, wanted, atol=ROUNDING)
