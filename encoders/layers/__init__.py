"""Layers and pure functions that several families share.

- ``attention``: attention over packed segments, on every device
- ``segments``: the offsets of packed segments, and the tensors that all blocks of a forward read
- ``table_taps``: numbers and weights of the rows that interpolate a table of position embeddings
- ``windows``: the order of tokens, or patches, in which those of an attention window are neighbours
- ``rotary``: the angles of rotary embeddings, and the rotation by them
- ``products``: convolutions computed as matrix products, where the result is the same
- ``bounded_linear``: linear layers that clamp their input and output
- ``keyless_bias_linear``: the projection of queries, keys and values whose keys have no bias
- ``blocks``: blocks of transformers, their sizes and their MLP
- ``assembly``: the tokens of an image's views (whole image and tiles) as one sequence
- ``torch_internals``: the private functions of torch that are used
"""
