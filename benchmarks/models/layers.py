# SPDX-License-Identifier: Apache-2.0
"""Attention and an MoE layer as the paper measures them, in two layouts of the ranks, for stock and for us.

``"node"``: a node's ranks work on the same sequences. Attention is split by heads, the experts by their hidden width,
and experts are spread over the nodes. Ours holds a part of the sequence on each rank between the two (all-gather before
attention, reduce-scatter after it). Stock has no such thing: its ranks hold all tokens, attention ends in an
all-reduce, and its MoE layer drops what is there twice.

``"ranks"``: every rank works on sequences of its own and experts are spread over all ranks, nothing is split. It is the
layout in which stock communicates least.

Both have the same parameters and the same tokens per node.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from deepspeed.moe import mappings
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import TopKGate
from deepspeed.utils import groups
from torch import nn

import ds_fsmoe
from benchmarks.harness.join import join
from ds_fsmoe.distributed.groups import make_groups

Layout = Literal["node", "ranks"]
Skew = Literal["", "hot expert", "hot rank", "rotating"]
SKEWS: tuple[Skew, ...] = get_args(Skew)
AUX_LOSS_WEIGHT = 0.01


@dataclass(frozen=True)
class Layer:
    """B sequences of L tokens per node, of width M; E experts of hidden width ``ratio * M``, k for each token."""

    B: int
    L: int
    M: int
    ratio: int
    f: float | None
    """Capacity factor; ``None``: nothing is dropped."""
    ffn: str
    """``"gpt"`` or ``"mixtral"``."""
    heads: int = 4
    E: int = 4
    k: int = 2
    layers: int = 2
    skew: Skew = ""
    """Where half of the tokens go as their first choice: to one expert, to those of one rank, to another expert in
    each step; ``""``: nowhere in particular."""

    def __str__(self) -> str:
        capacity = "no drop" if self.f is None else f"f {self.f:g}"
        skew = f", {self.skew}" if self.skew else ""
        many = "" if (self.E, self.k) == (4, 2) else f"E {self.E} k {self.k} "
        return f"{self.ffn} B {self.B} L {self.L} M {self.M} H {self.ratio}M {many}{capacity}{skew}"

    def directions(self) -> torch.Tensor:
        """[E, M], of length 1 and at right angles: tokens that point in one are meant for that expert."""
        return torch.linalg.qr(torch.randn(self.M, self.E, generator=torch.Generator().manual_seed(0)))[0].T


TINY = Layer(B=2, L=16, M=16, ratio=2, f=1.25, ffn="gpt")
"""Of no interest but that everything runs."""


class Mpu:
    """Tensor parallelism over so many neighbours, as Megatron hands it to DeepSpeed. Collective to make."""

    def __init__(self, size: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.groups: dict[str, dist.ProcessGroup] = {}
        model = [list(range(first, first + size)) for first in range(0, world, size)]
        data = [list(range(first, world, size)) for first in range(size)]
        for kind, every in (("model", model), ("data", data)):
            for ranks in every:
                group = dist.new_group(ranks)
                if rank in ranks:
                    self.groups[kind] = group

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self.groups["model"]

    def get_model_parallel_world_size(self) -> int:
        return self.groups["model"].size()

    def get_model_parallel_rank(self) -> int:
        return self.groups["model"].rank()

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self.groups["data"]

    def get_data_parallel_world_size(self) -> int:
        return self.groups["data"].size()

    def get_data_parallel_rank(self) -> int:
        return self.groups["data"].rank()


class StockGroups:
    """What DeepSpeed keeps of the process groups of one engine, by names that say nothing of the layout: engines of
    several layouts in one process have to put theirs in place before each step."""

    _TABLES = (
        "_EXPERT_PARALLEL_GROUP",
        "_EXPERT_PARALLEL_GROUP_RANKS",
        "_EXPERT_DATA_PARALLEL_GROUP",
        "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
    )

    def __init__(self) -> None:
        self.tables: tuple[dict[str, Any], ...] = tuple({} for _ in self._TABLES)
        self.mpu, self.expert_size = None, 1

    def put(self) -> None:
        """Let DeepSpeed have these."""
        for name, table in zip(self._TABLES, self.tables, strict=True):
            setattr(groups, name, table)
        groups.mpu, groups.expert_tensor_parallel_world_size = self.mpu, self.expert_size

    def take(self) -> None:
        """Remember what an engine has left there."""
        self.mpu, self.expert_size = groups.mpu, groups.expert_tensor_parallel_world_size


@functools.cache
def fix_gather() -> None:
    """Let stock gather tokens on gloo. ``deepspeed.moe.mappings._gather_tokens`` gives ``all_gather_into_tensor`` an
    output of one dimension and an input of three; a flat view of the input is all that is missing."""
    source = inspect.getsource(mappings._gather_tokens)
    line = "all_gather_into_tensor(gather_buffer, input_, "
    assert source.count(line) == 1
    exec(source.replace(line, line.replace("input_", "input_.view(-1)")), vars(mappings))


def fix_capacity() -> None:
    """Let stock round a capacity that drops nothing up to a multiple of the tensor-parallel ranks, also where the
    experts are tensor-parallel: it cuts the capacity there too, and stops if it cannot."""
    route = TopKGate.forward

    @functools.wraps(route)
    def forward(gate: TopKGate, *args: Any, **kwargs: Any) -> Any:
        asked = groups._get_expert_model_parallel_world_size
        groups._get_expert_model_parallel_world_size = lambda: 1
        try:
            return route(gate, *args, **kwargs)
        finally:
            groups._get_expert_model_parallel_world_size = asked

    TopKGate.forward = forward


def begin(timeout_s: float = 600) -> None:
    """Let this rank join the job, with the fixes that stock needs."""
    join(timeout_s)
    fix_gather()
    fix_capacity()


def ranks_per_node() -> int:
    """Of this job, the same on every node."""
    return make_groups().topology.node_of_rank.count(0)


def gathered(x_SM: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Rows of all ranks of a group, by rank."""
    out_SM = x_SM.new_empty(group.size() * len(x_SM), x_SM.shape[1])
    dist.all_gather_into_tensor(out_SM, x_SM.contiguous(), group=group)
    return out_SM


def scattered(x_SM: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's rows of the sum over a group."""
    # As our runtime does it on a CPU: gloo's own reduce-scatter is an all-reduce inside, and takes twice as long.
    parts_SM = torch.empty_like(x_SM, memory_format=torch.contiguous_format)
    dist.all_to_all_single(parts_SM, x_SM.contiguous(), group=group)
    return parts_SM.view(group.size(), -1, x_SM.shape[1]).sum(dim=0)


def copied(x_SM: torch.Tensor, _: dist.ProcessGroup) -> torch.Tensor:
    """The same."""
    return x_SM.view_as(x_SM)


def summed(x_SM: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The sum over a group's ranks."""
    total_SM = x_SM.clone()
    dist.all_reduce(total_SM, group=group)
    return total_SM


Collective = Callable[[torch.Tensor, dist.ProcessGroup], torch.Tensor]


class Through(torch.autograd.Function):
    """``apply(x_SM, group, forwards, backwards)``: one of the functions above forwards, and another backwards."""

    @staticmethod
    def forward(
        ctx: Any, x_SM: torch.Tensor, group: dist.ProcessGroup, forwards: Collective, backwards: Collective
    ) -> torch.Tensor:
        ctx.group, ctx.backwards = group, backwards
        return forwards(x_SM, group)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.backwards(gradient, ctx.group), None, None, None


def shared_by(group: dist.ProcessGroup, x_SM: torch.Tensor) -> torch.Tensor:
    """What all ranks of a group have and each works on in part: their gradients are summed."""
    return Through.apply(x_SM, group, copied, summed)


def summed_up(group: dist.ProcessGroup, x_SM: torch.Tensor) -> torch.Tensor:
    """The sum of the ranks' parts, with which all go on alike."""
    return Through.apply(x_SM, group, summed, copied)


class Attention(nn.Module):
    """Causal attention; its heads are shared out among the ranks of a group, if there is one.

    Args:
        layer: sizes.
        group: the ranks that share it.
        scattered: whether each of them holds a part of the tokens before and after, rather than all.
    """

    def __init__(self, layer: Layer, group: dist.ProcessGroup | None, scattered: bool) -> None:
        super().__init__()
        size = 1 if group is None else group.size()
        self.layer, self.group, self.scattered = layer, group, scattered
        self.heads = layer.heads // size
        # Without parameters: where tokens are scattered, their gradients would have to be summed over the ranks.
        self.norm = nn.LayerNorm(layer.M, elementwise_affine=False)
        self.qkv = nn.Linear(layer.M, 3 * layer.M // size, bias=False)
        self.out = nn.Linear(layer.M // size, layer.M, bias=False)
        if group is not None:
            for each in (self.qkv.weight, self.out.weight):
                each.model_parallel = each.tensor_model_parallel = True

    def forward(self, x_SM: torch.Tensor) -> torch.Tensor:
        x = self.norm(x_SM)
        if self.group is not None:
            x = Through.apply(x, self.group, *((gathered, scattered) if self.scattered else (copied, summed)))
        qkv = self.qkv(x).view(-1, self.layer.L, 3, self.heads, self.layer.M // self.layer.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # each [B, heads, L, M / heads]
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y = self.out(seen.transpose(1, 2).reshape(len(x), -1))
        if self.group is not None:
            y = Through.apply(y, self.group, *((scattered, gathered) if self.scattered else (summed, copied)))
        return x_SM + y


class SplitGPT(nn.Module):
    """Stock's tensor-parallel expert: each rank of a group has a part of the hidden width, and the sum is taken here.

    Modules are copied for each expert, so the group is none of its attributes.
    """

    group: dist.ProcessGroup | None = None

    def __init__(self, model_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(model_dim, hidden_dim // self.group.size())
        self.fc2 = nn.Linear(hidden_dim // self.group.size(), model_dim, bias=False)
        self.bias = nn.Parameter(torch.zeros(model_dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return summed_up(self.group, self.fc2(F.gelu(self.fc1(shared_by(self.group, x))))) + self.bias


class SplitMixtral(nn.Module):
    """The same for SwiGLU."""

    group: dist.ProcessGroup | None = None

    def __init__(self, model_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(model_dim, hidden_dim // self.group.size(), bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden_dim // self.group.size(), model_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = shared_by(self.group, x)
        return summed_up(self.group, self.w2(F.silu(self.w1(x)) * self.w3(x)))


class Model(nn.Module):
    """Blocks of attention and an MoE layer, for either system in either layout.

    Args:
        layer: sizes.
        layout: of the ranks.
        mpu: for ``"node"``.
        stock: whether it is for stock DeepSpeed.
    """

    def __init__(self, layer: Layer, layout: Layout, mpu: Mpu | None, stock: bool) -> None:
        super().__init__()
        group = None if layout == "ranks" else mpu.get_model_parallel_group()
        ep_size = dist.get_world_size() if group is None else dist.get_world_size() // group.size()
        options: dict[str, Any] = {"capacity_factor": layer.f or 1.0, "drop_tokens": layer.f is not None}
        options |= {"num_experts": layer.E, "ep_size": ep_size, "k": layer.k, "top2_2nd_expert_sampling": False}
        # Stock cuts the capacity among the ranks of a node: it has to be a multiple of their number.
        options["min_capacity"] = 0
        hidden_dim = layer.ratio * layer.M
        if stock and group is not None:
            kind: Any = SplitGPT if layer.ffn == "gpt" else SplitMixtral
            kind.group = group
            options["enable_expert_tensor_parallelism"] = True
        else:
            kind = ds_fsmoe.GPTFeedForward if layer.ffn == "gpt" else ds_fsmoe.MixtralFeedForward
        self.attention = nn.ModuleList(
            Attention(layer, group, scattered=group is not None and not stock) for _ in range(layer.layers)
        )
        make_moe = MoE
        if group is not None and not stock:
            make_moe, options["sequence_parallel"] = ds_fsmoe.MoE, True
        self.moes = nn.ModuleList(make_moe(layer.M, kind(layer.M, hidden_dim), **options) for _ in range(layer.layers))
        if layer.skew:
            for moe in self.moes:
                moe.deepspeed_moe.gate.wg.weight.data.copy_(layer.directions())

    def blocks(self, x_SM: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens to tokens, and the sum of the gates' auxiliary losses."""
        aux_losses = torch.zeros(())
        for attention, moe in zip(self.attention, self.moes, strict=True):
            x_SM = attention(x_SM)
            y_SM, aux_loss, _ = moe(x_SM)
            x_SM, aux_losses = x_SM + y_SM, aux_losses + aux_loss
        return x_SM, aux_losses

    def forward(self, x_SM: torch.Tensor) -> torch.Tensor:
        """This rank's part of the loss."""
        y_SM, aux_losses = self.blocks(x_SM)
        return AUX_LOSS_WEIGHT * aux_losses + y_SM.square().mean()
