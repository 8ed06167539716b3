"""Embedding many images: by a command whose workers share a job, or inside another engine.

- ``sources``: the images that a source names, listed and read
- ``workers``: which of several processes this one is
- ``manifest``: what all shards of a job have in common, and the list of its files;
  ``records``: the types of what they have in common, and of what each writes
- ``job``: encodes the shards that are left, in order
- ``shard``: the files of one shard; ``shards``: all of a job, which of them are written
- ``storage``: the folder of a job, on a disk or on a remote store
- ``parquet_files``: the form of a shard that pandas and polars read
- ``feature_store``: the form of a shard that vLLM reads, one file per image
- ``planning``: ``--plan``
- ``verify``: ``--status`` and ``--verify``
- ``batch``: :class:`EmbedBatch` for Ray Data and ``datasets``
"""
