"""The ``vitgraph`` commands, each in one or a few modules that import torch only when they need it.

- ``encoding``: ``vitgraph encode``, images and videos to a features file
- ``embedding``: ``vitgraph embed``, the images of a folder or list to files of vectors (shards)
- ``search``: ``vitgraph search``, the images of an ``embed`` job that are nearest to a photograph
- ``demo``: ``vitgraph demo``, feature maps of photographs, which ``demo_pictures`` draws
- ``towers``: ``vitgraph list``, the supported checkpoints
- ``cache``: ``vitgraph cache``, the downloaded vision towers on this disk
- ``benching``: ``vitgraph bench``, the speed and the error of a checkpoint
- ``arguments``: arguments that several commands have in common
"""
