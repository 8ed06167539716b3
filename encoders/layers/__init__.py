"""Layers and pure functions that several families share.

- ``attention``: attention over packed segments, on every device
- ``segments``: the offsets of segments, and what all blocks of a forward read
- ``table_taps``: the entries of a table of positions that a place in a grid is interpolated from
- ``windows``: the order of tokens, window by window
- ``frame_pairs``: the cells of two frames that make one token
- ``products``: convolutions computed from their weights, where that is the same
- ``bounded_linear``: linear layers that clamp what they read and return
- ``blocks``: blocks of transformers, their sizes and their MLP
- ``sam``, ``clip_vit``, ``deepseek_siglip``: whole towers, of which DeepSeek's encoders join one or
  two; the last also reads its part of their configs
- ``assembly``: the tokens of an image's views as one sequence
- ``torch_internals``: the names of torch that are used although they are not public
"""
