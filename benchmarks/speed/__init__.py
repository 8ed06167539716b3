"""The speed of whole vision towers on one GPU: ``python -m benchmarks speed``.

- ``floors``: the least milliseconds of workloads, by operations and the peak rates of a GPU
- ``measure``: measures one tower: the capture of its CUDA graphs, and the times of all variants
"""
