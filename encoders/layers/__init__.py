"""Layers and pure functions that several families share.

- ``attention``: attention over packed segments, on every device
- ``segments``: the offsets of segments, made on the host
- ``products``: convolutions and tables computed from their weights, where that is the same
- ``blocks``, ``siglip``, ``clip``, ``sam``: the blocks and the towers inside other towers
- ``assembly``: the tokens of an image's views as one sequence
"""
