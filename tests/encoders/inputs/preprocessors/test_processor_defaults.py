"""What a processor file leaves out, or has as null, means what transformers' class makes of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import transformers

from encoders.contract import Preprocessor
from tests.oracles.configs import Config, edited
from weights import FAMILIES, Family, build_config

Files = dict[str, dict[str, Any]]
NAMELESS = {
    "ernie": "Ernie4_5_VLMoeImageProcessor",
    "minimax-m3": "MiniMaxM3VLImageProcessor",
}
"""The class for published files that name none."""
NAMES = {"image_processor_type", "video_processor_type", "processor_class"}
OF_THE_TOWER = {"patch_size", "temporal_patch_size"}
"""Keys whose default in a class is another size than towers have that come with the class."""
NO_FLAGS = {"initial_shift"}
"""Keys with a number or true; transformers' class fails with null."""
ALWAYS_RGB = "do_convert_rgb"
AREAS = ("min_pixels", "max_pixels")
"""Bounds that classes keep as ``size``."""


def fitting(family: Family, layout: str, files: Mapping[str, Any]) -> Preprocessor:
    """The preprocessor of the first published tower that takes the files."""
    models = [*family.facts.published]
    models.sort(key=lambda model: not layout.startswith(model.layout))
    for model in models:
        config = dict(model.config)
        if family.name == "siglip":
            config = edited(config, image_size=384)  # the published file is of a tower of 384
        encoder = family.on_meta(build_config(family, config, None, model.repo_id))
        try:
            encoder.preprocessor.with_files(files)
        except ValueError:
            continue
        return encoder.preprocessor
    raise AssertionError(layout)


def sections(files: Mapping[str, Any]) -> Iterator[tuple[str, str | None]]:
    """The file and, in it, the section of each class that published files set."""
    for file, content in files.items():
        nested = [name for name in ("image_processor", "video_processor") if name in content]
        if nested or file != "processor_config":
            yield from ((file, name) for name in nested or [None])


def cases() -> Iterator[Any]:
    done: list[Any] = []
    for family in FAMILIES.values():
        for layout in family.layouts:
            files = layout.processor_files or {}
            for file, name in [] if files in done else sections(files):
                section = files[file][name] if name else files[file]
                video = "video" in (name or file)
                kind = str(section.get(f"{'video' if video else 'image'}_processor_type"))
                reference = NAMELESS.get(layout.name, kind.removesuffix("Fast"))
                known = getattr(transformers, reference, None)
                if known is not None:
                    values = (family, layout.name, files, file, name, known)
                    yield pytest.param(values, id=f"{layout.name}-{reference}")
            done.append(files)


class Section:
    """One section of published processor files, as our preprocessor and transformers read it."""

    def __init__(
        self, family: Family, layout: str, files: Files, file: str, name: str | None, known: type
    ) -> None:
        self.ours, self.known = fitting(family, layout, files), known
        self.files, self.file, self.name = files, file, name
        content = files[file][name] if name else files[file]
        self.content = {key: value for key, value in content.items() if key not in NAMES}
        self.names = {key: value for key, value in content.items() if key in NAMES}
        if "video" not in (name or file):  # what a file for images says of videos stays
            files = self.files = {"video_preprocessor_config": content, **files}
        own = known.valid_kwargs.__annotations__
        self.keys = dict.fromkeys((*self.content, *own))

    def theirs(self, content: Config) -> Any:
        """The object of transformers' class."""
        return self.known(**content)

    def read(self, content: Config) -> Any:
        """Our preprocessor, or None if it refuses the section."""
        section = {**self.names, **content}
        if self.name:
            section = {**self.files[self.file], self.name: section}
        try:
            ours = self.ours.with_files({**self.files, self.file: section})
        except ValueError:
            return None
        in_video = "video" in (self.name or self.file)
        return None if in_video and vars(ours)["video_error"] else ours

    def without(self, *keys: str) -> Config:
        return {key: value for key, value in self.content.items() if key not in keys}

    def saved(self) -> Config:
        """The section as transformers' class saves it."""
        plain_frames = {"draw_on_frames": False} if "font" in self.content else {}
        content = json.loads(self.theirs({**self.content, **plain_frames}).to_json_string())
        return {key: value for key, value in content.items() if key not in NAMES}


def plain(value: Any) -> Any:
    """A value of transformers as a file has it."""
    if isinstance(value, transformers.image_utils.SizeDict):
        return {name: number for name, number in dict(value).items() if number is not None}
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("case", [*cases()])
def test_a_missing_value_is_the_default_of_the_class(case: tuple[Any, ...]) -> None:
    section = Section(*case)
    for key in section.keys:
        less = section.without(key)
        if key in AREAS and key in section.content:
            size = plain(section.theirs(less).size)
            wanted = section.read({**section.without(*AREAS), "size": size})
        elif key in OF_THE_TOWER:
            wanted = section.read(section.content)
        elif (usual := plain(getattr(section.theirs(less), key, None))) is None:
            continue
        else:
            wanted = section.read({**less, key: usual})
        assert section.read(less) == wanted, key


@pytest.mark.parametrize("case", [*cases()])
def test_a_flag_that_is_null_is_off_as_in_the_class(case: tuple[Any, ...]) -> None:
    section = Section(*case)
    usual = section.theirs(section.content)
    flags = {key for key in section.keys if isinstance(getattr(usual, key, None), bool)}
    assert section.read(section.content) is not None
    assert {"do_rescale", "do_normalize"} <= flags
    for key in flags - NO_FLAGS:
        assert not getattr(section.theirs({**section.content, key: None}), key), key
        wanted = section.read({**section.content, key: key == ALWAYS_RGB})
        assert section.read({**section.content, key: None}) == wanted, key
    wanted = section.read({**section.content, "resample": 2})  # bilinear
    assert section.read({**section.content, "resample": None}) == wanted
    assert section.read({**section.content, "rescale_factor": 1 / 127}) is None


@pytest.mark.parametrize("case", [*cases()])
def test_what_the_class_saves_is_read_as_what_it_read(case: tuple[Any, ...]) -> None:
    section = Section(*case)
    assert section.read(section.saved()) == section.read(section.content)
