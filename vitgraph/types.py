"""The configs of encoders, and the types that signatures of public functions name.

They serve annotations and ``isinstance``; you need not import one to call a function. A config is
made by ``from_hf`` of its class, or read from ``encoder.config``.
"""

from encoders import BlockSizes as BlockSizes
from encoders import ClipConfig as ClipConfig
from encoders import CRadioConfig as CRadioConfig
from encoders import DeepseekOCRConfig as DeepseekOCRConfig
from encoders import DeepseekVL2Config as DeepseekVL2Config
from encoders import DeepseekVLConfig as DeepseekVLConfig
from encoders import DeepseekVLHybridConfig as DeepseekVLHybridConfig
from encoders import Dinov2Config as Dinov2Config
from encoders import Dinov3Config as Dinov3Config
from encoders import EncoderConfig as EncoderConfig
from encoders import Ernie4_5VLConfig as Ernie4_5VLConfig
from encoders import FeatureRows as FeatureRows
from encoders import Gelu as Gelu
from encoders import Gemma3Config as Gemma3Config
from encoders import Gemma4Config as Gemma4Config
from encoders import Glm4VConfig as Glm4VConfig
from encoders import GlmOCRConfig as GlmOCRConfig
from encoders import Grid as Grid
from encoders import GridLike as GridLike
from encoders import Idefics3Config as Idefics3Config
from encoders import InternViTConfig as InternViTConfig
from encoders import Lfm2VLConfig as Lfm2VLConfig
from encoders import Llama4Config as Llama4Config
from encoders import LlavaConfig as LlavaConfig
from encoders import Metadata as Metadata
from encoders import MiniMaxM3Config as MiniMaxM3Config
from encoders import ModeName as ModeName
from encoders import MoonViTConfig as MoonViTConfig
from encoders import OutputField as OutputField
from encoders import PaddleOCRVLConfig as PaddleOCRVLConfig
from encoders import PartialOutput as PartialOutput
from encoders import PatchConfig as PatchConfig
from encoders import PathInputs as PathInputs
from encoders import PixtralConfig as PixtralConfig
from encoders import Preprocessor as Preprocessor
from encoders import PrunedTokens as PrunedTokens
from encoders import Publication as Publication
from encoders import Qwen2_5VLConfig as Qwen2_5VLConfig
from encoders import Qwen2VLConfig as Qwen2VLConfig
from encoders import Qwen3VLConfig as Qwen3VLConfig
from encoders import Sam3Config as Sam3Config
from encoders import SamSizes as SamSizes
from encoders import Siglip2Config as Siglip2Config
from encoders import SiglipConfig as SiglipConfig
from encoders import Step3Config as Step3Config
from encoders import Step3VLConfig as Step3VLConfig
from encoders import TileConfig as TileConfig
from encoders import Tiling as Tiling
from encoders import VisionConfig as VisionConfig
from encoders.contract import Accelerator as Accelerator
from encoders.contract import CallBlock as CallBlock
from encoders.contract import DeviceOrDtype as DeviceOrDtype
from encoders.contract import FeatureMaps as FeatureMaps
from encoders.contract import Kernels as Kernels
from encoders.contract import Precision as Precision
from encoders.contract import Preprocess as Preprocess
from encoders.contract import Step as Step
from encoders.data import Array as Array
from encoders.inputs import AnyArray as AnyArray
from encoders.inputs import FileLike as FileLike
from encoders.inputs import ImageLike as ImageLike
from encoders.inputs import ItemLike as ItemLike
from encoders.inputs import VideoLike as VideoLike
from encoders.inputs.gpu_decoding import Decode as Decode
from encoders.streams import ImagesLike as ImagesLike
from encoders.streams import OnError as OnError
from encoders.streams import VectorPool as VectorPool
from encoders.streams import VideosLike as VideosLike
from graphwrap import Backend as Backend
from graphwrap import BackendInUse as BackendInUse
from graphwrap import Budget as Budget
from graphwrap import BudgetStats as BudgetStats
from graphwrap import FormKernels as FormKernels
from graphwrap import GraphStats as GraphStats
from graphwrap import OnOverflow as OnOverflow
from weights import CheckpointInfo as CheckpointInfo
from weights import DtypeName as DtypeName
from weights import FamilyConfig as FamilyConfig
from weights import Fetch as Fetch
from weights import JsonDict as JsonDict
from weights.files import Route as Route

from .analysis.attention import Heads as Heads
from .analysis.attention import Queries as Queries
from .analysis.colours import Maps as Maps
from .analysis.nearest import NearestPatch as NearestPatch
from .analysis.probes import Accuracy as Accuracy
from .analysis.probes import BlockScores as BlockScores
from .embedding.activations import Activations as Activations

__all__ = sorted(name for name in globals() if name[0].isupper())
"""The names that are imported above."""
