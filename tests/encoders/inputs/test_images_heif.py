"""Photographs of phones (HEIC): read where pillow-heif is installed, else the extra is named."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from encoders.inputs.intake import to_rgb
from tests.support.photographs import china

pillow_heif = pytest.importorskip("pillow_heif")


@pytest.fixture(autouse=True)
def unregistered(monkeypatch: pytest.MonkeyPatch) -> None:
    """PIL as it is before anything has told it of HEIF."""
    Image.init()  # else PIL would add the formats that it loads late to the copies below
    monkeypatch.setattr(Image, "OPEN", {k: v for k, v in Image.OPEN.items() if k != "HEIF"})
    monkeypatch.setattr(Image, "ID", [name for name in Image.ID if name != "HEIF"])


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "IMG_0001.HEIC"
    pillow_heif.from_pillow(china().resize((96, 64))).save(path, quality=-1)
    return path


def test_a_heic_photograph_is_read_from_a_path_bytes_and_a_file(photo: Path) -> None:
    wanted = np.asarray(china().resize((96, 64))).astype(int)
    with photo.open("rb") as file:
        for form in (photo, photo.read_bytes(), file, io.BytesIO(photo.read_bytes())):
            pixels = to_rgb(form).permute(1, 2, 0).numpy().astype(int)
            assert np.abs(pixels - wanted).mean() < 4  # the format halves the colours' resolution


def test_a_heic_photograph_is_turned_upright_once(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "turned.heic"
    pillow_heif.register_heif_opener()
    china().resize((96, 64)).save(path, exif=exif.tobytes(), quality=-1)
    upright = china().resize((96, 64)).transpose(Image.Transpose.ROTATE_270)
    got = to_rgb(path).int()
    assert got.shape == (3, 96, 64)
    assert float((got - to_rgb(upright).int()).abs().float().mean()) < 4


def test_without_pillow_heif_the_package_is_named(
    photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    told = r"is a HEIF file .*pip install 'pillow-heif>=1.0'"
    with pytest.raises(ValueError, match=rf"IMG_0001\.HEIC: {told}"):
        to_rgb(photo)
    with pytest.raises(ValueError, match=told):
        to_rgb(photo.read_bytes())


def test_a_damaged_heic_file_is_refused_by_its_name(photo: Path) -> None:
    photo.write_bytes(photo.read_bytes()[:200])
    for _ in range(2):  # before PIL knows the format, and after
        with pytest.raises(ValueError, match=r"IMG_0001\.HEIC: cannot be read as an image"):
            to_rgb(photo)


def test_other_files_are_not_taken_for_heif(tmp_path: Path) -> None:
    for content in (b"", b"ftyp", b"\0\0\0\x18ftypmp42\0\0\0\0mp42isom", b"heic" * 9):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ValueError, match="format that PIL does not know"):
            to_rgb(tmp_path / "file")
    assert "HEIF" not in Image.OPEN
    assert torch.equal(to_rgb(china()), to_rgb(china()))
