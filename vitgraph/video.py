"""Reads the frames of a video file, and writes small video files for the demo (PyAV)."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from encoders.inputs import VideoFrames, require_av

__all__ = ["VideoFrames", "write_video"]


def write_video(path: str | Path, frames: Tensor, fps: int) -> None:
    """Write frames as an H.264 file, or as MPEG-4 where FFmpeg has no H.264 encoder.

    Args:
        path: the file to write; its suffix chooses the container.
        frames: uint8 [F, 3, H, W], H and W even.
        fps: frames per second.

    Raises:
        ValueError: PyAV is missing, or the frames are not uint8 [F, 3, H, W] of even sizes.
    """
    require_av()
    import av

    count, channels, height, width = frames.shape if frames.ndim == 4 else (0, 0, 0, 0)
    if frames.dtype != torch.uint8 or channels != 3 or height % 2 or width % 2 or not count:
        raise ValueError(
            f"frames {tuple(frames.shape)} {frames.dtype}: must be uint8 [F, 3, H, W] with F >= 1 "
            "and even H and W"
        )
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with av.open(str(path), mode="w") as container:
        stream = container.add_stream(codec, rate=Fraction(fps))
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.bit_rate = 4_000_000
        for pixels in frames.permute(0, 2, 3, 1).numpy():
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
