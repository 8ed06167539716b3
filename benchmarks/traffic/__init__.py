"""Images and workloads for benchmarks.

- ``sizes``: lists of typical image sizes, to judge choices of token budgets
- ``random_workloads``: random workloads, different in every run
- ``photographs``: photographs of given sizes
"""
