"""One call whose images several GPUs share.

    torchrun --nproc-per-node 8 examples/data_parallel.py Qwen/Qwen3-VL-8B-Instruct *.jpg

Every process passes the same images and gets all features, in their order.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

import vitgraph


def main() -> None:
    """Encode the images in this process together with all others."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repo", help="Hugging Face repo id, or the folder of a checkpoint")
    parser.add_argument("images", nargs="+")
    options = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    encoder = vitgraph.load_encoder(options.repo, device=device, progress=dist.get_rank() == 0)
    graphed = vitgraph.GraphedEncoder(encoder).capture(progress=False)
    parallel = vitgraph.DataParallelEncoder(graphed)

    outputs = parallel(encoder.preprocess(options.images))
    if dist.get_rank() == 0:
        for name, output in zip(options.images, outputs, strict=True):
            assert output.pooler_output is not None  # it is left out only if `outputs=` says so
            print(name, tuple(output.pooler_output.shape))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
