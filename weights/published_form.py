"""How a tower is published, as plain data that lets its encoder save itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from encoders.saving import PublishedForm

from .layouts import published_shape, to_published
from .plan import Tower, extracted_config


def published_form(
    tower: Tower,
    shapes: Mapping[str, tuple[int, ...]],
    files: Mapping[str, Mapping[str, Any]],
    repo_id: str,
) -> PublishedForm:
    """What ``encoder.save_pretrained`` needs to write the tower as ``extract_encoder`` does.

    Args:
        tower: that was loaded.
        shapes: shapes of the encoder's ``state_dict`` by name.
        files: the checkpoint's processor files, name without ``.json`` -> content.
        repo_id: what it was loaded by; left out if that is a path.
    """
    layout = tower.layout
    return PublishedForm(
        files={"config": extracted_config(tower.contents.config), **files},
        names={name: to_published(layout, name) for name in shapes},
        shapes={name: published_shape(layout, name, shapes[name]) for name in layout.views},
        halves={
            piece.local: tower.config.num_heads
            for piece in tower.pieces
            if piece.slot is not None and piece.slot.halves
        },
        repo_id=None if tower.contents.snapshot.commit is None else repo_id,
    )
