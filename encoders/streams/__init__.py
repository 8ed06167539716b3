"""The methods ``encode`` and ``embed``, for a few images and videos, and ``encode_many`` and
``embed_many``, for a stream of any length.

Encoders and their wrappers, such as ``GraphedEncoder``, inherit the methods from
:class:`encoders.streams.items.EncodesItems`.

- ``items``: the four methods
- ``calls``: turns preprocessed items into one result each, in one or several calls of the encoder
- ``item_parts``: the parts of a large item that run in calls of their own
- ``stream``: turns the items of an iterable into results, in order and in bounded memory
- ``stream_item``: one item of a stream, from its preprocessing to its result
- ``preparing``: decodes and preprocesses items; ``turns``: how many a thread takes in one turn
- ``group_resizing``: resizes images of several turns together
- ``item_errors``: the results of items that could not be encoded; ``finite``: finds NaN in results
- ``collecting``: results as arrays on the host, copied by batch
- ``prefetch``: the threads that prepare items ahead
- ``device``: copies batches to a device, and runs them there
- ``progress``: shows progress as a bar on a terminal, as lines in a log
- ``pooling``: makes one vector per item; ``pruning``: keeps the tokens of a clip that changed

Other packages import from here, not from the modules. The names are imported when they are first
used, because every encoder imports ``items``, which must not import an image library.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..cuda_streams import capture_stream as capture_stream
    from ..inputs.gpu_decoding import Decode as Decode
    from ..inputs.intake import ImagesLike as ImagesLike
    from ..inputs.intake import VideosLike as VideosLike
    from .calls import EitherItemEncoder as EitherItemEncoder
    from .calls import ItemEncoder as ItemEncoder
    from .calls import ItemPath as ItemPath
    from .calls import MakeInputs as MakeInputs
    from .calls import ResultSettings as ResultSettings
    from .calls import join_inputs as join_inputs
    from .calls import select_items as select_items
    from .collecting import Arrays as Arrays
    from .collecting import Collected as Collected
    from .collecting import EncodedItem as EncodedItem
    from .finite import NOT_FINITE as NOT_FINITE
    from .finite import require_finite as require_finite
    from .item_errors import ItemError as ItemError
    from .item_parts import join_outputs as join_outputs
    from .items import EncodesItems as EncodesItems
    from .pooling import Pool as Pool
    from .pooling import VectorPool as VectorPool
    from .pooling import check_pool as check_pool
    from .pooling import pool as pool
    from .pooling import pool_items as pool_items
    from .progress import Progress as Progress
    from .pruning import PrunedTokens as PrunedTokens
    from .pruning import prune_video_tokens as prune_video_tokens
    from .stream import ItemResult as ItemResult
    from .stream import OnError as OnError
    from .stream import StreamOptions as StreamOptions
    from .stream import VectorKeywords as VectorKeywords
    from .stream import stream_items as stream_items

_MODULES = {
    alias.name: f"{'.' * node.level}{node.module}"
    for block in ast.parse(Path(__file__).read_text(encoding="utf-8")).body
    if isinstance(block, ast.If)
    for node in block.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""The public names that the imports for type checkers above list -> the module of each."""
__all__ = sorted(_MODULES)


if not TYPE_CHECKING:  # else a type checker would accept any misspelt name

    def __getattr__(name: str) -> object:
        """Import a name of another module when it is first used (PEP 562)."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_MODULES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
