"""Vectors of texts, to compare with the vectors that ``pool="head"`` makes of images.

The text half of a CLIP, MetaCLIP, SigLIP or SigLIP2 checkpoint runs in transformers; the image
tower is neither downloaded nor built. The extra ``text`` is needed.

Source: ``get_text_features`` and the processors of ``models/{clip,metaclip_2,siglip,siglip2}`` of
transformers 5.24.0.

Shapes: n texts, D width of the vectors.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weights import CheckpointError, TextHalf, read_text_half

from ..packages import require_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class _Names(NamedTuple):
    """How transformers names the classes of a model type, and the output of its text half."""

    config: str
    model: str
    output: str


_CLASSES = {
    "clip": _Names("CLIPConfig", "CLIPTextModelWithProjection", "text_embeds"),
    "metaclip_2": _Names("MetaClip2Config", "MetaClip2TextModelWithProjection", "text_embeds"),
    "siglip": _Names("SiglipConfig", "SiglipTextModel", "pooler_output"),
    "siglip2": _Names("Siglip2Config", "Siglip2TextModel", "pooler_output"),
}
"""The model types of a ``TextHalf`` -> names in transformers."""


def embed_texts(
    repo: str | os.PathLike[str],
    texts: Sequence[str],
    *,
    normalize: bool = False,
    device: torch.device | str | None = None,
    batch_size: int = 256,
    revision: str | None = None,
    subfolder: str | None = None,
    cache_dir: str | Path | None = None,
    token: bool | str | None = None,
    local_files_only: bool = False,
    progress: bool = True,
) -> Tensor:
    """Make one vector of each text, comparable with ``encoder.embed(images, pool="head")``.

    The cosine of the vectors of a text and an image is ``logits_per_image`` of transformers before
    its scale and bias. Texts are tokenised as the model was trained: CLIP's end after 77 tokens;
    those of SigLIP and SigLIP2 are lower-cased, and cut or padded to the model's length, mostly 64
    tokens.

    Args:
        repo: repo id or folder of a whole CLIP, MetaCLIP, SigLIP or SigLIP2 model.
        texts: the texts.
        normalize: divide each vector by its L2 norm.
        device: where the text half runs, as for :func:`vitgraph.load_encoder`.
        batch_size: the most texts of one call of the model.
        revision: this and all further keywords mean the same as for
            :func:`vitgraph.load_encoder`.

    Returns:
        [n, D] in float32, on the device; the model runs in float32.

    Raises:
        CheckpointError: the checkpoint cannot be found or read, or has no such text half.
        ValueError: transformers is not installed, an argument has an invalid value, or a vector is
            not finite.
        TypeError: ``texts`` is one string, or holds something else than strings.
    """
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"texts={texts!r}: must be a list of strings, such as ['a red car']")
    if type(batch_size) is not int or batch_size < 1:
        raise ValueError(f"batch_size={batch_size!r}: must be an integer of at least 1")
    if not isinstance(normalize, bool):
        raise ValueError(f"normalize={normalize!r}: must be True or False")
    require_transformers()
    half = read_text_half(
        repo,
        revision=revision,
        subfolder=subfolder,
        cache_dir=cache_dir,
        token=token,
        local_files_only=local_files_only,
        progress=progress,
        device=device,
    )
    names = _CLASSES[str(half.config["model_type"])]
    model, tokenizer = _build(half, names), _read_tokenizer(half)
    batches = [texts[start : start + batch_size] for start in range(0, len(texts), batch_size)]
    with torch.inference_mode():
        # A batch without rows shows the width.
        parts = [_embed(model, tokenizer, names, batch) for batch in batches or [[""]]]
    vectors = torch.cat(parts)[: len(texts)].clone()
    if not vectors.isfinite().all():
        odd = int((~vectors.isfinite().all(1)).nonzero()[0])
        raise ValueError(f"{half.label}: the vector of {texts[odd]!r} is not finite")
    return F.normalize(vectors, dim=1) if normalize else vectors


def _build(half: TextHalf, names: _Names) -> PreTrainedModel:
    """Return transformers' model of a text half, filled strictly with its tensors."""
    import transformers
    from transformers.initialization import no_init_weights

    config = getattr(transformers, names.config).from_dict(dict(half.config)).text_config
    if (projection := half.tensors.get("text_projection.weight")) is not None:
        config.projection_dim = projection.shape[0]  # CLIPModel reads it from the whole config
    with no_init_weights():  # memory that is not written takes no space
        model: PreTrainedModel = getattr(transformers, names.model)(config)
    own = model.state_dict()
    # Some versions of transformers name the parts of a lone half without "text_model.".
    state = {n if n in own else n.removeprefix("text_model."): t for n, t in half.tensors.items()}
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"{half.label}: the text half does not fit its config: {error}"
        ) from None
    device = next(iter(half.tensors.values())).device
    return model.eval().requires_grad_(False).to(device)


def _read_tokenizer(half: TextHalf) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a text half."""
    from transformers import AutoTokenizer

    with TemporaryDirectory() as folder:
        for name, content in half.files.items():
            (Path(folder) / name).write_bytes(content)
        try:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except ImportError as error:
            raise ValueError(
                f"{half.label}: its tokenizer needs the extra `text`: pip install "
                "'sentencepiece>=0.2' 'protobuf>=4'"
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{half.label}: transformers cannot read its tokenizer ({error}); the files are "
                f"{', '.join(half.files)}"
            ) from error


def _embed(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    names: _Names,
    texts: Sequence[str],
) -> Tensor:
    """Return the vectors of some texts, [n, D]."""
    length = min(model.config.max_position_embeddings, tokenizer.model_max_length)
    is_clip = names.output == "text_embeds"
    tokens = tokenizer(
        [text if is_clip else text.lower() for text in texts],
        padding=True if is_clip else "max_length",
        truncation=True,
        max_length=length,
        padding_side="right",  # SigLIP's vector is that of the last position, padding included
        return_tensors="pt",
    )
    inputs = {"input_ids": tokens["input_ids"]}
    if is_clip:  # SigLIP was trained without a mask: padding is attended to
        inputs["attention_mask"] = tokens["attention_mask"]
    output = model(**{name: value.to(model.device) for name, value in inputs.items()})
    vectors: Tensor = output[names.output]
    return vectors
