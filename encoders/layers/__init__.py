"""Layers and pure functions that several families share.

- ``attention``: attention over packed segments, on every device, and the offsets of segments
- ``table_taps``: the entries of a table of positions that a place in a grid is interpolated from
- ``products``: convolutions and tables computed from their weights, where that is the same
- ``blocks``, ``siglip``, ``clip``, ``sam``: the blocks and the towers inside other towers
- ``assembly``: the tokens of an image's views as one sequence
"""
