# SPDX-License-Identifier: Apache-2.0
"""What work takes by the clock of its device, and what it takes the host to issue it: two numbers, measured apart.

On CUDA work is timed by events, behind a delay that keeps the device waiting until the host has issued all of it. Timed
by the host's clock it would bear the latency of a launch and the Python around it, which on a busy device nobody waits
for. On a CPU whoever issues work does it, so there is one number.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from ds_fsmoe.observing.clock import HOST, Clock
from ds_fsmoe.planning.cost import Fit, fit

_ON_CUDA_CYCLES = (20_000, 50_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
"""From about ten microseconds to about five milliseconds."""
_AHEAD_CYCLES = 1_000_000
_ON_CPU_MS = (0.2, 0.5, 1.0, 2.0, 4.0)
_IN_A_ROW = 4
_ROUNDS = 5


class Delay:
    """Keeps the lane that calls it busy for a time.

    Args:
        device: of the lanes.
        host: the clock of the CPU.
    """

    def __init__(self, device: torch.device, host: Clock = HOST) -> None:
        self.device, self.host = device, host
        self._ahead = _AHEAD_CYCLES if device.type == "cuda" else 0.0
        self.line: Fit
        """Milliseconds of a delay by what is asked for: cycles on CUDA, milliseconds of sleep on a CPU."""
        self.calibrate()

    def calibrate(self) -> None:
        """Find out what a delay takes. On CUDA cycles are counted by a clock that follows the load of the device, so
        this is to be done again ahead of every measurement that depends on their length."""
        asked = _ON_CUDA_CYCLES if self.device.type == "cuda" else _ON_CPU_MS
        rounds = [[self._took_ms(each) for each in asked] for _ in range(_ROUNDS)]
        self.line = fit(asked, [statistics.median(column) for column in zip(*rounds[1:], strict=True)])
        self._alpha_ms, self._beta_ms = self.line.cost.alpha_ms, self.line.cost.beta_ms
        if not self._beta_ms > 0:
            raise RuntimeError(f"delays on {self.device} do not get longer when longer ones are asked for: {self.line}")

    def __call__(self, delay_ms: float) -> None:
        """Be busy for so long."""
        self._ask(max(0.0, (delay_ms - self._alpha_ms) / self._beta_ms))

    def _ask(self, amount: float) -> None:
        if self.device.type == "cuda":
            torch.cuda._sleep(int(amount))
        else:
            self.host.sleep(amount / 1e3)

    def _took_ms(self, amount: float) -> float:
        """One of several in a row: as in a schedule, where a lane has its next task at hand."""

        def work() -> None:
            for _ in range(_IN_A_ROW):
                self._ask(amount)

        return elapsed_ms(self.device, work, lambda: self._ask(self._ahead), self.host) / _IN_A_ROW


def elapsed_ms(
    device: torch.device,
    work: Callable[[], object],
    ahead: Callable[[], object] | None = None,
    host: Clock = HOST,
) -> float:
    """Milliseconds of some work, by the clock of the device.

    Args:
        device: on which it is done.
        work: issued on the current stream.
        ahead: done first, and not counted: a pause. It keeps a GPU waiting until the host has issued the work; and on a
            CPU work takes longer after a pause, which is how most tasks of a schedule begin.
        host: the clock of the CPU.
    """
    if device.type != "cuda":
        if ahead is not None:
            ahead()
        start_ns = host.perf_counter_ns()
        work()
        return (host.perf_counter_ns() - start_ns) / 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if ahead is not None:
        ahead()
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def issued_ms(device: torch.device, work: Callable[[], object], host: Clock = HOST) -> float:
    """What it costs the host to issue some work; on a CPU that is to do it. Leaves the device idle."""
    start_ns = host.perf_counter_ns()
    work()
    took_ms = (host.perf_counter_ns() - start_ns) / 1e6
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return took_ms


def pause_ms(issue_ms: float) -> float:
    """How long a device is kept waiting for work that takes the host so long to issue, with some to spare.

    It takes about a thousand launches ahead. Of work with more, the host has to issue the rest while it runs.
    """
    return 1.3 * issue_ms + 0.5
