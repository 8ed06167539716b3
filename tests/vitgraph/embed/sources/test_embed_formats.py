"""``vitgraph embed`` reads every format that ``encode`` reads, from every source."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

from encoders import Encoder
from tests.support.commands.embed_jobs import close, run_job, upload
from tests.support.fakes.google_store import Buckets
from tests.support.photographs import china
from vitgraph.features import load_embeddings

# Suffixes of all formats that PIL 11 both writes and decodes, and the mode that it writes.
FORMATS = {
    **dict.fromkeys((".bmp", ".dds", ".dib", ".gif", ".icns", ".ico", ".j2k"), "RGB"),
    **dict.fromkeys((".jp2", ".jpg", ".mpo", ".pcx", ".png", ".ppm", ".sgi", ".tga"), "RGB"),
    **dict.fromkeys((".tif", ".webp"), "RGB"),
    **dict.fromkeys((".msp", ".xbm"), "1"),
    ".blp": "P",
    ".pgm": "L",
}
SMALL = ("--min-pixels", 4096, "--max-pixels", 8192)
"""The options that keep the encoder's work small."""
PIXELS = 266
"""The width of the images, whose low byte is a line feed in many formats. PIL then takes a file for
one that may begin with lines of text, and asks it for ``readline``."""


@pytest.fixture(autouse=True)
def alphabetical(monkeypatch: pytest.MonkeyPatch) -> None:
    """PIL tries its formats in the order of a new process, where no image was written yet."""
    Image.init()
    monkeypatch.setattr(Image, "ID", sorted(Image.ID))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one image of each format."""
    folder = tmp_path_factory.mktemp("pictures")
    for suffix, mode in FORMATS.items():
        china().crop((0, 0, PIXELS, 20)).convert(mode).save(folder / f"picture{suffix}")
    return folder


class Sources(NamedTuple):
    """Each function writes the images of a folder into another folder, and returns a source."""

    pictures: Path
    folder: Path

    def files(self) -> str:
        return str(self.pictures)

    def lines(self) -> str:
        text = "".join(f"{path}\n" for path in sorted(self.pictures.iterdir()))
        (self.folder / "list.txt").write_text(text)
        return str(self.folder / "list.txt")

    def tar(self) -> str:
        with tarfile.open(self.folder / "pictures.tar", "w") as file:
            for path in sorted(self.pictures.iterdir()):
                file.add(path, path.name)
        return str(self.folder / "pictures.tar")

    def table(self) -> str:
        arrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet

        cells = [path.read_bytes() for path in sorted(self.pictures.iterdir())]
        parquet.write_table(arrow.table({"image": cells}), self.folder / "pictures.parquet")
        return str(self.folder / "pictures.parquet")

    def store(self) -> str:
        upload(Buckets(), self.pictures, "gs://bucket/pictures")
        return "gs://bucket/pictures"


@pytest.mark.parametrize(
    "source", [Sources.files, Sources.lines, Sources.tar, Sources.table, Sources.store]
)
@pytest.mark.usefixtures("gs")
def test_a_job_reads_every_format_from_every_source(
    source: Callable[[Sources], str], pictures: Path, repo: Path, encoder: Encoder, tmp_path: Path
) -> None:
    given, out = source(Sources(pictures, tmp_path)), tmp_path / "out"
    assert run_job(repo, given, out, "--any-path", *SMALL) == 0
    keys, vectors = load_embeddings(out)
    paths = sorted(pictures.iterdir())
    assert len(keys) == len(paths)
    wanted = encoder.embed(list(paths), pool="mean", min_pixels=4096, max_pixels=8192)
    for path, vector, expected in zip(paths, vectors, wanted, strict=True):
        assert close(vector, expected.numpy()), path.name


class Minimal:
    """A file with the three methods that PIL's documentation asks for."""

    def __init__(self, content: bytes) -> None:
        self._file = io.BytesIO(content)

    def read(self, size: int = -1, /) -> bytes:
        return self._file.read(size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()


@pytest.mark.parametrize("suffix", FORMATS)
def test_a_file_of_three_methods_is_read(suffix: str, pictures: Path, encoder: Encoder) -> None:
    path = pictures / f"picture{suffix}"
    file = Minimal(path.read_bytes())
    for _ in range(2):  # the second time from the end
        found, wanted = encoder.preprocess([file]), encoder.preprocess([path])
        assert np.array_equal(found.pixel_values.numpy(), wanted.pixel_values.numpy())
