"""Computes what ``vitgraph.plots`` draws from the features of vision encoders.

The modules import torch, but not matplotlib:

- ``attention``: the weights of attention as maps
- ``similarity``: how similar the blocks of two towers are; ``nearest``: the most similar patches
- ``probes``: what a vote of neighbours and a linear probe read off each block
- ``colours``: three principal components of feature maps as red, green and blue
"""
