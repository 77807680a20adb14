# SPDX-License-Identifier: Apache-2.0
"""Torch with a pretended GPU: what is asked of ``cuda`` is done on the CPU, and noted.

Two modes see to it. The outer one sees functions as they are called: it lets tensors say that they are on the GPU, and
makes those there that are asked for there. The inner one sees operations as they are done, of autograd too: it notes
what they read and write. Collectives on torch's ``fake`` process group are done as if every other rank had the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_fsmoe.execution.lanes import Lanes
from tests.pretended_gpu.gpu import Event, Gpu, Stream, extent_of

_UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
READ_BY_HOST = (
    *("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique_dim", "_unique2"),
    *("bincount", "repeat_interleave"),
)
"""Operations after which the host knows what only the device knew, be it only a size."""
_ASYNC = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "reduce", "broadcast"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "all_to_all", "all_to_all_single"),
)


def _tensors(of: Any) -> list[torch.Tensor]:
    """Those that have memory of their own in one piece: a sparse one's parts are tensors themselves."""
    return [each for each in tree_leaves(of) if isinstance(each, torch.Tensor) and each.layout == torch.strided]


def _unlikely(dtype: torch.dtype) -> float | int:
    """What memory that nobody has written holds."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return 1 if dtype == torch.bool else torch.iinfo(dtype).max


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Operations(TorchDispatchMode):
    """Notes every operation on the streams of the device."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__()
        self.gpu = gpu
        self.makes_on_gpu = False
        """Whether a tensor that is made from nothing is made on the device."""
        self.last: Stream | None = None
        """Where the last collective was put."""

    def is_there(self, tensor: torch.Tensor) -> bool:
        return tensor.layout == torch.strided and _address(tensor) in self.gpu.blocks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        there = [each for each in given if self.is_there(each)]
        if func.namespace == "c10d":
            return self._collective(func, args, kwargs, there)
        known = {_address(each) for each in given}
        written = [extent_of(each) for each in _tensors(_written_by(func, args, kwargs))]
        name = func._schema.name.removeprefix("aten::")
        self._check(name, args, kwargs, there, given)
        result = func(*args, **kwargs)
        made = [each for each in _tensors(result) if _address(each) not in known]
        if not there and not (self.makes_on_gpu and not given):
            return result
        for each in made:
            if not self.is_there(each):
                self.gpu.allocate(each.untyped_storage())
        if name in _UNWRITTEN:
            for each in made:
                each.fill_(_unlikely(each.dtype))
        elif made or written:
            self.gpu.do(name, map(extent_of, given), [*written, *map(extent_of, made)])
        return result

    def _check(
        self, name: str, args: Any, kwargs: Any, there: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
    ) -> None:
        # Who is told the size of the result need not be asked for it.
        if there and name in READ_BY_HOST and (kwargs or {}).get("output_size") is None:
            self.gpu.host_waits(name, self.gpu.current)
        elsewhere = [each for each in given if each.dim() and not self.is_there(each) and each.numel()]
        if there and elsewhere and name not in ("copy_", "_to_copy"):
            raise RuntimeError(f"{name}: tensors of the GPU with tensors of the CPU, {[e.shape for e in elsewhere]}")
        if name == "copy_" and there and elsewhere and not (len(args) > 2 and args[2]):
            self.gpu.host_waits("copy_ between the host and the device", self.gpu.current)

    def _collective(self, func: Any, args: Any, kwargs: Any, there: Sequence[torch.Tensor]) -> Any:
        name = func._schema.name.removeprefix("c10d::").strip("_")
        if not there:
            return func(*args, **kwargs)
        named = {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | kwargs
        gpu, stream = self.gpu, self.gpu.current
        if named.get("asyncOp", False):
            stream = gpu.stream_of_group(id(named["process_group"]) if "process_group" in named else None)
            stream.wait_stream(gpu.current)
        result = func(*args, **kwargs)
        outputs = _tensors(_written_by(func, args, kwargs)) or there
        _as_if_all_had_the_same(name, args)
        gpu.do(name, map(extent_of, there), map(extent_of, outputs), stream)
        self.last = stream
        return result


def _written_by(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    found = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(args[index] if index < len(args) else kwargs.get(argument.name))
    return found


def _as_if_all_had_the_same(name: str, args: Any) -> None:
    """Fill in what would have come from other ranks, if all of them had given what this one gives. A sum is left as it
    is, as if the others had given zero."""
    if name == "alltoall_base":
        output, given = args[:2]
        output.flatten()[: given.numel()].copy_(given.flatten()[: output.numel()])
    elif name == "allgather_base":
        output, given = args[:2]
        # Of no elements nothing comes; at the same address the others' parts are there, from before.
        if given.numel() and _address(output) != _address(given):
            output.view(-1, given.numel()).copy_(given.flatten())
    elif name == "reduce_scatter_base":
        output, given = args[:2]
        output.flatten().copy_(given.flatten()[: output.numel()])
    elif name == "allgather":
        for outputs, given in zip(*args[:2], strict=True):
            for output in outputs:
                output.copy_(given)


class _Work:
    """What an asynchronous collective returns. Until somebody has waited for it, it keeps its tensors."""

    def __init__(self, gpu: Gpu, stream: Stream, tensors: Any) -> None:
        self._gpu, self._event, self._tensors = gpu, Event(gpu), tensors
        self._event.record(stream)

    def wait(self, *_: Any) -> bool:
        self._gpu.current.wait_event(self._event)
        self._tensors = None
        return True

    def is_completed(self) -> bool:
        return True


def _index_of(gpu: Gpu, device: Any) -> int | None:
    """Of a GPU; ``None`` if it is the CPU that is meant."""
    if isinstance(device, int) and not isinstance(device, bool):
        return device
    device = torch.device(device)
    if device.type != "cuda":
        return None
    return gpu.chosen if device.index is None else device.index


class _Functions(TorchFunctionMode):
    """Makes on the device what is asked for there."""

    def __init__(self, gpu: Gpu, operations: _Operations) -> None:
        super().__init__()
        self.gpu, self.operations = gpu, operations

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        # Of the host's memory, all is as if it were pinned.
        kwargs.pop("pin_memory", None)
        device = kwargs.get("device")
        if device is None or func is torch.Tensor.to:
            return func(*args, **kwargs)
        there = _index_of(self.gpu, device)
        if there is not None:
            kwargs["device"] = "cpu"
            self.gpu.touch(func.__name__, there)
            if func in (torch.tensor, torch.as_tensor):  # torch waits for what it copies from the host's memory
                self.gpu.host_waits(func.__name__, self.gpu.current)
        before, self.operations.makes_on_gpu = self.operations.makes_on_gpu, there is not None
        try:
            return func(*args, **kwargs)
        finally:
            self.operations.makes_on_gpu = before


class _OfTensors:
    """What stands in the place of a tensor's own methods."""

    def __init__(self, gpu: Gpu, operations: _Operations) -> None:
        self.gpu, self.operations, self.is_there = gpu, operations, operations.is_there

    def put_in_place(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kind, there = torch.Tensor, torch.device("cuda", self.gpu.index)
        device = kind.device
        for name, getter in {
            "device": lambda each: there if self.is_there(each) else device.__get__(each),
            "is_cuda": self.is_there,
            "is_cpu": lambda each: not self.is_there(each),
        }.items():
            monkeypatch.setattr(kind, name, property(getter))
        for name, method in {
            "get_device": lambda each: self.gpu.index if self.is_there(each) else -1,
            "to": self._to(kind.to),
            "cuda": lambda each, *_, **options: self.moved(each, self.gpu.chosen, **options),
            "cpu": lambda each, *_, **__: self.moved(each, None),
            "tolist": self._read(kind.tolist),
            "numpy": self._read(kind.numpy),
            "record_stream": lambda each, stream: self._record_stream(each, stream),
        }.items():
            monkeypatch.setattr(kind, name, method)

    def _to(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            """The device is cut out, and a copy made where it is another."""
            rest = list(args)
            device = kwargs.pop("device", None)
            other = kwargs.pop("other", None)
            if rest and isinstance(rest[0], torch.Tensor):
                other = rest.pop(0)
            if other is not None:
                device = torch.device("cuda" if self.is_there(other) else "cpu")
                rest.insert(0, other.dtype)
            elif rest and isinstance(rest[0], (str, torch.device, int)) and not isinstance(rest[0], bool):
                device = rest.pop(0)
            if rest and rest[0] is None:  # no type
                rest.pop(0)
            if rest and isinstance(rest[0], bool):
                kwargs["non_blocking"] = rest.pop(0)
            if device is not None:
                index = _index_of(self.gpu, device)
                tensor = self.moved(tensor, index, kwargs.get("non_blocking", False))
            given = rest or {each for each in kwargs if each != "non_blocking"}
            return original(tensor, *rest, **kwargs) if given else tensor

        return to

    def moved(self, tensor: torch.Tensor, index: int | None, non_blocking: bool = False, **_: Any) -> torch.Tensor:
        """On the GPU of that number, or on the CPU."""
        if (index is not None) == self.is_there(tensor):
            return tensor
        if index is not None:
            self.gpu.touch("copy a tensor to the device", index)
        if not non_blocking:
            self.gpu.host_waits("copy between the host and the device", self.gpu.current)
        return _Moved.apply(tensor, self.operations, index is not None)

    def _read(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.is_there(tensor):
                self.gpu.host_waits(original.__name__, self.gpu.current)
            return original(tensor, *args, **kwargs)

        return read

    def _record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        block = self.gpu.blocks.get(_address(tensor))
        if block is not None:
            block.recorded.add(stream)


class _Moved(torch.autograd.Function):
    """A copy on the other side, of which a gradient comes back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, operations: _Operations, to_gpu: bool) -> torch.Tensor:
        ctx.operations, ctx.to_gpu = operations, to_gpu
        return _copied(tensor, operations, to_gpu)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _copied(gradient, ctx.operations, not ctx.to_gpu), None, None


def _copied(tensor: torch.Tensor, operations: _Operations, to_gpu: bool) -> torch.Tensor:
    with torch.utils._python_dispatch._disable_current_modes():
        copy = tensor.clone()
    if to_gpu:
        operations.gpu.allocate(copy.untyped_storage())
        operations.gpu.do("copy to the device", (), [extent_of(copy)])
    return copy


def _patch(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, operations: _Operations) -> None:
    def choose(device: Any) -> None:
        gpu.chosen = device if isinstance(device, int) else torch.device(device).index or 0
        gpu.is_set = gpu.is_set or gpu.chosen == gpu.index
        gpu.current.device_index = gpu.chosen

    def current_device() -> int:
        gpu.touch("look for the current device")
        return gpu.chosen

    for name, value in {
        "Stream": gpu.make_stream,
        "Event": lambda **options: Event(gpu, **options),
        "stream": gpu.on,
        "current_stream": lambda *_: gpu.current,
        "default_stream": lambda *_: gpu.default,
        "current_device": current_device,
        "set_device": choose,
        "is_initialized": lambda: gpu.is_set,
        "device": nullcontext,
        "get_device_capability": lambda *_: (9, 0),
        "synchronize": lambda *_: gpu.host_waits("synchronize"),
        "is_current_stream_capturing": lambda: False,
        # The generator's state lies on the host.
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.set_rng_state(state),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    # A backward is no function that the outer mode is to see: it would be off until the end of it.
    monkeypatch.setattr(torch.autograd, "has_torch_function", lambda _: False)
    monkeypatch.setattr(torch._tensor, "has_torch_function_unary", lambda _: False)
    _OfTensors(gpu, operations).put_in_place(monkeypatch)
    for name in _ASYNC:
        original = getattr(dist, name, None)
        if original is None:
            continue

        def collective(*args: Any, _original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            operations.last = None
            work = _original(*args, **kwargs)
            return work if work is None or operations.last is None else _Work(gpu, operations.last, (args, kwargs))

        monkeypatch.setattr(dist, name, collective)


def _watch_runs(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """The device knows when a run goes on, and which of its tasks is under way."""
    from ds_fsmoe.execution import lanes as lanes_module

    let, do = Lanes._let, lanes_module.LaneWork.do

    def watched_let(self: Lanes, *args: Any, **kwargs: Any) -> None:
        before, gpu.is_in_run = gpu.is_in_run, True
        try:
            let(self, *args, **kwargs)
        finally:
            gpu.is_in_run = before

    def watched_do(self: Any, step: Any, mark: Any) -> None:
        before, gpu.task = gpu.task, f"{self.label}/{step.task.name}"
        try:
            do(self, step, mark)
        finally:
            gpu.task = before

    monkeypatch.setattr(Lanes, "_let", watched_let)
    monkeypatch.setattr(lanes_module.LaneWork, "do", watched_do)


@contextmanager
def pretending(gpu: Gpu | None = None) -> Iterator[Gpu]:
    """Within this, ``cuda`` is the pretended device."""
    gpu = gpu or Gpu()
    operations = _Operations(gpu)
    with ExitStack() as stack:
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        _patch(monkeypatch, gpu, operations)
        _watch_runs(monkeypatch, gpu)
        stack.enter_context(operations)
        stack.enter_context(_Functions(gpu, operations))
        yield gpu
        # Tensors that outlive this are the CPU's again.
        gpu.blocks.clear()
