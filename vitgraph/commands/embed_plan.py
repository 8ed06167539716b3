"""``vitgraph embed --plan``: reads a sample of the images and prints an estimate of the job.

The encoder's images per second are measured, or looked up in committed measurements.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from encoders import Encoder
from encoders.contract import Limits
from encoders.streams import Pool
from graphwrap import GraphedEncoder
from weights import HubOptions, describe_encoder, inspect_checkpoint

from ..devices import DTYPES
from ..embedding.activations import outputs_of
from ..embedding.block_fields import is_block
from ..embedding.planning.estimate import THREADS_PER_GPU, Estimate, report
from ..embedding.planning.sample import committed_rate, measure_rate, sample_files, take_sample
from .arguments import read_hub, read_source
from .embed_options import Command


def print_plan(command: Command, load: Callable[[], Encoder | GraphedEncoder]) -> None:
    """Print an estimate of the time and the disk space that a job would take; write no file.

    Args:
        command: the parsed options, with the source of images.
        load: loads the encoder with its weights; called only with the option ``--device``, to
            measure the speed of that device.

    Raises:
        ValueError: an option has an invalid value, or no image of the source can be read.
        OSError: the source cannot be listed.
    """
    options = command.options
    encoder = describe_encoder(options.repo, HubOptions(**read_hub(options)), options.family)
    command.choose_pool(encoder.pooling_head is not None, None)
    limits, settings, stream = command.calls()
    if options.workers is None:
        stream = stream._replace(workers=THREADS_PER_GPU)
    encoder.item_encoder().check(settings)
    count, description = count_written(
        encoder, command.pool, command.fields, limits, options.sample
    )
    out_dtype: str = command.out_dtype or _dtype_of_weights(options)
    size = DTYPES[out_dtype].itemsize
    total, sampled_files = sample_files(command.files())
    for line in (*command.source.notes, *command.source.left_out.describe()):
        print(line)
    sample, images = take_sample(
        sampled_files, command.reader.read, encoder, limits, lambda image: count(image) * size
    )
    if options.device is None:
        rate = committed_rate(encoder, sample.tokens)
    else:
        rate = measure_rate(load().item_encoder(), images, limits, settings, stream)
    assert stream.workers is not None
    estimate = Estimate(total, sample, rate, stream.workers)
    print(report(estimate, options.files, options.gpus, f"{description}, {out_dtype}"))


def _dtype_of_weights(options: argparse.Namespace) -> str:
    if options.dtype not in (None, "auto"):
        return str(options.dtype)
    return inspect_checkpoint(options.repo, **read_source(options)).dtype


def count_written(
    encoder: Encoder,
    pool: Pool,
    fields: Sequence[str],
    limits: Limits,
    sample: int | None = None,
) -> tuple[Callable[[Tensor], int], str]:
    """Return a function that counts the numbers that a job writes for an image, and a description.

    Args:
        encoder: an encoder on the meta device, which computes shapes and no values.
        pool: the pooling of the tokens into one vector; "none" writes all tokens.
        fields: output fields that are written if ``pool`` is "none".
        limits: keywords of ``preprocess`` that bound the size of an image.
        sample: the most patches per image whose outputs of blocks are written; None for all.

    Returns:
        The function, which takes an image uint8 [3, H, W], and a description of the written
        numbers: "vectors [D]", or the names of the fields.
    """
    if pool != "none":
        width = encoder.embed(pool=pool).shape[1]
        return lambda image: width, f"vectors [{width}]"

    of_blocks = outputs_of(encoder.paths, fields) if is_block(fields[0]) else ()
    giving = encoder.with_extras(of_blocks)

    def count(image: Tensor) -> int:
        with torch.no_grad():
            (output,) = giving.encode([image], **limits._asdict())
        if of_blocks:
            states = {name: output.extras[name] for name in of_blocks if name in output.extras}
            rows = {name: state.shape[:-1].numel() for name, state in states.items()}
            rows |= {name: min(rows[name], sample or rows[name]) for name in fields if name in rows}
            return sum(rows[name] * state.shape[-1] for name, state in states.items())
        values = [output._asdict()[name] for name in fields]
        tensors = [x for field in values for x in (field if isinstance(field, tuple) else [field])]
        return sum(tensor.numel() for tensor in tensors)

    return count, ", ".join(fields)
