"""Images and workloads that benchmarks encode.

- ``sizes``: image sizes for judging token budgets
- ``random_workloads``: workloads drawn anew in every run
- ``photographs``: photographs of given sizes
"""
