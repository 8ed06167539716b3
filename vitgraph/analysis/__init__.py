"""Similar blocks and nearest patches found, and colours computed for feature maps.

``vitgraph.plots`` draws the figures of them.

- ``similarity``: the similarity of blocks; ``nearest``: the nearest patches
- ``colours``: three principal components of feature maps as red, green and blue
"""
