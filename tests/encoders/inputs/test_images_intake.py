"""Images that are accepted (modes, layouts, files), and the messages for those refused."""

from __future__ import annotations

import io
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from PIL import Image, ImageOps, PngImagePlugin, TiffImagePlugin
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import Qwen2VLImageProcessor
from transformers.image_transforms import convert_to_rgb

from encoders.inputs.image_files import open_image
from encoders.inputs.intake import Video, to_rgb
from encoders.inputs.normalizing import normalize
from encoders.inputs.patches import PatchPreprocessor
from encoders.inputs.resizing import resize
from encoders.inputs.staging import hold_to_resize
from encoders.intern.intern_vit_pixels import TilePreprocessor
from tests.oracles.versions import needs
from tests.support.photographs import china, hopper

QWEN = PatchPreprocessor.published("qwen2_vl", patch_size=14, temporal_patch_size=2, merge_size=2)


def as_array(image: Any) -> np.ndarray[Any, Any]:
    rgb = to_rgb(image)
    assert rgb.dtype == torch.uint8
    assert rgb.shape[0] == 3
    return rgb.permute(1, 2, 0).numpy()


def with_alpha(image: Image.Image) -> Image.Image:
    image = image.convert("RGBA")
    image.putalpha(Image.linear_gradient("L").resize(image.size))
    return image


def palette_with_transparency() -> Image.Image:
    buffer = io.BytesIO()
    china().resize((80, 60)).quantize(32).save(buffer, "PNG", transparency=bytes(range(0, 256, 8)))
    return Image.open(buffer)


def grey_with_colour_key() -> Image.Image:
    buffer = io.BytesIO()
    china().resize((80, 60)).convert("L").save(buffer, "PNG", transparency=200)
    return Image.open(buffer)


MODES = {
    **{mode: china().resize((80, 60)).convert(mode) for mode in ("RGB", "L", "1", "P", "CMYK")},
    **{mode: china().resize((80, 60)).convert(mode) for mode in ("YCbCr", "HSV")},
    "LA": with_alpha(china().resize((80, 60))).convert("LA"),
    "RGBA": with_alpha(china().resize((80, 60))),
    "PA": with_alpha(china().resize((80, 60))).convert("PA"),
    "P with transparency": palette_with_transparency(),
    "L with transparency": grey_with_colour_key(),
    "one pixel": Image.new("RGB", (1, 1), (9, 8, 7)),
}


reference_of_5_23 = needs("transformers", "5.23", "it converts images to RGB in other ways")


@reference_of_5_23
@pytest.mark.parametrize("mode", MODES)
def test_pil_modes_become_rgb_as_in_transformers(mode: str) -> None:
    wanted = convert_to_rgb(MODES[mode], return_numpy=True)
    assert np.array_equal(as_array(MODES[mode]), wanted)


@reference_of_5_23
@pytest.mark.parametrize("mode", MODES)
def test_pil_modes_are_encoded_as_in_transformers(mode: str) -> None:
    wanted = Qwen2VLImageProcessor()([MODES[mode]], return_tensors="pt")["pixel_values"]
    assert torch.equal(QWEN([MODES[mode]]).pixel_values, wanted)


@pytest.mark.parametrize("mode", ["La", "RGBa"])
def test_colours_multiplied_by_alpha_lie_over_white(mode: str) -> None:
    image = with_alpha(hopper()).convert(mode.upper()).convert(mode)
    assert np.array_equal(as_array(image), as_array(image.convert(mode.upper())))


@pytest.mark.parametrize("dtype", ["I;16", "I;16B", "I"])
def test_16_bit_grey_is_scaled_to_8_bits(dtype: str) -> None:
    grey = np.array([[0, 128, 129, 257], [32768, 65406, 65407, 65535]])
    kind = {"I;16": "<u2", "I;16B": ">u2", "I": "<i4"}[dtype]
    image = Image.frombytes(dtype, (4, 2), grey.astype(kind).tobytes())
    wanted = np.round(grey / 257).astype(np.uint8)
    assert np.array_equal(as_array(image), np.repeat(wanted[..., None], 3, -1))


@pytest.mark.parametrize(("mode", "wanted"), [("L", 200), ("I;16", 1)])
def test_mode_i_with_values_below_256_needs_conversion(mode: str, wanted: int) -> None:
    """Read as 16 bits, they would come out black."""
    image = Image.new("I", (3, 2), 200)
    with pytest.raises(ValueError, match="up to 200"):
        as_array(image)
    assert bool((as_array(image.convert(mode)) == wanted).all())
    assert bool((as_array(Image.new("I", (3, 2), 0)) == 0).all())


def test_a_16_bit_png_keeps_its_contrast(tmp_path: Path) -> None:
    grey = (np.asarray(hopper().convert("L")).astype(np.uint16)) * 257
    Image.fromarray(grey).save(tmp_path / "deep.png")
    wanted = np.asarray(hopper().convert("L"))
    assert np.array_equal(as_array(tmp_path / "deep.png")[..., 1], wanted)


@reference_of_5_23
@pytest.mark.parametrize("channels", [None, 1, 3, 4])
def test_arrays_and_tensors_are_taken_as_transformers_takes_them(channels: int | None) -> None:
    rng = np.random.default_rng(0)
    array = rng.integers(0, 256, (40, 50, channels or 1), dtype=np.uint8)
    wanted = Qwen2VLImageProcessor()([array], return_tensors="pt")["pixel_values"]
    tensor = torch.from_numpy(array.transpose(2, 0, 1).copy())
    if channels is None:
        array, tensor = array[..., 0], tensor[0]
    assert torch.equal(QWEN([array]).pixel_values, wanted)
    assert torch.equal(QWEN([tensor]).pixel_values, wanted)


def test_arrays_may_be_read_only_reversed_or_cut() -> None:
    array = np.array(china())
    array.flags.writeable = False
    for view in (array, array[::-1, ::-1], array[3:90, 5:77], array[..., ::-1], array[::2, ::3]):
        assert np.array_equal(as_array(view), view)


def test_images_are_copied_together_whatever_their_layout() -> None:
    rows = np.asarray(china())  # read-only
    images: list[Any] = [rows, rows[::-1, ::2], np.asfortranarray(rows), to_rgb(china())[:0]]
    images += [rows[::-1, ::-1, ::-1], np.broadcast_to(np.uint8(7), (5, 4, 3))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (held,) = hold_to_resize([*images, rows.copy()], torch.device("cpu"))
    wanted = [np.asarray(image).reshape(-1) for image in [*images, rows]]
    assert np.array_equal(held.numpy(), np.concatenate(wanted))


def test_the_input_is_never_written_to() -> None:
    array = np.array(china().resize((56, 56)))
    before = array.copy()
    QWEN([array])
    TilePreprocessor(image_size=56)([array, torch.from_numpy(array).permute(2, 0, 1)])
    assert np.array_equal(array, before)


def test_a_batch_array_is_a_list_of_images() -> None:
    batch = np.stack([np.asarray(china())] * 2)
    assert QWEN(batch).grid_thw.shape == (2, 3)
    assert QWEN(torch.from_numpy(batch).permute(0, 3, 1, 2)).grid_thw.shape == (2, 3)


def test_files_are_turned_upright_and_pil_objects_are_not(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned by 270 degrees
    china().save(tmp_path / "turned.png", exif=exif)
    upright = np.asarray(china().transpose(Image.Transpose.ROTATE_270))
    assert np.array_equal(as_array(tmp_path / "turned.png"), upright)
    assert np.array_equal(as_array(str(tmp_path / "turned.png")), upright)
    with Image.open(tmp_path / "turned.png") as opened:
        assert np.array_equal(as_array(opened), np.asarray(china()))


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 60), st.integers(1, 60))
def test_resizing_does_not_depend_on_the_memory_layout(
    h: int, w: int, tall: int, wide: int
) -> None:
    assume((tall, wide) != (1, 1))  # where torch's own kernel asserts on planes
    generator = torch.Generator().manual_seed(h * 41 + w)
    planes = torch.randint(0, 256, (3, h, w), dtype=torch.uint8, generator=generator)
    interleaved = planes.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    wanted = torch.nn.functional.interpolate(
        planes[None], (tall, wide), mode="bicubic", antialias=True, align_corners=False
    )[0]
    assert torch.equal(resize(planes, tall, wide), wanted)
    assert torch.equal(resize(interleaved, tall, wide), wanted)


@pytest.mark.parametrize("size", [(1, 1), (1, 7), (150, 1)])
def test_images_of_one_pixel_s_width_are_encoded(size: tuple[int, int]) -> None:
    image = china().resize(size)
    wanted = Qwen2VLImageProcessor()([image], return_tensors="pt")["pixel_values"]
    assert torch.equal(QWEN([image]).pixel_values, wanted)
    assert TilePreprocessor(image_size=56)([image]).pixel_values.isfinite().all()


def truncated(tmp_path: Path, suffix: str) -> Path:
    path = tmp_path / f"half{suffix}"
    china().save(path)
    path.write_bytes(path.read_bytes()[:5000])
    return path


def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "notes.png"
    path.write_text("not an image")
    return path


def save_float(tmp_path: Path) -> Path:
    china().convert("F").save(tmp_path / "depth.tiff")
    return tmp_path / "depth.tiff"


def lazily_opened(tmp_path: Path) -> Image.Image:
    return Image.open(io.BytesIO(truncated(tmp_path, ".jpg").read_bytes()))


FLOATS = np.full((4, 4, 3), 200.0, np.float32)
BAD = {
    "zero width": (lambda p: Image.new("RGB", (0, 5)), "is 0x5 pixels: an image needs at least"),
    "zero rows": (lambda p: np.zeros((0, 5, 3), np.uint8), "is 5x0 pixels"),
    "zero columns": (lambda p: torch.zeros(3, 5, 0, dtype=torch.uint8), "is 0x5 pixels"),
    "no such file": (lambda p: p / "gone.jpg", r"gone\.jpg: there is no such file"),
    "a folder": (lambda p: p, "is a folder; pass the paths of the images in it"),
    "a text file": (text_file, r"notes\.png: cannot be read as an image .*replace it"),
    "half a jpeg": (lambda p: truncated(p, ".jpg"), r"half\.jpg: cannot be read .*truncated"),
    "half a png": (lambda p: truncated(p, ".png"), r"half\.png: cannot be read .*truncated"),
    "half a jpeg, opened": (lazily_opened, "mode RGB cannot be decoded .*truncated"),
    "None": (lambda p: None, "is of type NoneType, not an image: pass a PIL image"),
    "bytes": (lambda p: b"abc", "cannot be read as an image"),
    "a clip": (
        lambda p: Video([torch.zeros(3, 8, 8)], 24),
        "is a clip, not an image: pass it ",
    ),
    "meta tensor": (
        lambda p: torch.zeros(3, 8, 8, dtype=torch.uint8, device="meta"),
        "is a meta tensor: an image is a dense tensor with values",
    ),
    "sparse tensor": (
        lambda p: torch.zeros(3, 8, 8, dtype=torch.uint8).to_sparse(),
        r"is a tensor of layout torch\.sparse_coo: an image is a dense tensor",
    ),
    "nested tensor": (
        lambda p: torch.nested.as_nested_tensor(
            [torch.zeros(8, 8, dtype=torch.uint8)] * 3, layout=torch.jagged
        ),
        "is a nested tensor: an image is a dense tensor",
    ),
    "float array": (
        lambda p: FLOATS,
        "values from 200 to 200: floats must lie",
    ),
    "float tensor": (
        lambda p: torch.full((3, 4, 4), torch.nan),
        "with values from nan to nan",
    ),
    "bool array": (lambda p: FLOATS > 0, "array of bool: .*multiply by 255 and cast"),
    "16-bit array": (lambda p: FLOATS.astype(np.uint16), "array of uint16: .*divide by 257"),
    "channels first": (lambda p: np.zeros((3, 9, 8), np.uint8), "move the channels to their pl"),
    "channels last": (lambda p: torch.zeros(9, 8, 3, dtype=torch.uint8), "move the channels"),
    "two channels": (lambda p: np.zeros((9, 8, 2), np.uint8), "1, 3 or 4 channels"),
    "one dimension": (lambda p: np.zeros(9, np.uint8), r"shape \(9,\): an image of this type"),
    "float PIL": (lambda p: china().convert("F"), "mode F cannot be decoded .*fixed range"),
    "float file": (save_float, r"depth\.tiff: .*mode F cannot be decoded .*as uint8$"),
    "8 or 16 bits": (
        lambda p: china().convert("L").convert("I"),
        r'mode I with values up to 2\d\d, .*convert\("L"\).*convert\("I;16"\)',
    ),
    "32-bit grey": (lambda p: Image.new("I", (2, 2), 70000), "70000 are not 16-bit"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_images_are_named_with_number_value_and_fix(case: str, tmp_path: Path) -> None:
    make, message = BAD[case]
    for preprocess in (QWEN, TilePreprocessor()):
        with pytest.raises(ValueError, match=message) as caught:
            preprocess([china(), make(tmp_path)])  # type: ignore[list-item]
        assert str(caught.value).startswith("image 1: ")


def test_a_picture_too_large_for_pil_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    china().save(tmp_path / "scan.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"scan\.png: .*MAX_IMAGE_PIXELS") as caught:
        to_rgb(tmp_path / "scan.png")
    assert "damaged" not in str(caught.value)


def test_an_error_of_a_file_that_is_read_late_is_not_called_a_damaged_image() -> None:
    class Late(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise TimeoutError("the store does not answer")

    with pytest.raises(TimeoutError, match=r"^the store does not answer$"):
        to_rgb(Late())


@pytest.mark.parametrize("suffix", ["JPEG", "PNG", "GIF"])
def test_a_pil_image_that_is_damaged_is_refused_every_time(suffix: str) -> None:
    china().resize((200, 100)).save(file := io.BytesIO(), suffix)
    rng, refused = random.Random(0), 0
    for _ in range(200):
        damaged = bytearray(file.getvalue())
        for _ in range(5):
            damaged[rng.randrange(len(damaged) // 4, len(damaged))] = rng.randrange(256)
        try:
            image = Image.open(io.BytesIO(damaged))
            to_rgb(image)
        except (OSError, SyntaxError):
            continue
        except ValueError:
            refused += 1
            with pytest.raises(ValueError, match="cannot be decoded to RGB"):
                to_rgb(image)
    assert refused > 5


def test_a_pil_image_whose_file_failed_once_is_read_again(tmp_path: Path) -> None:
    china().save(path := tmp_path / "china.png")
    image, content = Image.open(path), path.read_bytes()
    path.write_bytes(content[:-1000])
    with pytest.raises(ValueError, match="truncated"):
        to_rgb(image)
    path.write_bytes(content)
    assert torch.equal(to_rgb(image), to_rgb(china()))


def test_a_page_after_a_damaged_one_is_read_every_time() -> None:
    pages = [china(), hopper()]
    how = {"compression": "tiff_adobe_deflate", "save_all": True, "append_images": pages[1:]}
    pages[0].save(file := io.BytesIO(), "TIFF", **how)
    damaged = bytearray(file.getvalue())
    damaged[200:260] = bytes(60)
    image = Image.open(io.BytesIO(damaged))
    with pytest.raises(ValueError, match="cannot be decoded to RGB"):
        to_rgb(image)
    image.seek(1)
    for _ in range(2):
        assert torch.equal(to_rgb(image), to_rgb(pages[1]))


def test_a_lazily_opened_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    path = truncated(tmp_path, ".jpg")
    with Image.open(path) as opened, pytest.raises(ValueError, match=rf"image {path} of mode RGB"):
        to_rgb(opened)


@pytest.mark.parametrize("suffix", ["png", "jpeg", "gif", "bmp", "tiff", "webp", "ppm"])
def test_a_damaged_file_is_read_or_refused_but_nothing_else(suffix: str, tmp_path: Path) -> None:
    rng = random.Random(suffix)
    path = tmp_path / f"damaged.{suffix}"
    china().resize((60, 40)).save(path)
    whole = path.read_bytes()
    refused = []
    for _ in range(60):
        damaged = bytearray(whole)
        for _ in range(rng.choice((1, 3, 20))):
            damaged[rng.randrange(min(len(damaged), rng.choice((100, 5000))))] = rng.randrange(256)
        path.write_bytes(damaged[: rng.choice((len(damaged), rng.randrange(len(damaged))))])
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert to_rgb(path).shape[0] == 3
        except ValueError as error:
            refused.append(str(error))
    assert refused
    assert all("cannot be read as an image" in message for message in refused)


@pytest.mark.parametrize("preprocess", [QWEN, TilePreprocessor(image_size=56)])
def test_defaults_for_new_tensors_change_nothing(preprocess: Any) -> None:
    wanted = preprocess([china()], [[hopper()] * 8], num_frames=4)
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            got = preprocess([china()], [[hopper()] * 8], num_frames=4)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got.pixel_values, wanted.pixel_values)
    assert torch.equal(got.grid_thw, wanted.grid_thw)


@pytest.mark.parametrize("preprocess", [QWEN, TilePreprocessor(image_size=56)])
@pytest.mark.parametrize("bare", [china(), np.asarray(china()), to_rgb(china())])
def test_one_image_needs_no_list(preprocess: Any, bare: Any) -> None:
    assert torch.equal(preprocess(bare).pixel_values, preprocess([china()]).pixel_values)


@pytest.mark.parametrize("preprocess", [QWEN, TilePreprocessor(image_size=56)])
def test_images_and_videos_may_come_from_any_iterable(preprocess: Any) -> None:
    frames = np.stack([np.asarray(china())] * 2)
    got = preprocess((image for image in [china()]), (video for video in [frames]))
    wanted = preprocess([china()], [frames])
    assert torch.equal(got.pixel_values, wanted.pixel_values)
    assert torch.equal(got.grid_thw, preprocess(china(), Video(frames)).grid_thw)


def test_no_image_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="images is one NoneType: pass an image, or a list"):
        QWEN(None)


def test_encoded_images_are_read_from_memory_and_files(tmp_path: Path) -> None:
    china().save(path := tmp_path / "china.png")
    data, wanted = path.read_bytes(), to_rgb(china())
    with path.open("rb") as file:
        forms = [path, str(path), data, bytearray(data), io.BytesIO(data), file]
        forms += [{"bytes": data, "path": None}, {"bytes": None, "path": str(path)}]
        for form in forms:
            assert torch.equal(to_rgb(form), wanted)
            assert torch.equal(QWEN(form).pixel_values, QWEN([wanted]).pixel_values)


def test_a_memoryview_may_have_any_shape() -> None:
    china().save(file := io.BytesIO(), "JPEG")
    data, wanted = file.getvalue(), to_rgb(file.getvalue())
    odd = memoryview(np.repeat(np.frombuffer(data, np.uint8), 2))[::2]
    rows = memoryview(np.frombuffer(data + bytes(-len(data) % 4), np.uint8).reshape(-1, 4))
    for view in (memoryview(data), odd, rows):
        assert torch.equal(to_rgb(view), wanted)
    with pytest.raises(ValueError, match="bytes of no image file"):
        to_rgb(memoryview(np.array(5, np.uint8)))


def test_floats_from_0_to_1_are_read_as_torchvision_casts_them() -> None:
    whole = to_rgb(china())
    assert torch.equal(to_rgb(whole / 255), whole)
    assert torch.equal(to_rgb((whole.permute(1, 2, 0) / 255).numpy()), whole)
    assert torch.equal(to_rgb(whole.half() / 255), whole)


ODD_TAGS: dict[str, tuple[int, Any]] = {
    "a fraction as software": (0x0131, TiffImagePlugin.IFDRational(1, 3)),
    "text as a pointer": (0x8769, "here"),
    "a pointer out of the block": (0x8769, 10**9),
    "a large number": (0x0100, 2**32 - 1),
    "another type": (0x0110, 3.5),
}


def with_tag(tag: int, value: Any) -> bytes:
    """Return a small JPEG with an EXIF block of a tag and the orientation 6."""
    block = TiffImagePlugin.ImageFileDirectory_v2()
    kinds = {TiffImagePlugin.IFDRational: 5, str: 2, int: 4, float: 12}
    block.tagtype.update({tag: kinds[type(value)], 0x0112: 3})
    block[tag], block[0x0112] = value, 6
    file = io.BytesIO(b"Exif\0\0II*\0\x08\0\0\0" + block.tobytes(8))
    china().resize((80, 60)).save(saved := io.BytesIO(), "JPEG", exif=file.getvalue())
    return saved.getvalue()


@pytest.mark.parametrize("case", ODD_TAGS)
def test_an_odd_exif_tag_leaves_a_photograph_readable(case: str) -> None:
    data = with_tag(*ODD_TAGS[case])
    with Image.open(io.BytesIO(data)) as stored:
        wanted = np.asarray(stored.transpose(Image.Transpose.ROTATE_270))
    assert np.array_equal(as_array(data), wanted)


def test_exif_that_cannot_be_parsed_is_ignored() -> None:
    china().resize((80, 60)).save(file := io.BytesIO(), "JPEG", exif=b"Exif\0\0no block at all")
    assert as_array(file.getvalue()).shape == (60, 80, 3)


def test_an_upright_image_is_not_turned_again() -> None:
    data = with_tag(*ODD_TAGS["another type"])
    upright = open_image(data)
    assert upright.size == (60, 80)
    assert ImageOps.exif_transpose(upright).size == (60, 80)


@pytest.mark.parametrize("limit", ["MAX_TEXT_CHUNK", "MAX_TEXT_MEMORY"])
def test_a_png_with_a_long_comment_is_named(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PngImagePlugin.PngInfo()
    text.add_text("comment", "x" * 5000, zip=True)
    china().save(file := io.BytesIO(), "PNG", pnginfo=text)
    monkeypatch.setattr(PngImagePlugin, limit, 4000)
    with pytest.raises(ValueError, match=rf"^image 0: has a longer text chunk.*{limit}") as caught:
        QWEN(file.getvalue())
    assert "damaged" not in str(caught.value)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_name_of_over_255_bytes_is_a_missing_file(kind: str) -> None:
    for form in (name := "long" * 100 + ".mp4", Path(name)):
        with pytest.raises(ValueError, match=rf"^{kind} 0: long.*: there is no such file"):
            QWEN(**{f"{kind}s": [form]})


def test_floats_of_a_device_without_float64_are_read() -> None:
    class WithoutDoubles(TorchFunctionMode):
        """Refuses float64 as MPS does, until an image is copied to the CPU."""

        on_device = True

        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.on_device = self.on_device and function is not torch.Tensor.cpu
            if self.on_device and function is torch.Tensor.double:
                raise TypeError("the MPS framework doesn't support float64")
            return function(*args, **(kwargs or {}))

    pixels = torch.rand(3, 4, 4)
    wanted = to_rgb(pixels)
    with WithoutDoubles():
        assert torch.equal(to_rgb(pixels), wanted)


def test_a_url_and_a_strange_dict_are_refused() -> None:
    told = r"a\.png: is a URL, and nothing is downloaded here: pass vitgraph\.load_image\(url\), or"
    with pytest.raises(ValueError, match=f"^image 0: https://x.org/{told}"):
        QWEN(images=["https://x.org/a.png"])
    with pytest.raises(ValueError, match=f"https:/x.org/{told}"):
        to_rgb(Path("https://x.org/a.png"))  # as the command line passes it
    with pytest.raises(ValueError, match=r"^video 0: https:/x\.org/a\.mp4: is a URL, and nothing"):
        QWEN(videos="https://x.org/a.mp4")
    with pytest.raises(
        ValueError, match=r"^video 0: the bytes of a video: cannot be read as a video"
    ):
        QWEN(videos={"bytes": b"", "path": None})
    with pytest.raises(ValueError, match="array of float32 with values from 0 to 9: floats must"):
        to_rgb(np.full((4, 4), 9, np.float32) * np.eye(4, dtype=np.float32))
    with pytest.raises(ValueError, match=r"is a dict of \['pixels'\]: an image of the datasets"):
        to_rgb({"pixels": 1})


def test_pixels_after_fake_ones_are_normalised_alike() -> None:
    pixels, mean_std = torch.full((1, 3, 2, 2), 51, dtype=torch.uint8), ((0.1,) * 3, (0.5,) * 3)
    with FakeTensorMode() as mode:
        normalize(mode.from_tensor(pixels), *mean_std)
    torch.testing.assert_close(normalize(pixels, *mean_std), torch.full((1, 3, 2, 2), 0.2))
