"""The ``vitgraph`` commands, each in one or a few modules that import torch only when they need it.

- ``encode``: ``vitgraph encode``, images and videos to a features file; ``encode_checks``,
  ``encode_items``, ``encode_graphs`` and ``graph_options`` are its parts
- ``embed``: ``vitgraph embed``, the images of a folder or list to files of vectors (shards);
  ``embed_options`` parses its options, ``embed_plan`` is ``--plan``
- ``search``: ``vitgraph search``, the images of an ``embed`` job that are nearest to a photograph
  or to words; ``search_pairs``: its near-duplicates; ``search_checks`` and
  ``search_report`` are parts of both
- ``demo``: ``vitgraph demo``, feature maps of photographs, which ``demo_pictures`` draws
- ``towers``: ``vitgraph list``, the supported checkpoints
- ``cache``: ``vitgraph cache``, the downloaded vision towers on this disk
- ``bench``: ``vitgraph bench``, of ``bench_speed`` and ``bench_accuracy``
- ``arguments``: arguments that several commands have in common
"""
