"""Records reads, copies, gathers and compute for Perfetto, with a lane for each.

Format: "Trace Event Format", complete events (`ph: X`, microseconds) and metadata events (`ph: M`) that name the lanes;
chrome://tracing and ui.perfetto.dev open it.
"""

import json
import threading
from pathlib import Path
from typing import Final, NamedTuple

from zinfer.nvme.whole_file import replace_file
from zinfer.offload.stream import Event

LANES: Final = ("disk", "host", "host to device", "gather", "compute", "device to host")
_MOST_OPEN: Final = 4096  # slices whose events are not dated yet
_MOST_SLICES: Final = 2_000_000  # some 200 MB of JSON; viewers give up before that


def of_rank(path: Path, rank: int) -> Path:
    """Return the file for a rank's trace: ``trace.json`` is rank 0's, ``trace.1.json`` that of rank 1."""
    return path.with_name(f"{path.stem}.{rank}{path.suffix}") if rank else path


class Slice(NamedTuple):
    """One piece of work, on the clock of `time.perf_counter`."""

    lane: str
    name: str
    begin_s: float
    end_s: float


class Trace:
    """Collects slices from any thread; ``num_dropped`` counts those beyond two million."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slices: list[Slice] = []
        self._open: list[tuple[str, str, Event, Event]] = []
        self.num_dropped = 0

    def add(self, lane: str, name: str, begin_s: float, end_s: float) -> None:
        """Record work on the host."""
        with self._lock:
            self._keep(Slice(lane, name, begin_s, end_s))

    def add_between(self, lane: str, name: str, begin: Event, end: Event) -> None:
        """Record work between two events of a stream; their times are read once they are reached."""
        with self._lock:
            self._open.append((lane, name, begin, end))
            if len(self._open) > _MOST_OPEN:
                self._date(wait=False)

    def slices(self) -> list[Slice]:
        """Return all slices so far, sorted by start; waits for those under way."""
        with self._lock:
            self._date(wait=True)
            return sorted(self._slices, key=lambda slice: slice.begin_s)

    def write(self, path: Path) -> None:
        """Write the trace to a file, replacing it.

        Raises:
            OSError: the folder is missing, full or not writable; names the file.
        """
        document = {"traceEvents": _events(self.slices()), "otherData": {"dropped": self.num_dropped}}
        replace_file(path, json.dumps(document))

    def _keep(self, slice: Slice) -> None:
        if len(self._slices) < _MOST_SLICES:
            self._slices.append(slice)
        else:
            self.num_dropped += 1

    def _date(self, *, wait: bool) -> None:
        still_open: list[tuple[str, str, Event, Event]] = []
        for lane, name, begin, end in self._open:
            if wait:
                end.synchronize()
            if end.is_reached():
                self._keep(Slice(lane, name, begin.time_s(), end.time_s()))
            else:
                still_open.append((lane, name, begin, end))
        self._open = still_open


def _events(slices: list[Slice]) -> list[dict[str, object]]:
    """Convert slices to trace events. Overlapping slices of a lane get rows of their own, as viewers require."""
    origin_s = slices[0].begin_s if slices else 0.0
    used = {slice.lane for slice in slices}
    row_ends_s: dict[str, list[float]] = {lane: [0.0] for lane in LANES if lane in used}
    events: list[dict[str, object]] = []
    for slice in slices:
        ends_s = row_ends_s[slice.lane]
        row = next((row for row, end_s in enumerate(ends_s) if end_s <= slice.begin_s), len(ends_s))
        ends_s[row : row + 1] = [slice.end_s]
        begin_us, length_us = (slice.begin_s - origin_s) * 1e6, (slice.end_s - slice.begin_s) * 1e6
        place = {"ph": "X", "pid": 0, "tid": _row_number(slice.lane, row), "name": slice.name}
        events.append(place | {"ts": round(begin_us, 3), "dur": round(length_us, 3)})
    names = [
        {"ph": "M", "pid": 0, "tid": _row_number(lane, row), "name": "thread_name", "args": {"name": lane}}
        for lane, ends_s in row_ends_s.items()
        for row in range(len(ends_s))
    ]
    return [*names, *events]


def _row_number(lane: str, row: int) -> int:
    return LANES.index(lane) * 100 + row
