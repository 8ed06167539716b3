"""``vitgraph encode``: writes the features of images and videos to a file.

- ``encode``: the command and its arguments
- ``checks``: checks of the arguments before anything is downloaded
- ``items``: opens the images and videos and encodes them one after another
- ``graphs``: ``--graph``, which encodes by replaying CUDA graphs
- ``graph_options``: the options that say which CUDA graphs to capture
"""
