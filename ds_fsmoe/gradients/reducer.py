# SPDX-License-Identifier: Apache-2.0
"""Reduces gradients while the backward is still running: in windows, by one plan that all ranks share.

A round is one backward whose gradients are to be reduced. In it, gradients arrive one by one, and are numbered from end
to end. The buffer has their only copy, and autograd adds to it. The MoE layers' backwards open windows, in which
stretches of them are sent; ``finish`` sends the rest. Sums that this rank does not need are released when they are
sent.

The messages of a communicator and their sizes follow from the plan alone, never from the arrivals on a rank. Two faults
on a rank are therefore possible, and both are corrected at the end. A gradient that never came was sent as zero, which
is right. A gradient that came after its stretch was sent is sent in a message of its own, and added. The last message
has, for every parameter, the number of ranks on which that happened, so all ranks send those together.

The first rounds have no plan and send all at the end. They record before which window each gradient came. Ranks take
the latest of these, order the buffers by it and make the plan. A round in which a gradient came too late makes the next
one observe again. ``reduction`` makes the reducer; ``zero_stages`` connects it with DeepSpeed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.gradients.background_lane import end_gathers
from ds_fsmoe.gradients.flat_buffers import FlatGradients
from ds_fsmoe.layer.stock_layer import FSMoELayer
from ds_fsmoe.planning.decide.gradient_plan import BufferReadiness, GradientPlan, GradientSlice, never_above

MakePlan = Callable[[Sequence[BufferReadiness]], GradientPlan]


class WaitingGradients:
    """Bounds the gradients that wait to be sent, where a rank does not keep what others update (ZeRO 2).

    Before the first observed backward, gradients are assumed to come in the order of the model, from its end to its
    start. A gradient that comes later is sent again.

    Args:
        engine: the engine.
        most: the maximum of elements of a buffer that may wait after a layer.
        layers: the MoE layers.
    """

    def __init__(self, engine: Any, most: int, layers: Sequence[FSMoELayer]) -> None:
        self.most = most
        self._number_of = {id(each): number for number, each in enumerate(engine.module.parameters())}
        ends = sorted(
            (max((self._number_of.get(id(each), -1) for each in layer.parameters()), default=-1), layer.label)
            for layer in layers
        )
        self._ends = [end for end, _ in ends]
        self._in_backward = tuple(label for _, label in reversed(ends))

    def _ready_of(self, parameter: nn.Parameter) -> int:
        """Return the number of layers whose backward begins before a gradient comes."""
        return len(self._ends) - bisect_left(self._ends, self._number_of[id(parameter)])

    def guessed(self, flats: Sequence[FlatGradients]) -> tuple[tuple[str, ...], tuple[tuple[GradientSlice, ...], ...]]:
        """Return the windows, and the slices sent in each part of them, while there is no plan; empty if no gradient
        would wait too long. It arranges the buffers."""
        for flat in flats:
            flat.arrange(flat.in_order(self._ready_of))
        count = len(self._in_backward)
        readiness = [flat.readiness(self._ready_of, count) for flat in flats]
        nothing = GradientPlan(((),) * count, ((),) * count, tuple(flat.numel for flat in flats))
        parts = never_above(nothing, readiness, self.most).parts
        return (self._in_backward, parts) if any(parts) else ((), ())


class GradientReducer:
    """Owns the buffers and the state of a round.

    Args:
        flats: the buffers; the ranks of the last one include those of all others, and its ``extra`` has two elements
            per parameter of all buffers.
        gradient_of: returns the present gradient of a parameter, or ``None``.
        is_sending: returns whether the current backward is to be reduced; the same on every rank.
        make_plan: makes the plan from the bytes that exist before each window; the same on every rank. It may
            communicate.
        looks: the number of observed rounds before there is a plan.
        replace: puts a tensor, or ``None``, where ``gradient_of`` reads.
        all_used: whether every parameter is known to get its gradient once in each round, early enough. Nothing is then
            sent again, ranks exchange no marks, and ``extra`` is empty.
        waiting: bounds the gradients that wait; ``None``: the plan alone decides what is sent when.
        begin_sums: called where the end of a backward begins; ``None``: nothing is.
    """

    def __init__(
        self,
        flats: Sequence[FlatGradients],
        gradient_of: Callable[[nn.Parameter], torch.Tensor | None],
        is_sending: Callable[[], bool],
        make_plan: MakePlan,
        replace: Callable[[nn.Parameter, torch.Tensor | None], None],
        observed_rounds: int = 1,
        all_used: bool = False,
        waiting: WaitingGradients | None = None,
        begin_sums: Callable[[], None] | None = None,
    ) -> None:
        self.flats = tuple(flats)
        self._begin_sums = begin_sums
        self._make_plan = make_plan
        self._waiting = waiting
        self._gradient_of = gradient_of
        self._replace = replace
        self.is_sending = is_sending
        self._all_used = all_used
        self.plan: GradientPlan | None = None
        # By number: of a parameter over all buffers, as they were given. Their order in a buffer may change.
        self._numbers = {id(p): n for n, p in enumerate(p for flat in self.flats for p in flat.parameters)}
        self.flats[-1].reserve_extra(0 if all_used else 2 * len(self._numbers))
        self._ready_at = [0] * len(self._numbers)
        self._rounds_to_observe = observed_rounds
        self._layers_in_order: list[list[str]] = []
        """The layers, in the order of the windows they opened, for each observed round."""
        self._windows: tuple[str, ...] = ()
        """The layers that the plan counts on."""
        self._observed_windows: tuple[str, ...] = ()
        """The layers that the observed rounds passed."""
        self._next_plan: tuple[GradientPlan, tuple[str, ...]] | None = None
        """The plan of the next round and the layers it counts on, if they are others than now."""
        self._parts: tuple[tuple[GradientSlice, ...], ...] = ()
        self.rounds, self.sent_again = 0, 0
        """The number of finished rounds, and of gradients that had to travel twice in all of them."""
        self._backwards: set[int] = set()
        """Autograd's numbers of the backwards that have begun and not ended."""
        # Where a gradient has to be early enough, nothing is guessed.
        if waiting is not None and not all_used:
            self._windows, self._parts = waiting.guessed(self.flats)
        self._locate()
        self._begin()

    def __contains__(self, parameter: nn.Parameter) -> bool:
        return id(parameter) in self._numbers

    @property
    def parameters(self) -> Iterable[nn.Parameter]:
        """Return the parameters whose gradients are reduced here."""
        return (parameter for flat in self.flats for parameter in flat.parameters)

    def value(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the reduced gradient, [numel], from :meth:`finish` until :meth:`release`; zeros if this rank does not
        need it."""
        flat, index = self._places[id(parameter)]
        return self.flats[flat].value(index)

    def place(self, parameter: nn.Parameter) -> torch.Tensor:
        """Return the same memory as :meth:`value`, in the parameter's shape and layout."""
        flat, index = self._places[id(parameter)]
        return self.flats[flat].place(index)

    def release_gradient(self, parameter: nn.Parameter) -> None:
        """Release the reduced gradient of a parameter."""
        flat, index = self._places[id(parameter)]
        self.flats[flat].release_gradient(index)

    def release(self) -> None:
        """Release all gradients."""
        for flat in self.flats:
            flat.release()

    def ready(self, parameter: nn.Parameter) -> None:
        """Record that the gradient of a parameter exists; an unrecorded one is looked up at the end."""
        self.begin_if_over()
        self._note_backward()
        flat, index = self._places[id(parameter)]
        self._came_at[id(parameter)] = self._num_passed
        # What comes behind the stretch stays with the parameter: it is late.
        if self._sent[flat] <= self.flats[flat].starts[index]:
            self._move(parameter)

    def _note_backward(self) -> None:
        """Record the calling backward: autograd reports its end, and reports nothing if it ends in an error."""
        number = torch._C._current_graph_task_id()
        if number >= 0 and number not in self._backwards:
            self._backwards.add(number)
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._backwards.discard, number))

    def forget_if_broken_off(self) -> None:
        """Drop the remains of a failed backward at the start of a forward, so that the next round lacks them."""
        # Within a backward it is part of one, checkpointed as a whole, and no sign of an error.
        if self._backwards and torch._C._current_graph_task_id() < 0:
            self.forget()

    def forget(self) -> None:
        """Abandon the round, on every rank. Gradients that parameters still have remain there."""
        self._backwards.clear()
        self._wait()
        self.release()
        self._is_over = True

    def _move(self, parameter: nn.Parameter) -> None:
        """Move the gradient of a parameter to the buffer."""
        key, gradient = id(parameter), self._gradient_of(parameter)
        at, index = self._places[key]
        flat = self.flats[at]
        if gradient is None:
            return
        if gradient.dtype == flat.dtype:
            if not flat.holds(index, gradient):
                self._replace(parameter, flat.take(index, gradient))
        else:
            # Of another dtype than the communication dtype. The parameter keeps it until its slice is sent, for hooks.
            flat.place(index).copy_(gradient)
        self._visible.add(key)
        self._there.add(key)

    def open(self, label: str) -> tuple[GradientSlice, ...]:
        """Begin the window of a layer's backward; return the slices to send in it, in this order."""
        if not self.is_sending():
            return ()
        self.begin_if_over()
        self._note_backward()
        self._wait()
        self._release_sent()
        self._num_open += 1
        self._layers.append(label)
        # By name: where a rank has gone past a layer that others have run, it is where they are all the same.
        if label in self._windows[self._opened :]:
            self._opened = self._windows.index(label, self._opened) + 1
        elif self._windows:
            return ()
        else:
            self._opened += 1
        part = 2 * (self._opened - 1)
        if part >= len(self._parts):
            return ()
        self._start_until(part)  # a layer inside another's expert: the part beside the outer one has not gone yet
        self._wait()
        self._next_part = part + 1
        for grad_slice in self._parts[part]:
            self._fill(grad_slice)
        return self._parts[part]

    def tasks(self, grad_slice: GradientSlice) -> tuple[str, ...]:
        """Return the kinds of tasks of a slice that :meth:`open` returned."""
        return self.flats[grad_slice.flat].tasks(grad_slice.first, grad_slice.stop)

    def send(self, grad_slice: GradientSlice, task: str) -> None:
        """Run one task of a slice that :meth:`open` returned, in the calling thread and on its current stream."""
        self.flats[grad_slice.flat].send(grad_slice.first, grad_slice.stop, task)

    def close(self) -> None:
        """End the window of a layer's backward: start slices that are sent during the work that follows."""
        self._num_open = max(0, self._num_open - 1)
        self._release_sent()
        part = 2 * self._opened - 1
        if not self._is_over and part == self._next_part < len(self._parts):
            self._start_until(part + 1)

    def finish(self) -> set[int]:
        """End the backward: send the rest, and send again gradients that were sent too early.

        Returns:
            The ids of the parameters that have a gradient on any rank; of all, where all are known to have one.

        Raises:
            RuntimeError: a gradient came too late although none was expected to; all messages have been sent.
        """
        if self._begin_sums is not None:
            self._begin_sums()
        self.begin_if_over()
        self._wait()
        last = self.flats[-1]
        marks = self._marks()
        last.extra.copy_(torch.tensor([] if self._all_used else marks))
        # A rank that has passed fewer layers than others still splits its messages as they do.
        self._start_until(len(self._parts), at_end=True)
        for index, flat in enumerate(self.flats):
            grad_slice = GradientSlice(flat.kind, index, self._sent[index], flat.numel)
            if grad_slice.first == grad_slice.stop and not (flat is last and len(last.extra)):
                continue
            self._fill(grad_slice, at_end=True)
            self._in_flight.append(flat.start(grad_slice.first, grad_slice.stop, with_extra=flat is last))
        self._wait()
        self._num_open = 0
        self._release_sent()
        if self._all_used:
            late = marks[len(self._numbers) :]
            _refuse([tuple(each.shape) for each in self.parameters if late[self._numbers[id(each)]]])
        # The one look from the host at what the ranks have in common.
        present_on, late_on = ([1.0] * len(self._numbers), []) if self._all_used else last.extra.view(2, -1).tolist()
        self._send_again([number for number, count in enumerate(late_on) if count])
        self._agree_on_plan(any(late_on))
        self.rounds += 1
        self._is_over = True
        return {each for each, number in self._numbers.items() if present_on[number]}

    def _marks(self) -> list[float]:
        """Return for every parameter whether it has a gradient here; then, for every one, whether it was late."""
        present, late = ([0.0] * len(self._numbers) for _ in range(2))
        for flat, each in enumerate(self.flats):
            for index, parameter in enumerate(each.parameters):
                key, has_own = id(parameter), self._gradient_of(parameter) is not None
                number = self._numbers[key]
                present[number] = float(has_own or key in self._there)
                # When its place was sent, a gradient that was there left the parameter.
                late[number] = float(has_own and self._sent[flat] > each.starts[index])
        return present + late

    def begin_if_over(self) -> None:
        """Begin a round after the last one, by the plan that is due."""
        if self._is_over:
            self._begin()

    def _begin(self) -> None:
        if self._next_plan is not None:
            # Not before: until now the reduced gradients of the last round may have been read.
            self.plan, self._windows = self._next_plan
            self._next_plan = None
            for index, flat in enumerate(self.flats):
                flat.arrange(flat.in_order(self._ready_of), self.plan.is_in_levels(index))
            self._locate()
            self._parts = self.plan.parts
        self._is_over = False
        self.release()
        self._sent, self._released = ([0] * len(self.flats) for _ in range(2))
        self._num_open = self._opened = self._next_part = 0
        self._layers: list[str] = []
        # By id, as what came when.
        self._there: set[int] = set()
        # Of those, which the parameters can still see.
        self._visible: set[int] = set()
        self._came_at: dict[int, int] = {}
        self._in_flight: list[Callable[[], None]] = []

    def _locate(self) -> None:
        self._places = {
            id(parameter): (flat, index)
            for flat, each in enumerate(self.flats)
            for index, parameter in enumerate(each.parameters)
        }

    def _release_sent(self) -> None:
        """Release gradients that were sent and are not needed here, if no message is in flight."""
        if self._num_open or self._in_flight:
            return
        for at, flat in enumerate(self.flats):
            flat.release_sent(self._released[at], self._sent[at])
        self._released = list(self._sent)

    def _wait(self) -> None:
        for wait in self._in_flight:
            wait()
        self._in_flight = []

    def _start_until(self, part: int, at_end: bool = False) -> None:
        """Start all parts of the plan before this one."""
        for grad_slices in self._parts[self._next_part : part]:
            for grad_slice in grad_slices:
                self._fill(grad_slice, at_end)
                self._in_flight.append(self.flats[grad_slice.flat].start(grad_slice.first, grad_slice.stop))
        self._next_part = max(self._next_part, part)

    def _fill(self, grad_slice: GradientSlice, at_end: bool = False) -> None:
        """Fill a stretch before it is sent: missing gradients are zero, and at the end have their true value."""
        # Every message of a round comes through here before it is sent.
        end_gathers()
        flat = self.flats[grad_slice.flat]
        # One that began in an earlier stretch was filled with it.
        for index in range(bisect_left(flat.starts, grad_slice.first), bisect_left(flat.starts, grad_slice.stop)):
            parameter = flat.parameters[index]
            key = id(parameter)
            if key in self._visible and not self._is_in_place(parameter):
                # A hook or a script has put another in its stead, or none; or it is of another type.
                self._there.discard(key)
                self._move(parameter)
            if key not in self._there and at_end:
                self._move(parameter)
            if key in self._there:
                self._replace(parameter, None)
            else:
                flat.release_gradient(index)
            # This thread makes the zeros, and not the thread that sends them.
            flat.value(index)
        self._sent[grad_slice.flat] = grad_slice.stop

    def _is_in_place(self, parameter: nn.Parameter) -> bool:
        """Return True if a parameter's gradient is still the one in the buffer."""
        flat, index = self._places[id(parameter)]
        gradient = self._gradient_of(parameter)
        return gradient is not None and self.flats[flat].holds(index, gradient)

    def _send_again(self, numbers: Sequence[int]) -> None:
        parameters = {self._numbers[id(each)]: each for each in self.parameters} if numbers else {}
        for parameter in (parameters[number] for number in numbers):
            flat, index = self._places[id(parameter)]
            self.flats[flat].add(index, self._gradient_of(parameter))
            self._replace(parameter, None)
        self.sent_again += len(numbers)

    def _agree_on_plan(self, was_late: bool) -> None:
        """Record the order of gradients in an observed round; after the last one, agree on it and plan."""
        if not self._rounds_to_observe:
            self._rounds_to_observe = int(was_late)
            return
        # What was late once stays late: ranks may take turns.
        for each, number in self._numbers.items():
            self._ready_at[number] = max(self._ready_at[number], self._came_at.get(each, self._num_passed))
        if self.plan is None or not self._windows:
            self._layers_in_order.append(self._layers)
        self._rounds_to_observe -= 1
        if self._rounds_to_observe:
            return
        facts = on_every_rank((self._layers_in_order, self._ready_at), self.flats[-1].group)
        self._ready_at = [max(each) for each in zip(*(ready_at for _, ready_at in facts), strict=True)]
        seen = {tuple(layers) for passed, _ in facts for layers in passed} or {self._windows}
        # Where not every backward passes the same layers, there is no telling when a window opens.
        self._observed_windows = seen.pop() if len(seen) == 1 else ()
        self._plan_by(self._make_plan)

    def _plan_by(self, make_plan: MakePlan) -> None:
        readiness = self._readiness(len(self._observed_windows))
        plan = make_plan(readiness)
        plan = plan if self._waiting is None else never_above(plan, readiness, self._waiting.most)
        self._next_plan = plan, self._observed_windows

    @property
    def _num_passed(self) -> int:
        """Return the number of layers whose backward has begun; by name, if that is known."""
        return len(self._layers) if self.plan is None else self._opened

    def try_plan(self, make_plan: MakePlan) -> None:
        """Send by another plan from the next round on, if a round was observed to make one; else observe one more."""
        self._rounds_to_observe = min(self._rounds_to_observe, 1)
        if self._observed_windows:
            self._plan_by(make_plan)

    @property
    def next_plan(self) -> GradientPlan | None:
        """Return the plan of the next round: the current one, unless another waits for that round to begin."""
        return self.plan if self._next_plan is None else self._next_plan[0]

    def memory(self) -> dict[str, list]:
        """Return the basis of the coming plan as plain data: the layers whose windows it uses, and how many windows had
        opened when each gradient came."""
        windows = self._windows if self._next_plan is None else self._next_plan[1]
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
        self._rounds_to_observe, self._ready_at = 0, list(ready_at)
        self._observed_windows = tuple(windows)
        self._next_plan = plan, self._observed_windows
        self._begin()

    def _readiness(self, num_windows: int) -> list[BufferReadiness]:
        return [flat.readiness(self._ready_of, num_windows) for flat in self.flats]

    def _ready_of(self, parameter: nn.Parameter) -> int:
        return self._ready_at[self._numbers[id(parameter)]]


def _refuse(late: Sequence[tuple[int, ...]]) -> None:
    if late:
        raise RuntimeError(
            f"gradients of parameters of shape {list(late)} came after their slices were sent, or twice, although "
            "fsmoe.gradient_partition.all_used = true: remove it"
        )
