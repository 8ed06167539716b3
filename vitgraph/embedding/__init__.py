"""Embedding many images: the command, the job that writes shards, and the files of a shard."""
