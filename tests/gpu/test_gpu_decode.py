"""JPEG files decoded by nvImageCodec on a GPU: pixels near PIL's, and errors and turns as PIL's."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image

from encoders.inputs.gpu_decoding import DeviceImage, GpuDecoder, decoder_of, decoding_by
from encoders.inputs.intake import read_images
from encoders.inputs.torch_internals import empty_images
from tests.gpu.gpu_towers import NEEDS_CUDA
from tests.support.photographs import photographs
from tests.support.towers.streams import tower

pytest.importorskip("nvidia.nvimgcodec")
pytestmark = NEEDS_CUDA


def jpegs() -> list[bytes]:
    files = []
    for number, image in enumerate(photographs()):
        exif = Image.Exif()
        exif[0x0112] = number % 8 + 1
        mode = "L" if number == 2 else "RGB"
        image.convert(mode).save(
            file := io.BytesIO(), "JPEG", exif=exif, progressive=number % 3 == 1, quality=90
        )
        files.append(file.getvalue())
    return files


def test_pixels_are_at_most_three_levels_from_those_of_pil() -> None:
    files = jpegs()
    decoder = decoder_of(torch.device("cuda", 0))
    assert all(type(image).__name__ == "DeviceImage" for image in decoder.decode_files(files))
    with decoding_by(decoder):
        found = read_images(files)
    for pixels, wanted in zip(found, read_images(files), strict=True):
        assert pixels.shape == wanted.shape
        assert int((pixels.cpu().int() - wanted.int()).abs().max()) <= 3


@pytest.mark.parametrize("workers", [1, 8])
def test_streams_decoded_on_the_gpu_give_near_vectors(workers: int) -> None:
    encoder = tower("qwen3_vl", torch.float32).to("cuda")
    items: list[Any] = jpegs() * 6 + [photographs()[0]]
    found = list(encoder.embed_many(items, decode="gpu", workers=workers, progress=False))
    wanted = list(encoder.embed_many(items, progress=False))
    whole = encoder.embed(items, decode="gpu")
    # A stream and a call decode other batches, on which nvImageCodec's pixels depend.
    for one, other, third in zip(found, wanted, whole, strict=True):
        for made in (one, third):
            assert float((made - other).norm() / other.norm()) <= 0.05
    encoder.cpu()


def test_a_bad_file_is_the_error_of_its_item_alone() -> None:
    encoder = tower("qwen3_vl", torch.float32).to("cuda")
    good, bad = jpegs()[0], jpegs()[0][:3000]
    found = list(
        encoder.embed_many([good, bad, good], decode="gpu", on_error="keep", progress=False)
    )
    assert [isinstance(one, torch.Tensor) for one in found] == [True, False, True]
    encoder.cpu()


def test_files_are_right_while_their_cuda_stream_is_behind() -> None:
    """The engines do not wait for a CUDA stream, so they must get no memory that it still uses."""
    files, device = [], torch.device("cuda", 0)
    for image in photographs()[:6]:
        image.resize((640, 480)).convert("RGB").save(file := io.BytesIO(), "JPEG")
        files.append(file.getvalue())
    decoder = decoder_of(device)
    wanted = [pixels.cpu() for pixels in _pixels(decoder, files)]
    with torch.cuda.stream(torch.cuda.Stream()):
        for _ in range(3):  # in the first calls, nvImageCodec waits for memory of its own
            used = empty_images([(480, 640)] * len(files), device)
            torch.cuda._sleep(10**8)
            for pixels in used:
                pixels.fill_(7)
            del used, pixels  # torch gives this memory away again, but only for this CUDA stream
            found = _pixels(decoder, files)
    torch.cuda.synchronize()
    for one, other in zip(found, wanted, strict=True):
        assert int((one.cpu().int() - other.int()).abs().max()) <= 3


def test_encoders_whose_pixels_the_cpu_makes_wait_for_decoded_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder, files = tower("qwen3_vl", torch.float32).to("cuda"), jpegs()
    wanted = list(encoder.embed_many(files, progress=False))
    own, fill = encoder.item_encoder(), GpuDecoder._fill
    copies = list[list[torch.Tensor]]()  # kept, or the next files would be decoded to their memory

    def fill_late(decoder: GpuDecoder, places: Any) -> Any:
        left = fill(decoder, places)
        with torch.cuda.stream(decoder._stream):
            copies.append([pixels.clone() for _, pixels in places])
            for _, pixels in places:
                pixels.zero_()
            torch.cuda._sleep(10**8)
            for (_, pixels), copy in zip(places, copies[-1], strict=True):
                pixels.copy_(copy)
        return left

    monkeypatch.setattr(encoder, "_stream_encoder", lambda: replace(own, stager=None))
    monkeypatch.setattr(GpuDecoder, "_fill", fill_late)
    found = list(encoder.embed_many(files, decode="gpu", progress=False))
    for one, other in zip(found, wanted, strict=True):
        assert float((one - other).norm() / other.norm()) <= 0.05
    encoder.cpu()


def _pixels(decoder: GpuDecoder, files: list[bytes]) -> list[torch.Tensor]:
    images = decoder.decode_files(files)
    return [image.pixels for image in images if isinstance(image, DeviceImage)]
