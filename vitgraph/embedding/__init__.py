"""Embedding many images: by a command whose workers share a job, or inside another engine.

- ``command``: the arguments of ``vitgraph embed``
- ``sources``: the images that a source names, in files, tar files, parquet files and data sets
- ``workers``: which of several processes this one is
- ``job``: encodes the shards that are left, in order
- ``plans``: which files of a shard are encoded, and which are copies of another file
- ``manifest``: what all shards of a job have in common, and files that are written whole
- ``shards``: the files of one shard
- ``parquet_files``: the form of a shard that pandas and polars read
- ``checks``: ``--status`` and ``--verify``
- ``batch``: :class:`EmbedBatch` for Ray Data and ``datasets``
"""
