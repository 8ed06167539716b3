"""Decoders of video files: PyAV, as ``read_video`` uses it, and torchcodec on the CPU or by NVDEC.

    python -m benchmarks.clips --seconds 10 600 --json clips.json

Clips of 1280x720 at 30 frames per second are written by the program ``ffmpeg`` (a moving test
picture) in H.264, HEVC, VP9 and AV1. ``sampled`` reads two frames per second of them, ``whole``
each frame, one by one. ``read_video`` decodes a file twice, the first time to count its frames and
to find damage; ``one pass`` is PyAV without that. torchcodec counts by its exact scan of packets,
which decodes nothing and finds no damage in pictures. Figures are medians in seconds, and how far
the frames of torchcodec are from those of PyAV, in levels.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring.results import write_results
from encoders.inputs.video_files import VideoFrames

CODECS: dict[str, tuple[str, list[str]]] = {
    "H.264": ("mp4", ["-c:v", "libx264", "-preset", "veryfast"]),
    "HEVC": ("mp4", ["-c:v", "libx265", "-preset", "ultrafast", "-x265-params", "log-level=error"]),
    "VP9": ("webm", ["-c:v", "libvpx-vp9", "-deadline", "realtime", "-cpu-used", "8"]),
    "AV1": ("mp4", ["-c:v", "libsvtav1", "-preset", "12"]),
}
RATE = 30
Read = Callable[[Path, Sequence[int]], Iterable[Tensor]]


def write_clip(path: Path, options: Sequence[str], seconds: int, size: str) -> None:
    """Write a clip of a moving test picture with the program ``ffmpeg``."""
    source = f"testsrc2=size={size}:rate={RATE}"
    command = ["ffmpeg", "-v", "error", "-y", "-f", "lavfi", "-i", source, "-t", str(seconds)]
    subprocess.run([*command, *options, "-pix_fmt", "yuv420p", str(path)], check=True)


def by_read_video(path: Path, indices: Sequence[int]) -> Iterator[Tensor]:
    """Yield frames as ``read_video`` reads them."""
    frames = VideoFrames(path)
    return (frames[index] for index in indices)


def by_one_pass(path: Path, indices: Sequence[int]) -> Iterator[Tensor]:
    """Yield frames by PyAV in one pass, with nothing counted or checked before."""
    import av

    wanted = set(indices)
    with av.open(str(path)) as container:
        container.streams.video[0].thread_type = "AUTO"
        for number, frame in enumerate(container.decode(video=0)):
            if number in wanted:
                yield torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1)


def by_torchcodec(device: str) -> Read:
    """Return what yields frames by torchcodec on a device."""

    def read(path: Path, indices: Sequence[int]) -> Iterator[Tensor]:
        from torchcodec.decoders import VideoDecoder

        decoder = VideoDecoder(str(path), device=device, num_ffmpeg_threads=0)
        return (decoder.get_frame_at(index).data for index in indices)

    return read


def readers() -> dict[str, Read]:
    """Return the decoders that this machine has, by name."""
    found: dict[str, Read] = {"read_video": by_read_video, "PyAV, one pass": by_one_pass}
    if find_spec("torchcodec") is not None:
        found["torchcodec"] = by_torchcodec("cpu")
        if torch.cuda.is_available():
            found["torchcodec, NVDEC"] = by_torchcodec("cuda")
    return found


def measure(path: Path, frames: int, repeats: int) -> dict[str, Any]:
    """Return the seconds of each decoder for sampled and whole clips, and frame differences."""
    result: dict[str, Any] = {}
    for kind, indices in (("sampled", range(0, frames, RATE // 2)), ("whole", range(frames))):
        row: dict[str, Any] = {}
        times: dict[str, list[float]] = {name: [] for name in readers()}
        for _ in range(repeats):
            for name, read in readers().items():
                began = time.perf_counter()
                try:
                    count = sum(1 for _ in read(path, indices))
                except RuntimeError as error:  # a codec that this build of FFmpeg cannot decode
                    row[name] = str(error).splitlines()[0][:100]
                    continue
                assert count == len(indices)
                times[name].append(time.perf_counter() - began)
        for name, values in times.items():
            if values:
                row[name] = round(statistics.median(values), 3)
        result[kind] = row
    result["torchcodec's difference in levels"] = difference(path, range(0, frames, RATE // 2))
    return result


def difference(path: Path, indices: Sequence[int]) -> int | None:
    """Return the largest difference of torchcodec's frames from PyAV's; None without it."""
    if find_spec("torchcodec") is None:
        return None
    pairs = zip(by_one_pass(path, indices), by_torchcodec("cpu")(path, indices), strict=True)
    return max(int((one.int() - other.int()).abs().max()) for one, other in pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the clips, measure each, and print the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", nargs="+", type=int, default=[10, 600], help="of the clips")
    parser.add_argument("--codecs", nargs="+", choices=tuple(CODECS), default=list(CODECS))
    parser.add_argument("--size", default="1280x720")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="a file to write")
    options = parser.parse_args(arguments)
    if shutil.which("ffmpeg") is None:
        raise SystemExit("the program ffmpeg writes the clips: install it")
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seconds in options.seconds:
            for codec in options.codecs:
                suffix, encoding = CODECS[codec]
                path = Path(folder) / f"clip.{suffix}"
                write_clip(path, encoding, seconds, options.size)
                row = measure(path, seconds * RATE, options.repeats)
                result[f"{codec}, {seconds} s"] = row
                print(codec, f"{seconds} s", json.dumps(row), flush=True)
    if options.json is not None:
        write_results(options.json, result)


if __name__ == "__main__":
    main()
