"""The trace of the profiled step in the format of Chrome's trace viewer (chrome://tracing, ui.perfetto.dev), of bounded size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lmworks.io.files import write_text

MOST = 200_000  # events of all ranks together, the longest: about 25 MB
_NAME = 120  # characters of a name


def events_of(profiler: Any, rank: int, most: int) -> list[dict[str, Any]]:
    """The `most` longest events of a rank; its threads and its device are rows of one process, `pid`."""
    if not most:
        return []
    found = []
    for event in profiler.events():
        start, duration = event.time_range.start, event.time_range.elapsed_us()
        if duration <= 0:
            continue
        on_device = str(event.device_type).endswith("CUDA")
        row = f"GPU {event.device_index}" if on_device else f"thread {event.thread}"
        found.append({"name": str(event.name)[:_NAME], "ph": "X", "ts": start, "dur": duration, "pid": rank, "tid": row})
    return sorted(found, key=lambda one: -one["dur"])[:most]


def write_trace(path: Path, ranks: Sequence[Sequence[dict[str, Any]]]) -> None:
    """Write the events of all ranks; each rank's clock begins at its first event."""
    events: list[dict[str, Any]] = []
    for rank, own in enumerate(ranks):
        begin = min((one["ts"] for one in own), default=0)
        events += [{**one, "ts": round(one["ts"] - begin, 3), "dur": round(one["dur"], 3)} for one in own]
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
    write_text(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
