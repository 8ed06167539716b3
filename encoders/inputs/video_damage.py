"""The damage of a video file, collected while it is decoded for the first time."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from av.container import InputContainer
    from av.packet import Packet
    from av.stream import Stream
    from av.video.stream import VideoStream


class Damage:
    """Counts the corrupt packets of a file, and measures how far its packets go.

    What neither the container nor the decoder reports goes unnoticed: VP8 and VP9, for example,
    have no checksums.
    """

    def __init__(self, stream: VideoStream) -> None:
        self.stream = stream
        self.corrupt = 0
        self._end = self._film_end = self._longest = 0.0

    def see(self, packet: Packet[Stream]) -> None:
        """Count a packet of any stream."""
        is_film = packet.stream.index == self.stream.index
        self.corrupt += is_film and packet.is_corrupt
        if packet.pts is None or packet.time_base is None:
            return
        if packet.stream.type in ("video", "audio"):
            length = float((packet.duration or 0) * packet.time_base)
            self._longest = max(self._longest, length)
        end = float((packet.pts + (packet.duration or 0)) * packet.time_base)
        self._end = max(self._end, end)
        if is_film:
            self._film_end = max(self._film_end, end)

    def describe(self, container: InputContainer, starts: Sequence[float | None]) -> str | None:
        """Return what is wrong with the file, or None.

        Args:
            container: the file, whose packets were all seen.
            starts: seconds at which each decoded frame is shown.
        """
        if self.corrupt:
            return f"corrupt packets: {self.corrupt}"
        known = [start for start in starts if start is not None]
        stated, seconds = self._seconds(container)
        # A container may round its duration, or leave out that of the last packet.
        if stated - seconds > 2 * max(self._longest, *(b - a for a, b in pairwise(known)), 0):
            return f"it ends after {seconds:.2f} of the {stated:.2f} seconds that it states"
        return None

    def _seconds(self, container: InputContainer) -> tuple[float, float]:
        """Return the seconds that the file states, and those that its packets have.

        Only these formats state a duration or a count; for others FFmpeg estimates a duration from
        what is there. The count of an MP4 is not read, because it includes frames that an edit
        list leaves out.
        """
        name, stream = container.format.name, self.stream
        if name.startswith("mov,") and stream.duration and stream.time_base:
            start = float((stream.start_time or 0) * stream.time_base)
            return float(stream.duration * stream.time_base), self._film_end - start
        if name == "avi" and stream.average_rate:
            return float(stream.frames / stream.average_rate), self._film_end
        if name in ("matroska,webm", "flv") and container.duration:
            return container.duration / 1_000_000, self._end  # of the longest stream
        return 0.0, 0.0
