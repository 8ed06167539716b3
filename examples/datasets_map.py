"""Add a column of vectors to a dataset of Hugging Face, with one process per GPU.

    python examples/datasets_map.py Qwen/Qwen3-VL-2B-Instruct beans vectors --processes 8

A run that is repeated finds the result in the cache of the ``datasets`` package.
"""

from __future__ import annotations

import argparse

import multiprocess
from datasets import Image, load_dataset

from vitgraph import EmbedBatch


def main() -> None:
    """Load, map, save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repo", help="Hugging Face repo id, or the folder of a checkpoint")
    parser.add_argument("dataset", help="name on the Hub, or a folder")
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--split", default="train")
    parser.add_argument("--column", default="image")
    parser.add_argument("--processes", type=int, default=1, help="as many as there are GPUs")
    parser.add_argument("--batch-size", type=int, default=256, help="images per batch")
    options = parser.parse_args()

    dataset = load_dataset(options.dataset, split=options.split)
    # Undecoded: the threads of the encoder decode, and nothing is encoded again on the way out.
    dataset = dataset.cast_column(options.column, Image(decode=False))
    processes = options.processes if options.processes > 1 else None
    dataset = dataset.map(
        EmbedBatch(options.repo, column=options.column, normalize=True),
        batched=True,
        batch_size=options.batch_size,
        with_rank=True,
        num_proc=processes,
    )
    dataset.cast_column(options.column, Image()).save_to_disk(options.out)


if __name__ == "__main__":
    multiprocess.set_start_method("spawn")  # CUDA and torch's threads do not survive a fork
    main()
