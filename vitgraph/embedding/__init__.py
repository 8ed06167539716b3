"""Encoding many images: by ``vitgraph embed``, or inside Ray Data or ``datasets``.

A run of ``vitgraph embed`` is called a job. Its images are divided into shards, which several
processes (workers) encode and write as files into one folder.

- ``sources``: lists the images of a folder, list or dataset, and reads them
- ``workers``: finds out which of the workers this process is
- ``manifest``: the settings of a job, and the list of its images; ``records``: the types of the
  settings, and of the statistics that are written with each shard
- ``job``: encodes the shards that are not written yet, in order; ``collector``: makes the arrays of
  a shard from batches on the device
- ``large_images``: warns about images that make very many tokens
- ``report``: counts the encoded images at the end of a process
- ``shard``: writes and reads the files of one shard; ``shards``: all shards of a job;
  ``shard_writer``: writes shards while the next one is encoded
- ``storage``: the folder of a job, on a disk or on a remote store
- ``parquet_files``: shards as parquet files, which pandas and polars read
- ``activations``: outputs of blocks at all patches of an image or a sample; ``block_fields``: their
  names; ``activation_dataset``: :class:`ActivationDataset`, which reads them for training
- ``feature_store``: shards as one file per image, which vLLM reads; ``preparation``: a digest of
  what makes them besides weights
- ``planning``: ``--plan``, which estimates the time and disk space of a job
- ``verify``: ``--status`` and ``--verify``, which check the files of a job
- ``batch``: :class:`EmbedBatch` for Ray Data and ``datasets``
"""
