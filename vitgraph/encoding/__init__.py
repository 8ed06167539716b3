"""``vitgraph encode``: images and videos to one features file.

- ``command``: the arguments, and all steps in order
- ``checks``, ``graph_options``: what is checked before anything is fetched, without torch
- ``media``: images and videos, decoded when their turn comes
- ``items``: encodes one item after another, and describes each result
- ``graphs``: encodes through CUDA graphs, several items per replay
"""
