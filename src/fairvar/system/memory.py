"""Resident memory of this process.

`getrusage` is only the fallback: there, a child process starts with the peak of its parent, so a
small worker of a large process would report the large process.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

STATUS, RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_bytes() -> int | None:
    """The peak since the start of this process or since `reset_peak`."""
    peak = _status("VmHWM")
    if peak is not None or resource is None:
        return peak
    unit = 1 if sys.platform == "darwin" else 1024
    return int(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def resident_bytes() -> int | None:
    return _status("VmRSS")


def reset_peak() -> bool:
    """Set the peak to the present value; False if the system does not support it."""
    try:
        RESET.write_text("5")
    except OSError:
        return False
    return True


def _status(field: str) -> int | None:
    with contextlib.suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) * 1024
    return None
