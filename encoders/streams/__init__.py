"""Encoding the items that a user has: a few in one call, or a stream of any length.

Encoders and their wrappers inherit :class:`EncodesItems` and share all of it.

- ``items``: the methods ``encode`` and ``encode_many``
- ``calls``: preprocessed items to one result each, in one call of the encoder or in several
- ``stream``: items of an iterable to results, in order and in bounded memory
- ``prefetch``: the threads that prepare items ahead
- ``progress``: how far a stream is, for whoever waits
- ``device``: how batches reach a device and run there
"""

from .calls import (
    Encoding,
    ItemEncoder,
    ItemResults,
    is_out_of_memory,
    join_inputs,
    select_items,
    split_inputs,
)
from .items import EncodesItems
from .progress import Progress
from .stream import ItemError, ItemResult, StreamOptions, stream_items

__all__ = [
    "EncodesItems",
    "Encoding",
    "ItemEncoder",
    "ItemError",
    "ItemResult",
    "ItemResults",
    "Progress",
    "StreamOptions",
    "is_out_of_memory",
    "join_inputs",
    "select_items",
    "split_inputs",
    "stream_items",
]
