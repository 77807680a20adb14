# SPDX-License-Identifier: Apache-2.0
"""What all cores of the machine have done since it started, by the kernel's own count."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# Over a shorter time, 50 counts of all cores together, they say nothing.
MIN_TOTAL_S = 0.5


@dataclass(frozen=True)
class CpuTime:
    """Seconds, summed over cores; counted by the kernel in hundredths of a second."""

    total_s: float
    busy_s: float
    kernel_s: float
    """Of the busy ones, those spent in the kernel: system calls, faults of memory pages and interrupts. Of ranks that
    compute and send, it is the network and new memory."""

    def __sub__(self, earlier: CpuTime) -> CpuTime:
        return CpuTime(self.total_s - earlier.total_s, self.busy_s - earlier.busy_s, self.kernel_s - earlier.kernel_s)

    def __add__(self, other: CpuTime) -> CpuTime:
        return CpuTime(self.total_s + other.total_s, self.busy_s + other.busy_s, self.kernel_s + other.kernel_s)

    @property
    def busy_share(self) -> float:
        """Between 0 and 1; 0 if the time was too short to say."""
        return self.busy_s / self.total_s if self.total_s >= MIN_TOTAL_S else 0.0

    @property
    def kernel_share(self) -> float:
        """Between 0 and 1; 0 if the time was too short to say."""
        return self.kernel_s / self.total_s if self.total_s >= MIN_TOTAL_S else 0.0


def cpu_time(stat: Path = Path("/proc/stat")) -> CpuTime:
    """The count so far; all zero where there is no such file, so that shares are 0."""
    if not stat.exists():
        return CpuTime(0.0, 0.0, 0.0)
    user, nice, system, idle, waiting, irq, softirq, stolen = map(
        float, stat.read_text().split("\n", 1)[0].split()[1:9]
    )
    tick = os.sysconf("SC_CLK_TCK")
    kernel = system + irq + softirq
    busy = user + nice + kernel + stolen
    return CpuTime((busy + idle + waiting) / tick, busy / tick, kernel / tick)
