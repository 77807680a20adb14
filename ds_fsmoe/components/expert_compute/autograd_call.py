# SPDX-License-Identifier: Apache-2.0
"""Computes experts in one forward call of a layer through autograd, and keeps the state that a repeated call needs.

``calls`` and ``stacked_experts`` use it for experts without a hand-written form; ``written_call`` is the counterpart
for the others. Autocast, random numbers and buffers are saved, so that a repeated call computes the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.func import functional_call

from ds_fsmoe.components.expert_compute.gradient_sums import GradientSums
from ds_fsmoe.components.expert_compute.grouped_products import RowGroups
from ds_fsmoe.components.expert_compute.linears import RowWeights
from ds_fsmoe.components.expert_compute.saved import SavedTensors

if TYPE_CHECKING:
    from ds_fsmoe.components.expert_compute.stacked_forms import OwnExperts

# ---- State of a call that its repetition restores


@dataclass(frozen=True)
class AutocastState:
    """Holds the settings of autocast in a thread at some moment."""

    settings: tuple[tuple[str, bool, torch.dtype], ...]
    """Device type, whether autocast is enabled for it, and the dtype that it casts to."""
    cache_enabled: bool

    @classmethod
    def now(cls, device_types: Iterable[str]) -> AutocastState:
        """Return this thread's settings for some device types (``"cpu"``, ``"cuda"``)."""
        settings = [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in device_types]
        return cls(tuple(settings), torch.is_autocast_cache_enabled())

    def _is_now(self) -> bool:
        for device, enabled, dtype in self.settings:
            if torch.is_autocast_enabled(device) != enabled or torch.get_autocast_dtype(device) != dtype:
                return False
        return torch.is_autocast_cache_enabled() == self.cache_enabled

    def restored(self) -> AbstractContextManager:
        """Return a context that restores the settings; costs next to nothing where they are unchanged."""
        if self._is_now():
            return _NOTHING
        stack = ExitStack()
        for device, enabled, dtype in self.settings:
            stack.enter_context(torch.autocast(device, dtype, enabled, self.cache_enabled))
        return stack


_NOTHING = nullcontext()


@dataclass(frozen=True)
class RandomState:
    """Holds the state of the random-number generators of the host and of one device, at some moment."""

    device: torch.device
    of_host: torch.Tensor
    of_device: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        of_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(device, torch.get_rng_state(), of_device)

    def is_now(self) -> bool:
        """Return True if no random number has been drawn since."""
        now = RandomState.now(self.device)
        if self.of_device is not None and not torch.equal(self.of_device, now.of_device):
            return False
        return torch.equal(self.of_host, now.of_host)

    @property
    def nbytes(self) -> int:
        """Return the bytes of the states that are kept."""
        return self.of_host.nbytes + (0 if self.of_device is None else self.of_device.nbytes)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Repeat the draws that followed this state inside the context, and restore the generators after it."""
        outside = RandomState.now(self.device)
        self._set()
        try:
            yield
        finally:
            outside._set()

    def _set(self) -> None:
        torch.set_rng_state(self.of_host)
        if self.of_device is not None:
            torch.get_device_module(self.device).set_rng_state(self.of_device, self.device)


@contextmanager
def buffers_kept(module: nn.Module) -> Iterator[None]:
    """Replace a module's buffers by copies inside the context, and restore them after it, for a call that does not
    count."""
    held = [(each, dict(each._buffers)) for each in module.modules() if each._buffers]
    for each, buffers in held:
        each._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for each, buffers in held:
            each._buffers.update(buffers)


# ---- Calls that autograd differentiates


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """Return the argument: for hooks on saved tensors that do nothing."""
    return tensor


def has_saving_hooks() -> bool:
    """Return True if hooks are active on the tensors that autograd saves.

    Kept graphs would then keep tensors that the hooks want to drop.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


Aliases = Mapping[int, torch.Tensor]
"""The id of a parameter -> its replacement in a graph."""


@dataclass(frozen=True)
class _Run:
    """Holds a recorded call, with its graph."""

    leaf: torch.Tensor
    """Replaces the rows in the graph. It is empty: the graph has saved the values that it needs."""
    aliases: Aliases
    edge: GradientEdge | None
    """The graph edge for the gradient of the result; ``None``: the result depends on no tensor that has one."""
    dtype: torch.dtype
    """The dtype of the result."""
    y: torch.Tensor | None


class AutogradCall:
    """Calls a module once for each chunk, as ``module(...)``, so that hooks run.

    Where graphs are kept, a backward chunk must equal a forward chunk, and uses its graph. Otherwise the module is
    called again on the rows of the chunk, with the forward's random numbers. Hooks then run another time, as under
    activation checkpointing, and buffers keep the forward's values.

    Chunks other than the forward's cannot draw the same random numbers: an expert with dropout needs equal chunks in
    both phases. A module that changes buffers does so for each chunk of the forward. Modules that refuse
    ``torch.autograd.grad`` (reentrant checkpointing inside an expert) are not supported.

    With a graph, a call keeps what autograd saves, which includes a copy of strided rows (N > 1) in many cases. A
    backward that retains its own graph retains this one too. Without a graph, a call keeps the rows, in the caller's
    memory.

    Args:
        called: the experts to call.
        sums: the sums of weight gradients.
        order: see :class:`~ds_fsmoe.components.expert_compute.saved.SavedTensors`.
        needs_backward: whether to keep anything.
        keeps_graph: whether to keep graphs, or the rows alone.
        keeps_results: whether the backward may receive weights of rows, whose gradients need the results.
    """

    is_grouped = False
    makes_memory = False
    """False: results on slots may share memory with the rows."""

    def __init__(
        self,
        called: OneExpert | OwnExperts,
        sums: GradientSums,
        order: torch.Tensor | None = None,
        *,
        needs_backward: bool,
        keeps_graph: bool,
        keeps_results: bool = False,
    ) -> None:
        self._called, self._sums, self.saved = called, sums, SavedTensors(order)
        self.takes_rows = called.takes_rows
        """Whether several experts get rows [R, M] for slots too, as rows with equal counts."""
        self._wanted = tuple(each for each in called.parameters if sums.wants(each)) if needs_backward else ()
        self._needs_backward, self._keeps_graph, self._keeps_results = needs_backward, keeps_graph, keeps_results
        self._aliases: Aliases = {}
        self._runs: dict[tuple[int, int], _Run] = {}
        self._random: dict[tuple[int, int], RandomState] = {}

    def forget(self) -> None:
        """Drop the memory of weights; graphs alone keep it."""
        self._aliases = {}

    def forward(self, start: int, stop: int, x: torch.Tensor, groups: RowGroups | None = None) -> torch.Tensor:
        """Compute a chunk, [N, c, M] or [R, M], to the same shape.

        The result may share memory with the rows or with tensors that autograd has saved.

        Raises:
            ValueError: the module returns another shape.
        """
        if self._keeps_graph:
            self._aliases = self._aliases or self._stand_ins()
            self._runs[start, stop], y = self._record(x, groups, self._aliases)
            if self.takes_rows:
                # The graph has these rows; the call keeps them too, until streams are joined.
                self.saved.put(start, stop, (x,))
            return y
        if self._needs_backward:
            self.saved.put(start, stop, (x,))
            self._random[start, stop] = RandomState.now(x.device)
        with torch.no_grad():
            return self._called.call(x, groups, None)

    def backward(
        self,
        start: int,
        stop: int,
        dy: torch.Tensor,
        groups: RowGroups | None = None,
        weights: RowWeights | None = None,
    ) -> torch.Tensor:
        """Return the gradient of a chunk's rows, in the shape of ``dy``, and add the weights' gradients.

        The result may share memory with ``dy``.
        """
        # Several chunks without rows share one record.
        retains = self._keeps_graph and (start == stop or torch._C._autograd._get_current_graph_task_keep_graph())
        if self._keeps_graph:
            run = self._runs.get((start, stop)) if retains else self._runs.pop((start, stop), None)
            if run is None:
                known = ", ".join(f"[{first}, {last})" for first, last in self._runs)
                raise ValueError(
                    f"slots [{start}, {stop}): graphs are kept of {known} only; for other chunks in the backward, "
                    "pass same_chunks=False"
                )
            if self.takes_rows:
                self.saved.take(start, stop)
        else:
            run = self._record_again(start, stop, groups)
        if weights is not None:  # only rows have weights: then N is 1 for one expert
            weights.add_products(dy.flatten(0, -2), run.y.flatten(0, -2))
            dy = weights.apply(dy.flatten(0, -2)).view(dy.shape)
        aliases = [run.aliases[id(each)] for each in self._wanted]
        # The parameters themselves too: a module may store one outside ``_parameters``.
        themselves = () if self._called.has_all_gradients else self._wanted
        inputs = run.leaf, *aliases, *themselves
        found: Sequence[torch.Tensor | None] = (None,) * len(inputs)
        if run.edge is not None:
            of_result = (dy.to(run.dtype),)
            found = torch.autograd.grad((run.edge,), inputs, of_result, retain_graph=retains, allow_unused=True)
        dx, *gradients = found
        for parameter, alias, gradient in zip((*self._wanted, *themselves), inputs[1:], gradients, strict=True):
            if gradient is not None:
                self._sums.add(parameter, gradient)
            elif self._called.has_all_gradients:
                self._sums.add(parameter, torch.zeros_like(alias))
        return torch.zeros_like(dy, dtype=run.leaf.dtype) if dx is None else dx

    def _stand_ins(self) -> Aliases:
        # Hooks on a parameter are for the gradient that the layer returns, and run then. They would run here too if
        # the graph led to the parameters, so it leads to aliases.
        return {id(each): each.detach().requires_grad_() for each in self._wanted}

    def _record(self, x: torch.Tensor, groups: RowGroups | None, aliases: Aliases) -> tuple[_Run, torch.Tensor]:
        """Call the experts with autograd, and return the record and the result."""
        # Hooks that drop or move saved tensors (checkpointing, offloading) do so with the rows: this graph is used
        # inside a backward, where checkpointing would run the whole forward once more for it.
        with torch.enable_grad(), saved_tensors_hooks(as_it_is, as_it_is):
            leaf = x.detach().requires_grad_()
            # Not the leaf itself: autocast caches the casts of leaves, as if they were weights.
            y = self._called.call(leaf.view_as(leaf), groups, aliases)
        edge = get_gradient_edge(y) if y.requires_grad else None
        leaf.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        result = y.detach()
        return _Run(leaf, aliases, edge, y.dtype, result if self._keeps_results else None), result

    def _record_again(self, start: int, stop: int, groups: RowGroups | None) -> _Run:
        (x,) = self.saved.take(start, stop)
        state = self._random.get((start, stop))
        if state is None:  # another chunk: the state of the forward's chunk in which it begins
            state = next(
                (each for (first, last), each in self._random.items() if first <= start < last),
                next(iter(self._random.values())),
            )
        # The forward has counted statistics over rows already.
        with state.replayed(), buffers_kept(self._called.module):
            return self._record(x, groups, self._stand_ins())[0]


class OneExpert:
    """Calls one expert for :class:`AutogradCall`.

    Args:
        module: any row-wise module; of a tuple only the first element counts, as in stock.
        keep_expert_dim: call the module with [N, 1, c, M], as stock does, instead of [N, c, M].
        contiguous: make the module's rows contiguous first.
        where: the beginning of messages about the module.
    """

    takes_rows = False
    has_all_gradients = False
    """Whether a parameter without influence on the result has a gradient of zeros."""

    def __init__(self, module: nn.Module, *, keep_expert_dim: bool, contiguous: bool, where: str = "") -> None:
        self.module, self.parameters = module, tuple(module.parameters())
        self._named = [(name, id(each)) for name, each in module.named_parameters(remove_duplicate=False)]
        self._keep_expert_dim, self._contiguous, self._where = keep_expert_dim, contiguous, where

    def call(self, x_NcM: torch.Tensor, groups: RowGroups | None, aliases: Aliases | None) -> torch.Tensor:
        """Compute rows [N, c, M] to the same shape; ``aliases`` replace parameters.

        Raises:
            ValueError: the module returns another shape.
        """
        x_NcM = x_NcM.contiguous() if self._contiguous else x_NcM
        rows = x_NcM.unsqueeze(1) if self._keep_expert_dim else x_NcM
        if aliases is None:
            y = self.module(rows)
        else:
            named = {name: aliases[key] for name, key in self._named if key in aliases}
            y = functional_call(self.module, named, (rows,))
        if isinstance(y, tuple):
            y = y[0]
        expected = (x_NcM.shape[0], 1, *x_NcM.shape[1:]) if self._keep_expert_dim else x_NcM.shape
        if y.shape != expected:
            raise ValueError(
                f"{self._where}expert {type(self.module).__name__} returned {tuple(y.shape)} for {tuple(expected)}: "
                "an expert must return a row of the same width for every row"
            )
        return y.squeeze(1) if self._keep_expert_dim else y
