"""Decoders of video files: PyAV, as ``read_video`` uses it, and torchcodec on the CPU or by NVDEC.

    python -m benchmarks.clips --seconds 10 600 --json benchmarks/results/clips_h100.json
    python -m benchmarks.clips --table benchmarks/results/clips_h100.json

PyAV writes clips of 1280x720 at 30 frames per second (a moving test picture) in H.264, HEVC, VP9
and AV1. ``sampled`` reads two frames per second of them, ``whole`` each frame, one by one.
``read_video`` decodes a file twice, the first time to count its frames and to find damage; ``one
pass`` is PyAV without that. torchcodec counts by its exact scan of packets, which decodes nothing
and finds no damage in pictures. It needs the shared libraries of FFmpeg, and NVDEC the driver's
``libnvcuvid.so``; NVDEC leaves frames on the GPU. Figures are medians in seconds, and in seconds of
CPU time of all threads, after an untimed run; and how far the frames of torchcodec are from those
of PyAV, in levels. A decoder that fails has its error in their place.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.measuring.machine import ROOT, cpu_name, describe_machine, version_of
from benchmarks.measuring.results import write_results
from benchmarks.measuring.tables import markdown
from encoders.inputs.video_files import VideoFrames
from vitgraph.timing import synchronize

CODECS: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    "H.264": ("mp4", "libx264", {"preset": "veryfast"}),
    "HEVC": ("mp4", "libx265", {"preset": "ultrafast", "x265-params": "log-level=error"}),
    "VP9": ("webm", "libvpx-vp9", {"deadline": "realtime", "cpu-used": "8"}),
    "AV1": ("mp4", "libsvtav1", {"preset": "12"}),
}
"""The suffix of the file, FFmpeg's encoder and its options, by codec."""
RATE = 30
FRAMES = {"sampled": RATE // 2, "whole": 1}
"""Of how many frames one is read."""
LABELS = {"sampled": "2 per second", "whole": "all"}
Read = Callable[[Path, Sequence[int]], Iterable[Tensor]]


def write_clip(path: Path, codec: str, seconds: int, size: str) -> None:
    """Write a clip of a moving test picture."""
    import av

    _, encoder, settings = CODECS[codec]
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream(encoder, rate=RATE, options=dict(settings))
        stream.width, stream.height = map(int, size.split("x"))
        stream.pix_fmt = "yuv420p"
        for frame in moving_pictures(seconds, size):
            container.mux(stream.encode(frame))
        container.mux(stream.encode())


def moving_pictures(seconds: int, size: str) -> Iterator[Any]:
    """Yield the frames of FFmpeg's test picture."""
    import av
    from av.video.frame import PictureType

    graph = av.filter.Graph()
    parts = [
        graph.add("testsrc2", f"size={size}:rate={RATE}:duration={seconds}"),
        graph.add("format", "pix_fmts=yuv420p"),
        graph.add("buffersink"),
    ]
    graph.link_nodes(*parts).configure()
    for _ in range(seconds * RATE):
        frame = graph.vpull()
        frame.pict_type = PictureType.NONE  # it is I, which makes every frame a key frame
        yield frame


def by_read_video(path: Path, indices: Sequence[int]) -> Iterator[Tensor]:
    """Yield frames as ``read_video`` reads them."""
    frames = VideoFrames(path)
    return (frames[index] for index in indices)


def by_one_pass(path: Path, indices: Sequence[int]) -> Iterator[Tensor]:
    """Yield frames by PyAV in one pass, with nothing counted or checked before."""
    import av
    from av.video.reformatter import VideoReformatter

    wanted, reformatter = set(indices), VideoReformatter()
    with av.open(str(path)) as container:
        container.streams.video[0].thread_type = "AUTO"
        for number, frame in enumerate(container.decode(video=0)):
            if number in wanted:
                rows = reformatter.reformat(frame, format="rgb24", threads=1).to_ndarray()
                yield torch.from_numpy(rows).permute(2, 0, 1)


def by_torchcodec(device: str) -> Read:
    """Return what yields frames by torchcodec on a device."""

    def read(path: Path, indices: Sequence[int]) -> Iterator[Tensor]:
        from torchcodec.decoders import VideoDecoder

        decoder = VideoDecoder(str(path), device=device, num_ffmpeg_threads=0)
        if device != "cpu" and decoder.cpu_fallback:  # it would decode on the CPU without a word
            raise RuntimeError(str(decoder.cpu_fallback))
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


def measure(path: Path, frames: int, repeats: int) -> Iterator[dict[str, Any]]:
    """Yield what each decoder takes for the sampled and the whole clip, and how its frames differ.

    Args:
        path: the clip.
        frames: its number of frames.
        repeats: the number of timed runs, in which the decoders take turns.
    """
    some = range(0, frames, FRAMES["sampled"])
    levels = {name: compare(read, path, some) for name, read in readers().items()}
    working = {name: read for name, read in readers().items() if "error" not in levels[name]}
    for kind, step in FRAMES.items():
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in working}
        for _ in range(repeats):
            for name, read in working.items():
                times[name].append(time_read(read, path, range(0, frames, step)))
        found = dict(levels)
        for name, runs in times.items():
            wall, cpu = (round(statistics.median(part), 3) for part in zip(*runs, strict=True))
            found[name] = {**levels[name], "seconds": wall, "CPU seconds": cpu}
        yield {"frames": kind, "decoders": found}


def time_read(read: Read, path: Path, indices: Sequence[int]) -> tuple[float, float]:
    """Return the seconds, and the CPU seconds, in which a decoder reads frames one by one."""
    began, cpu = time.perf_counter(), time.process_time()
    count = sum(1 for _ in read(path, indices))
    synchronize()
    assert count == len(indices)
    return time.perf_counter() - began, time.process_time() - cpu


def compare(read: Read, path: Path, indices: Sequence[int]) -> dict[str, Any]:
    """Return how far frames are from PyAV's in levels of 255, or why a decoder does not read them.

    "largest" is that of all values, and "mean" the mean of all.
    """
    largest, means = 0, []
    try:
        for one, other in zip(by_one_pass(path, indices), read(path, indices), strict=True):
            levels = (one.int() - other.cpu().int()).abs()
            largest = max(largest, int(levels.max()))
            means.append(float(levels.double().mean()))
    except RuntimeError as error:  # of torchcodec: no FFmpeg, no NVDEC, or not for this codec
        return {"error": str(error).strip().splitlines()[0][:100]}
    return {"largest": largest, "mean": statistics.mean(means)}


def describe() -> dict[str, Any]:
    """Return the description of this machine, with the versions of the decoders."""
    packages = {name: version_of(name, name) for name in ("av", "torchcodec")}
    cores = {"cpu": cpu_name(), "cores": os.cpu_count(), "torch threads": torch.get_num_threads()}
    return {**describe_machine(), **cores, **packages}


def table(body: Mapping[str, Any]) -> str:
    """Return the seconds of each decoder as a Markdown table, with its caption.

    Without a GPU they are those of CPU time only, as the cores may be shared.
    """
    machine = body["about"]
    names = list(dict.fromkeys(name for row in body["clips"] for name in row["decoders"]))
    rows = [
        (
            row["codec"],
            f"{row['seconds']} s",
            LABELS[row["frames"]],
            *(cell(row["decoders"].get(name, {}), bool(machine["gpu"])) for name in names),
        )
        for row in body["clips"]
    ]
    shown, place = "Seconds of CPU time", f"{machine['cores']} cores of an {machine['cpu']}"
    if machine["gpu"]:
        shown = "Seconds, and in brackets seconds of CPU time,"
        place = f"{place} and an {machine['gpu']}"
    caption = (
        f"{shown} to read clips of {body['size']} at {RATE} frames per second, {place}, "
        f"PyAV {machine['av']}, torchcodec {machine['torchcodec']}, torch {machine['torch']} "
        f"(threads: {machine['torch threads']}):"
    )
    return f"{caption}\n\n{markdown(('codec', 'clip', 'frames', *names), rows)}"


def cell(figures: Mapping[str, Any], wall: bool) -> str:
    """Return what a decoder took as text; a dash if it was not measured."""
    if "seconds" not in figures:
        return "-"
    cpu = f"{figures['CPU seconds']:.2f}"
    return f"{figures['seconds']:.2f} ({cpu})" if wall else cpu


def tables() -> str:
    """Return the tables of all committed results."""
    files = sorted((ROOT / "benchmarks" / "results").glob("clips_*.json"))
    return "\n\n".join(table(json.loads(path.read_text())) for path in files)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the clips, measure each, and write the result as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", nargs="+", type=int, default=[10, 600], help="of the clips")
    parser.add_argument("--codecs", nargs="+", choices=tuple(CODECS), default=list(CODECS))
    parser.add_argument("--size", default="1280x720")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="a file to write")
    parser.add_argument("--table", type=Path, help="print the table of a results file")
    options = parser.parse_args(arguments)
    if options.table is not None:
        print(table(json.loads(options.table.read_text())))
        return
    body: dict[str, Any] = {"about": describe(), "size": options.size, "clips": []}
    with tempfile.TemporaryDirectory() as folder:
        for seconds in options.seconds:
            for codec in options.codecs:
                path = Path(folder) / f"clip.{CODECS[codec][0]}"
                write_clip(path, codec, seconds, options.size)
                for found in measure(path, seconds * RATE, options.repeats):
                    row = {"codec": codec, "seconds": seconds, **found}
                    body["clips"].append(row)
                    print(json.dumps(row), flush=True)
                    if options.json is not None:
                        write_results(options.json, body)


if __name__ == "__main__":
    main()
