"""What else this machine is doing while something is measured on it."""

import os
import time
from pathlib import Path

STAT = Path("/proc/stat")
BUSY_SHARE = 0.1
"""Other work on more of the cores than this slows a step by more than a quiet machine's speeds vary."""


def cores_here() -> list[int]:
    """Numbers of the cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


class OtherWork:
    """Counts, from when it is made, the time of this process's cores that went to others: programs or other machines.

    Args:
        stat: Linux's count of what each core has done.
    """

    def __init__(self, stat: Path = STAT):
        self._stat = stat
        self._began = self._now()

    def cores(self) -> float | None:
        """How many cores others have kept busy on average; None where the system does not say."""
        (began_s, all_began_s, own_began_s), (now_s, all_now_s, own_now_s) = self._began, self._now()
        if all_began_s is None or all_now_s is None or now_s <= began_s:
            return None
        return max(0.0, (all_now_s - all_began_s - (own_now_s - own_began_s)) / (now_s - began_s))

    def _now(self) -> tuple[float, float | None, float]:
        """The clock, and seconds that the cores, and this process on them, have worked."""
        return time.perf_counter(), _worked_s(self._stat), time.process_time()


def _worked_s(stat: Path) -> float | None:
    """Of the cores of this process, all work together, with what a virtual machine's host took for others."""
    try:
        lines = [line.split() for line in stat.read_text().splitlines()]
        cores = {f"cpu{core}" for core in cores_here()}
        rows = [[int(figure) for figure in fields[1:9]] for fields in lines if fields and fields[0] in cores]
        return sum(sum(row) - row[3] - row[4] for row in rows) / os.sysconf("SC_CLK_TCK") if rows else None
    except (OSError, ValueError, IndexError):
        return None
