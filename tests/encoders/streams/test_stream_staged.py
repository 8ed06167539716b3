"""Pixels that travel as uint8 and are normalised and cut on the device: the bits stay the same."""

from __future__ import annotations

import io
import os
import re
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from encoders import ItemError, Video
from encoders.contract import Limits
from encoders.dino.dino_pixels import DinoPreprocessor
from encoders.inputs.image_files import JpegRun, decode_jpegs
from encoders.inputs.patches import PatchPreprocessor
from encoders.inputs.staging import PlannedImage, StagedItem, StagedPreprocessor, stage_planned
from encoders.intern.intern_vit_pixels import TilePreprocessor
from encoders.nvidia.nemotron_pixels import NemotronPreprocessor
from encoders.streams import group_resizing, preparing, turns
from encoders.streams.device import DeviceQueue
from graphwrap import GraphedEncoder
from tests.oracles import slow
from tests.support.photographs import china, hopper, panning_clip, photographs
from tests.support.resizing import take_cpu_for_gpu
from tests.support.towers.streams import TOWERS, tower

SIZES = {"temporal_patch_size": 2, "merge_size": 2}
PREPROCESSORS: dict[str, StagedPreprocessor] = {
    "qwen2_vl": PatchPreprocessor.published("qwen2_vl", patch_size=14, **SIZES),
    "qwen3_vl": PatchPreprocessor.published("qwen3_vl", patch_size=16, **SIZES),
    "intern_vit": TilePreprocessor(),
    "intern_vit, other statistics for videos": TilePreprocessor(
        video_mean=(0.1, 0.2, 0.3), video_std=(0.4, 0.5, 0.6)
    ),
}

FLOATS: dict[str, PatchPreprocessor] = {
    "dinov3": DinoPreprocessor.dinov3(16),
    "nemotron": NemotronPreprocessor.nemotron(16),
}


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is handed uint8 pixels, as a GPU is."""
    plain = DeviceQueue.__init__

    def init(self: DeviceQueue, device: torch.device) -> None:
        plain(self, device)
        self.stages = True

    monkeypatch.setattr(DeviceQueue, "__init__", init)


@pytest.mark.parametrize("name", [slow(one) if "other" in one else one for one in PREPROCESSORS])
def test_finished_pixels_are_what_a_call_returns(name: str) -> None:
    preprocessor: Any = PREPROCESSORS[name]
    every = [*photographs()[:5], np.asarray(china()), hopper().resize((448, 448))]
    for images, clips in (
        (every, []),
        (every[:1], [panning_clip(1), panning_clip(3)]),
        (every[:1], [panning_clip(5), Video(panning_clip(4), fps=8.0)]),
    ):
        limits = Limits(num_frames=4 if clips and isinstance(clips[-1], Video) else None)
        wanted = preprocessor(images, clips, **limits._asdict())
        items = preprocessor.stage(images, clips, limits)
        assert all(item.paths["image"].pixels.dtype == torch.uint8 for item in items)
        found = preprocessor.finish(items)
        assert torch.equal(found.pixel_values, wanted.pixel_values)
        assert found.pixel_values.dtype == torch.float32
        assert torch.equal(found.grid_thw, wanted.grid_thw)
        assert found.tiles == wanted.tiles


@pytest.mark.parametrize("name", ["dinov3", "nemotron"])
@pytest.mark.parametrize("exact", [False, True])
def test_images_resized_as_floats_in_groups_keep_their_bits(
    name: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    preprocessor = FLOATS[name]
    every = [torch.from_numpy(np.array(image)) for image in (hopper(), china(), hopper())]
    take_cpu_for_gpu(monkeypatch, exact)
    plans = [preprocessor.plan(rows.permute(2, 0, 1), Limits()) for rows in every]
    staged = stage_planned([rows.view(-1) for rows in every], plans, torch.device("cpu"))
    wanted = preprocessor([rows.numpy() for rows in every])
    assert torch.equal(preprocessor.finish(staged).pixel_values, wanted.pixel_values)


@pytest.mark.parametrize("name", PREPROCESSORS)
def test_staged_pixels_take_less_than_a_quarter_of_the_bytes(name: str) -> None:
    preprocessor: Any = PREPROCESSORS[name]
    (item,) = preprocessor.stage([china()], [], Limits())
    assert 4 * item.paths["image"].pixels.nbytes <= preprocessor([china()]).pixel_values.nbytes


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts Linux' threads")
def test_staging_starts_no_further_threads_in_a_thread() -> None:
    preprocessor: Any = PREPROCESSORS["qwen3_vl"]
    threads: list[str] = []

    def stage() -> None:
        preprocessor.stage([np.asarray(china().resize((1280, 704)))], [], Limits())
        threads.extend(os.listdir("/proc/self/task"))

    worker = threading.Thread(target=stage)
    before = set(os.listdir("/proc/self/task"))  # of which some may end meanwhile
    worker.start()
    worker.join()
    assert len(set(threads) - before) == 1


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("name", TOWERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_staged_stream_gives_the_bits_of_encode(name: str, dtype: torch.dtype) -> None:
    encoder = tower(name, dtype)
    items = [hopper().resize((100, 90)), panning_clip(3), china().resize((64, 64))]
    limits = {"max_tiles": 1} if name == "intern_vit_300m" else {}
    alone = [encoder.encode([items[n]], **limits)[0] for n in (0, 2)]
    alone[1:1] = encoder.encode(videos=[items[1]], **limits)
    for made in (encoder, GraphedEncoder(encoder, backend="eager")):
        found = made.encode_many(items, batch_tokens=1, progress=False, **limits)
        for one, other in zip(found, alone, strict=True):
            assert torch.equal(one.pooler_output, other.pooler_output)


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("name", ["lfm2_vl", slow("deepseek_ocr"), slow("step3_vl")])
def test_a_staged_stream_takes_encoders_of_several_paths(name: str) -> None:
    encoder = tower(name)
    items = [china(), hopper().resize((40, 60))]
    wanted = [encoder.encode([item])[0] for item in items]
    found = encoder.encode_many(items, batch_tokens=10**6, progress=False)
    for one, other in zip(found, wanted, strict=True):
        assert one.pooler_output.shape == other.pooler_output.shape
        assert torch.allclose(one.pooler_output, other.pooler_output, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("staged")
def test_images_that_fail_together_are_resized_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, whole = tower("qwen3_vl"), group_resizing.stage_planned

    def fails(
        items: Sequence[torch.Tensor], plans: Sequence[PlannedImage], device: torch.device
    ) -> list[StagedItem]:
        if len(items) > 1 or plans[0].size == (90, 100):
            raise torch.OutOfMemoryError("no memory is left")
        return whole(items, plans, device)

    images = [hopper(), hopper().resize((100, 90)), china().resize((64, 64))]
    wanted = list(encoder.embed_many([images[0], images[2]], progress=False))
    monkeypatch.setattr(group_resizing, "stage_planned", fails)
    made = list(encoder.embed_many(images, progress=False, on_error="keep"))
    assert torch.equal(made[0], wanted[0])
    assert isinstance(made[1], ItemError)
    assert torch.equal(made[2], wanted[1])


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("on_error", ["raise", "keep"])
def test_an_error_that_no_item_is_to_blame_for_is_raised_itself(
    workers: int, on_error: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failure(Exception):
        pass

    def fails(*_: object) -> list[StagedItem]:
        raise Failure("a kernel cannot be compiled")

    monkeypatch.setattr(group_resizing, "stage_planned", fails)
    images = [np.zeros((64, 64, 3), np.uint8)] * 60
    stream = tower("qwen3_vl").embed_many(
        images, batch_tokens=10**6, workers=workers, on_error=on_error, progress=False
    )
    with pytest.raises(Failure):
        list(stream)


def jpeg(size: tuple[int, int], **options: Any) -> bytes:
    """Return a photograph of this size as a JPEG file."""
    file = io.BytesIO()
    hopper().resize(size).save(file, "JPEG", quality=90, **options)
    return file.getvalue()


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("workers", [1, 3])
def test_files_that_a_thread_decodes_together_keep_bits_and_errors(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_FEW_FILES", 2)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    files: list[Any] = []
    for number, data in enumerate(
        [
            *[jpeg(size) for size in ((100, 90), (64, 64), (100, 90), (40, 70))],
            jpeg((70, 40), exif=exif),
            jpeg((64, 64))[:-100],
            jpeg((90, 100)),
            b"no image",
            jpeg((64, 96), progressive=True),
        ]
        * 3
    ):
        files.append(tmp_path / f"{number}.jpg")
        files[-1].write_bytes(data)
    files[3], files[10] = files[3].read_bytes(), str(files[10])
    files[15].unlink()
    hopper().resize((64, 64)).save(tmp_path / "20.png")
    files[20] = tmp_path / "20.png"
    for number in (2, 13, 14, 16, 20, 21):  # open files, which only reading tells apart
        files[number] = io.BytesIO(files[number].read_bytes())
    encoder = tower("qwen3_vl")
    pairs = [(f"key {number}", file) for number, file in enumerate(files)]
    found = encoder.embed_many(pairs, workers=workers, progress=False, on_error="keep")
    for number, ((_, file), made) in enumerate(zip(pairs, found, strict=True)):
        if isinstance(made, ItemError):
            with pytest.raises(ValueError, match=f"^image 0: {re.escape(str(made.error))}$"):
                encoder.embed([file], pool="mean")
            continue
        wanted = encoder.embed([file], pool="mean")[0]
        assert made[0] == f"key {number}"
        assert torch.allclose(made[1], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("staged")
def test_large_files_after_small_ones_are_not_held_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(turns, "_FEW_FILES", 2)
    items, encoder = [*[jpeg((64, 64))] * 19, *[jpeg((2000, 2000))] * 8], tower("qwen3_vl")
    wanted = encoder.embed([items[-1]], max_pixels=65536)[0]
    tracemalloc.start()
    try:
        *_, vector = encoder.embed_many(items, max_pixels=65536, workers=1, progress=False)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert torch.allclose(vector, wanted, rtol=1e-5, atol=1e-6)
    assert most_bytes < group_resizing.MOST_BYTES + 2000 * 2000 * 3  # and not eight images, 96 MB


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize(("workers", "most"), [(1, 8), (4, 4), (16, 1)])
def test_threads_have_no_more_files_in_hand_than_leave_room_for_batches(
    workers: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_FEW_FILES", 2)
    runs: list[int] = []

    def decode(items: Sequence[object]) -> tuple[Sequence[object], JpegRun]:
        runs.append(len(items))
        return decode_jpegs(items)

    monkeypatch.setattr(preparing, "decode_jpegs", decode)
    files = [jpeg((64, 64))] * 100  # of 64 tokens each
    how = {"batch_tokens": 320, "workers": workers, "progress": False}
    assert len(list(tower("qwen3_vl").embed_many(files, pool="mean", **how))) == 100
    assert max(runs, default=1) == most


@pytest.mark.usefixtures("staged")
@pytest.mark.timeout(60)
def test_no_more_than_eight_batches_of_uint8_are_read_ahead() -> None:
    taken = 0

    def images() -> Iterator[Image.Image]:
        nonlocal taken
        for _ in range(120):
            taken += 1
            yield hopper().resize((64, 64))  # 64 tokens, so a batch has five

    how: dict[str, Any] = {"batch_tokens": 320, "workers": 4, "progress": False}
    stream = tower("qwen3_vl").embed_many(images(), **how)
    next(stream)
    while taken <= 1 + 20 + 1:  # more than four batches are
        time.sleep(0.001)
    for yielded, _ in enumerate(stream, 2):
        assert taken <= yielded + 40 + 1  # one may wait for the next turn of a thread


class LostPath(type(Path())):  # type: ignore[misc]  # the class depends on the system
    """A path to something that cannot be asked for any more."""

    def __fspath__(self) -> str:
        raise RuntimeError("the store is closed")


class LostFile(io.BytesIO):
    """An open file of a store that is closed."""

    def read(self, size: int | None = -1, /) -> bytes:
        raise LookupError("the store is closed")


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("lost", [LostPath("a.jpg"), LostFile()])
def test_files_of_other_classes_keep_their_own_errors(
    lost: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_FEW_FILES", 0)
    items: list[Any] = [jpeg((64, 64))] * 12
    items[6] = lost
    found = list(tower("qwen3_vl").embed_many(items, workers=1, progress=False, on_error="keep"))
    assert [type(one) is ItemError for one in found] == [number == 6 for number in range(12)]


@pytest.mark.usefixtures("staged")
@pytest.mark.parametrize("workers", [1, 3])
def test_arrays_that_a_thread_takes_together_keep_bits_and_errors(workers: int) -> None:
    encoder = tower("qwen3_vl")
    sizes = [(100, 90), (64, 64), (100, 90), (40, 70), (64, 96)] * 4
    images: list[Any] = [np.asarray(hopper().resize(size)) for size in sizes]
    wanted = [encoder.embed([image], pool="mean")[0] for image in images[:5]] * 4
    images[6] = np.zeros((4, 4, 4, 4, 4), np.uint8)
    images[9] = Image.fromarray(images[9])  # no array: a thread takes it alone
    pairs = [(f"key {number}", image) for number, image in enumerate(images)]
    found = list(
        encoder.embed_many(
            pairs, pool="mean", batch_tokens=40, workers=workers, progress=False, on_error="keep"
        )
    )
    error = found.pop(6)
    assert isinstance(error, ItemError)
    assert (error.index, error.key) == (6, "key 6")
    assert str(error.error).startswith("shape (4, 4, 4, 4, 4)")
    del wanted[6], pairs[6]
    for (key, vector), (name, _), one in zip(found, pairs, wanted, strict=True):
        assert key == name
        assert torch.allclose(vector, one, atol=1e-5)


@pytest.mark.usefixtures("staged")
def test_bad_items_of_a_staged_stream_are_kept() -> None:
    found = tower("qwen3_vl").embed_many(
        ["missing.jpg", hopper()], on_error="keep", pool="mean", progress=False
    )
    error, vector = found
    assert str(error.error).startswith("missing.jpg: there is no such file")
    assert vector.shape == (96,)


@pytest.mark.usefixtures("staged")
def test_arrays_that_need_work_are_prepared_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, prepare = [], preparing.Preparer.prepare

    def counted(self: preparing.Preparer, number: int, given: Sequence[object]) -> Any:
        counts.append(len(given))
        return prepare(self, number, given)

    monkeypatch.setattr(preparing.Preparer, "prepare", counted)
    rows = np.asarray(hopper().resize((64, 64)))
    for array, most in ((rows, 16), (rows / 255, 1), (rows[..., 0], 1)):
        counts.clear()
        list(tower("qwen3_vl").embed_many([array] * 20, workers=1, progress=False))
        assert max(counts) == most
