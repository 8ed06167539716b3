"""Linear CKA between blocks: equal to its definition, and what it cannot compare."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import vitgraph
from tests.support.towers.step3_paths import image, shared
from tests.support.towers.streams import tower
from vitgraph.analysis import similarity as module

IMAGES = [image(60 + 8 * n, 90 - 5 * n, seed=n) for n in range(6)]


def hsic(a: Tensor, b: Tensor) -> Tensor:
    """Song et al. 2012, equation 5, by whole matrices."""
    n = len(a)
    k, m = a @ a.T, b @ b.T
    k.fill_diagonal_(0)
    m.fill_diagonal_(0)
    one = torch.ones(n, dtype=a.dtype)
    inner = (k @ m).trace() + (one @ k @ one) * (one @ m @ one) / ((n - 1) * (n - 2))
    return (inner - 2 / (n - 2) * (one @ k @ m @ one)) / (n * (n - 3))


def cka(a: Tensor, b: Tensor) -> Tensor:
    return hsic(a, b) / (hsic(a, a) * hsic(b, b)).sqrt()


def means(encoder: Any, rows_before: int) -> list[Tensor]:
    """The mean over the patches of each image [N, D], after each block."""
    rows = []
    for one in IMAGES:
        inputs = encoder.preprocess([one])
        states = encoder.forward_intermediates(inputs)["image"]
        states = [s if s.ndim == 2 else s[:, rows_before:].flatten(0, 1) for s in states]
        rows.append([state.double().mean(0) for state in states])
    return [torch.stack(block) for block in zip(*rows, strict=True)]


def test_cka_of_two_towers_is_that_of_the_definition() -> None:
    a, b = means(tower("qwen2_5_vl"), 0), means(shared("step3"), 4)
    wanted = torch.stack([torch.stack([cka(x, y) for y in b]) for x in a])
    found = vitgraph.similarity_of_blocks(
        tower("qwen2_5_vl"), shared("step3"), IMAGES, progress=False
    )
    torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8)


def test_a_block_is_equal_to_itself_and_the_matrix_symmetric() -> None:
    encoder = tower("qwen3_vl")
    for samples in ("images", "patches"):
        found = vitgraph.similarity_of_blocks(
            encoder, encoder, IMAGES, samples=samples, progress=False
        )
        torch.testing.assert_close(found.diagonal(), torch.ones(len(found), dtype=torch.float64))
        torch.testing.assert_close(found, found.T)


def test_patches_are_compared_inside_each_image() -> None:
    encoder: Any = tower("qwen2_5_vl")
    found = vitgraph.similarity_of_blocks(
        encoder, encoder, IMAGES[:2], samples="patches", progress=False
    )
    sums = torch.zeros(3, dtype=torch.float64)
    for one in IMAGES[:2]:
        first, last = encoder.forward_intermediates(encoder.preprocess([one]), indices=[0, -1])[
            "image"
        ]
        first, last = (x.double() - x.double().mean(0) for x in (first, last))
        sums += torch.stack([hsic(first, last), hsic(first, first), hsic(last, last)])
    wanted = sums[0] / (sums[1] * sums[2]).sqrt()
    assert float(found[0, -1]) == pytest.approx(float(wanted), abs=1e-8)


def test_kernels_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = tower("qwen2_5_vl")
    whole = vitgraph.similarity_of_blocks(encoder, encoder, IMAGES, progress=False)
    monkeypatch.setattr(module, "NUMBERS_AT_ONCE", 1)
    parts = vitgraph.similarity_of_blocks(encoder, encoder, IMAGES, progress=False)
    torch.testing.assert_close(whole, parts)


def test_unrelated_features_have_a_similarity_around_zero() -> None:
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randn(60, 200, generator=draw, dtype=torch.float64) for _ in range(8)]
    total = module._hsic(rows)
    cka = total / torch.outer(total.diagonal(), total.diagonal()).sqrt()
    assert abs(float(cka[:4, 4:].mean())) < 0.02


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"images": IMAGES[:3]}, "3 images: CKA needs at least 4"),
        ({"images": [], "samples": "patches"}, "0 images: CKA needs at least 1"),
        ({"samples": "tokens"}, r"samples='tokens': must be \"images\" or \"patches\""),
        ({"samples": "patches", "b": "step3_vl"}, "compares the blocks of one encoder"),
    ],
)
def test_samples_that_cannot_be_compared_are_refused(given: Any, message: str) -> None:
    a = tower("qwen2_5_vl")
    b = shared(given["b"]) if "b" in given else a
    with pytest.raises(ValueError, match=message):
        vitgraph.similarity_of_blocks(
            a, b, given.get("images", IMAGES), samples=given.get("samples", "images")
        )


def test_progress_counts_the_images(capsys: pytest.CaptureFixture[str]) -> None:
    encoder = tower("qwen2_5_vl")
    vitgraph.similarity_of_blocks(encoder, encoder, IMAGES)
    assert "6 of 6 items (100%)" in capsys.readouterr().err
