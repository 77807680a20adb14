# SPDX-License-Identifier: Apache-2.0
"""Gathers updated parameters (ZeRO stages 1 and 2) during the next forward.

DeepSpeed gathers all of them at the end of the optimizer step, and every rank waits. Here all ranks begin there with
the same messages in the same order, those of the first layers first. A read of a parameter waits for its messages
(:mod:`ds_fsmoe.gradients.lazy_parameters`). A read sends nothing: a rank that reads alone, to print a norm, waits for
no other rank. The engine makes it where the config asks for it.

The messages share communicators with gradients. They begin after the backward, whose last action is to wait for its
messages. Gradients are sent after all of them have arrived (:func:`ds_fsmoe.gradients.background_lane.end_gathers`).

Where the ranks are in several nodes, a part is sent to one rank of each other node and forwarded inside it. Each node
sends the parts of the first layers first, and nodes send at the same time: both directions of a link are used.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.zero import stage_1_and_2
from torch import nn

from ds_fsmoe.distributed.groups import FSMoEGroups, communicator_like
from ds_fsmoe.execution.node_links import NodeLinks, exchange_sized
from ds_fsmoe.gradients.background_lane import begin_gather, end_gathers
from ds_fsmoe.gradients.lazy_parameters import can_be_waited_for, gather_on_first_read, wait_for
from ds_fsmoe.gradients.reduction import Reduction
from ds_fsmoe.gradients.reduction_algorithms import Steps
from ds_fsmoe.gradients.zero_stages import split_by_owner
from ds_fsmoe.layer.parts import node_links
from ds_fsmoe.planning.schedule import GRAD, GRAD_GATHER

FEWEST_NUMEL, MOST_MESSAGES = 1 << 16, 16
"""A message has at least so many elements of each node, as long as there are; and there are at most so many."""


_READERS = ("load_state_dict", "update_lp_params", "refresh_fp32_params", "offload_states", "reload_states")
"""What of ZeRO's optimizer reads or writes the flat parameters themselves."""


class ParameterPart(NamedTuple):
    """Represents elements [first, stop) of one of ZeRO's flat groups, of one parameter and one owner."""

    number: int
    """The number of the parameter in the order of the model."""
    group: int
    first: int
    stop: int
    owner: int
    """The rank in the group of ranks that share the parameters."""


def in_messages(
    parts: Sequence[ParameterPart], node_of_owner: Sequence[int], fewest_numel: int, most: int
) -> list[list[ParameterPart]]:
    """Distribute parts over messages, the first layers first, each with as many elements of every node.

    Args:
        parts: the parts.
        node_of_owner: [ranks]: the node of each rank.
        fewest_numel: the minimum of elements of each node in a message, while as many remain.
        most: the maximum of messages.
    """
    queues: dict[int, list[ParameterPart]] = {}
    for part in sorted(parts):
        queues.setdefault(node_of_owner[part.owner], []).append(part)
    longest = max((sum(each.stop - each.first for each in queue) for queue in queues.values()), default=0)
    share = max(fewest_numel, -(-longest // most))
    messages: list[list[ParameterPart]] = []
    for queue in queues.values():
        at, room = 0, share
        for part in queue:
            first = part.first
            while first < part.stop:
                if room == 0:
                    at, room = at + 1, share
                if at == len(messages):
                    messages.append([])
                stop = min(part.stop, first + room)
                messages[at].append(part._replace(first=first, stop=stop))
                room -= stop - first
                first = stop
    return messages


@dataclass(frozen=True)
class _Among:
    """Represents the ranks that share parameters."""

    group: dist.ProcessGroup
    nodes: NodeLinks | None

    @property
    def node_of_each(self) -> list[int]:
        if self.nodes is None:
            # Each sends to every other one.
            return list(range(self.group.size()))
        node_of = {rank: node for node, ranks in enumerate(self.nodes.ranks) for rank in ranks}
        return [node_of[rank] for rank in range(len(node_of))]

    def exchanges(self, parts: Sequence[ParameterPart]) -> dict[str, _Exchange]:
        """Return the exchanges that bring these parts to every rank, by kind, in order."""
        of_owner: dict[int, list[ParameterPart]] = {}
        for part in parts:
            of_owner.setdefault(part.owner, []).append(part)

        def of_owners(owners: Sequence[int]) -> list[ParameterPart]:
            return [part for owner in owners for part in of_owner.get(owner, ())]

        nodes, group = self.nodes, parts[0].group
        if nodes is None:
            of_each = [of_owners([rank]) for rank in range(self.group.size())]
            return {GRAD: _Exchange(self.group, of_each, self.group.rank(), group)}
        of_nodes = [of_owners([ranks[nodes.place]]) for ranks in nodes.ranks]
        of_places = [of_owners(ranks) for ranks in zip(*nodes.ranks, strict=True)]
        return {
            GRAD: _Exchange(nodes.between, of_nodes, nodes.node, group),
            GRAD_GATHER: _Exchange(nodes.inside, of_places, nodes.place, group),
        }


class _Exchange:
    """Sends this rank's parts to all others of a group, and receives theirs.

    Args:
        group: the ranks.
        of_each: the parts of each rank.
        own: this rank's index among them.
        flat: one of the message's flat groups, for the dtype of its elements.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, of_each: Sequence[Sequence[ParameterPart]], own: int, flat: int
    ) -> None:
        counts = [sum(part.stop - part.first for part in each) for each in of_each]
        self._group = group
        self._flat = flat
        self._own = of_each[own]
        # Rank in the group -> the elements that it gets from this rank, and that this rank gets from it.
        self._sends = [0 if each == own else counts[own] for each in range(len(counts))]
        self._receives = [0 if each == own else count for each, count in enumerate(counts)]
        # In the order in which they arrive.
        self._others = [part for each, those in enumerate(of_each) if each != own for part in those]

    def run(self, flats: Sequence[torch.Tensor]) -> None:
        """Exchange the parts. Collective over the group.

        Args:
            flats: ZeRO's flat groups.
        """
        own = torch.cat([flats[self._flat][:0], *_views(flats, self._own)])
        packed = own.expand(len(self._sends) - 1, -1).flatten()
        received = exchange_sized(packed, self._sends, self._receives, self._group)
        if self._others:
            sizes = [part.stop - part.first for part in self._others]
            torch._foreach_copy_(_views(flats, self._others), received.split(sizes))


def _views(flats: Sequence[torch.Tensor], parts: Sequence[ParameterPart]) -> list[torch.Tensor]:
    return [flats[part.group][part.first : part.stop] for part in parts]


@dataclass(frozen=True)
class _Message:
    exchanges: dict[str, _Exchange]
    parts: tuple[ParameterPart, ...]

    def steps(self, flats: Sequence[torch.Tensor]) -> Steps:
        """Return the steps that send the parts to every rank."""
        return {kind: functools.partial(each.run, flats) for kind, each in self.exchanges.items()}


class UpdatedParameters:
    """Replaces DeepSpeed's gather of updated parameters, for one engine. Making it is collective.

    Args:
        engine: with ZeRO stage 1 or 2.
        reduction: the reduction of its gradients, which sends concurrently with the caller.
        groups: the groups of the MoE layers, by DeepSpeed's name of their experts' group.
        layers: the engine's MoE layers; :meth:`before_layer` is called ahead of each of their calls.
    """

    def __init__(
        self, engine: Any, reduction: Reduction, groups: Mapping[str, FSMoEGroups], layers: Sequence[nn.Module]
    ) -> None:
        assert reduction.background is not None
        self._engine = engine
        self._optimizer = engine.optimizer
        self._reducer, self._background = reduction.reducer, reduction.background
        self._waits: list[Callable[[], None]] = []
        number_of = {id(each): number for number, each in enumerate(engine.module.parameters())}
        self._messages, self._parameters = self._planned(groups, number_of)
        self._brought_by: dict[int, list[int]] = {}
        """Number of a parameter -> the messages that bring it."""
        for index, message in enumerate(self._messages):
            for number in {part.number for part in message.parts}:
                self._brought_by.setdefault(number, []).append(index)
        self._numbers = {id(each): number_of[id(each)] for each in self._parameters}
        # torch's own modules go through operations that torch asks about; others may hand memory to a kernel. In our
        # layers a hook would change how experts are computed: see :meth:`before_layer`.
        within = {id(module) for layer in layers for module in layer.modules()}
        self._hooks = [
            module.register_forward_pre_hook(_wait_for_own)
            for module in engine.module.modules()
            if module._parameters and id(module) not in within and not type(module).__module__.startswith("torch.")
        ]
        self._step = self._optimizer.step
        self._optimizer.step = self._stepping
        for name in _READERS:
            setattr(self._optimizer, name, self._after_all(getattr(self._optimizer, name)))

    def _after_all(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def waiting(*args: Any, **kwargs: Any) -> Any:
            self.wait()
            return method(*args, **kwargs)

        return waiting

    def _planned(
        self, groups: Mapping[str, FSMoEGroups], number_of: Mapping[int, int]
    ) -> tuple[list[_Message], list[nn.Parameter]]:
        optimizer = self._optimizer
        everyone = next(iter(groups.values()))
        among: dict[str | None, _Among | None] = {}
        parts: dict[tuple[str | None, torch.dtype], list[ParameterPart]] = {}
        parameters: list[nn.Parameter] = []
        for group, members in enumerate(optimizer.round_robin_bit16_groups):
            name = members[0].group_name if members and is_moe_param(members[0]) else None
            if name not in among:
                among[name] = _among(everyone, "dp") if name is None else _among(groups[name], "edp")
            ranks = among[name]
            if ranks is None:
                continue
            size, flat = int(optimizer.partition_size[group]), optimizer.bit16_groups_flat[group]
            for parameter, offset in zip(members, optimizer.round_robin_bit16_offsets[group], strict=True):
                parameters.append(parameter)
                stretches = split_by_owner(offset, parameter.numel(), size)
                of_parameter = [ParameterPart(number_of[id(parameter)], group, *each) for each in stretches]
                parts.setdefault((name, flat.dtype), []).extend(of_parameter)
        messages = []
        for (name, _), of_ranks in parts.items():
            ranks = among[name]
            assert ranks is not None
            for each in in_messages(of_ranks, ranks.node_of_each, FEWEST_NUMEL, MOST_MESSAGES):
                messages.append(_Message(ranks.exchanges(each), tuple(each)))
        messages.sort(key=lambda message: min(part.number for part in message.parts))
        return messages, parameters

    def _stepping(self, *args: Any, **kwargs: Any) -> Any:
        """Run DeepSpeed's step, which only begins the gather at its end."""
        self.wait()
        stock_gather = stage_1_and_2.all_gather_dp_groups
        stage_1_and_2.all_gather_dp_groups = self._begin
        try:
            result = self._step(*args, **kwargs)
        finally:
            stage_1_and_2.all_gather_dp_groups = stock_gather
        if self._waits:
            self._mark()
        return result

    def _begin(self, **_: Any) -> None:
        """Begin all messages, in place of DeepSpeed's gather."""
        # After the remaining messages of a failed backward, and after the gathers of another engine.
        self._reducer.forget_if_broken_off()
        end_gathers()
        flats = self._optimizer.bit16_groups_flat
        self._waits = [self._background.start(each.steps(flats)) for each in self._messages]
        self._background.flush()
        begin_gather(self._waits)

    def _mark(self) -> None:
        if any(map(_is_compiled, self._engine.module.modules())):
            # Compiled code is made for parameters of one class.
            self.wait()
            return
        # The model keeps the engine, and with it this; a parameter alone does not.
        own = weakref.ref(self)
        for parameter in self._parameters:
            messages = self._brought_by.get(self._numbers[id(parameter)], ())
            if can_be_waited_for(parameter):
                gather_on_first_read(parameter, functools.partial(_arrive, own, messages))
            else:
                self._wait_for(messages)

    def before_layer(self, layer: nn.Module, *_: Any) -> None:
        """Wait for all parameters of an MoE layer, which reads the class of its experts' parameters."""
        for each in layer.parameters():
            wait_for(each)

    def _wait_for(self, messages: Sequence[int]) -> None:
        for each in messages:
            self._waits[each]()

    def wait(self) -> None:
        """Wait for all parameters: for code that reads memory without torch."""
        for each in self._parameters:
            wait_for(each)
        for wait in self._waits:
            wait()
        self._waits = []
        end_gathers()

    def close(self) -> None:
        """Return the gather to DeepSpeed."""
        self.wait()
        for hook in self._hooks:
            hook.remove()
        for name in ("step", *_READERS):
            vars(self._optimizer).pop(name, None)


def _among(groups: FSMoEGroups, kind: str) -> _Among | None:
    group, nodes = communicator_like(groups, kind), node_links(groups, kind, "gradients")
    return None if group is None else _Among(group, nodes)


def _arrive(own: weakref.ref[UpdatedParameters], messages: Sequence[int]) -> None:
    if (updated := own()) is not None:
        updated._wait_for(messages)


def _is_compiled(module: nn.Module) -> bool:
    by_itself = module._compiled_call_impl is not None or "_orig_mod" in module._modules
    # A function around the model may have been compiled; it has called our layers then.
    return by_itself or getattr(getattr(module, "opaque", None), "is_used", False)


def _wait_for_own(module: nn.Module, _: Any) -> None:
    for each in module._parameters.values():
        if each is not None:
            wait_for(each)
