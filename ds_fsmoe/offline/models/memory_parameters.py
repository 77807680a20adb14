# SPDX-License-Identifier: Apache-2.0
"""The parameters that one rank has before ZeRO cuts them, tensor by tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_fsmoe.offline.models.architecture import Architecture, Attention, Block
from ds_fsmoe.planning.groups import Groups


@dataclass(frozen=True)
class Parameters:
    """The parameters of one rank before ZeRO cuts them, tensor by tensor, in the order of the model."""

    dense: tuple[int, ...]
    """The elements of each tensor that every rank has."""
    experts: tuple[int, ...]
    """Those of this rank's experts."""
    experts_of_block: tuple[int, ...]
    """Of each block, the elements of this rank's experts; 0 without."""
    dense_of_block: tuple[int, ...]
    """Of each block, the elements of all else."""
    num_embedding: int = 0
    """The elements of the embedding, where it is on this rank."""
    num_head: int = 0
    """The elements of the head, where it is on this rank and a tensor of its own."""
    frozen: Parameters | None = None
    """Those that are not trained, where these are adapters."""

    @property
    def whole(self) -> Parameters:
        """Return all of them, frozen or not."""
        if self.frozen is None:
            return self
        base = self.frozen
        return replace(
            base,
            dense=base.dense + self.dense,
            experts=base.experts + self.experts,
            experts_of_block=tuple(map(sum, zip(base.experts_of_block, self.experts_of_block, strict=True))),
            dense_of_block=tuple(map(sum, zip(base.dense_of_block, self.dense_of_block, strict=True))),
        )

    def adapters(self, blocks: Sequence[Block], M: int, groups: Groups, rank: int, targets: str) -> Parameters:
        """Return adapters of these, which are frozen beside them.

        Args:
            blocks: those of these.
            M: the width of the model.
            groups: over which ranks experts are spread and cut.
            rank: of the adapters.
            targets: what has adapters, of ``training.LORA_TARGETS``.
        """
        dense, experts = [], []
        for block in blocks:
            dense.append([rank * each for pair in projections(block.attention, M) for each in pair])
            of_experts: list[int] = []
            if targets == "all" and block.experts is not None:
                here, hidden = rank * block.experts.E // groups.ep, block.experts.H // groups.esp
                of_experts = [here * M, here * (block.experts.gemms - 1) * hidden, here * hidden, here * M]
            experts.append(of_experts)
        sums = (tuple(map(sum, of)) for of in (experts, dense))
        return Parameters(*(tuple(each for of in kind for each in of) for kind in (dense, experts)), *sums, frozen=self)

    @property
    def num_dense(self) -> int:
        """Return the elements of all dense tensors."""
        return sum(self.dense)

    @property
    def num_experts(self) -> int:
        """Return the elements of this rank's experts."""
        return sum(self.experts)

    @classmethod
    def of(
        cls, architecture: Architecture, blocks: Sequence[Block], groups: Groups, ends: tuple[bool, bool] = (True, True)
    ) -> Parameters:
        """Return those of some blocks.

        Args:
            architecture: the model.
            blocks: of one pipeline stage.
            groups: over which ranks experts are spread and cut.
            ends: whether the embedding, and whether the last norm and the head, are in this stage.
        """
        M = architecture.M
        embedding = architecture.vocab * M
        dense = [embedding] if ends[0] else []
        experts: list[int] = []
        of_experts, of_dense = [], []
        for block in blocks:
            own = _experts(block, M, groups)
            rest = [*_attention(block.attention, M), *_others(block, M)]
            dense += rest
            experts += own
            of_experts.append(sum(own))
            of_dense.append(sum(rest))
        head = embedding if ends[1] and not (architecture.is_tied and ends[0]) else 0
        dense += [architecture.num_other, head] if ends[1] else []
        tensors, of_all = ([each for each in of if each] for of in (dense, experts))
        ends_numel = embedding if ends[0] else 0, head
        return cls(tuple(tensors), tuple(of_all), tuple(of_experts), tuple(of_dense), *ends_numel)


def projections(attention: Attention, M: int) -> list[tuple[int, int]]:
    """Return the features in and out of each matrix of attention, in the order in which they are used."""
    queries, values = attention.heads * attention.head_dim, attention.heads * attention.value_dim
    if attention.kind != "latent":
        keys, own_values = attention.kv_heads * attention.head_dim, attention.kv_heads * attention.value_dim
        gate = [(M, values)] * attention.has_output_gate
        return [(M, queries), (M, keys), (M, own_values), *gate, (values, M)]
    rank, kv_rank = attention.query_rank, attention.kv_rank or 0
    of_queries = [(M, queries)] if rank is None else [(M, rank), (rank, queries)]
    unshared = attention.heads * (attention.head_dim - attention.rope_dim + attention.value_dim)
    return [*of_queries, (M, kv_rank + attention.rope_dim), (kv_rank, unshared), (values, M)]


def _attention(attention: Attention, M: int) -> list[int]:
    queries, values = attention.heads * attention.head_dim, attention.heads * attention.value_dim
    if attention.kind != "latent":
        keys = attention.kv_heads * attention.head_dim
        matrices = [M * queries, M * keys, M * attention.kv_heads * attention.value_dim, M * values]
    else:
        rank, kv_rank = attention.query_rank, attention.kv_rank or 0
        of_queries = [M * queries] if rank is None else [M * rank, rank * queries]
        unshared = attention.heads * (attention.head_dim - attention.rope_dim + attention.value_dim)
        matrices = [*of_queries, M * (kv_rank + attention.rope_dim), kv_rank * unshared, M * values]
    left = attention.num_parameters(M) - sum(matrices)
    return [*matrices, left]


def _others(block: Block, M: int) -> list[int]:
    experts = block.experts
    if experts is None:
        return [M * block.dense_H] * block.dense_gemms + [block.num_norms]
    router = experts.E * (M + experts.has_router_bias)
    shared = [M * experts.shared_H] * experts.gemms if experts.shared_H else []
    return [router, *shared, M * experts.has_shared_gate, block.num_norms]


def _experts(block: Block, M: int, groups: Groups) -> list[int]:
    """Return the elements of this rank's tensors of experts: the layers up, and the one down."""
    experts = block.experts
    if experts is None:
        return []
    here, hidden = experts.E // groups.ep, experts.H // groups.esp
    up, biases = (experts.gemms - 1) * hidden, experts.has_bias
    return [here * up * M, here * up * biases, here * hidden * M, here * M * biases]
