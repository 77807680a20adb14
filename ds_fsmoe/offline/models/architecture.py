# SPDX-License-Identifier: Apache-2.0
"""Describes the blocks of a transformer with experts; parameters and operations follow from them. ``hf_config.py``
and ``known.py`` build architectures; ``model_layers.py`` and ``memory.py`` read them.

Parameters are exact: they equal those of the model of Hugging Face's transformers with the same sizes.

Letters: M width of the model, L positions of a sample, H width inside an expert, E experts, K experts per token.

The operations of a step are those of Chowdhery et al., PaLM (arXiv:2204.02311, appendix B). They are 6 for each active
parameter and token, and 3 times the forward of attention's scores and values, with all pairs of positions. Embedding
lookups need none, so a tied embedding counts only as the head.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ds_fsmoe.planning.workload import GEMMS, Shape
from ds_fsmoe.untrusted import MOST_EXPERTS, MOST_LAYERS, MOST_PARAMETERS, MOST_POSITIONS, MOST_WIDTH

_MOST = {"E": MOST_EXPERTS, "K": MOST_EXPERTS, "vocab": MOST_POSITIONS, "max_length": MOST_POSITIONS}
KINDS = ("full", "sliding", "latent", "linear")
"""The kinds of attention that can be priced."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Describes the attention of one block.

    Raises:
        ValueError: a size is below 1, the kind is unknown, or the kind's own size is missing.
    """

    heads: int
    kv_heads: int
    head_dim: int
    """The width of a query and of a key in one head."""
    value_dim: int
    """The width of a value in one head."""
    kind: str = "full"
    """``full``; ``sliding``: every position sees so many before it; ``latent``: keys and values are compressed for all
    heads at once (DeepSeek-V2, arXiv:2405.04434, section 2.1); ``linear``: heads keep a state of fixed size."""
    window: int | None = None
    """The positions that one sees: of ``sliding``, the window or chunk; of ``linear``, the block inside which all see
    one another."""
    query_rank: int | None = None
    """The rank of queries where attention is ``latent``; ``None``: they are not compressed."""
    kv_rank: int | None = None
    """The rank of keys and values where attention is ``latent``."""
    rope_dim: int = 0
    """The part of ``head_dim`` that the keys of all heads share where attention is ``latent``."""
    num_other: int = 0
    """The parameters that are no matrix: biases, norms of queries and keys, sinks."""
    has_output_gate: bool = False
    """Whether a projection as large as the one of queries gates what comes out."""

    def __post_init__(self) -> None:
        _check_sizes(self, ("heads", "kv_heads", "head_dim", "value_dim"))
        if self.kind not in KINDS:
            raise ValueError(f"kind = {self.kind!r}: the choices are {', '.join(KINDS)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads = {self.kv_heads}: must divide the number of heads, {self.heads}")
        needed = {"sliding": "window", "linear": "window", "latent": "kv_rank"}.get(self.kind)
        if needed is not None and (getattr(self, needed) or 0) < 1:
            raise ValueError(f"{needed} = {getattr(self, needed)}: must be at least 1 with {self.kind} attention")

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Return the widths of queries, keys, values and results, each over all their heads."""
        head_dim, value_dim = self.head_dim, self.value_dim
        return self.heads * head_dim, self.kv_heads * head_dim, self.kv_heads * value_dim, self.heads * value_dim

    def projections(self, M: int) -> list[tuple[int, int]]:
        """Return (features in, features out) of each matrix, in the order of use."""
        queries, keys, values, results = self.widths
        last = [*[(M, results)] * self.has_output_gate, (results, M)]
        if self.kind != "latent":
            return [(M, queries), (M, keys), (M, values), *last]
        assert self.kv_rank is not None
        of_queries = [(M, queries)] if self.query_rank is None else [(M, self.query_rank), (self.query_rank, queries)]
        unshared = self.heads * (self.head_dim - self.rope_dim + self.value_dim)
        return [*of_queries, (M, self.kv_rank + self.rope_dim), (self.kv_rank, unshared), *last]

    def matrices(self, M: int) -> tuple[int, ...]:
        """Return the number of elements of each matrix, in the order of use."""
        return tuple(features_in * features_out for features_in, features_out in self.projections(M))

    def num_weights(self, M: int) -> int:
        """Return the number of elements of the matrices."""
        return sum(self.matrices(M))

    def num_parameters(self, M: int) -> int:
        """Return the number of all parameters of attention."""
        return self.num_weights(M) + self.num_other

    def pairs(self, L: int) -> int:
        """Return the number of position pairs of one sample in each head. Pairs hidden by a causal mask count, since
        the costs of a cluster include kernels that skip them.
        """
        return L * (L if self.window is None else min(L, self.window))

    def scores(self, L: int) -> int:
        """Return the number of elements of the softmax of one sample; 0 with linear attention."""
        return 0 if self.kind == "linear" else self.heads * self.pairs(L)

    def flops(self, M: int, L: int) -> float:
        """Return the floating-point operations of the forward for one sample, two per product: projections, scores
        and values.
        """
        products = L * self.num_weights(M) + self.heads * self.pairs(L) * (self.head_dim + self.value_dim)
        if self.kind == "linear":  # every position reads the state and adds to it
            products += 2 * L * self.heads * self.head_dim * self.value_dim
        return 2.0 * products


@dataclass(frozen=True, slots=True)
class BlockExperts:
    """Describes the experts of one block, with its router and shared experts.

    Raises:
        ValueError: a size is below 1, choices exceed experts, or groups do not divide the experts.
    """

    E: int
    K: int
    H: int
    gemms: int = 3
    shared_H: int = 0
    """The width inside the shared experts, summed; 0: there are none."""
    has_shared_gate: bool = False
    """Whether one number per token scales what the shared experts give."""
    has_bias: bool = False
    """Whether every product of an expert has a bias."""
    has_router_bias: bool = False
    """Whether the router has a bias that is a parameter; DeepSeek's correction is none."""
    capacity_factor: float | None = None
    """The capacity factor; ``None``: no token is dropped, as in all models of transformers."""
    groups: tuple[int, int] | None = None
    """Groups of experts, and how many of them a token chooses from; ``None``: all are one group."""

    def __post_init__(self) -> None:
        _check_sizes(self, ("E", "K", "H", *(("shared_H",) if self.shared_H else ())))
        if self.K > self.E:
            raise ValueError(f"K = {self.K}: must be at most the number of experts, E = {self.E}")
        if self.gemms not in GEMMS.values():
            raise ValueError(f"gemms = {self.gemms}: the choices are 2, 3")
        if self.groups is not None:
            num_groups, num_chosen = self.groups
            if num_groups < 1 or self.E % num_groups or not 1 <= num_chosen <= num_groups:
                raise ValueError(
                    f"groups = {self.groups}: must be a number that divides the {self.E} experts, and at most as many "
                    "groups per token"
                )

    def of_one(self, M: int, num_shards: int = 1) -> tuple[int, ...]:
        """Return the elements of each tensor of a routed expert or of one of its shards: the products up, their
        biases, the product down, its bias.
        """
        hidden = self.H // num_shards
        up = (self.gemms - 1) * hidden
        return up * M, up * self.has_bias, hidden * M, M * self.has_bias


@dataclass(frozen=True, slots=True)
class ModelBlock:
    """Describes one block of a model: attention, and experts or a dense layer.

    Raises:
        ValueError: the block has neither, or both.
    """

    attention: Attention
    experts: BlockExperts | None = None
    dense_H: int = 0
    """The width inside the dense layer of a block without experts."""
    dense_gemms: int = 3
    num_norms: int = 0
    """The parameters of its norms, and of biases of its dense or shared layers."""

    def __post_init__(self) -> None:
        if (self.experts is None) == (self.dense_H < 1):
            raise ValueError(f"dense_H = {self.dense_H}: must be at least 1 without experts, and 0 with them")
        _check_sizes(self, ("dense_H",) if self.dense_H else ())
        if self.dense_gemms not in GEMMS.values():
            raise ValueError(f"dense_gemms = {self.dense_gemms}: the choices are 2, 3")

    def dense_tensors(self, M: int) -> tuple[int, ...]:
        """Return the elements of each tensor that every token uses: all but the routed experts."""
        attention, experts = (*self.attention.matrices(M), self.attention.num_other), self.experts
        if experts is None:
            return (*attention, *[M * self.dense_H] * self.dense_gemms, self.num_norms)
        router, shared = experts.E * (M + experts.has_router_bias), [M * experts.shared_H] * experts.gemms
        return (*attention, router, *shared, M * experts.has_shared_gate, self.num_norms)

    def num_parameters(self, M: int) -> int:
        """Return the number of all parameters."""
        return sum(self.dense_tensors(M)) + (self.experts.E * sum(self.experts.of_one(M)) if self.experts else 0)

    def num_active(self, M: int) -> int:
        """Return the number of parameters that one token uses."""
        return sum(self.dense_tensors(M)) + (self.experts.K * sum(self.experts.of_one(M)) if self.experts else 0)


@dataclass(frozen=True)
class Architecture:
    """Describes a language model, block by block. Identical blocks are equal.

    Raises:
        ValueError: a size is below 1, or there are no blocks.
    """

    name: str
    source: str
    """Where its sizes come from."""
    M: int
    vocab: int
    is_tied: bool
    """Whether the head is the transposed embedding."""
    max_length: int
    """The positions of the longest sample that it is made for."""
    blocks: tuple[ModelBlock, ...]
    num_other: int = 0
    """The parameters outside blocks, embedding and head: the last norm, learned positions."""
    dtype: str = "bf16"
    """The type of its weights in its file: fp32, bf16 or fp16."""

    def __post_init__(self) -> None:
        _check_sizes(self, ("M", "vocab", "max_length"))
        if not 1 <= len(self.blocks) <= MOST_LAYERS:
            raise ValueError(f"{self.name}: must have at least one block and at most {MOST_LAYERS}")
        if self.num_parameters > MOST_PARAMETERS:
            raise ValueError(f"{self.name}: {self.num_parameters:.3g} parameters: must be at most {MOST_PARAMETERS:g}")

    @cached_property
    def kinds(self) -> dict[ModelBlock, int]:
        """Return each kind of block with its count."""
        return dict(Counter(self.blocks))

    @property
    def num_embedding(self) -> int:
        """Return the number of parameters of embedding and head; tied ones count once."""
        return self.M * self.vocab * (1 if self.is_tied else 2)

    @cached_property
    def num_parameters(self) -> int:
        """Return the number of all parameters."""
        of_blocks = sum(count * each.num_parameters(self.M) for each, count in self.kinds.items())
        return of_blocks + self.num_embedding + self.num_other

    @cached_property
    def num_expert_parameters(self) -> int:
        """Return the number of parameters of all routed experts."""
        return sum(
            count * each.experts.E * sum(each.experts.of_one(self.M))
            for each, count in self.kinds.items()
            if each.experts is not None
        )

    @cached_property
    def num_active_parameters(self) -> int:
        """Return the number of parameters that one token uses, embedding and head included."""
        of_blocks = sum(count * each.num_active(self.M) for each, count in self.kinds.items())
        return of_blocks + self.num_embedding + self.num_other

    @cached_property
    def moe_blocks(self) -> tuple[int, ...]:
        """Return the indices of the blocks with experts."""
        return tuple(place for place, each in enumerate(self.blocks) if each.experts is not None)

    @cached_property
    def num_experts(self) -> int:
        """Return the greatest common divisor of the blocks' numbers of experts; 0 without experts."""
        return math.gcd(*(each.experts.E for each in self.kinds if each.experts is not None))

    def first(self, num_blocks: int) -> Architecture:
        """Return the same model with its first blocks only.

        Raises:
            ValueError: the number is out of range, or none of the blocks has experts.
        """
        if not 1 <= num_blocks <= len(self.blocks):
            raise ValueError(f"layers = {num_blocks}: must be from 1 to the {len(self.blocks)} of {self.name}")
        if self.moe_blocks and num_blocks <= self.moe_blocks[0]:
            raise ValueError(
                f"layers = {num_blocks}: must be at least {self.moe_blocks[0] + 1}, since the first "
                f"{self.moe_blocks[0]} of {self.name} have no experts"
            )
        return replace(self, blocks=self.blocks[:num_blocks])

    def with_experts(self, **changes: Any) -> Architecture:
        """Return the same model with changed experts in all blocks that have experts.

        Args:
            changes: fields of :class:`BlockExperts`.

        Raises:
            ValueError: :class:`BlockExperts` refuses the changes.
        """
        of_kind = {
            each: each if each.experts is None else replace(each, experts=replace(each.experts, **changes))
            for each in self.kinds
        }
        return replace(self, blocks=tuple(of_kind[each] for each in self.blocks))


def _check_sizes(sizes: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(sizes, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} = {value!r}: must be a whole number of at least 1")
        if value > _MOST.get(name, MOST_WIDTH):
            raise ValueError(f"{name} = {value}: must be at most {_MOST.get(name, MOST_WIDTH)}")


def describe_model(architecture: Architecture) -> list[tuple[str, str]]:
    """Return named lines about a model: its blocks and parameters, its experts, its attention."""
    num_blocks, num_moe = len(architecture.blocks), len(architecture.moe_blocks)
    of_experts = "all with experts" if num_moe == num_blocks else f"{num_moe} of them with experts"
    dense = sorted({each.dense_H for each in architecture.kinds if each.dense_H})
    of_dense = f", the others {' or '.join(map(str, dense))} wide" if dense else ""
    numbers = (architecture.num_parameters, architecture.num_expert_parameters, architecture.num_active_parameters)
    whole, in_experts, active = (f"{each / 1e9:.1f} B" for each in numbers)
    tied = ", head and embedding in one" if architecture.is_tied else ""
    blocks = [architecture.blocks[place] for place in architecture.moe_blocks]
    experts = Counter(each.experts for each in blocks if each.experts is not None)
    attention = Counter(each.attention for each in architecture.blocks)
    return [
        ("model", f"{architecture.name}: {architecture.source}"),
        (
            "blocks",
            f"{num_blocks}, {of_experts}{of_dense}, M = {architecture.M}, {architecture.vocab} words{tied}; {whole} "
            f"parameters, {in_experts} of them in experts, {active} used by a token",
        ),
        ("experts", _counted({_of_experts(each): count for each, count in experts.items()})),
        ("heads", _counted({_of_attention(each): count for each, count in attention.items()})),
    ]


def _of_experts(experts: BlockExperts) -> str:
    groups = f" from {experts.groups[1]} of {experts.groups[0]} groups" if experts.groups is not None else ""
    kind = "" if experts.gemms == 3 else ", two products each"
    shared = f", beside shared ones {experts.shared_H} wide" if experts.shared_H else ""
    return f"E = {experts.E}, k = {experts.K}{groups}, H = {experts.H}{kind}{shared}"


def _of_attention(attention: Attention) -> str:
    heads = f"{attention.heads} heads of {attention.head_dim}"
    if attention.kind == "latent":
        return f"{heads}, latent of rank {attention.kv_rank}"
    of_keys = f", {attention.kv_heads} of keys and values" if attention.kv_heads != attention.heads else ""
    kind = {"sliding": f", to {attention.window} positions", "linear": ", linear"}.get(attention.kind, "")
    return f"{heads}{of_keys}{kind}"


def _counted(texts: dict[str, int]) -> str:
    """Return kinds in one line, with their counts if there are several."""
    if len(texts) == 1:
        return next(iter(texts))
    return "; ".join(f"{count} x {text}" for text, count in texts.items())


def step_flops(shape: Shape, num_layers: int, architecture: Architecture | None = None) -> float:
    """Return the operations of one micro-batch, forward and backward, without recomputation and regardless of drops.

    Args:
        shape: the samples and the length; without an architecture, all sizes of a layer.
        num_layers: the number of layers.
        architecture: a whole model, of which ``num_layers`` blocks count; ``None``: equal layers only.
    """
    if architecture is None:
        active = shape.attention_weights + shape.M * shape.E + GEMMS[shape.ffn] * shape.K * shape.M * shape.H
        return num_layers * shape.B * (6.0 * active * shape.L + 12.0 * shape.M * shape.L**2)
    model = architecture.first(num_layers)
    embedding = 0 if model.is_tied else model.M * model.vocab
    active = model.num_active_parameters - embedding
    attention = 0.0
    for block in model.blocks:
        each = block.attention
        attention += each.flops(model.M, shape.L) - 2.0 * shape.L * each.num_weights(model.M)
    return shape.B * (6.0 * active * shape.L + 3.0 * attention)
