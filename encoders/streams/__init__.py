"""Encoding the items that a user has: a few in one call, or a stream of any length.

Encoders and their wrappers inherit :class:`encoders.streams.items.EncodesItems`, and share this
code.

- ``items``: the methods ``encode`` and ``encode_many``; ``keywords``: their keywords as types
- ``calls``: preprocessed items to one result each, in one call of the encoder or in several
- ``stream``: items of an iterable to results, in order and in bounded memory
- ``prefetch``: the threads that prepare items ahead
- ``device``: the copies of batches to a device, and their runs on it
- ``progress``: a bar on a terminal, lines in a log
- ``pooling``: one vector per item; ``pruning``: the tokens of a clip that changed
"""
