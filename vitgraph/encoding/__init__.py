"""``vitgraph encode``: images and videos to one features file.

- ``command``: the arguments, and all steps in order
- ``checks``: what is checked before anything is fetched
- ``media``: images and videos, decoded when their turn comes
- ``items``: encodes one item after another, and describes each result
- ``graphs``: encodes through CUDA graphs, several items per replay
"""
