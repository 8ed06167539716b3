"""JPEG files are given to nvImageCodec in batches, and what it cannot decode to the CPU."""

from __future__ import annotations

import io
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from encoders.inputs import gpu_decoding, image_files
from encoders.inputs.gpu_decoding import GpuDecoder, decoder_of, decoding_by
from encoders.inputs.image_files import open_image
from encoders.inputs.intake import read_images, to_rgb
from encoders.inputs.staging import to_resize
from encoders.streams import stream
from encoders.streams.device import DeviceQueue
from tests.oracles import BY_NAME, build_encoder
from tests.support.photographs import china

CPU = torch.device("cpu")


class FakeStream:
    """The part of ``nvidia.nvimgcodec.CodeStream`` that is called."""

    def __init__(self, data: bytes) -> None:
        image = Image.open(io.BytesIO(data))
        self.image, self.width, self.height = image, image.width, image.height
        self.progressive = "progressive" in image.info


class FakeCodec(ModuleType):
    """The part of ``nvidia.nvimgcodec`` that is called; it decodes with PIL on the CPU."""

    ColorSpec = SimpleNamespace(SRGB="SRGB")
    BackendKind = SimpleNamespace(HW_GPU_ONLY="HW", HYBRID_CPU_GPU="HYBRID")
    Backend = str
    calls: list[int]
    by_kernels: list[int]
    broken: bytes | None
    has_engines = True

    def CodeStream(self, data: bytes) -> FakeStream:
        if data == self.broken:
            raise RuntimeError("Failed to get image info")
        return FakeStream(data)

    def DecodeParams(self, **keywords: object) -> dict[str, object]:
        assert keywords == {"apply_exif_orientation": False, "color_spec": "SRGB"}
        return keywords

    def Decoder(
        self, device_id: int, max_num_cpu_threads: int, backends: Sequence[str], options: str
    ) -> SimpleNamespace:
        (kind,) = backends
        if kind == "HW" and not self.has_engines:
            raise RuntimeError("Could not create decoder")
        return SimpleNamespace(decode=partial(self.decode, kind))

    def as_image(self, buffer: Any, cuda_stream: int) -> Tensor:
        memory = SimpleNamespace(__array_interface__=buffer.__cuda_array_interface__)
        return torch.from_numpy(np.asarray(memory))

    def decode(
        self,
        kind: str,
        srcs: Sequence[FakeStream],
        *,
        images: Sequence[Tensor],
        params: object,
        cuda_stream: int,
    ) -> list[Tensor | None]:
        (self.calls if kind == "HW" else self.by_kernels).append(len(srcs))
        found: list[Tensor | None] = []
        for source, pixels in zip(srcs, images, strict=True):
            assert not (kind == "HW" and source.progressive)
            refused = source.width <= 9
            if not refused:
                pixels.copy_(to_rgb(source.image.convert("RGB")).permute(1, 2, 0))
            found.append(None if refused else pixels)
        return found


class Late(io.BytesIO):
    def read(self, size: int | None = -1, /) -> bytes:
        raise LookupError("the store does not answer")


@pytest.fixture
def codec(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCodec]:
    fake = FakeCodec("nvidia.nvimgcodec")
    fake.calls, fake.by_kernels, fake.broken = [], [], None
    package = ModuleType("nvidia")
    package.nvimgcodec = fake  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nvidia", package)
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", fake)
    decoder_of.cache_clear()
    yield fake
    decoder_of.cache_clear()


def jpeg(size: tuple[int, int] = (61, 43), mode: str = "RGB", **options: Any) -> bytes:
    china().resize(size).convert(mode).save(file := io.BytesIO(), "JPEG", **options)
    return file.getvalue()


def turned(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return jpeg(exif=exif)


def test_the_files_of_a_call_are_decoded_in_one_batch(codec: FakeCodec, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(jpeg((80, 20)))
    files: list[Any] = [jpeg(), tmp_path / "a.jpg", str(tmp_path / "a.jpg"), io.BytesIO(jpeg())]
    files += [{"bytes": jpeg(), "path": None}, jpeg(mode="L")]
    with decoding_by(GpuDecoder(CPU)):
        found = read_images(files)
    assert codec.calls == [6]
    for pixels, wanted in zip(found, read_images(files), strict=True):
        assert torch.equal(pixels, wanted)


@pytest.mark.parametrize("has_engines", [True, False])
def test_kernels_decode_what_engines_do_not(codec: FakeCodec, has_engines: bool) -> None:
    codec.has_engines = has_engines
    files = [jpeg(), jpeg((64, 40), progressive=True), jpeg((30, 20)), jpeg((8, 8))]
    with decoding_by(GpuDecoder(CPU)):
        found = read_images(files)
    assert (codec.calls, codec.by_kernels) == (([3], [2]) if has_engines else ([], [4]))
    for pixels, wanted in zip(found, read_images(files), strict=True):
        assert torch.equal(pixels, wanted)


def test_files_with_two_sizes_are_left_to_the_cpu(
    codec: FakeCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = SimpleNamespace(height=1000, width=61)
    monkeypatch.setattr(codec, "CodeStream", lambda data: broken)
    with decoding_by(GpuDecoder(CPU)):
        (found,) = read_images(jpeg())
    assert codec.calls == []
    assert torch.equal(found, to_rgb(jpeg()))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_decoded_on_a_device_are_upright(codec: FakeCodec, orientation: int) -> None:
    with decoding_by(GpuDecoder(CPU)):
        (found,) = read_images(turned(orientation))
    assert codec.calls == [1]
    assert torch.equal(found, to_rgb(open_image(turned(orientation))))


def test_other_images_are_decoded_by_the_cpu(codec: FakeCodec) -> None:
    china().save(png := io.BytesIO(), "PNG")
    others = [png.getvalue(), jpeg(mode="CMYK"), jpeg() + bytes(9), china(), to_rgb(china())]
    with decoding_by(GpuDecoder(CPU)):
        found = read_images(others)
    assert codec.calls == []
    for pixels, wanted in zip(found, read_images(others), strict=True):
        assert torch.equal(pixels, wanted)


def test_a_file_that_the_codec_cannot_decode_harms_no_other(codec: FakeCodec) -> None:
    codec.broken = jpeg((77, 33))
    files = [jpeg(), codec.broken, jpeg((8, 8)), jpeg((9, 60)), jpeg((30, 30))]
    with decoding_by(GpuDecoder(CPU)):
        found = read_images(files)
    for pixels, wanted in zip(found, read_images(files), strict=True):
        assert torch.equal(pixels, wanted)


class Answer(io.BytesIO):
    """An open file that can be read once, as of the web."""

    def seekable(self) -> bool:
        return False

    def seek(self, offset: int, whence: int = 0, /) -> int:
        raise io.UnsupportedOperation("seek")


def test_files_that_can_be_read_once_are_decoded_by_the_cpu_too(codec: FakeCodec) -> None:
    china().save(png := io.BytesIO(), "PNG")
    contents = [jpeg(), png.getvalue(), jpeg(mode="CMYK")]
    with decoding_by(GpuDecoder(CPU)):
        found = read_images([Answer(content) for content in contents])
    for pixels, content in zip(found, contents, strict=True):
        assert torch.equal(pixels, to_rgb(content))
        assert torch.equal(pixels, to_rgb(Answer(content)))
    for bad in (b"no image", b"", jpeg()[:900]):
        with pytest.raises(ValueError, match="image 0: cannot be read as an image"):
            read_images(Answer(bad))
        with decoding_by(GpuDecoder(CPU)), pytest.raises(ValueError, match="cannot be read as an"):
            read_images(Answer(bad))


@pytest.mark.parametrize("bad", [jpeg()[:900], b"no image", "gone.jpg", None, {"id": 3}])
def test_errors_of_images_are_those_of_the_cpu(codec: FakeCodec, bad: Any) -> None:
    with pytest.raises(ValueError) as wanted:
        read_images([jpeg(), bad])
    with decoding_by(GpuDecoder(CPU)), pytest.raises(ValueError) as got:
        read_images([jpeg(), bad])
    assert str(got.value) == str(wanted.value)
    assert str(got.value).startswith("image 1: ")


def test_pil_s_limit_holds_for_images_decoded_on_a_device(
    codec: FakeCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with decoding_by(GpuDecoder(CPU)), pytest.raises(ValueError, match="MAX_IMAGE_PIXELS"):
        read_images(jpeg())
    assert codec.calls == []


def test_files_of_several_threads_share_calls(codec: FakeCodec) -> None:
    decoder = GpuDecoder(CPU)
    files = [jpeg((60 + n, 40)) for n in range(48)]
    found: dict[int, list[object]] = {}

    def work(number: int) -> None:
        for n in range(number, len(files), 6):
            found[n] = decoder.decode_files([files[n]])

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sum(codec.calls) == len(files)
    for n, data in enumerate(files):
        (image,) = found[n]
        assert torch.equal(to_rgb(image), to_rgb(data))  # type: ignore[arg-type]


def test_a_call_decodes_few_large_files(codec: FakeCodec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decoding, "_MOST_BYTES", 3 * 43 * 61 * 3)
    files = [jpeg()] * 7 + [jpeg((200, 100))] * 2
    with decoding_by(GpuDecoder(CPU)):
        read_images(files)
    assert codec.calls == [3, 3, 1, 1, 1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_files_of_a_call_that_failed_are_not_decoded_by_the_next_one(
    codec: FakeCodec, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    def fails(*_: object, **__: object) -> list[object]:
        raise error

    decoder = GpuDecoder(CPU)
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        patch.setattr(decoder, "_fill_by", fails)
        decoder.decode_files([jpeg()] * 200)
    decoder.decode_files([jpeg()])
    assert codec.calls == [1]


def test_decoding_on_a_device_ends_with_its_block(codec: FakeCodec) -> None:
    with pytest.raises(ValueError, match="image 0"), decoding_by(GpuDecoder(CPU)):
        read_images([None])
    read_images(jpeg())
    assert codec.calls == []


ENCODER = build_encoder(BY_NAME["qwen3_vl"], BY_NAME["qwen3_vl"].tiny)


@pytest.mark.parametrize(
    ("decode", "message"),
    [("gpu", "decode='gpu': the encoder is on cpu"), ("npu", "decode='npu': must be 'cpu' or")],
)
def test_decoding_where_it_cannot_be_is_refused(decode: Any, message: str) -> None:
    for method in (ENCODER.encode, ENCODER.embed, ENCODER.encode_many, ENCODER.embed_many):
        with pytest.raises(ValueError, match=message):
            method([jpeg()], decode=decode)


def test_files_are_decoded_on_the_device_of_the_encoder(
    codec: FakeCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_decoding, "check_decode", lambda decode, device: None)
    monkeypatch.setattr(stream, "check_decode", lambda decode, device: None)
    files = [jpeg(), jpeg((64, 64)), jpeg((90, 30))]
    vectors = ENCODER.embed(files, decode="gpu")
    assert codec.calls == [3]
    assert torch.equal(vectors, ENCODER.embed(files))
    (output, *_) = ENCODER.encode(files, decode="gpu")
    streamed = list(ENCODER.embed_many(files, decode="gpu", progress=False))
    assert sum(codec.calls) == 9
    torch.testing.assert_close(torch.stack(streamed), vectors)
    torch.testing.assert_close(output, ENCODER.encode(files)[0])


def test_a_thread_of_a_stream_decodes_its_files_in_one_call(
    codec: FakeCodec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_decoding, "check_decode", lambda decode, device: None)
    monkeypatch.setattr(stream, "check_decode", lambda decode, device: None)
    (tmp_path / "a.jpg").write_bytes(turned(6))
    china().resize((50, 40)).save(tmp_path / "b.png")
    items: list[Any] = [jpeg(), (7, tmp_path / "a.jpg"), str(tmp_path / "b.png"), jpeg()[:900]]
    items += [Late(), (9, io.BytesIO(jpeg()))]
    items += [(8, b"no image"), china().resize((40, 40)), {"image": jpeg()}, jpeg((8, 8))] * 2
    options: dict[str, Any] = {"workers": 1, "progress": False, "on_error": "keep"}
    found = list(ENCODER.embed_many(items, decode="gpu", **options))
    assert codec.calls[0] > 1
    for one, other in zip(found, ENCODER.embed_many(items, **options), strict=True):
        pair = (x if isinstance(x, tuple) else [x] for x in (one, other))
        for got, wanted in zip(*pair, strict=True):
            if isinstance(wanted, Tensor):
                torch.testing.assert_close(got, wanted)
            else:
                assert str(got) == str(wanted)


@pytest.mark.parametrize("kind", [bytes, io.BytesIO])
def test_all_threads_read_files_of_a_slow_disk(
    codec: FakeCodec, monkeypatch: pytest.MonkeyPatch, kind: Callable[[bytes], Any]
) -> None:
    monkeypatch.setattr(gpu_decoding, "check_decode", lambda decode, device: None)
    monkeypatch.setattr(stream, "check_decode", lambda decode, device: None)
    jpeg_bytes, lock, readers, counts = image_files.jpeg_bytes, threading.Lock(), [0], set[int]()

    def read_late(source: Any) -> bytes | None:
        with lock:
            readers[0] += 1
            counts.add(readers[0])
        time.sleep(0.01)
        with lock:
            readers[0] -= 1
        return jpeg_bytes(source)

    monkeypatch.setattr(gpu_decoding, "jpeg_bytes", read_late)
    options: dict[str, Any] = {"workers": 6, "batch_tokens": 1 << 16, "progress": False}
    files = [kind(jpeg((64, 64))) for _ in range(100)]
    assert len(list(ENCODER.embed_many(files, decode="gpu", **options))) == 100
    assert max(counts) > 2  # of many files that are read at once, two turns are in hand


class Odd:
    """An object of the user's whose attributes raise an error of their own."""

    def __getattr__(self, name: str) -> object:
        raise LookupError(name)


def test_an_item_that_a_turn_fails_on_is_the_only_one_lost(
    codec: FakeCodec, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_decoding, "check_decode", lambda decode, device: None)
    monkeypatch.setattr(stream, "check_decode", lambda decode, device: None)
    upright = gpu_decoding._upright

    def turn(file: Any) -> Tensor:
        if file.header.turn != gpu_decoding.UPRIGHT:
            raise torch.OutOfMemoryError("no memory is left")
        return upright(file)

    monkeypatch.setattr(gpu_decoding, "_upright", turn)
    items: list[Any] = [jpeg(), turned(6), Answer(jpeg()), Odd(), jpeg()]
    options: dict[str, Any] = {"workers": 1, "progress": False, "on_error": "keep"}
    found = list(ENCODER.embed_many(items, decode="gpu", **options))
    assert [isinstance(one, Tensor) for one in found] == [True, True, True, False, True]


@pytest.mark.parametrize("workers", [1, 4])
def test_a_stream_reads_decoded_images_on_the_cuda_stream_that_waits_for_them(
    codec: FakeCodec, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """So do encoders whose pixels are made on the CPU, as DataParallelEncoder's are."""
    monkeypatch.setattr(gpu_decoding, "check_decode", lambda decode, device: None)
    monkeypatch.setattr(stream, "check_decode", lambda decode, device: None)
    staging, here, reads = threading.local(), list[bool](), list[bool]()

    @contextmanager
    def enter(queue: DeviceQueue) -> Iterator[None]:
        staging.on = True
        yield
        staging.on = False

    def receive(decoder: GpuDecoder, batches: object) -> None:
        here.append(getattr(staging, "on", False))

    def read(image: Tensor, device: torch.device) -> Tensor:
        reads.append(getattr(staging, "on", False))
        return to_resize(image, device)

    monkeypatch.setattr(DeviceQueue, "staging", enter)
    monkeypatch.setattr(GpuDecoder, "_receive", receive)
    monkeypatch.setattr("encoders.inputs.patches.to_resize", read)
    files = [jpeg(), jpeg((64, 64)), jpeg((90, 30))] * 4
    options: dict[str, Any] = {"workers": workers, "progress": False}
    assert len(list(ENCODER.embed_many(files, decode="gpu", **options))) == len(files)
    assert len(reads) == len(files)
    assert {*here} == {*reads} == {True}


def test_without_nvimagecodec_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.nvimgcodec", None)
    decoder_of.cache_clear()
    with pytest.raises(ValueError, match="pip install 'nvidia-nvimgcodec-cu13"):
        decoder_of(CPU)


def test_the_real_codec_has_the_names_that_are_called() -> None:
    real = pytest.importorskip("nvidia.nvimgcodec")
    files = [jpeg(), jpeg((90, 30), progressive=True), jpeg(mode="L")]
    sources = [real.CodeStream(data) for data in files]
    params = real.DecodeParams(apply_exif_orientation=False, color_spec=real.ColorSpec.SRGB)
    made = [np.empty((source.height, source.width, 3), np.uint8) for source in sources]
    codec = real.Decoder(
        device_id=real.NVIMGCODEC_DEVICE_CPU_ONLY,
        max_num_cpu_threads=1,
        backends=[real.Backend(real.BackendKind.CPU_ONLY)],
        options=":fancy_upsampling=1",
    )
    images = [real.as_image(pixels, 0) for pixels in made]
    assert all(codec.decode(sources, images=images, params=params, cuda_stream=0))
    for pixels, data in zip(made, files, strict=True):
        assert np.array_equal(pixels, to_rgb(data).permute(1, 2, 0).numpy())
    assert real.BackendKind.HW_GPU_ONLY != real.BackendKind.HYBRID_CPU_GPU
