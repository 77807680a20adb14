# SPDX-License-Identifier: Apache-2.0
"""Measures how long work takes by the clock of its device, and separately how long the host takes to issue it.

``measuring/stopwatch.py`` calls it. On CUDA work is timed by events, after a delay that keeps the device busy until the
host has issued all of it. The host's clock would include the latency of a launch and Python's time, which are hidden on
a busy device. On a CPU the thread that issues work also executes it, so there is one number.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from ds_fsmoe.observing.clock import HOST, Clock
from ds_fsmoe.planning.cost import Fit, fit

_ON_CUDA_CYCLES = (20_000, 50_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
"""The cycles of the delays that are timed: from about ten microseconds to about five milliseconds."""
_AHEAD_CYCLES = 1_000_000
_ON_CPU_MS = (0.2, 0.5, 1.0, 2.0, 4.0)
_IN_A_ROW = 4
_ROUNDS = 5


class Delay:
    """Keeps the lane that calls it busy for a time.

    Args:
        device: the device of the lanes.
        host: the clock of the CPU.
    """

    def __init__(self, device: torch.device, host: Clock = HOST) -> None:
        self.device, self.host = device, host
        self._ahead = _AHEAD_CYCLES if device.type == "cuda" else 0.0
        self.line: Fit
        """The milliseconds of a delay by what is asked for: cycles on CUDA, milliseconds of sleep on a CPU."""
        self.calibrate()

    def calibrate(self) -> None:
        """Measure how long a delay takes. On CUDA, cycles follow the load of the device: call this again before every
        measurement that depends on the length of delays."""
        asked = _ON_CUDA_CYCLES if self.device.type == "cuda" else _ON_CPU_MS
        rounds = [[self._took_ms(each) for each in asked] for _ in range(_ROUNDS)]
        self.line = fit(asked, [statistics.median(column) for column in zip(*rounds[1:], strict=True)])
        self._alpha_ms, self._beta_ms = self.line.cost.alpha_ms, self.line.cost.beta_ms
        if not self._beta_ms > 0:
            raise RuntimeError(f"delays on {self.device} do not grow as requested: {self.line}")

    def __call__(self, delay_ms: float) -> None:
        """Keep the lane busy for ``delay_ms`` milliseconds."""
        self._ask(max(0.0, (delay_ms - self._alpha_ms) / self._beta_ms))

    def _ask(self, amount: float) -> None:
        if self.device.type == "cuda":
            torch.cuda._sleep(int(amount))
        else:
            self.host.sleep(amount / 1e3)

    def _took_ms(self, amount: float) -> float:
        """Measure one delay of several in a row: as in a schedule, where a lane has its next task ready. Return
        milliseconds."""

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
    """Return the milliseconds of some work, by the clock of the device.

    Args:
        device: the device that executes it.
        work: the work, issued on the current stream.
        ahead: a pause before the work, which is not counted. It keeps a GPU waiting until the host has issued the work.
            On a CPU work takes longer after a pause, as most tasks of a schedule do.
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
    """Return the milliseconds that the host needs to issue some work; on a CPU, to execute it. It leaves the device
    idle."""
    start_ns = host.perf_counter_ns()
    work()
    took_ms = (host.perf_counter_ns() - start_ns) / 1e6
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return took_ms


def pause_ms(issue_ms: float) -> float:
    """Return the milliseconds to keep a device busy while the host issues work, with a margin.

    A device queues about a thousand launches. With more, the host has to issue the rest while the work runs.
    """
    return 1.3 * issue_ms + 0.5
