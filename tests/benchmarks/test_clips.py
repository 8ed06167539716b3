"""The benchmark of video decoders reads every frame of a clip by each decoder there is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from benchmarks import clips
from tests.support.photographs import panning_clip


def test_decoders_of_clips_yield_the_same_frames(tmp_path: Path) -> None:
    import av

    path = tmp_path / "clip.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=clips.RATE)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        for pixels in panning_clip(20, 96, 128):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    found = clips.measure(path, 20, 1)
    assert set(found["sampled"]) == set(found["whole"]) == set(clips.readers())
    for one, other in zip(
        clips.by_read_video(path, range(20)), clips.by_one_pass(path, range(20)), strict=True
    ):
        assert torch.equal(one, other)
