"""Embed a folder of images with Ray Data, one actor per GPU, into parquet files.

    python examples/ray_data.py Qwen/Qwen3-VL-2B-Instruct photos vectors --actors 8 --cpus 10

Folders may be URLs such as ``s3://bucket/photos``. Ray reads files ahead, and starts actors again
that die. Its tasks that read need cores, too: actors must not take them all, or nothing moves. The
result has the columns ``path``, ``embedding`` and ``error``.
"""

from __future__ import annotations

import argparse

import ray

from vitgraph import EmbedBatch, resolve_commit


def main() -> None:
    """Run the pipeline on a cluster that ``ray.init`` finds, or on this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repo", help="Hugging Face repo id, or a folder that every node sees")
    parser.add_argument("images", help="folder of images")
    parser.add_argument("out", help="folder to write")
    parser.add_argument("--actors", type=int, default=1, help="as many as there are GPUs")
    parser.add_argument("--gpus", type=float, default=1, help="per actor; 0 runs on the CPU")
    parser.add_argument("--cpus", type=float, default=4, help="cores per actor, to decode images")
    parser.add_argument("--batch-size", type=int, default=256, help="images per batch")
    options = parser.parse_args()

    images = ray.data.read_binary_files(options.images, include_paths=True)
    vectors = images.map_batches(
        EmbedBatch,
        fn_constructor_kwargs={
            "repo": options.repo,
            "revision": resolve_commit(options.repo),  # all actors load the same commit
            "column": "bytes",
            "normalize": True,
            "workers": max(int(options.cpus), 1),
        },
        compute=ray.data.ActorPoolStrategy(size=options.actors),
        batch_size=options.batch_size,
        num_gpus=options.gpus,
        num_cpus=options.cpus,
    )
    vectors.drop_columns(["bytes"]).write_parquet(options.out)


if __name__ == "__main__":
    main()
