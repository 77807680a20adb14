# SPDX-License-Identifier: Apache-2.0
"""The layer inside DeepSpeed: subclasses of stock's gate and inner MoE layer.

DeepSpeed decides parameter groups, expert checkpoints, timers and refusals by ``isinstance`` on ``MoE``, ``MOELayer``
and ``TopKGate``. So conversion (see ``engine/convert_layers.py``) gives a layer's inner modules one of these classes.
Parameter objects and names in state dicts stay, and every ``isinstance`` stays true. ``experts_layer`` is the
counterpart for Hugging Face models.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from deepspeed.moe.experts import Experts as StockExperts
from deepspeed.moe.layer import MoE as StockMoE
from deepspeed.moe.sharded_moe import MOE_TIMER, TOPK_GATE_TIMER
from deepspeed.moe.sharded_moe import MOELayer as StockMOELayer
from deepspeed.moe.sharded_moe import TopKGate as StockTopKGate
from deepspeed.utils import groups as stock_groups
from torch import nn

from ds_fsmoe.checkpoint_files.expert_parts import of_one_expert
from ds_fsmoe.checkpoint_files.numbering import ShardDim
from ds_fsmoe.checks.missing_engine import warn_missing_engine
from ds_fsmoe.components.expert_compute.autograd_call import buffers_kept
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.manual_ffn import is_observed, runs_unobserved
from ds_fsmoe.components.expert_compute.shards import shard_dims_of
from ds_fsmoe.components.gate import GateBase, GateCallOptions
from ds_fsmoe.components.gates.topk import TopKSettings, route_top_k
from ds_fsmoe.components.routing import (
    Routing,
    RoutingBase,
    StockMasks,
    StockRoutes,
    routing_of,
    stock_masks,
    stock_routes,
)
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.groups import sizes_of_mpu
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.execution.pipeline import WholeExperts
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.layer.state import ConvertedLayer
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.observing.instruments import LayerCall
from ds_fsmoe.observing.spans import Recorder
from ds_fsmoe.planning.schedule import A2A_IN, A2A_IN_NODE, A2A_OUT, A2A_OUT_NODE

# ---- The module ``deepspeed_moe.experts`` with a rank's experts, and whether it must be called itself
#
# DeepSpeed's own only passes each expert its rows, so our layer calls the experts directly. If a user has put hooks on
# the module, or replaced its forward or the module, it is called once with all rows.


def is_like_stocks(container: nn.Module) -> bool:
    """Return True if the module computes as DeepSpeed's: its class, or one that changes neither forward nor call."""
    return (
        isinstance(container, StockExperts)
        and type(container).forward is StockExperts.forward
        and type(container).__call__ is nn.Module.__call__
        and "forward" not in vars(container)
    )


def why_called(container: nn.Module) -> str | None:
    """Return why the module must be called itself, as the rest of a sentence about its layer; ``None`` if it need not
    be."""
    if not is_like_stocks(container):
        kind = type(container)
        return f"its experts module is a {kind.__module__}.{kind.__qualname__}, which takes all rows in one call"
    if is_observed(container):
        return "hooks on its experts module need all rows in one call, as in DeepSpeed"
    return None


def check_containers(layers: Mapping[str, Any], esp_size: int) -> None:
    """Refuse to shard experts over several ranks where their module would receive partial sums.

    Args:
        layers: name -> a ``deepspeed.moe.layer.MoE``.
        esp_size: the number of ranks that share an expert.

    Raises:
        LayerError: the module of experts must be called; names the layer.
    """
    for name, layer in layers.items() if esp_size > 1 else ():
        if reason := why_called(layer.deepspeed_moe.experts):
            raise LayerError(
                f"fsmoe.expert_tensor_parallel_size = {esp_size}: {name}: {reason}; with experts sharded over "
                f"{esp_size} ranks these would be partial sums: use 1"
            )


# ---- Shards of experts, made once the process groups exist
#
# A script fills the experts of a layer by DeepSpeed's rule: rank r has those of EP rank ``r % ep`` (``r // (ranks /
# ep)`` with ``use_data_before_expert_parallelism``), and of all ranks with the same ones the first decides. Where
# experts are sharded, the layout differs: neighbours share the experts of one EP rank. So each rank keeps its experts
# whole until the process groups exist. Then every shard is made from the expert that DeepSpeed would have trained.


_SAMPLES = 1024
"""The number of elements of a tensor in a digest, which is for a warning only."""


@torch.no_grad()
def hand_out(
    experts: Sequence[nn.Module],
    shards: Sequence[nn.Module],
    group: dist.ProcessGroup,
    rules: Sequence[int],
    esp: int,
    path: str,
) -> None:
    """Fill this rank's shards from the experts of the ranks that decide on them. Collective over the block.

    Args:
        experts: the whole experts of this rank, as the script has filled them.
        shards: the shards of this rank, as many as its whole experts; in their final dtypes and on their device.
        group: the block: rank i of it has shard ``i % esp`` of the experts of EP rank ``i // esp``.
        rules: for each rank of the block, the EP rank whose experts it has by DeepSpeed's rule.
        esp: the number of shards of an expert.
        path: the path of the layer, for messages.
    """
    own, ep = dist.get_rank(group), len(rules) // esp
    deciding = [rules.index(ep_rank) for ep_rank in range(ep)]
    _warn_if_filled_otherwise(experts, group, rules, deciding, esp, path)
    receivers = range(rules[own] * esp, (rules[own] + 1) * esp) if deciding[rules[own]] == own else ()
    for whole, shard in zip(experts, shards, strict=True):
        cuts, targets = shard_dims_of(whole), dict(_tensors(shard))
        sent = [_bytes_of_shard(whole, targets, cuts, index, esp) for index in range(esp)] if receivers else []
        sizes = [target.nbytes for target in targets.values()]
        device = next(shard.parameters()).device
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        with waiting("the shards of experts of", path):
            dist.all_to_all_single(
                received,
                torch.cat(sent) if sent else received.new_empty(0),
                [sum(sizes) if rank == deciding[own // esp] else 0 for rank in range(len(rules))],
                [sum(sizes) if rank in receivers else 0 for rank in range(len(rules))],
                group=group,
            )
        for target, values in zip(targets.values(), received.split(sizes), strict=True):
            # A copy, as a part of a larger buffer may not be aligned for its dtype.
            target.copy_(values.clone().view(target.dtype).view(target.shape))


def _warn_if_filled_otherwise(
    experts: Sequence[nn.Module],
    group: dist.ProcessGroup,
    rules: Sequence[int],
    deciding: Sequence[int],
    esp: int,
    path: str,
) -> None:
    """Warn if ranks have equal experts where shards share one, but not where DeepSpeed's rule makes them equal."""
    digests = on_every_rank(_digest(experts), group)
    by_rule = all(digests[rank] == digests[deciding[rule]] for rank, rule in enumerate(rules))
    by_shards = all(digests[rank] == digests[rank // esp * esp] for rank in range(len(rules)))
    if by_shards and not by_rule:
        log_on_rank_0(
            f"{path}: rank r must have the experts of EP rank r % ep_size before initialize(); others are lost",
            logging.WARNING,
            f"Groups of {esp} neighbouring ranks have equal experts, but ranks that DeepSpeed's rule gives equal "
            f"experts do not (fsmoe.expert_tensor_parallel_size = {esp}). If these are pretrained weights, load them "
            "by that rule",
        )


def _digest(experts: Sequence[nn.Module]) -> str:
    digest = hashlib.sha256()
    for expert in experts:
        for _, tensor in _tensors(expert):
            flat = tensor.detach().reshape(-1)
            sample = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous().cpu()
            digest.update(_as_bytes(sample).numpy().tobytes())
    return digest.hexdigest()


def _bytes_of_shard(
    whole: nn.Module, targets: Mapping[str, torch.Tensor], cuts: Mapping[str, ShardDim], index: int, count: int
) -> torch.Tensor:
    """Return the bytes of an expert's shard, in the dtypes and on the device of this rank's shard."""
    parts = (
        of_one_expert(cuts.get(name, "whole"), index, count).take(tensor.detach()[None])[0].to(targets[name])
        for name, tensor in _tensors(whole)
    )
    return torch.cat([_as_bytes(each) for each in parts])


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def facts_of_experts(layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the properties of experts, besides shapes, that must be equal on all ranks, as short texts by name.

    They must be equal so that each rank can take over the experts of another.
    """
    facts = {}
    for name, layer in layers.items():
        for index, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            frozen = [each for each, parameter in expert.named_parameters() if not parameter.requires_grad]
            buffers = [f"{each} {list(buffer.shape)}" for each, buffer in expert.named_buffers()]
            facts[f"{name}: frozen parameters of expert {index}"] = ", ".join(frozen) or "none"
            facts[f"{name}: buffers of expert {index}"] = ", ".join(buffers) or "none"
    return facts


# ---- The gate and the inner MoE layer


__all__ = ["FSMoEGate", "FSMoELayer", "StockMOELayer", "StockMoE", "StockTopKGate", "gate_settings"]


class FSMoEGate(GateCallOptions, StockTopKGate):
    """Routes tokens in stock's gate module, with its parameter ``wg``.

    Called as a module it takes and returns the same as stock's, for hooks and other callers. Our layer calls it as a
    module only for its hooks; otherwise it uses :meth:`decide`.
    """

    takes_given: ClassVar[bool] = True
    _decided: Routing | None = None

    @property
    def takes_width(self) -> int | None:
        """Return the width of the gate's input, see :class:`~ds_fsmoe.components.gate.GateBase`."""
        return getattr(self.wg, "in_features", None)

    def forward(
        self,
        input: torch.Tensor,
        used_token: torch.Tensor | None = None,
        sparse_routes: bool = False,
        use_tutel: bool = False,
    ) -> StockRoutes | StockMasks:
        """Route tokens with stock's arguments, and return stock's results; ``use_tutel`` has no effect."""
        # In unpadded dispatch the ranks need not agree, and may not all be here: the result is this rank's.
        routing = self.decide(input, used_token, self.ep_group if self.needs_capacity else None, with_capacity=True)
        self._decided = routing
        return stock_routes(routing) if sparse_routes else stock_masks(routing)

    def route_with_hooks(self, x_SM: torch.Tensor, used_token_S: torch.Tensor | None) -> Routing:
        """Route tokens through the module's call, so that its hooks may change the result."""
        routing = routing_of(self(x_SM, used_token_S, True, False))
        # The tuple has no place for dropped choices and for the entropy.
        decided, self._decided = self._decided, None
        if decided is None:
            return routing
        chosen_KS = torch.where(routing.slots_KS < routing.num_slots, routing.chosen(), decided.chosen())
        return replace(routing, entropy=decided.entropy, experts_KS=chosen_KS)

    def decide(
        self,
        x_SM: torch.Tensor,
        used_token_S: torch.Tensor | None,
        group: dist.ProcessGroup | None,
        with_capacity: bool = False,
    ) -> Routing:
        """Route tokens without hooks, see :class:`~ds_fsmoe.components.gate.GateBase`.

        Args:
            x_SM, used_token_S, group: see there.
            with_capacity: whether a capacity is agreed on even where ranks need none.
        """
        needs_capacity = with_capacity or self.needs_capacity
        with _timed(self, TOPK_GATE_TIMER, "gate_time") if self.wall_clock_breakdown else nullcontext():
            options = {"ops": self.ops, "says_entropy": self.says_entropy, "needs_capacity": needs_capacity}
            options |= {"given": self.given}
            settings = gate_settings(self)
            return route_top_k(x_SM, self.wg.weight, settings, self.training, used_token_S, group, **options)


def gate_settings(gate: StockTopKGate) -> TopKSettings:
    """Return the settings of a stock gate, read at every call because callers may change them between steps."""
    return TopKSettings(
        k=gate.k,
        capacity_factor=gate.capacity_factor,
        eval_capacity_factor=gate.eval_capacity_factor,
        min_capacity=gate.min_capacity,
        noisy_gate_policy=gate.noisy_gate_policy,
        drop_tokens=gate.drop_tokens,
        drop_policy=getattr(gate, "drop_policy", "probs"),
        use_rts=gate.use_rts,
        top2_2nd_expert_sampling=gate.top2_2nd_expert_sampling,
    )


class FSMoELayer(ConvertedLayer, StockMOELayer):
    """Runs DeepSpeed's inner MoE layer, ``moe.deepspeed_moe``, in our pipeline. Made by conversion, never constructed.

    It has the parameters, the names in a state dict and the results of DeepSpeed's ``MOELayer``. Its forward computes
    [..., M] to [..., M], and sets ``l_aux``, a scalar, and ``exp_counts`` [E] on the layer.

    Examples:
        >>> import torch, ds_fsmoe
        >>> layer = ds_fsmoe.MoE(8, torch.nn.Linear(8, 8), num_experts=4, k=2)
        >>> inner = layer.deepspeed_moe
        >>> isinstance(inner, ds_fsmoe.FSMoELayer), inner(torch.randn(6, 8)).shape, inner.exp_counts.sum()
        (True, torch.Size([6, 8]), tensor(12))
    """

    def fits_operator(self, *args: Any, **kwargs: Any) -> bool:
        """Return True if a call can go through the operator: the gate is ours and autocast is off, as otherwise the
        result dtype is unknown, and there are no keyword arguments."""
        is_known = isinstance(self.gate, FSMoEGate) and not torch.is_autocast_enabled(args[0].device.type)
        return is_known and not kwargs

    def through_operator(self, *args: Any) -> torch.Tensor:
        """Return the result of a call, in compiled code, and set the same attributes."""
        second = args[1] if len(args) > 1 else None
        result, self.l_aux, self.exp_counts = self.call_operator(args[0], second, num_experts=self.total_experts)
        return result

    def forward(self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None) -> torch.Tensor:
        """Compute [..., M] to [..., M]; set ``l_aux`` and ``exp_counts`` on the layer, where stock's ``MoE`` reads
        them.

        Args:
            hidden_states: [..., M], the tokens of this rank.
            used_token: [S], 0 for tokens that take no part; ``None``: all take part.

        Raises:
            RuntimeError: the experts are spread over ranks, and the process group does not exist.
        """
        state = self.fsmoe
        run = state.begin_call(self, hidden_states, used_token)
        with _stock_times(self, run) if self.wall_clock_breakdown else nullcontext():
            output = run.token_path(hidden_states)
        self.l_aux, self.exp_counts = run.routing.aux_loss, run.routing.counts_E
        if state.mp_group is not None and not state.tensor_parallel.same_tokens:
            # Each rank has the loss of its own tokens; the sum over the group must be their mean.
            self.l_aux = self.l_aux / state.mp_group.size()
        return output

    def run_alone(self, device: torch.device) -> None:
        """Run the layer without an engine of ours, among the ranks of its group.

        Raises:
            RuntimeError: it has other ranks, and no group yet.
        """
        if self.ep_size > 1 and self.ep_group is None:
            raise RuntimeError(
                f"this MoE layer has ep_size = {self.ep_size} and no process group yet: call initialize() before "
                "the first forward"
            )
        self.fsmoe.run_alone(self.ep_group)

    def whole_experts(self, local: ExpertSet | None) -> ExpertSet | WholeExperts:
        """Return the experts of this rank for a call that :meth:`why_called` requires.

        Raises:
            RuntimeError: the layer runs in chunks, and its experts are unknown.
        """
        container, path = self.experts, self.fsmoe.path
        if self.fsmoe.pipeline.is_chunked:
            if local is None:
                raise RuntimeError(
                    f"{path}: its experts module was replaced after the first forward, and the layer runs in "
                    "chunks: call engine.fsmoe.recheck_chunking() on every rank after such a change"
                )
            return local
        name = f"{path}.deepspeed_moe.experts, a {type(container).__name__}," if path else type(container).__name__
        again = partial(buffers_kept, container)
        return WholeExperts(container, tuple(container.parameters()), name, again, is_like_stocks(container))

    def why_called(self) -> str | None:
        """Return why the experts module must be called itself; ``None`` if it need not be."""
        return why_called(self.experts)

    def run_without_tokens(self, shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
        """Take part in a forward of the other ranks, with tokens that are masked out.

        Args:
            shape: the shape of the tokens, [..., M].
            like: a tensor that the result depends on.

        Returns:
            A scalar, 0.
        """
        weight = next(self.experts.parameters())
        x = torch.zeros(shape, dtype=weight.dtype, device=weight.device) + like.to(weight)
        y = self(x, torch.zeros(shape[:-1].numel(), device=weight.device))
        return 0.0 * (y.float().sum() + self.l_aux.float())

    def local_experts(self) -> ExpertSet | None:
        """Return the experts of this rank; ``None`` if the module with the experts is of an unknown kind."""
        if not is_like_stocks(self.experts):
            return None
        state, modules = self.fsmoe, tuple(self.experts.deepspeed_experts)
        # Compared by identity: replaced modules or parameters lead to a new set.
        present = [*modules, *(parameter for module in modules for parameter in module.parameters())]
        if state.known_experts is None or [*map(id, present)] != [*map(id, state.known_experts[0])]:
            state.known_experts = present, ExpertSet(modules, keep_expert_dim=True, path=state.path)
        return state.known_experts[1]

    def _set_ep_group(self, ep_group: dist.ProcessGroup) -> None:
        self.ep_group = ep_group
        state = self.fsmoe
        if state.running is not None:
            # DeepSpeed calls this layer by layer on every rank, and the creation of groups is collective.
            groups = state.connect(self.ep_size, self.gate)
            if state.unsharded is not None and groups.block_group is not None:
                rules = state.running.experts_by_rule(self.ep_size)
                esp_size, path = state.running.block.esp_size, state.path or state.label
                shards = self.experts.deepspeed_experts
                hand_out(state.unsharded, shards, groups.block_group, rules, esp_size, path)
            state.unsharded = None
        elif sizes_of_mpu(stock_groups.mpu)[0] > 1:
            raise LayerError(
                f"a ds_fsmoe.MoE with {sizes_of_mpu(stock_groups.mpu)[0]} tensor-parallel ranks, in a stock "
                "DeepSpeed engine: call ds_fsmoe.initialize, or ds_fsmoe.install() first, with fsmoe.enabled = true"
            )
        elif warn_missing_engine not in state.checks:
            # Only an engine sets a layer's group, and this one is not ours.
            state.checks.append(warn_missing_engine)
        if hasattr(self.gate, "_set_ep_group"):  # stock's gate, or a user's module in its place
            self.gate._set_ep_group(ep_group if state.capacity_group is None else state.capacity_group)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Extend torch's loading: add a sentence to the error where shards receive whole experts."""
        super()._load_from_state_dict(state_dict, prefix, *others)
        running = self.fsmoe.running
        esp_size = 1 if running is None else running.block.esp_size
        experts = f"{prefix}experts.deepspeed_experts."
        for name, own in self.experts.deepspeed_experts.named_parameters() if esp_size > 1 else ():
            shape = getattr(state_dict.get(experts + name), "shape", own.shape)
            if shape != own.shape:
                *_, error_messages = others
                error_messages.append(
                    f"{experts}{name} is {list(shape)} there and {list(own.shape)} here, because a rank holds shards "
                    f"of experts with fsmoe.expert_tensor_parallel_size = {esp_size}. Load whole experts before "
                    "initialize(), on rank r those of EP rank r % ep_size, or a checkpoint by "
                    "engine.load_checkpoint(), which cuts what it reads"
                )
                return

    def route(
        self, x_SM: torch.Tensor, used_token_S: torch.Tensor | None, group: dist.ProcessGroup | None
    ) -> RoutingBase:
        """Return the decision of the layer's gate; see :class:`~ds_fsmoe.components.gate.GateBase`."""
        if isinstance(self.gate, FSMoEGate) and not runs_unobserved(self.gate):
            return self.gate.route_with_hooks(x_SM, used_token_S)
        return self.route_without_hooks(x_SM, used_token_S, group)

    def route_without_hooks(
        self, x_SM: torch.Tensor, used_token_S: torch.Tensor | None, group: dist.ProcessGroup | None
    ) -> RoutingBase:
        """Return the gate's decision without hooks, for made-up tokens."""
        if isinstance(self.gate, FSMoEGate):
            return self.gate.decide(x_SM, used_token_S, group)
        if isinstance(self.gate, GateBase):
            return self.gate(x_SM, used_token_S, group)
        # A user's subclass of stock's gate keeps its own forward; only its result is converted.
        return routing_of(self.gate(x_SM, used_token_S, True, False))


@contextmanager
def _stock_times(layer: FSMoELayer, call: LayerCall) -> Iterator[None]:
    """Measure the times that stock's ``wall_clock_breakdown`` prints of a layer: its whole call, and its two
    all-to-alls."""
    recorder = Recorder(call.x.device)
    call.pipeline = call.pipeline.watched(recorder)
    with _timed(layer, MOE_TIMER, "time_moe"):
        yield
    spans = recorder.timeline(call.pipeline.forward.schedule).spans
    layer.time_falltoall, layer.time_salltoall = (
        sum(each.end_ms - each.start_ms for each in spans if each.task.kind in kinds)
        for kinds in ((A2A_IN_NODE, A2A_IN), (A2A_OUT, A2A_OUT_NODE))
    )


@contextmanager
def _timed(module: nn.Module, timer: str, attribute: str) -> Iterator[None]:
    """Run one of stock's timers, which ``wall_clock_breakdown`` prints from the attributes of gate and layer."""
    module.timers(timer).start()
    yield
    module.timers(timer).stop()
    setattr(module, attribute, module.timers(timer).elapsed(reset=False))
