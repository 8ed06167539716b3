"""The vision encoders of open vision-language models: loaded strictly, replayed as CUDA graphs.

``import vitgraph`` offers the whole library and imports each part when it is first used. The names
in ``__all__`` are public, and so is what ``features``, ``integrations``, ``plots``, ``seeded``,
``types`` and ``video`` list in theirs; all other modules are internal. These are the modules:

- ``types``: the classes of configs, and the types that signatures name, for annotations
- ``models``: the checkpoints that are known to load, as :func:`list_models` gives them
- ``features``: the features files that ``vitgraph encode`` writes
- ``embedding``: many images embedded by a job of several workers, or inside another engine
- ``search``: the images of an embedding job that are most similar to a photograph or a text
- ``parallel``: one call divided among several GPUs
- ``integrations``: encoders inside other libraries, one module per library
- ``analysis``: compares blocks, and finds nearest patches; ``plots``: draws these and feature maps
- ``fetching``: images read from the web; ``video``: video files read and written
- ``cli``, ``commands``, ``terminal``: the command line
- ``seeded``: small checkpoints with random weights
- ``timing``: times functions that run in turn
- ``pages``: HTML pages of one file
- ``devices``: where encoders run; ``packages``: whether optional packages are installed
- ``shadows``: raises an error if a file of the user hides a package of this library
"""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from .shadows import refuse_shadows

if TYPE_CHECKING:
    from encoders import ClipEncoder as ClipEncoder
    from encoders import Cosmos3EdgeEncoder as Cosmos3EdgeEncoder
    from encoders import CRadioEncoder as CRadioEncoder
    from encoders import DeepseekOCR2Encoder as DeepseekOCR2Encoder
    from encoders import DeepseekOCREncoder as DeepseekOCREncoder
    from encoders import DeepseekV4Encoder as DeepseekV4Encoder
    from encoders import DeepseekVL2Encoder as DeepseekVL2Encoder
    from encoders import DeepseekVLEncoder as DeepseekVLEncoder
    from encoders import DeepseekVLHybridEncoder as DeepseekVLHybridEncoder
    from encoders import Dinov2Encoder as Dinov2Encoder
    from encoders import Dinov3Encoder as Dinov3Encoder
    from encoders import DotsOCREncoder as DotsOCREncoder
    from encoders import Encoder as Encoder
    from encoders import EncoderItemSpec as EncoderItemSpec
    from encoders import EncoderOutput as EncoderOutput
    from encoders import Ernie4_5VLEncoder as Ernie4_5VLEncoder
    from encoders import Gemma3Encoder as Gemma3Encoder
    from encoders import Gemma4Encoder as Gemma4Encoder
    from encoders import Glm4VEncoder as Glm4VEncoder
    from encoders import GlmOCREncoder as GlmOCREncoder
    from encoders import GraniteDoclingEncoder as GraniteDoclingEncoder
    from encoders import GraphableEncoder as GraphableEncoder
    from encoders import HunyuanVLEncoder as HunyuanVLEncoder
    from encoders import Idefics3Encoder as Idefics3Encoder
    from encoders import InternViT as InternViT
    from encoders import ItemError as ItemError
    from encoders import Lfm2VLEncoder as Lfm2VLEncoder
    from encoders import Llama4Encoder as Llama4Encoder
    from encoders import LlavaEncoder as LlavaEncoder
    from encoders import LlavaNextEncoder as LlavaNextEncoder
    from encoders import LlavaOnevisionEncoder as LlavaOnevisionEncoder
    from encoders import MiniCPMVEncoder as MiniCPMVEncoder
    from encoders import MiniMaxM3Encoder as MiniMaxM3Encoder
    from encoders import Molmo2Encoder as Molmo2Encoder
    from encoders import MoonViTEncoder as MoonViTEncoder
    from encoders import MuseGlimmerEncoder as MuseGlimmerEncoder
    from encoders import NemotronEncoder as NemotronEncoder
    from encoders import PaddleOCRVLEncoder as PaddleOCRVLEncoder
    from encoders import PaliGemmaEncoder as PaliGemmaEncoder
    from encoders import PathsEncoder as PathsEncoder
    from encoders import PixtralEncoder as PixtralEncoder
    from encoders import Qwen2_5VLEncoder as Qwen2_5VLEncoder
    from encoders import Qwen2VLEncoder as Qwen2VLEncoder
    from encoders import Qwen3VLEncoder as Qwen3VLEncoder
    from encoders import Sam3Encoder as Sam3Encoder
    from encoders import Siglip2Encoder as Siglip2Encoder
    from encoders import SiglipEncoder as SiglipEncoder
    from encoders import Step3Encoder as Step3Encoder
    from encoders import Step3VLEncoder as Step3VLEncoder
    from encoders import Video as Video
    from encoders import VisionEncoder as VisionEncoder
    from encoders import VisionInputs as VisionInputs
    from encoders import prune_video_tokens as prune_video_tokens
    from encoders.inputs import read_video as read_video
    from encoders.inputs import smart_resize as smart_resize
    from graphwrap import GraphedEncoder as GraphedEncoder
    from graphwrap import fit_budgets as fit_budgets
    from weights import CheckpointError as CheckpointError
    from weights import extract_encoder as extract_encoder
    from weights import inspect_checkpoint as inspect_checkpoint
    from weights import load_encoder as load_encoder
    from weights import resolve_commit as resolve_commit

    from . import features as features
    from . import integrations as integrations
    from . import plots as plots
    from . import seeded as seeded
    from . import types as types
    from . import video as video
    from .analysis.attention import attention_maps as attention_maps
    from .analysis.nearest import nearest_patches as nearest_patches
    from .analysis.probes import probe_blocks as probe_blocks
    from .analysis.similarity import similarity_of_blocks as similarity_of_blocks
    from .embedding.activation_dataset import ActivationDataset as ActivationDataset
    from .embedding.batch import EmbedBatch as EmbedBatch
    from .features import load_embeddings as load_embeddings
    from .features import load_features as load_features
    from .fetching import load_image as load_image
    from .models import list_models as list_models
    from .parallel import DataParallelEncoder as DataParallelEncoder
    from .plots import plot_attention as plot_attention
    from .plots import plot_feature_maps as plot_feature_maps
    from .plots import plot_nearest_patches as plot_nearest_patches
    from .plots import plot_probes as plot_probes
    from .plots import plot_similarity as plot_similarity
    from .plots import write_explorer as write_explorer
    from .search.texts import embed_texts as embed_texts

__version__ = "0.2.0.dev0"

_MODULES = {
    alias.name: f"{'.' * node.level}{node.module or alias.name}"
    for block in ast.parse(Path(__file__).read_text(encoding="utf-8")).body
    if isinstance(block, ast.If)
    for node in block.body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""The public names that the imports for type checkers above list -> the module of each."""
__all__ = sorted(("__version__", *_MODULES))

refuse_shadows()


if not TYPE_CHECKING:  # else a type checker would accept any misspelt name

    def __getattr__(name: str) -> object:
        """Return the value of a public name, importing it when it is first used (PEP 562).

        Raises:
            AttributeError: ``vitgraph`` has no such public name.
        """
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return _found(name)


@cache
def _found(name: str) -> object:
    """Import a public name, or a public submodule such as ``features``.

    The check for files that shadow a package is repeated, because ``sys.path`` may have changed
    since ``import vitgraph``.
    """
    refuse_shadows()
    module = import_module(_MODULES[name], __name__)
    return module if _MODULES[name] == f".{name}" else getattr(module, name)


def __dir__() -> list[str]:
    """Return the public names of the package, including names that are not imported yet."""
    return __all__
