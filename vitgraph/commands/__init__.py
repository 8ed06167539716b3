"""The commands, one module each or a few; torch is imported when a command needs it.

- ``encoding``: ``vitgraph encode``, images and videos to a features file
- ``embedding``: ``vitgraph embed``, a folder or list to shards
- ``search``: the images of a job that are nearest to a photograph
- ``demo``: feature maps of photographs, which ``demo_pictures`` draws
- ``towers``: ``vitgraph list``; ``cache``: the towers kept on this disk
- ``benching``: ``vitgraph bench``
- ``arguments``: the arguments that several commands have
"""
