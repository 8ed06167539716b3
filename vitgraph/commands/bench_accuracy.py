"""``vitgraph bench accuracy``: the error of each precision and attention kernel on a user's images.

The encoder runs on the same images in several forms: in its own dtype, accelerated with each
attention kernel, and with fp8 products. Each form is compared, token by token, with the encoder in
float32. Without a GPU, only the encoder in its own dtype is compared.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING

from ..terminal import format_table
from .bench_speed import load_checked

if TYPE_CHECKING:
    from torch import Tensor

    from encoders import Encoder
    from encoders.contract import Kernels

COMPARED_FIELDS = ("last_hidden_state", "pooler_output")
"""The output fields that are compared with the same fields of the encoder in float32."""
NEAR = 0.99
"""The cosine with the same token in float32 from which a token counts in the column ``near``."""


def add_accuracy(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``bench accuracy`` that ``bench speed`` does not have to its parser."""
    parser.add_argument("images", nargs="+", type=Path, metavar="PHOTO", help="pictures to encode")
    parser.add_argument(
        "--dtype", default="bfloat16", help="dtype of the encoder; by default bfloat16"
    )
    parser.set_defaults(command=print_accuracy, video=[])


def print_accuracy(options: argparse.Namespace) -> None:
    """Run ``bench accuracy``: compare an encoder's forms with float32 and print the errors.

    The printed table has a row per form (kernel or precision) and output field.

    Raises:
        ValueError: an option has an invalid value, a picture cannot be read, or a checkpoint cannot
            be loaded.
    """
    from .encode_checks import check_media

    check_media(options)
    encoder = load_checked(options)
    from ..devices import enough_memory

    with enough_memory(options.repo, "give another --device"):
        rows = compare(encoder, options.images, options.kernels)
    print(json.dumps(rows, indent=2) if options.json else table(rows))


def forms_of(encoder: Encoder, kernels: Sequence[Kernels]) -> Iterator[tuple[str, Encoder]]:
    """Yield the forms of an encoder that run on its device, each with its name for the table.

    The first form is the encoder itself. On CUDA, its accelerated form follows once per attention
    kernel, and once with fp8 products if the GPU supports them.

    Args:
        encoder: an encoder in the dtype to measure the error of.
        kernels: attention kernels, as in ``encoder.accelerated(kernels=...)``.
    """
    from encoders.accelerated import fp8_obstacle

    weight = next(encoder.parameters())
    yield f"reference, {str(weight.dtype).removeprefix('torch.')}", encoder
    if weight.is_cuda:
        for name in kernels:
            yield f"accelerated, kernels={name}", encoder.accelerated(name)
    if fp8_obstacle(weight.device, weight.dtype) is None:
        yield "accelerated, precision=fp8", encoder.accelerated(precision="fp8")


def compare(
    encoder: Encoder, images: Sequence[Path], kernels: Sequence[Kernels]
) -> list[dict[str, str | float]]:
    """Return the error of each form of an encoder against the encoder in float32, per output field.

    Args:
        encoder: an encoder in the dtype to measure the error of.
        images: paths of image files.
        kernels: attention kernels, as in ``encoder.accelerated(kernels=...)``.

    Returns:
        One dict per form and output field, with the keys ``form``, ``field`` and the three keys
        that :func:`errors` returns.
    """
    truth = _outputs(deepcopy(encoder).float(), images)
    return [
        {"form": name, "field": field, **errors(outputs[field], truth[field])}
        for name, form in forms_of(encoder, kernels)
        for outputs in [_outputs(form, images)]
        for field in COMPARED_FIELDS
    ]


def _outputs(encoder: Encoder, images: Sequence[Path]) -> dict[str, Tensor]:
    """Encode image files, and return for each field the tokens [T, D] of all, on the CPU."""
    import torch

    with torch.no_grad():
        outputs = encoder.encode(images=[str(path) for path in images])
    fields = {
        "last_hidden_state": [output.last_hidden_state for output in outputs],
        "pooler_output": [output.pooler_output for output in outputs],
    }
    return {
        field: torch.cat([rows.flatten(0, -2).cpu() for rows in fields[field]])
        for field in COMPARED_FIELDS
    }


def errors(tokens: Tensor, truth: Tensor) -> dict[str, float]:
    """Return the error of tokens against the same tokens of the encoder in float32.

    Args:
        tokens: [T, D].
        truth: the same tokens [T, D], computed in float32.

    Returns:
        ``relative_l2``, the relative L2 error over all tokens; ``lowest_cosine``, the lowest cosine
        of a token with the same token in float32; ``near``, the share of tokens whose cosine is at
        least :data:`NEAR`.
    """
    import torch.nn.functional as F

    a, b = tokens.double(), truth.double()
    cosine = F.cosine_similarity(a, b, dim=-1)
    return {
        "relative_l2": float((a - b).norm() / b.norm()),
        "lowest_cosine": float(cosine.min()),
        "near": float((cosine >= NEAR).double().mean()),
    }


def table(rows: Sequence[Mapping[str, str | float]]) -> str:
    """Return the errors that :func:`compare` returned as the text of a table."""
    head = ("form", "field", "relative L2", "lowest cosine", f"tokens >= {NEAR}")
    cells = [
        (
            str(row["form"]),
            str(row["field"]),
            f"{row['relative_l2']:.2e}",
            f"{row['lowest_cosine']:.4f}",
            f"{row['near']:.2%}",
        )
        for row in rows
    ]
    return "Distance to the encoder in float32, per token:\n" + format_table(head, cells)
