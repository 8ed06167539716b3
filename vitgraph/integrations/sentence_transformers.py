"""Encoders as the first module of a ``SentenceTransformer`` for images.

``SentenceTransformer(modules=[ImageEncoder(encoder)])`` then has everything that the library
offers for embeddings: batches, a progress bar, normalising, similarities, a pool of processes.

Source: ``base/modules/input_module.py`` and ``base/model.py`` of sentence-transformers 6.2.0.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, get_args

import torch
from torch import Tensor

from encoders import Encoder, EncoderOutput, PartialOutput, VisionEncoder
from encoders.inputs import ImageLike
from encoders.streams import ResultSettings, VectorPool, pool_items
from graphwrap import GraphedEncoder
from weights import load_encoder

try:
    from sentence_transformers.base.modules import InputModule
except ImportError as error:
    raise ImportError(
        "vitgraph.integrations.sentence_transformers needs sentence-transformers: "
        "pip install 'sentence-transformers>=5.4'"
    ) from error

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer, SentenceTransformerModelCardData

__all__ = ["ImageEncoder"]

MODEL_ID = "sentence_transformers_model_id"
"""The text in a model card that sentence-transformers replaces by the repo id on upload."""
USAGE = """\
```python
from PIL import Image
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("{name}", trust_remote_code=True)
vectors = model.encode([Image.open("photo.jpg")])
```

The flag is needed although the repo holds no code: the class of the module is the installed
vitgraph's (`pip install .` in a clone of its repository), and sentence-transformers imports a class
of another package only with it.

The encoder alone, with its features per patch:

```python
import vitgraph

encoder = vitgraph.load_encoder("{name}")
features = encoder.encode(images=["photo.jpg"])
```

{others}"""
"""The example in a model card: ``{name}`` is the repo id, ``{others}`` are the examples that
``encoder.save_pretrained`` writes."""


class Pixels(TypedDict):
    """The preprocessed images that :meth:`ImageEncoder.preprocess` returns."""

    pixel_values: Tensor
    grid_thw: list[list[int]]
    """The (t, h, w) of each image in patches."""


class Embedded(Pixels):
    """Preprocessed images, and the vector of each."""

    sentence_embedding: Tensor
    """Vectors [images, D] in float32."""


class ImageEncoder(InputModule):  # type: ignore[misc]  # the library is not there for mypy
    """The first module of a ``SentenceTransformer``: one float32 vector per image.

    Args:
        encoder: an encoder returned by ``load_encoder``, or a :class:`GraphedEncoder` around one,
            which cannot be sent to the process pool of sentence-transformers.
        pool: "mean" or "max" over the tokens of an image, "cls" for the class token, averaged over
            the tiles, or "head" for the pooling head of SigLIP and SigLIP2.
        min_pixels, max_pixels, max_tiles, max_soft_tokens: as for ``encoder.preprocess``; None
            means the limit of the checkpoint.

    Raises:
        ValueError: ``pool`` is unknown, or the encoder has no class token or head for it, or the
            GraphedEncoder does not return the field that is pooled; or the encoder has several
            input paths (such as "image" and "tiles").
    """

    config_file_name = "vitgraph_config.json"
    config_keys = ["pool", "min_pixels", "max_pixels", "max_tiles", "max_soft_tokens"]

    def __init__(
        self,
        encoder: Encoder | GraphedEncoder,
        pool: VectorPool = "mean",
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        max_soft_tokens: int | None = None,
    ) -> None:
        super().__init__()
        pools = get_args(VectorPool)
        if pool not in pools:
            raise ValueError(f"pool={pool!r}: must be one of {', '.join(pools)}")
        encoder.item_encoder().check(ResultSettings(pool))
        self.graphed = encoder if isinstance(encoder, GraphedEncoder) else None
        inner = encoder.encoder if isinstance(encoder, GraphedEncoder) else encoder
        if not isinstance(inner, VisionEncoder):
            path_names = ", ".join(inner.paths) if isinstance(inner, Encoder) else "of its own kind"
            raise ValueError(
                f"{type(inner).__name__} has the paths {path_names}, and ImageEncoder runs one: "
                "call encoder.embed_many(images, pool=...) instead"
            )
        self.encoder = inner
        self.pool = pool
        self.min_pixels, self.max_pixels = min_pixels, max_pixels
        self.max_tiles, self.max_soft_tokens = max_tiles, max_soft_tokens

    @property
    def modalities(self) -> list[str]:
        """The modalities that the encoder takes: images only."""
        return ["image"]

    def preprocess(
        self, inputs: Sequence[ImageLike], prompt: str | None = None, **unused: object
    ) -> Pixels:
        """Return the pixels of images under "pixel_values", and their grids as a list under
        "grid_thw".

        A list stays on the host when sentence-transformers moves tensors to the device.

        Args:
            inputs: images, as ``encoder.preprocess`` takes them.
            prompt: not read; images have no prompt.
        """
        pixels = self.encoder.preprocess(
            images=inputs,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
            max_tiles=self.max_tiles,
            max_soft_tokens=self.max_soft_tokens,
        )
        return {"pixel_values": pixels.pixel_values, "grid_thw": pixels.grid_thw.tolist()}

    def forward(self, features: Pixels, **unused: object) -> Embedded:
        """Encode images, and return ``features`` with ``sentence_embedding`` [images, D] added.

        Args:
            features: the result of :meth:`preprocess`.
        """
        pixels, grid = features["pixel_values"], features["grid_thw"]
        items: Sequence[EncoderOutput | PartialOutput]
        if self.graphed is None:
            items = self.encoder.split(self.encoder(pixels, grid), grid)
        else:
            items = self.encoder.split(self.graphed(pixels, grid), grid)
        vectors = pool_items(items, self.pool, head=self.encoder.pooling_head)
        return {**features, "sentence_embedding": torch.stack(vectors).float()}

    def on_model_ready(self, model: SentenceTransformer) -> None:
        """Replace the example in the model card, which encodes sentences, by one with an image."""
        super().on_model_ready(model)
        card = model.model_card_data
        card.generate_widget_examples = False
        # A lambda could not be pickled, and the process pool pickles the model card.
        card.generate_usage_snippet = partial(self._usage, card)

    def _usage(self, card: SentenceTransformerModelCardData) -> str:
        published, name = self.encoder.published, card.model_id or MODEL_ID
        other_usage = published.usage.format(name=name) if published else ""
        return USAGE.format(name=name, others=other_usage)

    def get_embedding_dimension(self) -> int:
        """Return the number of columns of a vector."""
        return self.encoder.embed(pool=self.pool).shape[1]

    def save(
        self, output_path: str, *unused: object, safe_serialization: bool = True, **more: object
    ) -> None:
        """Write the encoder as ``encoder.save_pretrained`` does, and a config with the pooling and
        limits.

        Args:
            output_path: the folder to write.
            safe_serialization: not read; weights are always written as safetensors.
        """
        self.encoder.save_pretrained(output_path)
        self.save_config(output_path)

    @classmethod
    def load(
        cls,
        model_name_or_path: str,
        subfolder: str = "",
        token: bool | str | None = None,
        cache_folder: str | None = None,
        revision: str | None = None,
        local_files_only: bool = False,
        **unused: object,
    ) -> ImageEncoder:
        """Load the encoder and the pooling that :meth:`save` wrote, from a folder or a repo of the
        Hub."""
        config = cls.load_config(
            model_name_or_path,
            subfolder,
            token=token,
            cache_folder=cache_folder,
            revision=revision,
            local_files_only=local_files_only,
        )
        encoder = load_encoder(
            model_name_or_path,
            subfolder=subfolder or None,
            token=token,
            cache_dir=cache_folder,
            revision=None if Path(model_name_or_path).exists() else revision,
            local_files_only=local_files_only,
        )
        return cls(encoder, **config)
