"""An encoder for Dynamo: ``--custom-encoder-class vitgraph.integrations.dynamo.Encoder``.

Dynamo makes the class without arguments, so its options, the fields of :class:`Options`, are
environment variables such as ``VITGRAPH_DYNAMO_MAX_PIXELS=1048576``.

Source: ai-dynamo 1.6.1, ``dynamo/vllm/multimodal_utils/custom_encoder``: ``backend/base.py``
defines the base class, ``async_encoder.py`` and ``batcher.py`` call it, ``adapter/`` reads results.

Shapes: N tokens of an image, L DeepStack layers, D width of the language model.
"""

from __future__ import annotations

import base64
import logging
import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from PIL import Image
from torch import Tensor

from encoders import Encoder as Tower
from encoders import Qwen3VLEncoder
from encoders.contract import Limits, PartialOutput, VisionInputs
from encoders.inputs import StagedItem, open_image
from encoders.streams import join_inputs
from graphwrap import Backend, GraphedEncoder
from weights import DtypeName, load_encoder

from ..embedding.feature_store import language_rows
from ..fetching import MOST_BYTES, Fetcher

try:
    from dynamo.vllm.multimodal_utils.custom_encoder.adapter.qwen3_vl import Qwen3VLImageEncoding
    from dynamo.vllm.multimodal_utils.custom_encoder.backend import (
        Preprocessed,
        VisionEncoderBackend,
    )
except ImportError as error:
    raise ImportError(
        "vitgraph.integrations.dynamo needs ai-dynamo 1.6 with vLLM: pip install "
        f"'ai-dynamo[vllm]>=1.6,<1.7' ({error})"
    ) from error

__all__ = ["Encoder", "Options", "read_options"]

PREFIX = "VITGRAPH_DYNAMO_"
_NUMBERS = ("max_tokens", "min_pixels", "max_pixels", "max_tiles", "threads", "image_token_id")
"""The options whose values are positive whole numbers."""
_LARGEST_BUDGET, _MOST_THREADS = 8192, 16
"""The most output tokens of a batch, and the most threads, by default."""
_LOG = logging.getLogger(__name__)
Prepared: TypeAlias = StagedItem | VisionInputs
"""A preprocessed image: resized on the encoder's device, or patches with a grid."""
Artifact: TypeAlias = Qwen3VLImageEncoding | Tensor
"""The features of an image for Dynamo: token rows, and for Qwen3-VL the image's grid as well."""


class Options(NamedTuple):
    """The settings of the encoder, each read from an environment variable.

    ``min_pixels``, ``max_pixels`` and ``max_tiles`` limit the size of images; None means the limit
    of the checkpoint.
    """

    checkpoint: str | None = None
    """The repo id or folder of the tower; None means the model that Dynamo serves."""
    revision: str | None = None
    device: str = "auto"
    dtype: DtypeName = "auto"
    """The dtype of weights and features; it must be the language model's own dtype if that model
    is text-only."""
    max_tokens: int | None = None
    """The most output tokens of a batch, of an image and of a graph. None means 8192 for batch and
    image, and graphs as large as a third of the free memory allows."""
    min_pixels: int | None = None
    max_pixels: int | None = None
    max_tiles: int | None = None
    allowed_hosts: str = ""
    """Host names, separated by commas, from which images are fetched although their addresses are
    private."""
    threads: int | None = None
    """The number of images that are fetched and decoded at the same time; None means one per core,
    at most 16."""
    image_token_id: int | None = None
    """The id of the placeholder token of an image in the prompt of a text-only language model;
    None for Qwen3-VL and Qwen3.5, because Dynamo's adapter for them knows it."""
    backend: Backend = "auto"
    """The ``backend`` of the GraphedEncoder; "eager" captures no graphs."""
    table: str = "auto"
    """Where times of graphs are kept: "auto" for the folder of kept tables, or a file."""


class Encoder(VisionEncoderBackend[str, Prepared, Artifact]):  # type: ignore[misc]  # not there for mypy
    """A vision tower that Dynamo calls to download, batch and encode the images of requests.

    Users give Dynamo the name of this class. In this file, the encoder classes of vitgraph are
    called ``Tower``.

    Attributes:
        options: the settings that were read from environment variables.
        max_batch_cost: most output tokens per batch.
        preprocess_concurrency: number of images that are preprocessed at the same time.
        image_token_id: id of the image token of a text-only language model; None for Qwen3-VL and
            Qwen3.5.
        buckets: output tokens of each graph; None until :meth:`build` captures graphs.

    Raises:
        ValueError: a variable ``VITGRAPH_DYNAMO_...`` that is unknown or has a wrong value.
    """

    def __init__(self) -> None:
        self.options = read_options(os.environ)
        self.max_batch_cost = self.options.max_tokens or _LARGEST_BUDGET
        cores = min(os.cpu_count() or 1, _MOST_THREADS)
        self.preprocess_concurrency = self.options.threads or cores
        self.image_token_id = self.options.image_token_id
        self.buckets: list[int] | None = None
        hosts = (host.strip() for host in self.options.allowed_hosts.split(","))
        self._fetcher = Fetcher(allowed_hosts=[host for host in hosts if host])
        self._graphed: GraphedEncoder | None = None

    def build(self, model_id: str) -> None:
        """Load the tower and capture its CUDA graphs; Dynamo replays them on the same thread.

        Args:
            model_id: repo id or folder of the model that Dynamo serves. Its tower is loaded unless
                the options name another checkpoint.

        Raises:
            ValueError: Dynamo cannot pass the tower's features to the language model, or the
                checkpoint cannot be loaded.
        """
        options = self.options
        tower = self.load_tower(options.checkpoint or model_id)
        _check_adapter(tower, self.image_token_id)
        graphed = GraphedEncoder(
            tower,
            max_budget=options.max_tokens,
            backend=options.backend,
            table=options.table,
            clone=False,
        )
        self._graphed = graphed.capture(progress=False)
        self.buckets = sorted({budget.tokens for budget in graphed.budgets})
        _LOG.info("%s, graphs of %s tokens (%s)", options, self.buckets, graphed.backend)

    def load_tower(self, checkpoint: str) -> Tower:
        """Load the tower of a repo or folder; a subclass may override this to build another one."""
        device, dtype, revision = self.options.device, self.options.dtype, self.options.revision
        return load_encoder(
            checkpoint, revision=revision, device=device, dtype=dtype, progress=False
        )

    def preprocess(self, raw: str) -> Preprocessed[Prepared]:
        """Download, decode and resize one image; any thread may call it.

        Args:
            raw: a ``data:`` URL in base64, or an https URL.

        Returns:
            The preprocessed image and, as its cost, the number of its output tokens.

        Raises:
            ValueError: the image is rejected; the client sees the message, the log the reason.
        """
        content = self._read(raw)
        try:
            image = open_image(content)
        except ValueError as error:
            raise _refusal("cannot be decoded: send a JPEG, PNG or WebP file", error) from None
        try:
            item, tokens = self._prepare(image)
        except ValueError as error:
            size = f"{image.width}x{image.height} pixels"
            raise _refusal(f"has {size}, which this model does not take", error) from None
        if tokens > self.max_batch_cost:
            raise ValueError(
                f"the image makes {tokens:,} tokens, and at most {self.max_batch_cost:,} are "
                "encoded: send a smaller image"
            )
        return Preprocessed(item, tokens)

    def forward_batch(
        self, items: list[Prepared], target_bucket: int | None = None
    ) -> list[Artifact]:
        """Encode the images of a batch in one call.

        Args:
            items: the images, as :meth:`preprocess` returned them.
            target_bucket: not read; Dynamo passes None, and the encoder chooses the graphs itself.

        Returns:
            Per image, on the CPU: for Qwen3-VL its tokens and their L DeepStack features, joined to
            [N, (1 + L) * D], and its grid (t, h, w) in patches; for a text-only language model only
            the tokens [N, D].
        """
        inputs = self._join(items)
        outputs = [language_rows(output) for output in self.encode(inputs)]
        lengths = [len(output) for output in outputs]
        rows = _on_host(torch.cat(outputs)).split(lengths)
        if self.image_token_id is not None:
            return list(rows)
        grids = (tuple(grid) for grid in inputs.grid_thw.tolist())
        return [Qwen3VLImageEncoding(*pair) for pair in zip(rows, grids, strict=True)]

    def encode(self, inputs: VisionInputs) -> Sequence[PartialOutput]:
        """Return one output per image, in memory that the next call overwrites.

        Args:
            inputs: the images of a batch, on the device of the encoder.
        """
        return self._built()(inputs)

    def close(self) -> None:
        """Free the CUDA graphs and the weights."""
        graphed, self._graphed = self._built(), None
        graphed.release()
        on_cuda = graphed.device.type == "cuda"
        del graphed
        if on_cuda:
            torch.cuda.empty_cache()

    def _built(self) -> GraphedEncoder:
        if self._graphed is None:
            raise RuntimeError("the encoder is not built, or is closed")
        return self._graphed

    def _read(self, url: str) -> bytes:
        """Return the bytes of the image that a URL contains (``data:``) or points to (https).

        Raises:
            ValueError: the URL is rejected or the file too large; the message is for the client.
        """
        head, _, text = url.partition(",")
        is_data = head.startswith("data:")
        try:
            if not is_data:
                return self._fetcher.read(url)
            if not head.endswith(";base64") or len(text) > MOST_BYTES * 4 // 3 + 4:
                raise ValueError(f"a data: URL of {len(url):,} characters")
            return base64.b64decode(text, validate=True)
        except ValueError as error:
            allowed_url = (
                "a data: URL in base64" if is_data else "an https URL of a host that is allowed"
            )
            rule = f"cannot be read: send {allowed_url}, and at most {MOST_BYTES:,} bytes"
            raise _refusal(rule, error) from None

    def _prepare(self, image: Image.Image) -> tuple[Prepared, int]:
        """Preprocess a decoded image, and return the result and the number of its output tokens."""
        item_encoder, options = self._built().item_encoder(), self.options
        limits = Limits(options.min_pixels, options.max_pixels, options.max_tiles)
        if item_encoder.stager is None:
            inputs = item_encoder.preprocess([image], (), limits)
            return inputs, item_encoder.tokens(inputs)
        (item,) = item_encoder.stager.stage([image], (), limits, item_encoder.device)
        return item, item_encoder.tokens(item.layout(item_encoder.paths))

    def _join(self, items: Sequence[Prepared]) -> VisionInputs:
        """Join preprocessed images to the input of one call, on the device of the encoder.

        Images that are only resized so far are normalised and divided into patches there.
        """
        graphed = self._built()
        device, item_encoder = graphed.device, graphed.item_encoder()
        staged_items = [item for item in items if isinstance(item, StagedItem)]
        if item_encoder.stager is None:
            prepared_items = (item for item in items if isinstance(item, VisionInputs))
            return join_inputs([item.to(device) for item in prepared_items])
        return item_encoder.stager.finish(staged_items, item_encoder.pixel_dtype)


def read_options(environment: Mapping[str, str]) -> Options:
    """Return the options that environment variables set.

    Args:
        environment: the variables by name; only those that begin with ``VITGRAPH_DYNAMO_`` are
            read.

    Raises:
        ValueError: an unknown variable that begins with ``VITGRAPH_DYNAMO_``, or a value that is no
            positive whole number where one is needed.
    """
    field_of = {f"{PREFIX}{field.upper()}": field for field in Options._fields}
    options: dict[str, object] = Options()._asdict()
    for name, text in environment.items():
        if not name.startswith(PREFIX):
            continue
        if name not in field_of:
            raise ValueError(f"{name}: is not known; known are {', '.join(field_of)}")
        is_number = field_of[name] in _NUMBERS
        if is_number and not (text.isascii() and text.isdigit() and int(text)):
            raise ValueError(f"{name}={text}: must be a positive whole number")
        options[field_of[name]] = int(text) if is_number else text
    return Options._make(options.values())


def _on_host(rows: Tensor) -> Tensor:
    """Return a copy of ``rows`` on the CPU; rows on CUDA are copied to page-locked memory.

    Torch keeps page-locked memory for the next batch. A batch of 4,860 tokens of Qwen3-VL-8B is 159
    MB; fresh memory would cost page faults and a copy through a staging buffer.
    """
    host = torch.empty_like(rows, device="cpu", pin_memory=rows.is_cuda)
    return host.copy_(rows)


def _check_adapter(tower: Tower, image_token_id: int | None) -> None:
    """Check that Dynamo can pass the tower's features to the language model.

    Dynamo's adapter for Qwen3-VL takes features of :class:`Qwen3VLEncoder` only. A text-only
    language model takes the features of any tower without DeepStack.
    """
    qwen3 = isinstance(tower, Qwen3VLEncoder)
    if image_token_id is None and not qwen3:
        raise ValueError(
            f"Dynamo takes features of {type(tower).__name__} only for text-only decoders: set "
            f"{PREFIX}IMAGE_TOKEN_ID to the decoder's placeholder, or serve the model without "
            "--custom-encoder-class"
        )
    deepstack = isinstance(tower, Qwen3VLEncoder) and tower.config.deepstack_visual_indexes
    if image_token_id is not None and deepstack:
        raise ValueError(
            "a text-only decoder has no place for DeepStack features: unset "
            f"{PREFIX}IMAGE_TOKEN_ID, or take a tower without them"
        )


def _refusal(rule: str, reason: ValueError) -> ValueError:
    """Return an error with a text for the client, and log the reason, which clients must not
    see.
    """
    _LOG.info("an image is rejected: %s", reason)
    return ValueError(f"the image {rule}")
