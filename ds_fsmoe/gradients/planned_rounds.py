# SPDX-License-Identifier: Apache-2.0
"""Records in backwards before which window each gradient comes, and has a plan made from it; see the reducer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.gradients.flat_buffers import FlatGradients
from ds_fsmoe.gradients.waiting_gradients import WaitingGradients
from ds_fsmoe.planning.decide.gradient_plan import BufferReadiness, GradientPlan, GradientSlice

MakePlan = Callable[[Sequence[BufferReadiness]], GradientPlan]


class PlannedRounds:
    """Holds the plan by which gradients travel, and what it rests on.

    Args:
        flats, make_plan, looks, waiting: see :class:`~ds_fsmoe.gradients.reducer.GradientReducer`.
    """

    def __init__(
        self, flats: Sequence[FlatGradients], make_plan: MakePlan, looks: int, waiting: WaitingGradients | None
    ) -> None:
        self.flats = tuple(flats)
        self._make_plan = make_plan
        self._waiting = waiting
        self.plan: GradientPlan | None = None
        # By number: of a parameter over all buffers, as they were given. Their order in a buffer may change.
        self._numbers = {id(p): n for n, p in enumerate(p for flat in self.flats for p in flat.parameters)}
        self._ready_at = [0] * len(self._numbers)
        self._looks_left = looks
        self._passed: list[list[str]] = []
        """The layers, in the order of the windows they opened, for each observed round."""
        self._windows: tuple[str, ...] = ()
        """The layers that the plan counts on."""
        self._seen_windows: tuple[str, ...] = ()
        """The layers that the observed rounds passed."""
        self._new_plan: GradientPlan | None = None
        self._new_windows: tuple[str, ...] = ()
        self._is_new = True
        """Return whether no round has been observed yet."""
        self._parts: tuple[tuple[GradientSlice, ...], ...] = ()
        # Of the round under way.
        self._opened = 0
        self._layers: list[str] = []
        self._came_at: dict[int, int] = {}

    def _begin(self) -> None:
        """Begin a round."""
        raise NotImplementedError

    def _look(self, was_late: bool) -> None:
        """Record what came when, if this round was an observed one; after the last one agree on it, and plan."""
        if not self._looks_left:
            self._looks_left = int(was_late)
            return
        # What was late once stays late: ranks may take turns.
        for number in range(len(self._numbers)):
            came_at = self._came_at.get(number, self._num_passed)
            self._ready_at[number] = max(self._ready_at[number], came_at)
        if self.plan is None or not self._windows:
            self._passed.append(self._layers)
        self._looks_left -= 1
        if self._looks_left:
            return
        facts = on_every_rank((self._passed, self._ready_at), self.flats[-1].group)
        self._ready_at = [max(each) for each in zip(*(ready_at for _, ready_at in facts), strict=True)]
        seen = {tuple(layers) for passed, _ in facts for layers in passed} or {self._windows}
        # Where not every backward passes the same layers, there is no telling when a window opens.
        self._new_windows = self._seen_windows = seen.pop() if len(seen) == 1 else ()
        self._new_plan = self._planned(self._make_plan)

    def _planned(self, make_plan: MakePlan) -> GradientPlan:
        supplies = self._supplies(len(self._new_windows))
        plan = make_plan(supplies)
        return plan if self._waiting is None else self._waiting.bounded(plan, supplies)

    @property
    def _num_passed(self) -> int:
        """The number of layers whose backward has begun; by name, if that is known."""
        return len(self._layers) if self.plan is None else self._opened

    def try_plan(self, make_plan: MakePlan) -> None:
        """Send by another plan from the next round on, if a round was observed to make one; else observe one more."""
        self._looks_left = min(self._looks_left, 1)
        if self._seen_windows:
            self._new_windows = self._seen_windows
            self._new_plan = self._planned(make_plan)

    @property
    def coming_plan(self) -> GradientPlan | None:
        """The plan of the next round: the one in force, unless another waits for that round to begin."""
        return self.plan if self._new_plan is None else self._new_plan

    def memory(self) -> dict[str, list]:
        """Return what the coming plan rests on, as plain data: the layers whose windows it counts on, and how many
        windows had opened when each gradient came."""
        windows = self._new_windows if self._new_plan else self._windows
        return {"windows": list(windows), "ready_at": list(self._ready_at)}

    def go_on_with(self, plan: GradientPlan, windows: Sequence[str], ready_at: Sequence[int]) -> None:
        """Send by a plan from another run, of the same model on as many ranks; between two rounds.

        Args:
            plan: the plan to use.
            windows, ready_at: its :meth:`memory`.

        Raises:
            ValueError: the plan is for other buffers or parameters.
        """
        sizes = tuple(flat.numel for flat in self.flats)
        if plan.sizes != sizes or len(ready_at) != len(self._numbers):
            raise ValueError(f"a plan for buffers of {plan.sizes} elements and {len(ready_at)} parameters: has {sizes}")
        self._looks_left, self._ready_at = 0, list(ready_at)
        self._new_plan = plan
        self._new_windows = self._seen_windows = tuple(windows)
        self._begin()

    def _supplies(self, num_windows: int) -> list[BufferReadiness]:
        return [flat.readiness(self._ready_of, num_windows) for flat in self.flats]

    def _ready_of(self, parameter: nn.Parameter) -> int:
        return self._ready_at[self._numbers[id(parameter)]]
