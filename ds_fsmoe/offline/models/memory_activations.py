# SPDX-License-Identifier: Apache-2.0
"""Computes the bytes that a block keeps from its forward to its backward, and the peak that its backward adds.
``memory.py`` calls it; ``memory_states.py`` has the parameters and their states.

Every term is a tensor that transformers 5 or ds_fsmoe makes, by the operation that saves it. The method is that of
Korthikanti et al. (arXiv:2205.05198, section 4), with the operations of today's models. Their RMSNorm is written out
and computes in fp32. Attention keeps no scores unless it is eager, and an expert keeps two tensors of rows.

Letters: S tokens of this rank, M width of the model, K choices of a token, R rows at this rank's experts, H width
inside an expert, F = 2 H with a gate, a bytes of a number.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_fsmoe.offline.models.architecture import Attention, BlockExperts, ModelBlock
from ds_fsmoe.offline.models.memory_states import Account, plus
from ds_fsmoe.offline.models.training import Training
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.two_batch import NUM_SUB_BATCHES

ATTENTION = "attention"
NORMS = "norms and residuals"
DENSE = "dense and shared layers"
ROUTER = "router"
ROWS = "rows of experts"
INPUTS = "inputs of checkpointed blocks"
LOGITS = "logits and loss"
AT_WORK = "inside one block"

FP32, INDEX = 4, 8
"""The bytes of a number in fp32 and of an index in int64."""


@dataclass(frozen=True)
class LayerRows:
    """Holds the numbers of rows of one layer."""

    sent: float
    """The rows that this rank's tokens make, S K."""
    here: float
    """The rows at this rank's experts, R: of as many ranks as share them."""
    hidden: float
    """The width inside an expert on this rank."""
    up_projections: int
    """The tensors of the first product: 2 with a gate."""


def layer_rows(experts: BlockExperts, groups: Groups, training: Training) -> LayerRows:
    """Return the rows of a layer. Without a capacity factor no row is dropped or empty."""
    sent = training.tokens * experts.K * (experts.capacity_factor or 1.0)
    return LayerRows(sent, training.load * sent * groups.esp, experts.H / groups.esp, experts.gemms - 1)


def norm(tokens: float, width: float, training: Training, in_fp32: bool = False) -> float:
    """Return the bytes that an RMSNorm keeps: its input in fp32, the scaled input, and a root for each row. A frozen
    weight needs no scaled input.

    Args:
        tokens, width: the sizes of its input.
        training: the training settings.
        in_fp32: whether its weight is multiplied in fp32, as in gpt-oss.
    """
    scaled = 0 if training.lora else FP32 if in_fp32 else training.number_bytes
    return tokens * (width * (FP32 + scaled) + FP32)


def is_eager(attention: Attention, M: int, training: Training) -> bool:
    """Return True if scores are materialised. A family with sinks has no other attention in transformers without
    extra kernels.
    """
    return training.attention == "eager" or (training.attention == "auto" and has_sinks(attention, M))


def has_sinks(attention: Attention, M: int) -> bool:
    """Return True if every head has a sink, judged by the number of parameters; see :func:`is_eager`."""
    return attention.num_other in (attention.heads, attention.heads + sum(attention.widths[:3]) + M)


def norms_of_heads(attention: Attention) -> bool:
    """Return True if queries and keys are normed, judged by the number of parameters."""
    return attention.kind != "latent" and attention.num_other in (2 * attention.head_dim, sum(attention.widths[:2]))


def attention_keeps(attention: Attention, M: int, training: Training) -> float:
    """Return the bytes that attention keeps, from the normed tokens that its projections read to its result."""
    S, a, L = training.tokens, training.number_bytes, training.length
    queries, keys, own_values, values = attention.widths
    kept: float = a * S * M
    if training.lora:  # what its A gives to its B
        kept += a * S * training.lora * len(attention.projections(M))
    if attention.kind == "latent":
        rank, kv_rank = attention.query_rank, attention.kv_rank or 0
        if rank is not None:
            kept += norm(S, rank, training) + a * S * rank
        # The norm's input is a part of what keys and values are compressed to; in fp32 the whole of it stays.
        kept += norm(S, kv_rank, training) + a * S * kv_rank + (a == FP32) * a * S * attention.rope_dim
        # Values are a part of what they are expanded to, which stays.
        unshared = attention.heads * (attention.head_dim - attention.rope_dim + attention.value_dim)
        kept += a * S * (queries + unshared + queries)
    else:
        if norms_of_heads(attention):
            kept += norm(S, queries, training) + norm(S, keys, training)
            if attention.num_other == 2 * attention.head_dim:  # a root for each head
                kept += FP32 * S * (attention.heads + attention.kv_heads - 2)
        if is_eager(attention, M, training):
            keys, own_values = queries, values  # repeated for the heads that share them
        kept += a * S * (queries + keys + own_values)
    kept += a * S * values
    if attention.has_output_gate:  # its sigmoid, and what it leaves of the result
        kept += 2 * a * S * values
    if is_eager(attention, M, training):
        scores = training.samples * attention.heads * L * L
        if has_sinks(attention, M):
            kept += a * (scores + S * attention.heads) + INDEX * S * attention.heads
        else:
            kept += FP32 * scores + (a < FP32) * a * scores
        return kept
    kept += FP32 * S * attention.heads
    if attention.kind == "latent" and training.device == "cpu":
        kept += a * S * values  # there the result lies head by head, and is copied token by token
    return kept


def _feed_forward_keeps(hidden: int, gemms: int, training: Training) -> float:
    """Return the bytes that a dense layer keeps besides its input: each first product, their activation, the gated
    product.
    """
    # What a frozen matrix reads is not kept.
    return training.number_bytes * training.tokens * hidden * ((4 if gemms == 3 else 2) - bool(training.lora))


def keeps_rows(training: Training) -> bool:
    """Return True if experts keep their incoming rows: for gradients of weights or adapters, or to recompute hidden
    layers.
    """
    return not training.lora or training.lora_targets == "all" or training.recompute


def experts_keep(experts: BlockExperts, M: int, groups: Groups, training: Training) -> Account:
    """Return item -> bytes that a block's router and experts keep for the backward, without their input."""
    S, a, rows = training.tokens, training.number_bytes, layer_rows(experts, groups, training)
    scores = 0.0 if experts.has_bias else FP32 * S * experts.E
    if experts.groups is not None and a < FP32:
        scores += FP32 * S * M  # DeepSeek's router computes in fp32
    # Which experts, which places, and a weight as it was made and as it is used; and an order of the rows.
    tables = rows.sent * (2 * INDEX + 2 * FP32) + INDEX * rows.here
    kept = a * (rows.sent * M + (rows.here * M if keeps_rows(training) else 0.0))
    if not training.recompute:
        kept += a * rows.here * rows.up_projections * rows.hidden
    found = {ROUTER: scores + tables, ROWS: kept}
    if experts.shared_H:
        gate = a * S * (M + 1) if experts.has_shared_gate else 0.0
        found[DENSE] = _feed_forward_keeps(experts.shared_H, experts.gemms, training) + gate
    return found


def block_keeps(block: ModelBlock, M: int, groups: Groups, training: Training) -> Account:
    """Return the items that a block keeps for its backward without activation checkpointing."""
    S, a = training.tokens, training.number_bytes
    in_fp32 = has_sinks(block.attention, M)
    kept = {
        ATTENTION: attention_keeps(block.attention, M, training),
        # Both norms, and what the second one gives to router and experts or to the dense layer.
        NORMS: 2 * norm(S, M, training, in_fp32) + (0.0 if training.lora else a * S * M),
    }
    if block.experts is None:
        return plus(kept, {DENSE: _feed_forward_keeps(block.dense_H, block.dense_gemms, training)})
    return plus(kept, experts_keep(block.experts, M, groups, training))


def block_needs(
    block: ModelBlock, M: int, groups: Groups, training: Training, weights: float, stay: bool
) -> tuple[list[Account], list[Account]]:
    """Return the items of a block at two candidate peaks of its backward: before and after its experts have
    gradients.

    Args:
        block: the block.
        M: the width of the model.
        groups: the ranks over which experts are spread and sharded.
        training: the training settings.
        weights: the elements of this rank's experts in the block.
        stay: whether their gradients stay where they are made, and so are counted elsewhere.
    """
    S, a = training.tokens, training.number_bytes
    kept = block_keeps(block, M, groups, training)
    residual, trained = a * S * M, not training.lora
    attention = {item: kept[item] for item in (ATTENTION, NORMS)}
    late: list[Account] = [plus(attention, {AT_WORK: residual + _attention_needs(block.attention, M, training)})]
    if block.experts is None:
        # The gradients of what is gated and of both its factors, and of the largest weight.
        work = residual + a * (S * M + 3 * S * block.dense_H + trained * M * block.dense_H)
        return [plus(kept, {AT_WORK: work})], late
    experts, rows = block.experts, layer_rows(block.experts, groups, training)
    early: list[Account] = []
    if experts.shared_H:
        residual *= 2  # the gradient on the way around the experts, too
        work = residual + a * (3 * S * experts.shared_H + trained * M * experts.shared_H)
        early.append(plus(kept, {AT_WORK: work}))
        kept = {item: size for item, size in kept.items() if item != DENSE}
    # Rows that came back are read, and their gradients made.
    early.append(plus(kept, {AT_WORK: residual + a * rows.sent * M}))
    kept = plus(kept, {ROWS: -a * rows.sent * M})
    sizes = rows.here * M
    # Gradients of rows: as they are sent, as they come, and expert by expert; in chunks, two of which are under way. On
    # streams what comes and what leaves is held until the phase is over.
    is_held = training.device == "gpu"
    # Both sub-batches are in flight, and the experts compute for one at a time.
    pieces = training.degree * (NUM_SUB_BATCHES if training.is_two_batch else 1)
    part = 1.0 if is_held else min(1.0, 2 / training.degree)
    comes = (groups.ep > 1) / groups.esp + (groups.esp > 1)
    is_ordered = groups.ep * groups.esp > 1  # the rows of one rank alone lie expert by expert already
    moved = rows.sent * M + sizes * (comes * part + is_ordered / pieces)
    if training.recompute:
        moved += rows.here * rows.up_projections * rows.hidden / pieces
    # Through an activation: the gradient of what is gated, that of both factors, and what is gated once more.
    gated = rows.here * rows.hidden * (3 if experts.gemms == 2 else 2 + rows.up_projections)
    early.append(plus(kept, {AT_WORK: residual + a * (moved + gated / pieces)}))
    # Then the gradients of weights, that of the second products first; the first products are gone.
    less = rows.here * rows.up_projections * rows.hidden / pieces
    second = rows.here * rows.hidden / pieces + weights / experts.gemms
    # The rows go when both are made, and the gradients of rows come; of several chunks the rows of others stay.
    after = 0.0 if pieces == 1 and is_ordered and keeps_rows(training) else sizes / (1 if is_held else training.degree)
    for of_weights in (second, weights + after):
        made = moved + less + of_weights - (less if training.recompute else 0)
        early.append(plus(kept, {ROWS: 0.0 if training.recompute else -a * less, AT_WORK: residual + a * made}))
    # They are passed on, that of the largest weight last, while the rows are sent back.
    largest = 0.0 if stay else weights * (experts.gemms - 1) / experts.gemms
    late.append(plus(attention, {AT_WORK: residual + a * (rows.sent * M + largest)}))
    if training.is_two_batch and training.checkpointing:
        # After its recomputation for the first sub-batch, the second one is still at the attention of the block behind.
        behind = {item: size / NUM_SUB_BATCHES for item, size in attention.items()}
        early = [plus(each, behind) for each in early]
    return early, late


def _attention_needs(attention: Attention, M: int, training: Training) -> float:
    """Return the bytes that the backward of attention makes: gradients of its result, queries, keys and values.
    Materialised scores add the gradients of the softmax and of its result.
    """
    S, a = training.tokens, training.number_bytes
    queries, keys, own_values, values = attention.widths
    if is_eager(attention, M, training):
        scores = training.samples * attention.heads * training.length * training.length
        return a * (S * values + 2 * scores) + (0 if has_sinks(attention, M) else (FP32 - a) * scores)
    return a * S * (values + queries + keys + own_values)


def head_needs(M: int, vocab: int, training: Training) -> tuple[Account, list[Account]]:
    """Return the items of the last norm, the head and the loss: at the end of the forward, and at moments of the
    head's backward.
    """
    S, a = training.tokens, training.number_bytes
    logits = S * vocab
    read = norm(S, M, training) + (0.0 if training.lora else a * S * M)
    kept = read + FP32 * logits
    # Logits as the head makes them and in fp32, which is the same tensor in fp32.
    forward = {LOGITS: kept + a * logits + (a < FP32) * FP32 * logits}
    # The gradient of the logarithms from that of the loss, and that of the logits from it; then in their own type, and
    # with them the gradients of weights and of what the head has read.
    backward: list[Account] = [
        {LOGITS: kept + 2 * FP32 * logits},
        {LOGITS: read + (a < FP32) * FP32 * logits + a * logits},
        {LOGITS: read + a * (logits + (0 if training.lora else vocab * M) + S * M)},
    ]
    return forward, backward
