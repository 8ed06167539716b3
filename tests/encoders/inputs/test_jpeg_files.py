"""JPEG files come out as PIL decodes them, to the bit, whichever decoder is installed."""

from __future__ import annotations

import io
import random
import struct
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from encoders.inputs import jpeg_files
from encoders.inputs.image_files import open_image
from encoders.inputs.intake import to_rgb
from tests.support.photographs import china

simplejpeg = pytest.importorskip("simplejpeg")
SIZES = [(1, 1), (7, 5), (8, 8), (9, 17), (64, 48), (161, 97), (333, 16)]
ADOBE_RGB = b"\xff\xee\x00\x0eAdobe\x00\x64\x00\x00\x00\x00\x00"  # transform 0: not YCbCr


def saved(size: tuple[int, int] = (161, 97), mode: str = "RGB", **options: object) -> bytes:
    image = china().resize(size).convert(mode)
    image.save(file := io.BytesIO(), "JPEG", **options)
    return file.getvalue()


def oriented(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return saved(exif=exif)


def without_jfif(data: bytes) -> bytes:
    """Return a JPEG without its APP0 segment, so that only Adobe's says what the colours are."""
    length = int.from_bytes(data[4:6], "big")
    return data[:2] + data[4 + length :]


def with_segment(marker: int, content: bytes, data: bytes | None = None) -> bytes:
    """Return a JPEG with one more segment, after that of JFIF."""
    data = saved() if data is None else data
    segment = b"\xff" + bytes([marker]) + (len(content) + 2).to_bytes(2, "big") + content
    return data[:20] + segment + data[20:]


def with_exif(
    *entries: tuple[int, int, int, int], order: str = "<", more: bytes = bytes(40)
) -> bytes:
    """Return a JPEG with EXIF of entries of tag, type, number and value."""
    head = b"II*\0" if order == "<" else b"MM\0*"
    tiff = head + struct.pack(order + "LH", 8, len(entries))
    for tag, kind, number, value in entries:
        value <<= 16 if order == ">" and kind == 3 and number == 1 else 0
        tiff += struct.pack(order + "HHLL", tag, kind, number, value)
    return with_segment(0xE1, b"Exif\0\0" + tiff + bytes(4) + more)


def with_xmp(orientation: int, data: bytes | None = None) -> bytes:
    name = b"http://ns.adobe.com/xap/1.0/\0"
    return with_segment(0xE1, name + b'<x tiff:Orientation="%d"/>' % orientation, data)


TURN, MAKER, RESOLUTION = (0x112, 3, 1, 6), (0x10F, 2, 9, 40), (0x11A, 5, 1, 50)
"""Entries of EXIF: an orientation, and values that lie where ``with_exif`` has zeros."""


def two_pictures() -> bytes:
    china().save(file := io.BytesIO(), "MPO", save_all=True, append_images=[china()])
    return file.getvalue()


def grey_of_stated_sampling() -> bytes:
    """Return a grey JPEG whose only component states a sampling of 2x2, which has no meaning."""
    data = saved(mode="L")
    frame = data.index(b"\xff\xc0")
    return data[: frame + 11] + b"\x22" + data[frame + 12 :]


FILES = {
    **{f"subsampling {n}": saved(subsampling=n) for n in range(3)},
    **{f"progressive, subsampling {n}": saved(subsampling=n, progressive=True) for n in range(3)},
    **{f"{w}x{h}": saved((w, h)) for w, h in SIZES},
    **{f"quality {n}": saved(quality=n) for n in (1, 30, 100)},
    **{f"orientation {n}": oriented(n) for n in range(10)},
    "grey": saved(mode="L"),
    "grey, progressive": saved(mode="L", progressive=True),
    "grey with a stated sampling": grey_of_stated_sampling(),
    "CMYK": saved(mode="CMYK"),
    "restart markers": saved(restart_marker_blocks=3),
    "restart markers, progressive": saved(restart_marker_rows=1, progressive=True),
    "stored as RGB": saved(keep_rgb=True),
    "Adobe transform 0": b"\xff\xd8" + ADOBE_RGB + without_jfif(saved())[2:],
    "Adobe transform 0 and JFIF": b"\xff\xd8" + ADOBE_RGB + saved()[2:],
    "no JFIF": without_jfif(saved()),
    **{
        f"EXIF, order {order}, orientation {turn}": with_exif(
            MAKER, (0x112, 3, 1, turn), RESOLUTION, order=order
        )
        for order in "<>"
        for turn in (0, 1, 3, 6, 9)
    },
    "EXIF without orientation": with_exif(MAKER),
    "EXIF without entries": with_exif(),
    "EXIF that orients twice": with_exif(TURN, (0x112, 3, 1, 3)),
    "EXIF of a long orientation": with_exif((0x112, 4, 1, 6)),
    "EXIF of a float orientation": with_exif((0x112, 11, 1, 0x40C00000)),
    "EXIF of two orientations": with_exif((0x112, 3, 2, 6)),
    "EXIF with a value outside before": with_exif((0x10F, 2, 900, 40), TURN),
    "EXIF with a value outside after": with_exif(TURN, (0x10F, 2, 900, 40)),
    "EXIF with more values than bytes": with_exif(*[(n, 2, 30, 8) for n in range(9)], TURN),
    "EXIF of an unknown type": with_exif((0x10F, 77, 1, 0), TURN),
    "EXIF whose resolution is one byte": with_exif(TURN, (0x128, 3, 1, 2), (0x11A, 7, 1, 0)),
    "EXIF of two units": with_exif(TURN, (0x128, 3, 2, 2), RESOLUTION),
    "EXIF that ends in its entries": with_exif(TURN, MAKER, more=b"")[:-4],
    "EXIF of no TIFF": with_segment(0xE1, b"Exif\0\0" + bytes(60)),
    "EXIF alone": with_segment(0xE1, b"Exif\0\0"),
    "EXIF in parts": with_segment(0xE1, b"Exif\0\0" + bytes(9), with_exif(TURN)),
    "EXIF, its name twice": with_segment(0xE1, b"Exif\0\0Exif\0\0II*\0" + bytes(30)),
    "XMP that orients": with_xmp(6),
    "XMP that orients, and EXIF": with_xmp(3, with_exif(TURN)),
    "XMP that orients, and EXIF without": with_xmp(3, with_exif(MAKER)),
    "Photoshop": with_segment(0xED, b"Photoshop 3.0\x008BIM\x04\x04" + bytes(8)),
    "Photoshop cut off": with_segment(0xED, b"Photoshop 3.0\x008BIM\x04\x04"),
    "Photoshop cut off, resolution": with_segment(
        0xED, b"Photoshop 3.0\x008BIM\x03\xed" + bytes(7)
    ),
    "other applications": with_segment(0xEB, b"JP", with_segment(0xEC, b"Ducky")),
    "several pictures stated": with_segment(0xE2, b"MPF\0" + bytes(9)),
    "bytes after the end": saved() + bytes(1000),
    "bytes between segments": saved()[:2] + b"\xff" * 5 + saved()[2:],
    "two pictures": two_pictures(),
    "no end marker": saved()[:-2],
    "half": saved()[: len(saved()) // 2],
    "half, progressive": saved(progressive=True)[:3000],
    "the header alone": saved()[:640],
    "no bytes": b"",
}


def of_pil(data: bytes) -> Tensor | str:
    """Return what PIL makes of a file: the pixels, or the message of the error."""
    try:
        return to_rgb(open_image(data))
    except ValueError as error:
        return str(error)


def ours(data: bytes | Path) -> Tensor | str:
    try:
        return to_rgb(data)
    except ValueError as error:
        return str(error)


def require_equal(data: bytes) -> None:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        got = ours(data)
    with warnings.catch_warnings(record=True) as wanted_warned:
        warnings.simplefilter("always")
        wanted = of_pil(data)
    assert [str(one.message) for one in warned] == [str(one.message) for one in wanted_warned]
    if isinstance(got, Tensor) and isinstance(wanted, Tensor):
        assert torch.equal(got, wanted)
    else:
        assert got == wanted


@pytest.mark.parametrize("name", FILES)
def test_a_jpeg_has_the_pixels_or_the_error_of_pil(name: str) -> None:
    require_equal(FILES[name])


@pytest.mark.parametrize("name", ["subsampling 2", "grey", "progressive, subsampling 2"])
def test_whole_jpegs_are_decoded_without_pil(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = of_pil(FILES[name])
    monkeypatch.setattr(Image.Image, "load", None)
    got = to_rgb(FILES[name])
    assert isinstance(wanted, Tensor)
    assert torch.equal(got, wanted)


def test_damaged_jpegs_have_the_pixels_or_the_error_of_pil() -> None:
    rng = random.Random(0)
    whole = [saved((60, 40), subsampling=n % 3, progressive=n > 2) for n in range(6)]
    whole.append(saved((60, 40), restart_marker_blocks=2))
    for number in range(420):
        damaged = bytearray(whole[number % len(whole)])
        for _ in range(rng.choice((1, 3, 20))):
            damaged[rng.randrange(2, len(damaged))] = rng.randrange(256)
        end = rng.choice((len(damaged), rng.randrange(len(damaged))))
        require_equal(bytes(damaged[:end]))


def test_a_jpeg_over_pil_s_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match="MAX_IMAGE_PIXELS"):
        to_rgb(saved())
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 161 * 97 - 1)
    with pytest.warns(Image.DecompressionBombWarning):
        to_rgb(saved())


def test_truncated_jpegs_are_read_where_pil_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.ImageFile.LOAD_TRUNCATED_IMAGES", True)
    assert isinstance(ours(FILES["half"]), Tensor)
    require_equal(FILES["half"])


def test_jpegs_of_paths_and_open_files_are_alike(tmp_path: Path) -> None:
    path = tmp_path / "turned.jpg"
    path.write_bytes(FILES["orientation 6"])
    wanted = of_pil(FILES["orientation 6"])
    assert isinstance(wanted, Tensor)
    assert torch.equal(to_rgb(path), wanted)
    with path.open("rb") as file:
        assert torch.equal(to_rgb(file), wanted)
    path.write_bytes(FILES["half"])
    assert ours(path) == f"{path}: {ours(FILES['half'])}"


def test_a_large_jpeg_of_a_path_is_read_whole(tmp_path: Path) -> None:
    noise = Image.frombytes("RGB", (480, 480), random.Random(0).randbytes(480 * 480 * 3))
    noise.save(path := tmp_path / "noise.jpg", quality=100)
    assert path.stat().st_size > 300_000
    assert torch.equal(to_rgb(path), to_rgb(open_image(path)))


def test_pil_decodes_jpegs_if_its_libjpeg_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.features.check_feature", lambda feature: False)
    monkeypatch.setattr(simplejpeg, "decode_jpeg", None)
    jpeg_files.is_fast.cache_clear()
    try:
        require_equal(FILES["subsampling 2"])
    finally:
        jpeg_files.is_fast.cache_clear()


@pytest.mark.parametrize(
    "name",
    [
        *("subsampling 0", "grey", "progressive, subsampling 2", "Photoshop", "other applications"),
        *("EXIF, order <, orientation 6", "EXIF, order >, orientation 3"),
        *("orientation 8", "EXIF without orientation", "XMP that orients, and EXIF"),
    ],
)
def test_plain_headers_are_read_without_pil(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wanted = of_pil(FILES[name])
    path = tmp_path / "plain.jpg"
    path.write_bytes(FILES[name])
    monkeypatch.setattr(Image, "open", None)
    assert isinstance(wanted, Tensor)
    with path.open("rb") as file:
        file.seek(5)
        for source in (FILES[name], bytearray(FILES[name]), path, io.BytesIO(FILES[name]), file):
            assert torch.equal(to_rgb(source), wanted)


def test_damaged_headers_have_the_pixels_or_the_error_of_pil() -> None:
    rng = random.Random(1)
    whole = [saved((30, 20), subsampling=n, icc_profile=bytes(40), comment=b"x") for n in range(3)]
    whole += [data[:2] + ADOBE_RGB + data[2:] for data in whole]
    whole += [with_exif(MAKER, TURN, RESOLUTION, order=order) for order in "<><"]
    for number in range(450):
        damaged = bytearray(whole[number % len(whole)])
        damaged[rng.randrange(2, 260)] = rng.choice((0, 1, 2, 0xC0, 0xDA, 0xFF, rng.randrange(256)))
        require_equal(bytes(damaged))
