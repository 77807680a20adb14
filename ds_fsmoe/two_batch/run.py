# SPDX-License-Identifier: Apache-2.0
"""Runs one forward of a chain of blocks in two sub-batches, and repeats that of a checkpointed block in the backward.

``splitter`` decides which forwards are split and creates a :class:`TwoBatchRun` for each. This module splits the
arguments, alternates between the sub-batches, and joins their results.
"""

from __future__ import annotations

import operator
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from functools import partial
from typing import Any

import torch
from greenlet import getcurrent, greenlet

from ds_fsmoe.execution.call import SubBatch
from ds_fsmoe.layer.replay import Tape

# ---- Runs the calls of one sub-batch, one after another, on a stack that can be suspended and resumed
#
# A layer's call pauses deep inside a block, in code that does not know of it. Both sub-batches run in one thread, so
# they share torch's state per thread: modes, streams, and the sequence numbers of autograd's nodes. Each sub-batch has
# its own context variables.


Call = Callable[[Any], Any]
"""Maps the result of the call before to the argument of the next one."""


class Fiber:
    """Runs the calls of one sub-batch.

    Args:
        value: the argument of the first call.
        is_last_in_backward: see :class:`~ds_fsmoe.execution.call.SubBatch`.
        begin: called first, inside the sub-batch's own context.
    """

    def __init__(self, value: Any, is_last_in_backward: bool, begin: Callable[[], None]) -> None:
        self.value = value
        """The value that the last call returned."""
        self.is_paused = False
        """True while a call pauses."""
        self._calls: deque[Call] = deque()
        self._sub_batch = SubBatch(self._pause, is_last_in_backward)
        self._begin = begin
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None
        self._stack = greenlet(self._run)
        self._stack.gr_context = copy_context()

    def add(self, call: Call) -> None:
        """Append a function to the calls."""
        self._calls.append(call)

    def resume(self) -> None:
        """Continue until a call pauses, or all have returned.

        Raises:
            BaseException: the error of a call; the fiber is then finished.
        """
        self._stack.parent = getcurrent()
        self._stack.switch()

    def close(self) -> None:
        """Stop calls that have not returned, as if they had raised an error, and drop the rest."""
        self._calls.clear()
        if self._stack:
            self._stack.throw()

    def _run(self) -> None:
        self._begin()
        with self._sub_batch.running():
            while True:
                while self._calls:
                    self.value = self._calls.popleft()(self.value)
                self._stack.parent.switch()

    @contextmanager
    def saving(self, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> Iterator[None]:
        """Save tensors of this sub-batch by these functions inside the block, although torch keeps such hooks per
        thread.

        Args:
            pack, unpack: see :class:`torch.autograd.graph.saved_tensors_hooks`.
        """
        self._hooks = torch.autograd.graph.saved_tensors_hooks(pack, unpack)
        try:
            with self._hooks:
                yield
        finally:
            self._hooks = None

    def _pause(self) -> None:
        self.is_paused = True
        hooks = self._hooks
        if hooks is not None:
            hooks.__exit__()
        try:
            self._stack.parent.switch()
        finally:
            self.is_paused = False
            if hooks is not None:
                hooks.__enter__()


def run_alternating(fibers: Sequence[Fiber]) -> None:
    """Run all calls of fibers to their ends, each until it pauses, and close the fibers.

    Raises:
        BaseException: the error of a call; the other fibers are closed.
    """
    try:
        for fiber in fibers:
            fiber.resume()
        while any(fiber.is_paused for fiber in fibers):
            for fiber in fibers:
                if fiber.is_paused:
                    fiber.resume()
    finally:
        for fiber in fibers:
            fiber.close()


# ---- Activation checkpointing of a block that runs in sub-batches: in the backward both run again, alternating
#
# Tensors that autograd would save in a block are dropped. When the backward first needs one, the block's forward runs
# once more for both sub-batches, with overlap, and the tensors that it saves are used. Layers replay their routing. The
# forward runs to its end on every rank: a rank that stopped early could omit a collective that others wait in.


class Again:
    """Runs one block's forward in both sub-batches, which may run once more.

    Args:
        forward: the block's forward.
        rests: for each sub-batch, its arguments without the first.
    """

    def __init__(self, forward: Callable[..., Any], rests: Sequence[Rest]) -> None:
        self._forward = forward
        self._rests = rests
        self._given: list[torch.Tensor] = []
        self._tapes = [Tape() for _ in range(NUM_SUB_BATCHES)]
        self._saved: list[list[weakref.ref[_Saved]]] = [[] for _ in range(NUM_SUB_BATCHES)]
        self._num_again = [0] * NUM_SUB_BATCHES
        self._autocasts: list[Callable[[], Any]] = []
        self._has_run_again = False

    def run(self, sub_batch: int, fiber: Fiber, x_BLM: torch.Tensor) -> Any:
        """Run the forward of a sub-batch, and return its result. The first sub-batch comes first.

        Args:
            sub_batch: its number.
            fiber: the fiber that runs it.
            x_BLM: the first argument.
        """
        self._given.append(x_BLM)
        self._autocasts = self._autocasts or _autocasts_now(x_BLM.device.type)
        args, kwargs = self._rests[sub_batch]
        with (
            self._tapes[sub_batch].running(is_again=False),
            fiber.saving(partial(self._leave_out, sub_batch), _Saved.read),
        ):
            return self._forward(x_BLM, *args, **kwargs)

    def run_again(self) -> None:
        """Run the forward of both sub-batches again, alternating, and fill in the dropped tensors. Collective as the
        forward.

        Raises:
            RuntimeError: it saved other tensors than the first time.
        """
        if self._has_run_again:
            raise RuntimeError("a checkpointed block was recomputed, but did not save what is needed now")
        self._has_run_again = True
        with torch.enable_grad(), ExitStack() as stack:
            for autocast in self._autocasts:
                stack.enter_context(autocast())
            fibers = []
            for sub_batch, given in enumerate(self._given):
                x_BLM = given.detach().requires_grad_(given.requires_grad)
                fibers.append(Fiber(x_BLM, is_last_in_backward=sub_batch == 0, begin=lambda: None))
                fibers[sub_batch].add(partial(self._once_more, sub_batch, fibers[sub_batch]))
            run_alternating(fibers)
        counts = [len(each) for each in self._saved]
        if counts != self._num_again:
            raise RuntimeError(
                f"a checkpointed block saved {counts} tensors of its sub-batches, and {self._num_again} when it was "
                "recomputed: its forward must be deterministic"
            )
        self._given, self._saved, self._rests = [], [], ()

    def _once_more(self, sub_batch: int, fiber: Fiber, x_BLM: torch.Tensor) -> None:
        args, kwargs = self._rests[sub_batch]
        with (
            self._tapes[sub_batch].running(is_again=True),
            fiber.saving(partial(self._fill_in, sub_batch), _no_backward),
        ):
            self._forward(x_BLM, *args, **kwargs)

    def _leave_out(self, sub_batch: int, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(self)
        self._saved[sub_batch].append(weakref.ref(saved))
        return saved

    def _fill_in(self, sub_batch: int, tensor: torch.Tensor) -> None:
        place = self._num_again[sub_batch]
        self._num_again[sub_batch] += 1
        saved = self._saved[sub_batch][place]() if place < len(self._saved[sub_batch]) else None
        if saved is not None:
            saved.tensor = tensor.detach()


class _Saved:
    """Replaces a tensor that autograd saved; it is freed, with the tensor, when autograd drops it."""

    def __init__(self, of: Again) -> None:
        self._of = of
        self.tensor: torch.Tensor | None = None

    def read(self) -> torch.Tensor:
        """Return the tensor, recomputed if needed."""
        if self.tensor is None:
            self._of.run_again()
        return self.tensor


def _no_backward(_: object) -> torch.Tensor:
    raise RuntimeError("a recomputed forward has no backward of its own")


def _autocasts_now(device_type: str) -> list[Callable[[], Any]]:
    """Return functions that create contexts with the present autocast settings, of the device and of the CPU."""
    return [
        partial(
            torch.autocast,
            each,
            dtype=torch.get_autocast_dtype(each),
            enabled=torch.is_autocast_enabled(each),
            cache_enabled=torch.is_autocast_cache_enabled(),
        )
        for each in dict.fromkeys((device_type, "cpu"))
    ]


# ---- Joins the results that transformers collects of modules, such as routers' scores
#
# It collects into lists in a context variable, one entry for each call. Each sub-batch has its own context and lists,
# and at the end the entries of both are joined.


_MODULE, _NAME = "transformers.utils.output_capturing", "_active_collector"


def _collector() -> Any:
    """Return the context variable of transformers; ``None`` without transformers."""
    return getattr(sys.modules.get(_MODULE), _NAME, None)


def wants_blocks() -> bool:
    """Return True if the results of blocks are collected in the present forward."""
    variable = _collector()
    lists = None if variable is None else variable.get()
    return isinstance(lists, dict) and "hidden_states" in lists


class Collected:
    """Collects results in one forward with sub-batches."""

    def __init__(self) -> None:
        variable = _collector()
        self._whole: Any = None if variable is None else variable.get()
        self._of_sub_batches: list[dict[str, Any]] = [{}, {}]
        if isinstance(self._whole, dict):
            self._of_sub_batches = [{key: [] for key in self._whole} for _ in range(2)]

    def begin(self, sub_batch: int) -> None:
        """Start to collect separately, in the context of a sub-batch."""
        variable = _collector()
        if variable is not None and isinstance(self._whole, dict):
            variable.set(self._of_sub_batches[sub_batch])

    def end(self) -> None:
        """Add the joined entries of both sub-batches to the forward's own lists."""
        if not isinstance(self._whole, dict):
            return
        for key, entries in self._whole.items():
            if isinstance(entries, list):
                pairs = zip(*(each[key] for each in self._of_sub_batches), strict=True)
                entries += [joined_sub_batches(first, second) for first, second in pairs]


# ---- One forward of a chain of blocks in two sub-batches


Forward = Callable[..., Any]


class TwoBatchRun:
    """Runs blocks for both sub-batches, alternating.

    Each sub-batch computes up to the next layer with experts, and sends its tokens to them. When both have, the experts
    of the first sub-batch compute, and then those of the second. So each sub-batch's tokens are sent while the other
    computes.

    Args:
        x_BLM: the first block's first argument.
    """

    def __init__(self, x_BLM: torch.Tensor) -> None:
        self.batch = len(x_BLM)
        """The samples of both sub-batches, B."""
        self._has_gradients = torch.is_grad_enabled()
        self._collected = Collected()
        self._fibers = [
            # The backward runs from the youngest node to the oldest: the first sub-batch comes last.
            Fiber(sub_batch, is_last_in_backward=number == 0, begin=partial(self._collected.begin, number))
            for number, sub_batch in enumerate(x_BLM.split(sub_batch_sizes(self.batch)))
        ]

    def add(self, forward: Forward, rests: Sequence[Rest], runs_again: bool = False) -> None:
        """Append a block, which is called with the output of the block before it.

        Args:
            forward: its forward.
            rests: for each sub-batch, its other arguments.
            runs_again: whether its activations are dropped, and it runs again in the backward.
        """
        again = Again(forward, rests) if runs_again else None
        for sub_batch, (fiber, (args, kwargs)) in enumerate(zip(self._fibers, rests, strict=True)):
            if again is None:
                fiber.add(partial(_call, forward, args, kwargs))
            else:
                fiber.add(partial(_call, partial(again.run, sub_batch, fiber), (), {}))

    def advance(self) -> None:
        """Run both sub-batches through the last block's layer, up to the point where the experts' results are in
        flight."""
        with self._reverting_on_failure():
            for fiber in self._fibers:
                fiber.resume()
            for fiber in self._fibers:
                if fiber.is_paused:
                    fiber.resume()

    def complete(self) -> Any:
        """Run both sub-batches to their ends, and return the last block's result for the whole batch."""
        with self._reverting_on_failure(), torch.set_grad_enabled(self._has_gradients):
            for fiber in self._fibers:
                fiber.resume()
            found = joined_sub_batches(*(fiber.value for fiber in self._fibers))
        self.close()
        self._collected.end()
        return found

    def close(self) -> None:
        """Drop calls that have not run."""
        for fiber in self._fibers:
            fiber.close()

    @contextmanager
    def _reverting_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.close()
            raise


def _call(forward: Forward, args: tuple, kwargs: dict[str, Any], value: Any) -> Any:
    first = value[0] if isinstance(value, tuple) else value
    return forward(first, *args, **kwargs)


# ---- Splits the arguments of a block into sub-batches, and joins its results


NUM_SUB_BATCHES = 2
Rest = tuple[tuple, dict[str, Any]]
"""The arguments of a block without the first, by position and by name."""
_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device)
_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


class CannotSplitError(Exception):
    """Gives the reason why a block must run with the whole batch."""


def sub_batch_sizes(batch: int) -> tuple[int, int]:
    """Return the samples of each sub-batch; of an odd number the first has one more."""
    return batch - batch // 2, batch // 2


def check_cache(arguments: dict[str, Any]) -> None:
    """Refuse arguments that keep state from call to call.

    Raises:
        CannotSplitError: there is a cache.
    """
    for name in _CACHES:
        if arguments.get(name) is not None:
            raise CannotSplitError(f"it gets a cache ({name}); set use_cache = False")


def sub_batches_of(value: Any, batch: int, name: str) -> tuple[Any, Any]:
    """Return each sub-batch's part of an argument: tensors with a row per sample are split, other values are passed to
    both.

    Args:
        value: the argument, or a tuple, list or dictionary of such.
        batch: the samples of the whole batch, B.
        name: for messages.

    Raises:
        CannotSplitError: the value cannot be split by the batch.
    """
    if isinstance(value, _PLAIN):
        return value, value
    if isinstance(value, torch.Tensor):
        return _sub_batches_of_tensor(value, batch, name)
    if isinstance(value, (tuple, list)) and type(value) in (tuple, list):
        pairs = [sub_batches_of(each, batch, f"{name}[{place}]") for place, each in enumerate(value)]
        return type(value)(pair[0] for pair in pairs), type(value)(pair[1] for pair in pairs)
    if type(value) is dict:
        of_keys = {key: sub_batches_of(each, batch, f"{name}[{key!r}]") for key, each in value.items()}
        return {key: pair[0] for key, pair in of_keys.items()}, {key: pair[1] for key, pair in of_keys.items()}
    raise CannotSplitError(f"{name}, a {type(value).__name__}, cannot be split by the batch")


def _sub_batches_of_tensor(value: torch.Tensor, batch: int, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    # A tensor of a single dimension has an entry per position, or is a number.
    if value.dim() < 2 or value.shape[0] == 1:
        return value, value
    if value.shape[0] == batch:
        first, second = value.split(sub_batch_sizes(batch))
        return first, second
    raise CannotSplitError(
        f"{name} of shape {list(value.shape)} cannot be split for a batch of {batch}: its first size is neither "
        "that nor 1"
    )


def joined_sub_batches(first: Any, second: Any) -> Any:
    """Return the results of a block for both sub-batches as one for the whole batch.

    Args:
        first, second: tensors with a sample in each row, or ``None``, or tuples of such.
    """
    if isinstance(first, tuple):
        return tuple(joined_sub_batches(*each) for each in zip(first, second, strict=True))
    return None if first is None else torch.cat((first, second))


def check_output(value: Any, batch: int) -> None:
    """Refuse results that :func:`joined_sub_batches` cannot join.

    Args:
        value: a block's result for a whole batch.
        batch: its samples, B.

    Raises:
        CannotSplitError: the value cannot be joined.
    """
    for each in value if isinstance(value, tuple) else (value,):
        is_of_samples = isinstance(each, torch.Tensor) and each.dim() > 1 and each.shape[0] == batch
        if each is not None and not is_of_samples:
            shape = f" of shape {list(each.shape)}" if isinstance(each, torch.Tensor) else ""
            raise CannotSplitError(f"it returns a {type(each).__name__}{shape}, which has no element per sample")


# ---- Replaces the result of a block, between it and the next block: the value is computed at the first access
#
# It is no tensor, so code that acts on tensors only ignores it; torch's functions receive the value.


class Pending:
    """Represents a tensor that is computed at the first access.

    Args:
        complete: computes it; called once.
    """

    def __init__(self, complete: Callable[[], torch.Tensor]) -> None:
        self._complete: Callable[[], torch.Tensor] | None = complete
        self._value: torch.Tensor | None = None

    @property
    def is_open(self) -> bool:
        """Return True if the value has not been accessed."""
        return self._complete is not None

    @property
    def value(self) -> torch.Tensor:
        """Return the tensor, computed now if needed."""
        if self._complete is not None:
            complete, self._complete = self._complete, None
            self._value = complete()
        return self._value

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call a function of torch with values in place of pending arguments."""
        return function(*map(resolved, args), **{name: resolved(each) for name, each in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        # Not while it is created or copied.
        if name.startswith("__") or name in ("_complete", "_value"):
            raise AttributeError(name)
        return getattr(self.value, name)

    def __getitem__(self, at: Any) -> torch.Tensor:
        return self.value[at]

    def __len__(self) -> int:
        return len(self.value)


def resolved(value: Any) -> Any:
    """Return a value, or a list or tuple, with tensors in place of pending values."""
    if isinstance(value, Pending):
        return value.value
    if type(value) in (tuple, list):
        return type(value)(map(resolved, value))
    return value


def _with_value(of: Callable) -> Callable:
    def method(self: Pending, *others: Any) -> Any:
        return of(self.value, *map(resolved, others))

    return method


def _with_value_second(of: Callable) -> Callable:
    def method(self: Pending, other: Any) -> Any:
        return of(resolved(other), self.value)

    return method


for _name in ("add", "sub", "mul", "truediv", "matmul", "pow"):
    setattr(Pending, f"__{_name}__", _with_value(getattr(operator, _name)))
    setattr(Pending, f"__r{_name}__", _with_value_second(getattr(operator, _name)))
for _name in ("neg", "abs", "lt", "le", "gt", "ge", "setitem"):
    setattr(Pending, f"__{_name}__", _with_value(getattr(operator, _name)))
