"""``encode_many``: what goes in, what comes out, in which order, and what a bad item does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import numpy as np
import pytest
import torch
from PIL import Image

from encoders import ItemError, Video
from encoders.contract import EncoderOutput
from encoders.streams.items import EncodesItems
from graphwrap import GraphedEncoder
from tests.support.photographs import china, flower, hopper, panning_clip, photographs
from tests.support.towers.streams import TOWERS, NumberEncoder, prefetch_threads, tower

CLIP = panning_clip(5)


def distance(one: EncoderOutput, other: EncoderOutput) -> float:
    assert one.pooler_output is not None
    assert other.pooler_output is not None
    difference = one.pooler_output - other.pooler_output
    return float(difference.norm() / other.pooler_output.norm())


def jpeg(image: Image.Image) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "JPEG")
    return buffer.getvalue()


@pytest.mark.parametrize("name", TOWERS)
def test_a_stream_gives_what_encode_gives(name: str) -> None:
    encoder = tower(name)
    small = {"min_pixels": 3136, "max_pixels": 40_000}
    limits = {"max_tiles": 2} if name == "intern_vit_300m" else small
    images = photographs()
    images = images[:1] + images[2:5]
    alone = [encoder.encode([image], **limits)[0] for image in images]
    alone[1:1] = encoder.encode(videos=[CLIP], **limits)
    items = [images[0], CLIP, *images[1:]]
    for made in (encoder, GraphedEncoder(encoder, budgets=[256, 1024], backend="static")):
        for tokens in (1, 300, 100_000):
            results = made.encode_many(items, batch_tokens=tokens, progress=False, **limits)
            for one, other in zip(results, alone, strict=True):
                assert distance(one, other) <= 2e-6


def test_every_kind_of_item_is_read(tmp_path: Path) -> None:
    encoder, photo = tower("qwen3_vl"), flower().resize((96, 64))
    photo.save(tmp_path / "photo.png")
    array = np.asarray(photo)
    (image,), (clip,) = encoder.encode([photo]), encoder.encode(videos=[CLIP])
    png = (tmp_path / "photo.png").read_bytes()
    images: list[Any] = [
        photo,
        tmp_path / "photo.png",
        str(tmp_path / "photo.png"),
        array,
        torch.from_numpy(array.copy()).permute(2, 0, 1),
        png,
        bytearray(png),
        memoryview(png),
        {"bytes": png, "path": "photo.png"},
        {"bytes": None, "path": str(tmp_path / "photo.png")},
        {"image": photo, "label": 3},
        {"image": {"bytes": png, "path": None}},
    ]
    frames = [Image.fromarray(frame) for frame in CLIP]
    clips: list[Any] = [CLIP, frames, Video(frames), {"video": frames, "label": 1}]
    results = list(encoder.encode_many(images + clips, progress=False))
    for result in results[: len(images)]:
        assert distance(result, image) <= 2e-6
    for result in results[len(images) :]:
        assert distance(result, clip) <= 2e-6


def test_pairs_keep_their_keys() -> None:
    encoder = NumberEncoder()
    items = [("a", 1), 2, (("b", 7), 3), (None, 4)]
    results = list(encoder.embed_many(items, pool="mean", progress=False))
    assert [key for key, _ in (results[0], results[2], results[3])] == ["a", ("b", 7), None]
    assert [float(results[0][1]), float(results[1]), float(results[3][1])] == [1, 2, 4]


@pytest.mark.parametrize("key", [hopper(), np.asarray(hopper()), torch.zeros(8, 8).byte()])
def test_a_pair_of_two_images_is_no_item_with_a_key(key: Any) -> None:
    items = [hopper(), (key, hopper())]
    with pytest.raises(ValueError, match=r"^item 1: a tuple of two .* as a list of frames"):
        list(tower("qwen3_vl").encode_many(items, progress=False))


def test_order_is_kept_whichever_thread_is_first() -> None:
    encoder = NumberEncoder(lambda number: 1 + number % 7)
    encoder.seconds = 0.003
    results = encoder.embed_many(
        iter(range(60)), batch_tokens=20, workers=5, pool="mean", progress=False
    )
    assert [int(result) for result in results] == list(range(60))
    assert encoder.prepared != sorted(encoder.prepared)


def test_batches_go_by_tokens_and_a_large_item_is_alone() -> None:
    sizes = [30, 40, 50, 200, 10, 10, 80, 5]
    encoder = NumberEncoder(lambda number: sizes[number])
    list(encoder.encode_many(range(8), batch_tokens=100, progress=False))
    assert encoder.calls == [70, 50, 200, 100, 5]


def test_results_share_no_memory_with_their_batch() -> None:
    images = [china(), hopper()] * 2
    for result in tower("qwen3_vl").encode_many(images, progress=False):
        tokens = result.pooler_output
        assert tokens.untyped_storage().nbytes() == tokens.nbytes
    for vector in tower("qwen3_vl").embed_many(images, progress=False):
        assert vector.untyped_storage().nbytes() == vector.nbytes


def test_results_of_views_stay_when_the_next_batch_runs() -> None:
    encoder = tower("qwen3_vl")
    views = GraphedEncoder(encoder, budgets=[64, 256], backend="static", clone=False)
    images = [image.resize((96, 64 + 32 * n)) for n, image in enumerate(photographs()[:4])]
    results = list(views.encode_many(images, batch_tokens=1, progress=False))
    for result, image in zip(results, images, strict=True):
        assert distance(result, encoder.encode([image])[0]) <= 2e-6


def test_vectors_are_those_of_embed() -> None:
    encoder, images = tower("qwen2_vl"), photographs()[:3]
    limits = {"max_pixels": 30_000}
    vectors = encoder.embed(images, pool="max", normalize=True, **limits)
    stream = encoder.embed_many(images, pool="max", normalize=True, progress=False, **limits)
    for one, other in zip(stream, vectors, strict=True):
        assert float((one - other).norm()) <= 2e-6


def test_a_stream_records_no_gradients() -> None:
    encoder = tower("qwen3_vl").requires_grad_(True)
    try:
        (vector,) = encoder.embed_many([hopper()], pool="mean", progress=False)
        assert not vector.requires_grad
    finally:
        encoder.requires_grad_(False)


def test_a_map_style_dataset_is_read_by_its_numbers() -> None:
    class Dataset:
        def __getitem__(self, number: int) -> int:
            if number == 3:
                raise IndexError(number)
            return number * 10

    vectors = NumberEncoder().embed_many(Dataset(), pool="mean", progress=False)
    assert [int(vector) for vector in vectors] == [0, 10, 20]


def test_items_without_a_length_that_claim_one_are_read() -> None:
    class Numbers(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(3))

    loader = torch.utils.data.DataLoader(Numbers(), batch_size=None)
    assert len(list(NumberEncoder().embed_many(loader, pool="mean", progress=False))) == 3


def test_an_empty_stream_ends_at_once() -> None:
    assert list(NumberEncoder().encode_many([])) == []
    assert not prefetch_threads()


# --- bad items ---------------------------------------------------------------------------------


def test_a_bad_item_raises_at_its_place_with_its_number() -> None:
    encoder = NumberEncoder()
    encoder.bad = {25}
    stream = encoder.embed_many(range(50), batch_tokens=100, pool="mean", progress=False)
    assert [int(next(stream)) for _ in range(25)] == list(range(25))
    with pytest.raises(ValueError, match=r"^item 25: 25 is a bad number$"):
        next(stream)
    assert not prefetch_threads()


def test_a_bad_pair_raises_with_its_key() -> None:
    encoder = NumberEncoder()
    encoder.bad = {1}
    with pytest.raises(ValueError, match=r"^item 0 \(b.jpg\): 1 is a bad number$"):
        list(encoder.encode_many([("b.jpg", 1)], progress=False))


def test_kept_errors_stand_in_place_of_their_items() -> None:
    encoder = NumberEncoder()
    encoder.bad = {0, 13, 14}
    items = [(f"key {n}", n) for n in range(20)]
    results = list(encoder.encode_many(items, batch_tokens=40, on_error="keep", progress=False))
    assert len(results) == 20
    for number in encoder.bad:
        error = results[number]
        assert isinstance(error, ItemError)
        assert error[:2] == (number, f"key {number}")
        assert str(error.error) == f"{number} is a bad number"
        assert error.error.__traceback__ is None
    kept = [result for result in results if not isinstance(result, ItemError)]
    assert [key for key, _ in kept] == [f"key {n}" for n in range(20) if n not in encoder.bad]


@pytest.mark.parametrize(
    "error", [ValueError("no"), RuntimeError("no"), torch.OutOfMemoryError("CUDA out of memory")]
)
def test_only_the_item_that_fails_in_a_batch_is_lost(error: Exception) -> None:
    encoder = NumberEncoder()
    encoder.poison, encoder.error = {5}, error
    stream = encoder.embed_many(
        range(10), batch_tokens=1000, pool="mean", on_error="keep", progress=False
    )
    results = list(stream)
    assert isinstance(results[5], ItemError)
    assert results[5].index == 5
    assert results[5].key is None
    assert [int(results[n]) for n in range(10) if n != 5] == [0, 1, 2, 3, 4, 6, 7, 8, 9]


@pytest.mark.parametrize("method", ["embed_many", "encode_many"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_only_the_item_that_is_not_finite_in_a_batch_is_lost(value: float, method: str) -> None:
    encoder = NumberEncoder()
    encoder.overflow, encoder.bad = {5: value}, {2}
    stream = partial(getattr(encoder, method), range(10), batch_tokens=1000, progress=False)
    results = list(stream(on_error="keep"))
    errors = [result for result in results if isinstance(result, ItemError)]
    assert [error.index for error in errors] == [2, 5]
    assert encoder.calls == [90]  # the batch is not encoded again
    encoder.bad = set()
    with pytest.raises(ValueError, match=r"^item 5: has features that are NaN or infinite"):
        list(stream())


def test_a_failure_of_every_item_is_not_the_items() -> None:
    encoder = NumberEncoder()
    encoder.poison, encoder.error = set(range(10)), RuntimeError("weights were moved")
    with pytest.raises(RuntimeError, match="weights were moved"):
        list(encoder.encode_many(range(10), on_error="keep", progress=False))
    assert not prefetch_threads()


def test_an_error_that_is_its_own_cause_is_kept() -> None:
    class Circle(NumberEncoder):
        def preprocess(self, images: Any = (), videos: Any = (), **limits: Any) -> Any:
            try:
                return super().preprocess(images, videos, **limits)
            except ValueError as error:
                other = RuntimeError("in a circle")
                error.__cause__ = other
                raise other from error

    encoder = Circle()
    encoder.bad = {1}
    encoder.poison = {2}
    own = ValueError("its own cause")
    own.__cause__ = own
    encoder.error = own
    results = list(encoder.encode_many([0, 1, 2], on_error="keep", progress=False))
    assert [isinstance(result, ItemError) for result in results] == [False, True, True]


class Unheard(Exception):
    """A class that no reader of images raises."""


def broken_zip(path: Path) -> ZipFile:
    """Two photographs, the first of which has a byte that its checksum does not know."""
    data = jpeg(hopper().resize((80, 80)))
    with ZipFile(path, "w") as archive:
        archive.writestr("bad.jpg", data)
        archive.writestr("good.jpg", data)
    raw = bytearray(path.read_bytes())
    raw[raw.index(data) + len(data) // 2] ^= 255
    path.write_bytes(raw)
    return ZipFile(path)


def wrappers() -> list[EncodesItems]:
    encoder = tower("qwen3_vl")
    return [encoder, GraphedEncoder(encoder, budgets=[64, 256], backend="static")]


@pytest.mark.parametrize("made", wrappers(), ids=["encoder", "graphs"])
def test_a_damaged_member_of_a_zip_file_is_that_item_s_error(
    made: EncodesItems, tmp_path: Path
) -> None:
    with broken_zip(tmp_path / "photos.zip") as archive:
        names = ["good.jpg", "bad.jpg", "good.jpg"]
        results = list(
            made.embed_many(
                [(name, archive.open(name)) for name in names],
                on_error="keep",
                pool="mean",
                progress=False,
            )
        )
    assert [isinstance(result, ItemError) for result in results] == [False, True, False]
    assert isinstance(results[1].error, BadZipFile)
    assert results[1].error.__traceback__ is None
    assert results[1].key == "bad.jpg"


@pytest.mark.parametrize("error", [Unheard("gone"), StopIteration("gone"), AssertionError("gone")])
def test_whatever_an_item_s_source_raises_is_its_error(error: Exception) -> None:
    class Source(NumberEncoder):
        def preprocess(self, images: Any = (), videos: Any = (), **limits: Any) -> Any:
            if 2 in images:
                raise error
            return super().preprocess(images, videos, **limits)

    results = list(Source().encode_many(range(4), on_error="keep", progress=False))
    assert [isinstance(result, ItemError) for result in results] == [False, False, True, False]
    assert results[2].error is error
    if not isinstance(error, StopIteration):  # which Python itself turns into a RuntimeError
        with pytest.raises(type(error), match="gone"):
            list(Source().encode_many(range(4), progress=False))


def test_real_files_that_are_damaged_are_named_by_their_path(tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jpg", tmp_path / "bad.jpg"
    good.write_bytes(jpeg(hopper().resize((80, 80))))
    bad.write_bytes(good.read_bytes()[:400])
    missing = tmp_path / "missing.jpg"
    encoder = tower("qwen3_vl")
    results = list(
        encoder.embed_many(
            [good, bad, missing, {"label": 1}], on_error="keep", pool="mean", progress=False
        )
    )
    assert [isinstance(result, ItemError) for result in results] == [False, True, True, True]
    assert str(results[1].error).startswith(f"{bad}: cannot be read as an image")
    assert str(results[2].error).startswith(f"{missing}: there is no such file")
    assert "a dict with 'label'" in str(results[3].error)
    with pytest.raises(ValueError, match=r"^item 1: .*bad.jpg: cannot be read"):
        list(encoder.encode_many([good, bad], progress=False))


def test_an_error_of_the_iterable_comes_after_the_results_before_it() -> None:
    def items() -> Iterator[int]:
        yield from range(15)
        raise KeyError("row 15")

    encoder = NumberEncoder()
    stream = encoder.embed_many(
        items(), batch_tokens=40, pool="mean", on_error="keep", progress=False
    )
    assert [int(next(stream)) for _ in range(15)] == list(range(15))
    with pytest.raises(KeyError, match="row 15"):
        next(stream)
    assert not prefetch_threads()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"items": "photos"}, "items is one str: pass an iterable of items"),
        ({"items": Path("photos")}, "items is one PosixPath: pass an iterable"),
        ({"items": 7}, "items is one int: pass an iterable"),
        ({"items": b"JFIF"}, r"items is one bytes: pass an iterable of items, \[item\] for one"),
        ({"items": BytesIO(b"JFIF")}, "items is one BytesIO: pass an iterable"),
        ({"items": {"image": None}}, "items is one dict: pass an iterable"),
        ({"items": np.zeros((8, 8, 3), np.uint8)}, "items is one ndarray: pass an iterable"),
        ({"on_error": "ignore"}, "on_error='ignore': must be 'raise' or 'keep'"),
        ({"batch_tokens": 0}, "batch_tokens=0: must be a positive integer"),
        ({"workers": -1}, "workers=-1: must be a positive integer"),
        ({"workers": True}, "workers=True: must be a positive integer"),
        ({"pool": "cls"}, "no class token"),
        ({"max_tiles": 3}, "max_tiles=3: this tower has no tiles"),
        ({"max_tiles": 3, "on_error": "keep"}, "max_tiles=3: this tower has no tiles"),
    ],
)
def test_impossible_arguments_are_refused_at_the_call(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tower("qwen3_vl").embed_many(**{"items": [], **arguments})
