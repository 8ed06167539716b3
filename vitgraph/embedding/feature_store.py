"""A feature store: a folder of image features that an unmodified vLLM reads, one file per image.

In the folder of a store::

    store.json                        the checkpoint, numerics and limits of all images
    <key>/encoder_cache.safetensors   the tensor ``ec_cache`` [tokens, (1 + L) * D] of one image

A request to vLLM names an image by its key, in ``multi_modal_uuids``. A file appears whole or not
at all, and is never written twice, so vLLM may read a store while it is being filled.

Source: ``ECExampleConnector`` of vLLM 0.32.0 and 0.33.0,
``distributed/ec_transfer/ec_connector/example_connector.py``.

Shapes: L DeepStack layers, D width of the language model.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from encoders import (
    ClipEncoder,
    Encoder,
    Gemma3Encoder,
    Gemma4Encoder,
    Glm4VEncoder,
    GlmOCREncoder,
    Idefics3Encoder,
    InternViT,
    Lfm2VLEncoder,
    Llama4Encoder,
    MoonViTEncoder,
    PaddleOCRVLEncoder,
    PixtralEncoder,
    Qwen2_5VLEncoder,
    Qwen2VLEncoder,
    Qwen3VLEncoder,
    Siglip2Encoder,
    SiglipEncoder,
)
from encoders.contract import EncoderOutput, PartialOutput
from graphwrap import GraphedEncoder
from weights.files import flush, temporary_beside

from ..devices import DTYPES
from .preparation import preparation_digest
from .storage import STORE, STORED, TENSOR, LocalFolder, local_folder

if TYPE_CHECKING:
    from .parquet_files import Array

TOWERS = (
    *(Qwen2VLEncoder, Qwen2_5VLEncoder, Qwen3VLEncoder, InternViT, Glm4VEncoder, GlmOCREncoder),
    *(Gemma3Encoder, Gemma4Encoder, PixtralEncoder, Idefics3Encoder, PaddleOCRVLEncoder),
    Lfm2VLEncoder,
)
"""The encoders whose stored features vLLM accepts: their outputs were compared with vLLM's."""
REFUSED: Mapping[type[Encoder], str] = {
    ClipEncoder: "it is the tower of no language model",
    SiglipEncoder: "it is the tower of no language model",
    Siglip2Encoder: "it is the tower of no language model",
    Llama4Encoder: "its processor in vLLM does not round pixels, which moved tokens by 1 %",
    MoonViTEncoder: "Kimi-VL was not compared, and vLLM cuts clips of Kimi-K2.5 into items",
}
"""The encoders that a store rejects for a special reason, which the error message gives. Other
encoders outside :data:`TOWERS` are rejected because their tokens were not compared with vLLM's."""
_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_OF_JOBS = (".json", ".jsonl", ".csv")
"""File name endings that the key of an image must not have, because other files of a job's folder
have them."""

_ADDED = dict.fromkeys(("max_soft_tokens", "preparation", "precision", "kernels"))
"""Settings that stores of earlier versions lack."""


class StoreSettings(NamedTuple):
    """The checkpoint, numerics and bounds of image size that all images of a store have in common.

    The bounds are keywords of ``preprocess``; None takes the bound of the checkpoint.
    """

    checkpoint: str | None
    """The repo id of the checkpoint; None if it was not loaded from the Hub."""
    dtype: str
    commit: str
    """The commit of the repo; if not loaded from the Hub, a digest of the weights in ``dtype``."""
    width: int
    """The number of columns of each stored tensor: (1 + L) * D, for L DeepStack layers of width D.
    """
    min_pixels: int | None = None
    max_pixels: int | None = None
    max_tiles: int | None = None
    max_soft_tokens: int | None = None
    preparation: str | None = None
    """A digest of the encoder's config and preprocessor, which has the values of the checkpoint's
    processor files or was set by hand. None: the store is of an earlier version, without it."""
    precision: str | None = None
    """"bf16" if products are computed in ``dtype``, else "fp8"."""
    kernels: str | None = None
    """The steps that rounded the features: the encoder's own ("reference") or fused ones
    ("accelerated")."""


class FeatureStore:
    """Writes features of images into a folder that vLLM reads, and reads them again.

    Args:
        folder: a path, local or mounted; made if it does not exist.
        encoder: the encoder that makes the features, of a class in :data:`TOWERS`. A new store
            takes its settings from the encoder; an existing store rejects an encoder with other
            settings. None opens an existing store as it is.
        min_pixels, max_pixels, max_tiles, max_soft_tokens: the bounds of image size with which all
            images of the store are encoded; None takes the bound of the checkpoint.

    Attributes:
        folder: the folder of the store.
        settings: checkpoint, dtype and bounds of image size that all images have in common.

    Raises:
        ValueError: ``folder`` is a remote address, or holds no store and ``encoder`` is None; the
            encoder's class is not in :data:`TOWERS`; or the store has other settings.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        encoder: Encoder | GraphedEncoder | None = None,
        *,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        max_tiles: int | None = None,
        max_soft_tokens: int | None = None,
    ) -> None:
        self.folder = local_folder(folder)
        stored = _read_settings(self.folder)
        if encoder is None:
            if stored is None:
                raise ValueError(
                    f"{self.folder}: has no {STORE}; pass the encoder whose features it is to hold"
                )
            self.settings = stored
            return
        settings = _describe(encoder)._replace(
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            max_tiles=max_tiles,
            max_soft_tokens=max_soft_tokens,
        )
        if stored is None:
            content = json.dumps(settings._asdict(), indent=1) + "\n"
            LocalFolder(self.folder).create(STORE, content.encode())
            stored = _read_settings(self.folder)
        assert stored is not None
        _compare(stored, settings, self.folder)
        self.settings = stored

    def put(self, key: str, output: EncoderOutput | PartialOutput) -> bool:
        """Write the features of one image, unless the store has this key.

        Args:
            key: the name that requests to vLLM pass in ``multi_modal_uuids``: :func:`content_key`
                of the bytes of the image file, or a name of your own that no other image ever gets.
            output: the output that ``encode`` returned for this image, in the dtype of the store.

        Returns:
            Whether the features were written; False if the store had the key already.

        Raises:
            ValueError: a key that cannot name a folder, or an output of another dtype or width.
            OSError: the folder cannot be written to, or the disk is full.
        """
        return self.write(key, language_rows(output), self._path(key))

    def write(self, key: str, rows: Tensor, temporary_path: Path) -> bool:
        """Write the features of one image, unless the store has this key.

        Args:
            key: key of the image, as in :meth:`put`.
            rows: [tokens, (1 + L) * D] in the dtype of the store, for L DeepStack layers of width
                D.
            temporary_path: the features are first written to a temporary file beside this path; the
                file's name is this path's name with additions.

        Returns:
            Whether the features were written; False if the store had the key already.

        Raises:
            ValueError: a key that cannot name a folder, or features of another dtype or width.
            OSError: the folder cannot be written to, or the disk is full.
        """
        dtype, width = str(rows.dtype).removeprefix("torch."), rows.shape[1]
        if (dtype, width) != (self.settings.dtype, self.settings.width):
            raise ValueError(
                f"{key}: is {dtype} of width {width}, and this store holds {self.settings.dtype} "
                f"of width {self.settings.width}: take the encoder and dtype of the store"
            )
        path = self._path(key)
        if path.exists():
            return False
        path.parent.mkdir(exist_ok=True)
        with temporary_beside(temporary_path) as temporary:
            save_file({TENSOR: rows.detach().cpu().contiguous()}, temporary)
            flush(temporary)
            try:
                os.link(temporary, path)
            except FileExistsError:  # another writer has written the file meanwhile
                return False
            except OSError:  # a file system without hard links
                temporary.replace(path)
        return True

    def write_array(self, key: str, rows: Array, temporary_path: Path) -> bool:
        """Cast the features [tokens, width] of one image to the dtype of the store, and write them.

        The arguments and the result are the same as in :meth:`write`, with a numpy array as rows.
        """
        return self.write(
            key, torch.from_numpy(rows).to(DTYPES[self.settings.dtype]), temporary_path
        )

    def read_arrays(self, keys: Sequence[str]) -> Array:
        """Return the features of several images, concatenated, as float32 [all tokens, width]."""
        none = torch.empty(0, self.settings.width)
        return torch.cat([none, *(self.get(key).float() for key in keys)]).numpy()

    def get(self, key: str) -> Tensor:
        """Return the features of one image on the CPU.

        Args:
            key: the key under which :meth:`put` wrote them.

        Returns:
            [tokens, (1 + L) * D] for L DeepStack layers, D the width of the language model.

        Raises:
            KeyError: the store does not have this key.
            ValueError: a key that cannot name a folder.
        """
        if key not in self:
            raise KeyError(key)
        return load_file(self._path(key))[TENSOR]

    def __contains__(self, key: str) -> bool:
        return self._path(key).exists()

    def _path(self, key: str) -> Path:
        if not _KEY.fullmatch(key) or key.endswith(_OF_JOBS):
            raise ValueError(
                f"key {key!r}: must match {_KEY.pattern} and not end in {', '.join(_OF_JOBS)}; "
                "content_key(bytes of the file) always does"
            )
        return self.folder / key / STORED


def language_rows(output: EncoderOutput | PartialOutput) -> Tensor:
    """Concatenate the two outputs that a language model reads: tokens and DeepStack features.

    Args:
        output: an output with ``pooler_output`` [tokens, D], and ``deepstack_features`` of L layers
            in the same shape.

    Returns:
        [tokens, (1 + L) * D], concatenated along the channels, as vLLM's own encoders return it.

    Raises:
        ValueError: the output lacks one of the two fields.
    """
    if output.pooler_output is None or output.deepstack_features is None:
        raise ValueError(
            "the GraphedEncoder leaves out what language models read: leave its outputs at "
            "('pooler_output', 'deepstack_features')"
        )
    return torch.cat((output.pooler_output, *output.deepstack_features), dim=1)


def _describe(encoder: Encoder | GraphedEncoder) -> StoreSettings:
    inner = encoder.encoder if isinstance(encoder, GraphedEncoder) else encoder
    kind = type(inner)
    if kind not in TOWERS or not isinstance(inner, Encoder):
        default_reason = "its tokens were not compared with those of vLLM"
        reason = next(
            (reason_of_tower for tower, reason_of_tower in REFUSED.items() if tower is kind),
            default_reason,
        )
        raise ValueError(
            f"a feature store takes no {kind.__name__}, since {reason}: pass the images themselves "
            f"to vLLM; stored are features of {', '.join(tower.__name__ for tower in TOWERS)}"
        )
    layers = 1
    if isinstance(inner, Qwen3VLEncoder):
        layers += len(inner.config.deepstack_visual_indexes)
    published = inner.published
    commit = published.commit if published is not None else None
    precision, kernels = _numerics(encoder)
    return StoreSettings(
        published.repo_id if published is not None else None,
        str(inner.dtype).removeprefix("torch."),
        commit or _digest(inner),
        layers * inner.out_features,
        preparation=preparation_digest(inner),
        precision=precision,
        kernels=kernels,
    )


def _numerics(encoder: Encoder | GraphedEncoder) -> tuple[str, str]:
    """Return the precision of an encoder's products, and whose steps round its features.

    The second is "accelerated" for fused steps, else "reference".
    """
    if isinstance(encoder, GraphedEncoder):
        inner, kernels, precision = encoder.encoder, encoder.kernels, encoder.precision
        assert isinstance(inner, Encoder)  # `_describe` rejects all others
        encoder = inner
        if kernels != "reference" and all(x.accelerator is None for x in inner.paths.values()):
            # A new form, because one that ran says why its last run was not fused.
            encoder = inner.accelerated(kernels, precision)
    numerics = ("bf16", "reference")
    for path in encoder.paths.values():
        choices = path.kernel_choices()
        if choices["kernels"] != "reference" and choices["reference_because"] is None:
            numerics = (str(choices["precision"]), "accelerated")
    return numerics


def _digest(encoder: Encoder) -> str:
    """Return a digest of the names and bytes of all weights, which the settings hold instead of a
    commit if the checkpoint is no repo of the Hub."""
    digest = hashlib.sha256()
    for name, tensor in sorted(encoder.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return f"weights {digest.hexdigest()[:40]}"


def _read_settings(folder: Path) -> StoreSettings | None:
    try:
        fields = {**_ADDED, **json.loads((folder / STORE).read_bytes())}
        return StoreSettings(*(fields[name] for name in StoreSettings._fields))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder / STORE}: is damaged ({error!r})") from error


def _compare(stored: StoreSettings, settings: StoreSettings, folder: Path) -> None:
    for name, stored_value in stored._asdict().items():
        value = settings._asdict()[name]
        if value != stored_value:
            raise ValueError(
                f"{folder}: holds features of {name} {stored_value}, now it is {value}; give the "
                "same checkpoint, preprocessor, dtype, kernels and limits, or another folder"
            )
