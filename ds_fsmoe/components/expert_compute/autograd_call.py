# SPDX-License-Identifier: Apache-2.0
"""Experts in one forward call of a layer, where autograd differentiates them."""

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

# ---- What a call found around it and its repetition has to find again, and to leave as it was


@dataclass(frozen=True)
class AutocastState:
    """Autocast as it stood in a thread at some moment."""

    settings: tuple[tuple[str, bool, torch.dtype], ...]
    """Device type, whether it is enabled there, and the type that it casts to."""
    cache_enabled: bool

    @classmethod
    def now(cls, device_types: Iterable[str]) -> AutocastState:
        """This thread's state for some device types (``"cpu"``, ``"cuda"``)."""
        settings = [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in device_types]
        return cls(tuple(settings), torch.is_autocast_cache_enabled())

    def _is_now(self) -> bool:
        for device, enabled, dtype in self.settings:
            if torch.is_autocast_enabled(device) != enabled or torch.get_autocast_dtype(device) != dtype:
                return False
        return torch.is_autocast_cache_enabled() == self.cache_enabled

    def restored(self) -> AbstractContextManager:
        """Puts the state in force; costs next to nothing where it is already."""
        if self._is_now():
            return _NOTHING
        stack = ExitStack()
        for device, enabled, dtype in self.settings:
            stack.enter_context(torch.autocast(device, dtype, enabled, self.cache_enabled))
        return stack


_NOTHING = nullcontext()


@dataclass(frozen=True)
class RandomState:
    """The random-number generators, of the host and of one device, as they stood at some moment."""

    device: torch.device
    of_host: torch.Tensor
    of_device: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        of_device = None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)
        return cls(device, torch.get_rng_state(), of_device)

    def is_now(self) -> bool:
        """Return whether no random number has been drawn since."""
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
        """Draws inside are those that followed this state; outside nothing is drawn."""
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
    """Inside, buffers are copies that may be changed; outside they are what they were, as for a call that does not
    count."""
    held = [(each, dict(each._buffers)) for each in module.modules() if each._buffers]
    for each, buffers in held:
        each._buffers.update({name: None if buffer is None else buffer.clone() for name, buffer in buffers.items()})
    try:
        yield
    finally:
        for each, buffers in held:
            each._buffers.update(buffers)


# ---- Experts in one forward call of a layer, where autograd differentiates them


def as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """Return its argument: for autograd's hooks on saved tensors that do nothing."""
    return tensor


def has_saving_hooks() -> bool:
    """Whether what is saved for the backward goes through hooks: kept graphs would hold what those want to drop."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


Aliases = Mapping[int, torch.Tensor]
"""By the id of a parameter what stands in for it in a graph."""


@dataclass(frozen=True)
class _Run:
    """A recorded call."""

    leaf: torch.Tensor
    """Stands for the rows in the graph. It is empty: the graph has what it needs of them."""
    aliases: Aliases
    edge: GradientEdge | None
    """Where the gradient of the result goes in; ``None``: the result depends on nothing."""
    dtype: torch.dtype
    """The type that the result has."""
    y: torch.Tensor | None


class AutogradCall:
    """Calls a module once for each cut, as ``module(...)``, so that hooks run.

    Where graphs are kept a backward cut uses that of the forward's cut, and has to be one of them. Otherwise the module
    is called again on the rows of the cut, under the forward's random numbers: hooks run another time, as under
    activation checkpointing, and buffers stay as the forward left them. Cuts that differ from the forward's
    cannot draw the same numbers: an expert with dropout needs equal cuts in both phases. A module that changes buffers
    does so for each cut of the forward. Modules that refuse ``torch.autograd.grad`` (reentrant checkpointing inside an
    expert) are not supported.

    Kept is, with a graph, what autograd saves; where the rows are strided (N > 1), that is often a copy of them. Where
    a backward retains its own graph, this one stays, too. Without a graph the rows are kept, which are the caller's
    memory.

    Args:
        called: what is called.
        sums: where weight gradients go.
        order: see :class:`~ds_fsmoe.components.expert_compute.saved.SavedTensors`.
        needs_backward: whether to keep anything.
        keeps_graph: whether to keep graphs, or the rows alone.
        keeps_results: whether the backward may be given weights of rows, of which results have gradients.
    """

    is_grouped = False
    makes_memory = False
    """Says that results on slots may be memory of the rows."""

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
        """Whether several experts get rows [R, M] also where they have slots, which are rows with equal counts."""
        self._wanted = tuple(each for each in called.parameters if sums.wants(each)) if needs_backward else ()
        self._needs_backward, self._keeps_graph, self._keeps_results = needs_backward, keeps_graph, keeps_results
        self._aliases: Aliases = {}
        self._runs: dict[tuple[int, int], _Run] = {}
        self._random: dict[tuple[int, int], RandomState] = {}

    def forget(self) -> None:
        """Hold the memory of weights no longer: only graphs do."""
        self._aliases = {}

    def forward(self, start: int, stop: int, x: torch.Tensor, groups: RowGroups | None = None) -> torch.Tensor:
        """[N, c, M], or [R, M], to the same shape; may be memory of the rows or of what autograd has saved.

        Raises:
            ValueError: the module returns another shape.
        """
        if self._keeps_graph:
            self._aliases = self._aliases or self._stand_ins()
            self._runs[start, stop], y = self._record(x, groups, self._aliases)
            if self.takes_rows:
                # The graph has these rows; the call has them too, to hold until streams are joined.
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
        """The same shapes, may be the same memory; adds to the weights' gradients."""
        # Several chunks without rows are one cut.
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
        if weights is not None:  # only rows have any: of one expert N is 1
            weights.add_products(dy.flatten(0, -2), run.y.flatten(0, -2))
            dy = weights.apply(dy.flatten(0, -2)).view(dy.shape)
        aliases = [run.aliases[id(each)] for each in self._wanted]
        # The parameters themselves as well: a module may hold one elsewhere than where modules look for it.
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
        # the graph led to the parameters themselves, so it leads to aliases of them.
        return {id(each): each.detach().requires_grad_() for each in self._wanted}

    def _record(self, x: torch.Tensor, groups: RowGroups | None, aliases: Aliases) -> tuple[_Run, torch.Tensor]:
        """Return the recorded call and the result."""
        # Whoever drops or moves what autograd keeps (checkpointing, offloading) does so with the rows: this graph is
        # walked inside a backward, where checkpointing would run the whole forward once more for it.
        with torch.enable_grad(), saved_tensors_hooks(as_it_is, as_it_is):
            leaf = x.detach().requires_grad_()
            # Not the leaf itself: autocast remembers the casts of leaves, as if they were weights.
            y = self._called.call(leaf.view_as(leaf), groups, aliases)
        edge = get_gradient_edge(y) if y.requires_grad else None
        leaf.data = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        result = y.detach()
        return _Run(leaf, aliases, edge, y.dtype, result if self._keeps_results else None), result

    def _record_again(self, start: int, stop: int, groups: RowGroups | None) -> _Run:
        (x,) = self.saved.take(start, stop)
        state = self._random.get((start, stop))
        if state is None:  # another cut: the numbers of the forward's cut in which it begins
            state = next(
                (each for (first, last), each in self._random.items() if first <= start < last),
                next(iter(self._random.values())),
            )
        # Statistics over rows have been counted once.
        with state.replayed(), buffers_kept(self._called.module):
            return self._record(x, groups, self._stand_ins())[0]


class OneExpert:
    """One expert as :class:`AutogradCall` calls it.

    Args:
        module: any row-wise module; of a tuple only the first counts, as in stock.
        keep_expert_dim: call the module with [N, 1, c, M], as stock does, instead of [N, c, M].
        contiguous: make the module's rows contiguous first.
        where: the beginning of messages about the module.
    """

    takes_rows = False
    has_all_gradients = False
    """Whether a parameter on which nothing depends has a gradient of zeros."""

    def __init__(self, module: nn.Module, *, keep_expert_dim: bool, contiguous: bool, where: str = "") -> None:
        self.module, self.parameters = module, tuple(module.parameters())
        self._named = [(name, id(each)) for name, each in module.named_parameters(remove_duplicate=False)]
        self._keep_expert_dim, self._contiguous, self._where = keep_expert_dim, contiguous, where

    def call(self, x_NcM: torch.Tensor, groups: RowGroups | None, aliases: Aliases | None) -> torch.Tensor:
        """[N, c, M] to the same shape.

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
