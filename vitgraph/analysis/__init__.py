"""Compare towers: the similarity of blocks, matching patches, and figures of attention.

- ``similarity``: the similarity of blocks; ``nearest``: the nearest patches
- ``figures``: both, and attention over a photograph, as figures
- ``colours``: three principal components of feature maps as red, green and blue
"""
