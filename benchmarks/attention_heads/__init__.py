"""Attention with heads of 72 and 80 columns on one GPU: ``python -m benchmarks.attention_heads``.

- ``measure``: the library's kernels and candidates beside them, each timed and checked
"""
