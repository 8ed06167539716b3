"""The speed of whole towers on one GPU: ``python -m benchmarks speed``.

- ``measure``: one tower, its graphs, what capturing them takes, and every contestant in turn
"""
