# SPDX-License-Identifier: Apache-2.0
"""Computes the bytes of parameters, gradients and optimizer states on a rank, for each ZeRO stage and independent of
the batch. ``memory.py`` calls it; ``memory_activations.py`` has the activations.

Experts are partitioned over the ranks with the same ones (edp), everything else over all replicas (dp). The stages are
those of Rajbhandari et al., ZeRO (arXiv:1910.02054, section 5). Further buffers are those that DeepSpeed 0.19.8
allocates, and those of ``gradients/``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from ds_fsmoe.offline.models.architecture import Architecture, ModelBlock
from ds_fsmoe.offline.models.training import MASTER, Training
from ds_fsmoe.planning.groups import Groups


@dataclass(frozen=True)
class Parameters:
    """Holds the tensor sizes of one rank before ZeRO partitions them, in the order of the model."""

    blocks: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    """Of each block, the elements of each tensor that every rank has, and of those of this rank's experts."""
    num_embedding: int = 0
    """The elements of the embedding, where it is on this rank."""
    num_other: int = 0
    """The elements outside blocks, embedding and head, where they are on this rank."""
    num_head: int = 0
    """The elements of the head, where it is on this rank and a tensor of its own."""
    frozen: Parameters | None = None
    """Those that are not trained, where these are adapters."""

    @property
    def whole(self) -> Parameters:
        """Return all parameters, frozen or not."""
        if self.frozen is None:
            return self
        pairs = zip(self.frozen.blocks, self.blocks, strict=True)
        blocks = tuple((base[0] + own[0], base[1] + own[1]) for base, own in pairs)
        return replace(self.frozen, blocks=blocks)

    def adapters(self, blocks: Sequence[ModelBlock], M: int, groups: Groups, rank: int, targets: str) -> Parameters:
        """Return adapters of these parameters, which become frozen.

        Args:
            blocks: the blocks of these parameters.
            M: the width of the model.
            groups: the ranks over which experts are spread and sharded.
            rank: the rank of the adapters.
            targets: the modules with adapters, one of ``training.LORA_TARGETS``.
        """
        found = []
        for block in blocks:
            dense = tuple(rank * each for pair in block.attention.projections(M) for each in pair)
            experts: tuple[int, ...] = ()
            if targets == "all" and block.experts is not None:
                here, hidden = rank * block.experts.E // groups.ep, block.experts.H // groups.esp
                experts = here * M, here * (block.experts.gemms - 1) * hidden, here * hidden, here * M
            found.append((dense, experts))
        return Parameters(tuple(found), frozen=self)

    @cached_property
    def dense(self) -> tuple[int, ...]:
        """Return the elements of each tensor that every rank has."""
        of_blocks = (each for dense, _ in self.blocks for each in dense)
        return tuple(each for each in (self.num_embedding, *of_blocks, self.num_other, self.num_head) if each)

    @cached_property
    def experts(self) -> tuple[int, ...]:
        """Return the elements of each tensor of this rank's experts."""
        return tuple(each for _, experts in self.blocks for each in experts if each)

    @cached_property
    def dense_of_block(self) -> tuple[int, ...]:
        """Return the elements of each block without experts."""
        return tuple(sum(dense) for dense, _ in self.blocks)

    @cached_property
    def experts_of_block(self) -> tuple[int, ...]:
        """Return the elements of this rank's experts in each block; 0 without experts."""
        return tuple(sum(experts) for _, experts in self.blocks)

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
        cls,
        architecture: Architecture,
        blocks: Sequence[ModelBlock],
        groups: Groups,
        ends: tuple[bool, bool] = (True, True),
    ) -> Parameters:
        """Return the parameters of some blocks.

        Args:
            architecture: the model.
            blocks: the blocks of one pipeline stage.
            groups: the ranks over which experts are spread and sharded.
            ends: whether the embedding, and whether the last norm and the head, are in this stage.
        """
        M, embedding = architecture.M, architecture.vocab * architecture.M
        found = tuple((each.dense_tensors(M), _experts(each, M, groups)) for each in blocks)
        has_head = ends[1] and not (architecture.is_tied and ends[0])
        return cls(found, embedding * ends[0], architecture.num_other * ends[1], embedding * has_head)


def _experts(block: ModelBlock, M: int, groups: Groups) -> tuple[int, ...]:
    """Return the elements of this rank's tensors of experts."""
    experts = block.experts
    return () if experts is None else tuple(experts.E // groups.ep * each for each in experts.of_one(M, groups.esp))


Account = Mapping[str, float]
"""An item to its bytes."""

PARAMETERS = "parameters"
FROZEN = "frozen parameters"
MASTERS = "master weights"
OPTIMIZER = "optimizer states"
GRADIENTS = "gradients"
MESSAGE = "messages of gradients"
BUCKETS = "DeepSpeed's buckets"
GATHERED = "gathered parameters"
STEP = "inside the optimizer step"

MOST_SENT = 500_000_000
"""The elements of a message of gradients without ZeRO, at the most."""
FEWEST_SENT = 1 << 16
"""With ZeRO 1 and 2, where ``reduce_bucket_size`` over the ranks is less."""
SUB_GROUP = 1_000_000_000
"""``zero_optimization.sub_group_size``, in elements: stage 3 updates as many at a time."""


def plus(*accounts: Account) -> dict[str, float]:
    """Return the sum of accounts, item by item."""
    total: dict[str, float] = {}
    for account in accounts:
        for item, size in account.items():
            total[item] = total.get(item, 0.0) + size
    return total


@dataclass(frozen=True)
class States:
    """Holds the memory of a rank besides activations."""

    rest: Account
    """Between two steps."""
    head: Account
    """In the forward, and until the backward of the head is over, besides."""
    before: tuple[Account, ...]
    """In the backward of each block, until its experts have their gradients, besides."""
    behind: tuple[Account, ...]
    """In the backward of each block from there on, besides."""
    after: Account
    """At the end of the backward, when all gradients are there, besides."""
    steps: tuple[Account, ...]
    """At each moment of the optimizer step, besides."""
    keeps_expert_gradients: bool = False
    """Whether gradients of experts stay where the backward makes them."""
    host: Account = field(default_factory=dict)
    """In the memory of the host."""


def states_of(parameters: Parameters, groups: Groups, training: Training) -> States:
    """Return the states on a rank for a model, or for its pipeline stage."""
    dp, edp = groups.stage // groups.mp, groups.edp
    make = (_stage_0, _stages_1_and_2, _stages_1_and_2, _stage_3)[training.zero]
    states = make(parameters, dp, edp, training)
    if parameters.frozen is None:
        return states
    share = (1 / dp, 1 / edp) if training.zero == 3 else (1, 1)
    frozen = share[0] * parameters.frozen.num_dense + share[1] * parameters.frozen.num_experts
    return replace(states, rest=plus(states.rest, {FROZEN: training.number_bytes * frozen}))


def _uses_own_buffers(dp: int, training: Training) -> bool:
    """Return True if gradients are sent in our buffers. A model without a replica has none to reduce; stage 3 and
    BF16_Optimizer reduce them themselves.
    """
    is_bf16_optimizer = training.zero == 1 and training.gradient_bytes > training.number_bytes
    return training.early_gradients and dp > 1 and training.zero < 3 and not is_bf16_optimizer


def _gradients_present(parameters: Parameters, has_dense: bool, has_experts: bool) -> tuple[list[int], list[int]]:
    """Return for each block the elements with gradients, except those that we send: (at the begin of its backward,
    once its experts have theirs). A backward makes those of the head first.

    Args:
        parameters: the parameters.
        has_dense, has_experts: whether we send the gradients of dense parameters, and of experts.
    """
    blocks = list(zip(parameters.experts_of_block, parameters.dense_of_block, strict=True))
    before, behind = [], []
    there = (not has_dense) * parameters.num_head
    for of_experts, of_dense in reversed(blocks):
        before.append(there)
        behind.append(there + (not has_experts) * of_experts)
        there = behind[-1] + (not has_dense) * of_dense
    return before[::-1], behind[::-1]


def _temporary(training: Training, elements: float) -> float:
    """Return the temporary bytes of one update of ``elements`` numbers. Torch's Adam makes two tensors per
    parameter: the root of the second moment, and its sum with epsilon. Fused kernels need none.
    """
    return 2 * MASTER * elements if training.optimizer == "torch_adam" else 0.0


def _stage_0(parameters: Parameters, dp: int, edp: int, training: Training) -> States:
    a, dense, experts = training.number_bytes, parameters.num_dense, parameters.num_experts
    everything = dense + experts
    rest: dict[str, float] = {PARAMETERS: a * everything, OPTIMIZER: training.state_bytes * everything}
    if a < MASTER:
        rest[MASTERS] = MASTER * everything
    after = {GRADIENTS: a * everything}
    largest = max((*parameters.dense, *parameters.experts))
    if a == MASTER:
        steps = [plus(after, {STEP: _temporary(training, largest)})]
    elif training.optimizer == "adam":
        # FP16_Optimizer: the gradients of a group in fp32, tensor by tensor and then end to end; the dense ones first.
        steps = [plus(after, {STEP: MASTER * size}) for size in (2 * dense, dense + 2 * experts, everything) if size]
    else:
        # FP16_UnfusedOptimizer: all gradients in fp32, tensor by tensor.
        steps = [plus(after, {STEP: MASTER * everything + _temporary(training, largest)})]
    before, behind = (
        tuple({GRADIENTS: a * each} for each in of) for of in _gradients_present(parameters, False, False)
    )
    message: Account = {MESSAGE: a * min(MOST_SENT, dense) * _uses_own_buffers(dp, training)}
    return States(rest, {}, before, behind, plus(after, message), tuple(steps), keeps_expert_gradients=True)


def most_in_partition(sizes: Sequence[int], parts: int) -> int:
    """Return the elements of all tensors in the fullest partition; those that only begin or end there count whole.
    ZeRO 1 and 2 copy as many gradients.
    """
    if not sum(sizes):
        return 0
    cut = -(-sum(sizes) // parts)
    bounds = np.cumsum([0, *sizes])
    begins = np.arange(parts) * cut
    begins = begins[begins < bounds[-1]]
    firsts = np.searchsorted(bounds[1:], begins, side="right")
    behinds = np.searchsorted(bounds[:-1], begins + cut, side="left")
    return int((bounds[behinds] - bounds[firsts]).max())


def _waiting(sent: int, block: int, training: Training) -> int:
    """Return the number of waiting gradient elements that we send: at stage 2 a bucket and a block."""
    return sent if training.zero == 1 else min(sent, training.reduce_bucket + block)


def _buckets(sent: int, dp: int, training: Training) -> float:
    """Return the bytes of DeepSpeed's bucket, or of ours: a message, the data received by its owner, and the sum."""
    ours = (dp + 2) * min(sent, max(FEWEST_SENT, training.reduce_bucket // dp))
    return training.number_bytes * max(training.reduce_bucket, ours)


def _stages_1_and_2(parameters: Parameters, dp: int, edp: int, training: Training) -> States:
    a, g, dense, experts = (
        training.number_bytes,
        training.gradient_bytes,
        parameters.num_dense,
        parameters.num_experts,
    )
    parts = [each for each in (dense / dp, experts / edp) if each]
    held = sum(parts)
    rest: dict[str, float] = {
        PARAMETERS: a * (dense + experts),
        MASTERS: MASTER * held,
        OPTIMIZER: training.state_bytes * held,
    }
    everything = _gradients_present(parameters, False, False)
    if g > a and training.zero == 1 and not training.offload:
        # BF16_Optimizer: fp32 gradients of all parameters, end to end; and those that the backward makes stay.
        rest[GRADIENTS] = g * (dense + experts)
        before, behind = (tuple({GRADIENTS: a * each} for each in of) for of in everything)
        after = {GRADIENTS: a * (dense + experts)}
        steps = [plus(after, {STEP: _temporary(training, each)}) for each in parts]
        return States(rest, {}, before, behind, after, tuple(steps), keeps_expert_gradients=True)
    has_dense = _uses_own_buffers(dp, training)
    has_experts = has_dense and edp > 1
    stay = training.zero == 1 and not has_experts
    of_blocks = zip(parameters.experts_of_block, parameters.dense_of_block, strict=True)
    # The block that has most of those that we send.
    block = max((has_experts * of_experts + has_dense * of_dense for of_experts, of_dense in of_blocks), default=0)
    ours = has_dense * dense + has_experts * experts
    whole = most_in_partition(parameters.dense, dp) + most_in_partition(parameters.experts, edp)
    copied = g * held if g > a else a * whole
    soon = copied
    if g > a:  # in fp32, group by group: those that we send get theirs at the end
        soon = g * ((not has_experts) * experts / edp + (not has_dense) * dense / dp)

    def there(elements: int, all_elements: int) -> Account:
        # Of those that we send, at stage 2 a bucket and a block wait; of the others a rank keeps its own part.
        sent = all_elements - elements
        waiting = _waiting(sent, block, training)
        buckets = _buckets(sent, dp, training)
        if training.offload:
            return {BUCKETS: buckets, GRADIENTS: a * (waiting + (training.zero == 1) * elements)}
        kept = a * (waiting + (sent - waiting) * held / (dense + experts))
        if training.zero == 1:
            return {BUCKETS: buckets, GRADIENTS: a * elements + kept}
        # When the first bucket is full the copies get their memory, all of it.
        return {BUCKETS: buckets, GRADIENTS: kept + (soon if elements > training.reduce_bucket else 0.0)}

    lefts = _gradients_present(parameters, has_dense, has_experts)
    early, late = (tuple(map(there, *each)) for each in zip(lefts, everything, strict=True))
    bucket = a * training.reduce_bucket
    if training.offload:
        # A rank's part is updated on the host, to which each gradient goes when it is summed. There DeepSpeed has
        # masters, their gradients in fp32, states, the copies sent back, and a buffer for one gradient.
        room = {BUCKETS: a * max((*parameters.dense, *parameters.experts))}
        on_host = {MASTERS: rest.pop(MASTERS), OPTIMIZER: rest.pop(OPTIMIZER)}
        host = {**on_host, GRADIENTS: MASTER * held, PARAMETERS: a * held, **room}
        return States(rest | room, {}, early, late, {BUCKETS: bucket}, ({},), stay, host)
    left = (not has_experts) * experts + (not has_dense) * dense
    left = max(0, left - training.reduce_bucket) if training.zero == 1 else 0
    # What a rank has of sums is copied into its part then; at stage 1 all may be there just before.
    own = a * ours * whole / (dense + experts)
    full: Account = {BUCKETS: bucket, GRADIENTS: copied + a * left + max(own, (training.zero == 1) * a * ours - copied)}
    steps = []
    for place, part in enumerate(parts):
        is_last = place == len(parts) - 1
        flat = a * part if a < MASTER and g == a else 0.0
        steps.append({GRADIENTS: copied, STEP: MASTER * part + flat})
        # The copies are one memory, which goes with the last view of it.
        steps.append({GRADIENTS: 0.0 if is_last else copied, STEP: MASTER * part + _temporary(training, part)})
    return States(rest, {}, early, late, full, tuple(steps), stay)


def _stage_3(parameters: Parameters, dp: int, edp: int, training: Training) -> States:
    a, g, dense, experts = (
        training.number_bytes,
        training.gradient_bytes,
        parameters.num_dense,
        parameters.num_experts,
    )
    parts = [dense / dp, experts / edp]
    held = sum(parts)
    # On a CPU DeepSpeed compares "cpu" with "cpu:0", and copies fp32 parameters that could be updated where they are.
    is_shared = a == MASTER and training.device == "gpu"
    rest: dict[str, float] = {
        PARAMETERS: a * held,
        MASTERS: 0.0 if is_shared else MASTER * held,
        OPTIMIZER: training.state_bytes * held,
        GRADIENTS: g * held,
        BUCKETS: a * training.reduce_bucket,
    }
    whole = parameters.whole
    of_blocks = [
        (edp > 1) * of_experts + (dp > 1) * of_dense
        for of_experts, of_dense in zip(whole.experts_of_block, whole.dense_of_block, strict=True)
    ]
    cut = (dp > 1) * whole.num_dense + (edp > 1) * whole.num_experts
    small = sum(each for each in whole.dense if each < training.persistence) if dp > 1 else 0
    # The prefetcher runs ahead, module by module, until so many parameters are there; those of experts that are on one
    # rank alone count, and take nothing. What the module at hand needs comes on top.
    share = min(1.0, training.max_live / max(1, whole.num_dense + whole.num_experts))
    largest = max((edp > 1) * max((0, *whole.experts_of_block)), (dp > 1) * max(whole.dense))
    most = share * cut + (largest if share < 1 else 0)

    # A message stays until the last of its parameters is needed, besides the parameters that are copied out of it.
    message = min(training.prefetch_bucket, cut)

    def gathered(elements: int) -> Account:
        return {GATHERED: a * (max(0.0, min(elements, most) - small) + message)}

    # The parameters behind a block are released when its backward runs.
    embedding = (dp > 1) * whole.num_embedding
    ahead = tuple(gathered(embedding + sum(of_blocks[: place + 1])) for place in range(len(of_blocks)))
    steps = []
    for part in parts:
        size = min(part, SUB_GROUP)
        flat = g * size if g < MASTER else 0.0
        steps.append({STEP: MASTER * size + max(flat, _temporary(training, size))})
    rest[GATHERED] = a * small
    return States(rest, gathered(cut), ahead, ahead, {}, tuple(steps))
