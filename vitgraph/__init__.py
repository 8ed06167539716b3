"""The vision encoders of open vision-language models: loaded strictly, replayed as CUDA graphs.

``import vitgraph`` offers the whole library and imports each part when it is first used. The names
in ``__all__`` are public, and so is what ``features``, ``integrations``, ``plots``, ``seeded`` and
``video`` list in theirs; all other modules are internal. These are the modules:

- ``models``: the checkpoints that are known to load, as :func:`list_models` gives them
- ``features``: the features files that ``vitgraph encode`` writes
- ``embedding``: many images embedded by a job of several workers, or inside another engine
- ``search``: the images of an embedding job that are nearest to a photograph
- ``parallel``: one call shared out over several GPUs
- ``integrations``: encoders inside other libraries, one module per library
- ``analysis``, ``plots``, ``colours``: what a tower sees, compared and drawn
- ``fetching``, ``video``: images of the web, and files of videos
- ``cli``, ``commands``, ``terminal``: the command line
- ``seeded``: small checkpoints with random weights
- ``devices``, ``packages``: where encoders run, and the packages that are imported
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, cast

from .packages import refuse_shadows

if TYPE_CHECKING:
    from encoders import *  # noqa: F403
    from encoders import ItemError as ItemError
    from encoders import PrunedTokens as PrunedTokens
    from encoders import Publication as Publication
    from encoders import Video as Video
    from encoders import prune_video_tokens as prune_video_tokens
    from encoders.inputs.clips import read_video as read_video
    from encoders.inputs.sizes import smart_resize as smart_resize
    from graphwrap import Budget as Budget
    from graphwrap import BudgetStats as BudgetStats
    from graphwrap import GraphedEncoder as GraphedEncoder
    from graphwrap import GraphStats as GraphStats
    from graphwrap import fit_budgets as fit_budgets
    from weights import FAMILIES as FAMILIES
    from weights import LAYOUTS as LAYOUTS
    from weights import PUBLISHED as PUBLISHED
    from weights import CheckpointError as CheckpointError
    from weights import CheckpointInfo as CheckpointInfo
    from weights import Family as Family
    from weights import Layout as Layout
    from weights import PublishedModel as PublishedModel
    from weights import extract_encoder as extract_encoder
    from weights import inspect_checkpoint as inspect_checkpoint
    from weights import load_encoder as load_encoder
    from weights import resolve_commit as resolve_commit

    from . import features as features
    from . import integrations as integrations
    from . import plots as plots
    from . import seeded as seeded
    from . import video as video
    from .analysis.figures import plot_attention as plot_attention
    from .analysis.figures import plot_similarity as plot_similarity
    from .analysis.nearest import NearestPatch as NearestPatch
    from .analysis.nearest import nearest_patches as nearest_patches
    from .analysis.similarity import similarity_of_blocks as similarity_of_blocks
    from .embedding.batch import EmbedBatch as EmbedBatch
    from .features import Features as Features
    from .features import load_embeddings as load_embeddings
    from .features import load_features as load_features
    from .fetching import load_image as load_image
    from .models import list_models as list_models
    from .parallel import DataParallelEncoder as DataParallelEncoder
    from .plots import plot_feature_maps as plot_feature_maps
    from .plots import plot_nearest_patches as plot_nearest_patches

__version__ = "0.2.0"

_MODULES = {
    "Budget": "graphwrap",
    "BudgetStats": "graphwrap",
    "CheckpointError": "weights",
    "CheckpointInfo": "weights",
    "DataParallelEncoder": "vitgraph.parallel",
    "EmbedBatch": "vitgraph.embedding.batch",
    "FAMILIES": "weights",
    "Family": "weights",
    "Features": "vitgraph.features",
    "GraphStats": "graphwrap",
    "GraphedEncoder": "graphwrap",
    "LAYOUTS": "weights",
    "Layout": "weights",
    "NearestPatch": "vitgraph.analysis.nearest",
    "PUBLISHED": "weights",
    "PublishedModel": "weights",
    "extract_encoder": "weights",
    "fit_budgets": "graphwrap",
    "inspect_checkpoint": "weights",
    "list_models": "vitgraph.models",
    "load_embeddings": "vitgraph.features",
    "load_encoder": "weights",
    "load_features": "vitgraph.features",
    "load_image": "vitgraph.fetching",
    "nearest_patches": "vitgraph.analysis.nearest",
    "plot_attention": "vitgraph.analysis.figures",
    "plot_feature_maps": "vitgraph.plots",
    "plot_nearest_patches": "vitgraph.plots",
    "plot_similarity": "vitgraph.analysis.figures",
    "prune_video_tokens": "encoders",
    "read_video": "encoders.inputs",
    "resolve_commit": "weights",
    "similarity_of_blocks": "vitgraph.analysis.similarity",
    "smart_resize": "encoders.inputs",
}
"""The module that defines each public name; the names in ``encoders.__all__`` are public, too."""
_SUBMODULES = ("features", "integrations", "plots", "seeded", "video")
"""The submodules of ``vitgraph`` that are public themselves, such as ``vitgraph.features``."""

refuse_shadows()


def __getattr__(name: str) -> object:
    """Return a public name of the package, which is imported when it is first asked for (PEP 562).

    Raises:
        AttributeError: ``vitgraph`` has no such public name.
    """
    if name == "__all__":
        return sorted({"__version__", *_MODULES, *_SUBMODULES, *_import("encoders").__all__})
    if name in _SUBMODULES:
        return _import(f"{__name__}.{name}")
    if name not in _MODULES and not _is_of_encoders(name):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(_import(_MODULES.get(name, "encoders")), name)
    globals()[name] = value
    return value


def _is_of_encoders(name: str) -> bool:
    """Return whether ``encoders`` exports a class or constant of this name."""
    return name[:1].isupper() and name in _import("encoders").__all__


def _import(module: str) -> ModuleType:
    """Import a module by its full name.

    The check for files that shadow a package is repeated, because ``sys.path`` may have changed
    since ``import vitgraph``.
    """
    refuse_shadows()
    return import_module(module)


def __dir__() -> list[str]:
    """Return the public names of the package, also those that are not imported yet."""
    return cast("list[str]", __getattr__("__all__"))
