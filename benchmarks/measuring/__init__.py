"""Modules that several benchmarks share; ``vitgraph.timing`` times their calls.

- ``machine``: a description of the machine: GPU, driver, clocks, versions, commit, date
- ``results``: writes results as JSON, with four digits and one record a line
- ``tables``: tables in Markdown
- ``torch_flash``: transformers' attention by torch's own flash-attention 2
"""
