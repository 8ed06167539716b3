"""The speed of whole vision towers on one GPU: ``python -m benchmarks speed``.

- ``measure``: measures one tower: the capture of its CUDA graphs, and the times of all variants
"""
