"""The CUDA graphs of an encoder, one per budget, on static buffers that they share.

- ``capture``: the graphs of all budgets captured, as many as memory holds
- ``budget_graph``: the graph of one budget; ``buffers``: the memory that all graphs share
- ``measuring``: replays and eager runs timed after capture
- ``replay``: inputs copied in, graphs replayed, results copied out
"""
