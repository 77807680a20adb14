# SPDX-License-Identifier: Apache-2.0
"""Builds the planner's layers of a whole model in a training step: one for each block with experts. ``ds_fsmoe
plan`` calls it.

All else belongs to a neighbouring layer, as computation and as gradients. Blocks without experts come before the next
block with experts, and shared experts behind it. The embedding is before the first layer, the head behind the last.
Model parallelism divides all of that except shared experts and gates, which every rank computes for its share of the
tokens. Embedding lookups, norms and activations take no time here, but their gradients count.

Letters: B samples per model-parallel group, L positions, M width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_fsmoe.offline.models.architecture import Architecture, Attention, BlockExperts, ModelBlock
from ds_fsmoe.offline.models.memory_activations import has_sinks, norms_of_heads
from ds_fsmoe.planning.groups import Fanout, Groups
from ds_fsmoe.planning.schedule import ATTENTION, DENSE, ELEMENTWISE, MP_GATHER, MP_REDUCE, SOFTMAX, Lane
from ds_fsmoe.planning.workload import (
    GEMMS,
    AllToAll,
    BlockWork,
    Gradient,
    Layer,
    Shape,
    Work,
    activation_bytes,
    arranging,
    check_divides,
    collective,
    moe_works,
    summed,
)

_NORM_BYTES = 39
"""For an element of a norm, a third of forward and backward: transformers' RMSNorm in fp32 takes nine kernels there."""
_ROTATION_BYTES = 18
"""For an element of queries and keys: the halves are exchanged (4), two products (8), a sum (6)."""
_RESIDUAL_BYTES = 12
"""For an element of a token: two sums."""
_SCORE_BYTES = 21
"""For a score of eager attention with sinks, a third of forward and backward: products (4), scaling (4), mask (4),
sinks (4), largest (2), difference (4), softmax (4), without the sinks (4); backward 33."""
_LOGIT_BYTES = 11
"""For a logit, a third of forward and backward: it is written (2), made fp32 (6), its logarithm (8); backward 18."""
_FFN = {gemms: name for name, gemms in GEMMS.items()}


@dataclass(frozen=True, slots=True)
class ModelStage:
    """Describes the part of a model in one pipeline stage."""

    index: int
    places: range
    """The places of its blocks in the model."""
    has_embedding: bool
    has_head: bool


@dataclass(frozen=True, slots=True)
class DenseStage:
    """Holds the work of a pipeline stage without experts: a chain of operations, without gradients in between."""

    forward: tuple[Work, ...]
    backward: tuple[Work, ...]
    """Where blocks run their forward again, with that ahead."""
    gradients: tuple[Gradient, ...]


@dataclass(frozen=True, slots=True)
class _Part:
    """Holds unchunked computation, with the collectives around it."""

    forward: tuple[Work, ...] = ()
    backward: tuple[Work, ...] = ()
    tensors: tuple[int, ...] = ()
    """The elements of its tensors on a rank, in the order in which their gradients exist."""


def _joined(parts: Sequence[_Part]) -> _Part:
    """Return consecutive parts as one, whose backward begins with the last of them."""
    return _Part(
        tuple(work for part in parts for work in part.forward),
        tuple(work for part in parts[::-1] for work in part.backward),
        tuple(size for part in parts[::-1] for size in part.tensors),
    )


@dataclass(frozen=True)
class _Sizes:
    """Holds the sizes that all parts of a step have in common."""

    groups: Groups
    B: int
    L: int
    M: int
    dtype_bytes: int

    @property
    def tokens_S(self) -> float:
        """Return the number of tokens on a rank between the parts that model parallelism divides."""
        return self.B * self.L / self.groups.mp

    def divided(self, works: Sequence[Work], tensors: Sequence[float], whole: int = 0) -> _Part:
        """Return a part that model parallelism divides.

        Args:
            works: the computation in the forward, over all ranks of a group.
            tensors: the elements of its tensors, over all ranks of a group.
            whole: the elements that each rank has whole.
        """
        mp, size_bytes = self.groups.mp, self.B * self.L * self.M * self.dtype_bytes
        gather, reduce = (collective(kind, self.groups.placements["mp"], size_bytes) for kind in (MP_GATHER, MP_REDUCE))
        mine = [replace(each, size=each.size / mp) for each in works]
        # The backward gathers what the forward reduced, and vice versa.
        return _Part(
            (*gather, *mine, *reduce),
            (*gather, *twice(mine), *reduce),
            (*(round(each / mp) for each in tensors), *((whole,) if whole else ())),
        )


def twice(works: Sequence[Work]) -> tuple[Work, ...]:
    """Return the backward of computation: gradients of inputs and of weights, the last first."""
    return tuple(replace(each, size=2 * each.size, launches=2 * each.launches) for each in works[::-1])


def stages(architecture: Architecture, pp: int) -> tuple[ModelStage, ...]:
    """Divide the blocks of a model over pipeline stages as evenly as possible; the first stages get the remainder.

    Raises:
        ValueError: there are more stages than blocks.
    """
    num_blocks = len(architecture.blocks)
    if pp > num_blocks:
        raise ValueError(f"pp = {pp}: must be at most the number of blocks, {num_blocks}")
    least, more = divmod(num_blocks, pp)
    found, first = [], 0
    for index in range(pp):
        end = first + least + (index < more)
        found.append(ModelStage(index, range(first, end), index == 0, index == pp - 1))
        first = end
    return tuple(found)


def busiest_stage(architecture: Architecture, pp: int, length: int) -> ModelStage:
    """Return the stage with the most computation among those with experts.

    Args:
        architecture: the model.
        pp: the number of stages.
        length: the positions of a sample.

    Raises:
        ValueError: there are more stages than blocks.
    """
    moe = set(architecture.moe_blocks)
    with_experts = [each for each in stages(architecture, pp) if moe & set(each.places)]
    return max(with_experts, key=lambda each: stage_flops(architecture, each, length))


def stage_flops(architecture: Architecture, stage: ModelStage, length: int) -> float:
    """Return the floating-point operations of a stage's forward for one sample."""
    M = architecture.M
    flops = sum(_flops(architecture.blocks[place], M, length) for place in stage.places)
    return flops + (2.0 * length * M * architecture.vocab if stage.has_head else 0.0)


def _flops(block: ModelBlock, M: int, length: int) -> float:
    weights = block.num_active(M) - block.attention.num_parameters(M) - block.num_norms
    return block.attention.flops(M, length) + 2.0 * length * weights


def commonest_moe(architecture: Architecture) -> ModelBlock:
    """Return the most frequent kind of block with experts; the first of several."""
    counts = {each: count for each, count in architecture.kinds.items() if each.experts is not None}
    return max(counts, key=counts.__getitem__)


def moe_shape(
    architecture: Architecture,
    block: ModelBlock,
    samples: int,
    length: int,
    dtype_bytes: int,
    capacity_factor: float | None = None,
    imbalance: float = 1.0,
) -> Shape:
    """Return the sizes of a block's experts' part, as a generalised layer.

    Args:
        architecture: the model.
        block: a block with experts.
        samples, length: B, L.
        dtype_bytes: the bytes of an element that is sent.
        capacity_factor: the capacity factor; ``None``: the block's.
        imbalance: the rows of the fullest rank over those of the mean rank.
    """
    experts = block.experts
    assert experts is not None
    return Shape(
        B=samples,
        L=length,
        M=architecture.M,
        H=experts.H,
        E=experts.E,
        K=experts.K,
        capacity_factor=experts.capacity_factor if capacity_factor is None else capacity_factor,
        ffn=_FFN[experts.gemms],
        heads=block.attention.heads,
        kv_heads=block.attention.kv_heads,
        dtype_bytes=dtype_bytes,
        imbalance=imbalance,
    )


def model_layers(
    architecture: Architecture,
    groups: Groups,
    samples: int,
    length: int,
    dtype_bytes: int,
    alltoall: AllToAll = "flat",
    recompute: bool = False,
    fanout: Fanout | None = None,
    capacity_factor: float | None = None,
    imbalance: float = 1.0,
    stage: ModelStage | None = None,
) -> tuple[Layer, ...]:
    """Return the layers of one pipeline stage in the order of the forward. Equal layers are the same object.

    Args:
        architecture: the model.
        groups: the ranks that run it.
        samples: the samples per model-parallel group.
        length: the positions of a sample.
        dtype_bytes: the bytes of an element that is sent.
        alltoall: the kind of all-to-all.
        recompute: whether blocks, but not the head, run their forward again in the backward.
        fanout: the fan-out of a token in node-deduplicated dispatch; ``None``: that of balanced routing.
        capacity_factor: the capacity factor; ``None``: the blocks' own.
        imbalance: the rows of the fullest rank over those of the mean rank, where no token is dropped.
        stage: the stage; ``None``: the busiest one with experts.

    Raises:
        ValueError: the experts do not divide over the EP ranks, or their width over the ESP ranks; stages exceed
            blocks; or the stage has no experts.
    """
    stage = stage or busiest_stage(architecture, groups.pp, length)
    moe = [place for place in stage.places if architecture.blocks[place].experts is not None]
    if not moe:
        raise ValueError(f"stage {stage.index + 1} of {groups.pp}: none of its blocks has experts")
    sizes = _Sizes(groups, samples, length, architecture.M, dtype_bytes)
    made: dict[tuple, Layer] = {}
    layers = []
    for place in moe:
        is_first, is_last = place == moe[0], place == moe[-1]
        start = stage.places[0] if is_first else max(each for each in moe if each < place) + 1
        before = architecture.blocks[start:place]
        behind = architecture.blocks[place + 1 : stage.places[-1] + 1] if is_last else ()
        # What stages share is summed over them first, when all backwards are over.
        embedding = _embedding(architecture, stage, sizes) if is_first else _Part()
        head = _head(architecture, sizes, recompute) if stage.has_head and is_last else _Part()
        block = architecture.blocks[place]
        key = block, before, behind, embedding, head
        if key not in made:
            shape = moe_shape(architecture, block, samples, length, dtype_bytes, capacity_factor, imbalance)
            check_divides(shape, groups)
            parts = moe_works(shape, groups, alltoall, sizes.tokens_S, True, fanout)
            made[key] = _layer(block, shape, sizes, parts, (before, behind), (embedding, head), recompute)
        layers.append(made[key])
    return tuple(layers)


def dense_stage(
    architecture: Architecture,
    groups: Groups,
    samples: int,
    length: int,
    dtype_bytes: int,
    stage: ModelStage,
    recompute: bool = False,
) -> DenseStage:
    """Return the work of a pipeline stage without experts.

    Args:
        architecture, groups, samples, length, dtype_bytes, recompute: see :func:`model_layers`.
        stage: the stage.
    """
    sizes = _Sizes(groups, samples, length, architecture.M, dtype_bytes)
    parts = [part for place in stage.places for part in _dense_block(architecture.blocks[place], sizes)]
    whole = _joined([*parts, *([_head(architecture, sizes, recompute)] if stage.has_head else [])])
    dense = [*whole.tensors, *_embedding(architecture, stage, sizes).tensors]
    gradients = tuple(each for each in summed(groups, dtype_bytes, dense, []) if each.size_bytes)
    backward = (*whole.forward, *whole.backward) if recompute else whole.backward
    return DenseStage(whole.forward, backward, gradients)


def _embedding(architecture: Architecture, stage: ModelStage, sizes: _Sizes) -> _Part:
    """Return the part of the embedding; lookups take no time. A tied one is also on the stage with the head. There
    it exists once per stage, and its gradient exists after the backward.
    """
    is_here = stage.has_embedding or (architecture.is_tied and stage.has_head)
    return _Part(tensors=(round(sizes.M * architecture.vocab / sizes.groups.mp),) * is_here)


def _layer(
    block: ModelBlock,
    shape: Shape,
    sizes: _Sizes,
    parts: tuple,
    around: tuple[tuple[ModelBlock, ...], tuple[ModelBlock, ...]],
    ends: tuple[_Part, _Part],
    recompute: bool,
) -> Layer:
    """Return the layer of one block with experts.

    Args:
        block, shape: the block, and its experts' part.
        sizes: the sizes of the step.
        parts: the experts' part, (forward, backward).
        around: the blocks without experts before and behind it.
        ends: the embedding and the head.
        recompute: whether blocks run their forward again.
    """
    experts = block.experts
    assert experts is not None
    route, order, restore = arranging(shape, sizes.tokens_S)
    before = _joined(
        [
            *(part for each in around[0] for part in _dense_block(each, sizes)),
            _attention(block.attention, sizes, block.num_norms),
        ]
    )
    behind = _joined(
        [_shared(experts, sizes), *(part for each in around[1] for part in _dense_block(each, sizes)), ends[1]]
    )
    forward = BlockWork((*before.forward, route, order), parts[0], (restore, *behind.forward))
    backward = BlockWork((*behind.backward, restore), parts[1], (order, route, *before.backward))
    gate = experts.E * (sizes.M + experts.has_router_bias) + sizes.M * experts.has_shared_gate
    dense = [*behind.tensors, gate, *before.tensors, *ends[0].tensors]
    groups = sizes.groups
    of_expert = [sizes.M * (experts.H // groups.esp)] * experts.gemms
    if experts.has_bias:
        of_expert.append((experts.gemms - 1) * (experts.H // groups.esp) + sizes.M)
    of_experts = of_expert * (experts.E // groups.ep)
    gradients = summed(groups, sizes.dtype_bytes, dense, of_experts)
    return Layer(forward, backward, gradients, recompute, numel=sum(dense) + sum(of_experts))


def _attention(attention: Attention, sizes: _Sizes, num_norms: int) -> _Part:
    """Return the part of attention, with the norms of its block. Element-wise are norms, rotations, residuals, and
    the scores of a family without fused attention.
    """
    M, B, L = sizes.M, sizes.B, sizes.L
    works = [Work(ATTENTION, (Lane.COMPUTE,), B * attention.flops(M, L))]
    if attention.scores(L):
        works.append(Work(SOFTMAX, (Lane.COMPUTE,), B * attention.scores(L)))
    queries, keys, *_ = attention.widths
    normed = 2 * M + (queries + keys if norms_of_heads(attention) else 0)
    if attention.kind == "latent":
        normed += (attention.query_rank or 0) + (attention.kv_rank or 0)
        queries = keys = attention.heads * attention.rope_dim
    of_token = _NORM_BYTES * normed + _ROTATION_BYTES * (queries + keys) + _RESIDUAL_BYTES * M
    scores = attention.heads * L * L if has_sinks(attention, M) else 0
    works.append(_elementwise(B * (L * of_token + _SCORE_BYTES * scores)))
    return sizes.divided(works, attention.matrices(M)[::-1], attention.num_other + num_norms)


def _dense_block(block: ModelBlock, sizes: _Sizes) -> tuple[_Part, _Part]:
    """Return the parts of a block without experts."""
    weights = sizes.M * block.dense_H
    work = _dense(2.0 * block.dense_gemms * sizes.B * sizes.L * weights, block.dense_gemms)
    activations = activation_bytes(sizes.B * sizes.L, block.dense_H, block.dense_gemms, sizes.dtype_bytes)
    feed_forward = sizes.divided([work, _elementwise(activations)], [weights] * block.dense_gemms)
    return _attention(block.attention, sizes, block.num_norms), feed_forward


def _shared(experts: BlockExperts, sizes: _Sizes) -> _Part:
    """Return the part of shared experts, which every rank has whole."""
    if not experts.shared_H:
        return _Part()
    weights = sizes.M * experts.shared_H
    activations = activation_bytes(sizes.tokens_S, experts.shared_H, experts.gemms, sizes.dtype_bytes)
    works = [_dense(2.0 * experts.gemms * sizes.tokens_S * weights, experts.gemms), _elementwise(activations)]
    return _Part(tuple(works), twice(works), (weights,) * experts.gemms)


def _head(architecture: Architecture, sizes: _Sizes, recompute: bool) -> _Part:
    """Return the part of the head and the loss."""
    positions, vocab = sizes.B * sizes.L, architecture.vocab
    product, loss = _dense(2.0 * positions * sizes.M * vocab, 1), Work(SOFTMAX, (Lane.COMPUTE,), positions * vocab)
    tensors = [] if architecture.is_tied else [sizes.M * vocab]
    traffic = _elementwise(positions * (_NORM_BYTES * sizes.M + _LOGIT_BYTES * vocab))
    part = sizes.divided([product, loss, traffic], tensors, architecture.num_other)
    # A layer that recomputes runs all its forward again, which counts the head once more than it is run.
    return replace(part, backward=part.forward) if recompute else part


def _dense(flops: float, launches: int) -> Work:
    return Work(DENSE, (Lane.COMPUTE,), flops, launches)


def _elementwise(size_bytes: float) -> Work:
    """Return the memory traffic of element-wise kernels; the cost of their bytes includes their launches."""
    return Work(ELEMENTWISE, (Lane.COMPUTE,), size_bytes, 0)
