# SPDX-License-Identifier: Apache-2.0
"""Predicts the memory of one rank that trains a model, item by item, and the largest micro-batch that fits.
``ds_fsmoe plan`` calls it.

The peak is the fullest of several moments: the end of the forward, the backward of the head or of a block, and the
optimizer step. Items of one moment are added up; moments are not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from ds_fsmoe.offline.models.architecture import Architecture, ModelBlock
from ds_fsmoe.offline.models.memory_activations import (
    ATTENTION,
    FP32,
    INPUTS,
    NORMS,
    block_keeps,
    block_needs,
    head_needs,
    is_eager,
)
from ds_fsmoe.offline.models.memory_states import Account, Parameters, plus, states_of
from ds_fsmoe.offline.models.training import GB, STAGES, Training
from ds_fsmoe.planning.groups import Groups, num_communicators

COMMUNICATORS = "NCCL and CUDA (estimated)"
COMMUNICATOR_BYTES = 512 * 2**20
"""An estimate. Reports of a communicator: 388 MiB on an RTX 3060 (sgl-project/sglang, pull request 35538), 544 MB for
two and 688 MB for more A100 with NVLink (NVIDIA/nccl, issue 964), 3.3 GB after an all-to-all of 8 H100 (issue 1685)."""
CONTEXT_BYTES = 0.75e9
"""An estimate: a process that uses CUDA takes 0.5 to 1 GB ahead of its first tensor (781 MB in pytorch/pytorch, issue
34323)."""
MOST_SAMPLES = 1 << 20


@dataclass(frozen=True)
class Moment:
    """Holds the items in memory at one moment."""

    name: str
    items: Account
    """An item to its bytes."""

    @property
    def total(self) -> float:
        """Return the bytes of all items."""
        return sum(self.items.values())


@dataclass(frozen=True)
class Memory:
    """Holds the predicted memory of one rank."""

    moments: tuple[Moment, ...]
    host: Account = field(default_factory=dict)
    """The bytes that a rank holds on the host, in the optimizer's offload."""

    @property
    def peak(self) -> Moment:
        """Return the fullest moment."""
        return max(self.moments, key=lambda each: each.total)

    @property
    def total(self) -> float:
        """Return the bytes of the fullest moment."""
        return self.peak.total

    @property
    def on_host(self) -> float:
        """Return the bytes on the host."""
        return sum(self.host.values())


def memory_of(architecture: Architecture, groups: Groups, training: Training) -> Memory:
    """Return the memory of one rank of a job; with pipeline stages, the fuller of the first and the last.

    Raises:
        ValueError: ranks do not divide the experts, or DeepSpeed or ds_fsmoe refuses the settings.
    """
    _check(architecture, groups, training)
    stages = [_stage(architecture, groups, training, stage) for stage in sorted({0, groups.pp - 1})]
    return max(stages, key=lambda each: each.total)


def _check(architecture: Architecture, groups: Groups, training: Training) -> None:
    experts = architecture.num_experts
    if experts and experts % groups.ep:
        raise ValueError(f"ep = {groups.ep}: must divide the {experts} experts of {architecture.name}")
    if len(architecture.blocks) < groups.pp:
        raise ValueError(f"pp = {groups.pp}: {architecture.name} has {len(architecture.blocks)} blocks")
    if training.zero == 3 and groups.esp > 1:
        raise ValueError(f"expert_tensor_parallel_size = {groups.esp}: not supported at ZeRO 3 (docs/compatibility.md)")
    if groups.mp > 1:
        raise ValueError(f"mp = {groups.mp}: models of transformers have no model parallelism here")
    if training.zero > 1 and groups.pp > 1:
        raise ValueError(f"zero = {training.zero}: DeepSpeed's pipelines support ZeRO 0 and 1 only")


def _stage(architecture: Architecture, groups: Groups, training: Training, stage: int) -> Memory:
    blocks = architecture.blocks
    own = blocks[stage * len(blocks) // groups.pp : (stage + 1) * len(blocks) // groups.pp]
    ends = stage == 0, stage == groups.pp - 1
    parameters = Parameters.of(architecture, own, groups, ends)
    if training.lora:
        parameters = parameters.adapters(own, architecture.M, groups, training.lora, training.lora_targets)
    states = states_of(parameters, groups, training)
    # With one batch in flight for each stage that is still to come, the first one keeps the most.
    in_flight = groups.pp - stage
    M = architecture.M
    inputs, keeps = _kept(own, M, groups, training)
    base = plus(states.rest, _outside(groups, training))
    others = plus(
        {INPUTS: (in_flight - 1) * sum(inputs)},
        *({item: (in_flight - 1) * size for item, size in each.items()} for each in keeps),
    )
    computing = plus(base, others)
    all_kept = plus(states.head, *keeps, {INPUTS: sum(inputs)})
    moments = []
    if ends[1]:
        forward, backward = head_needs(M, architecture.vocab, training)
        moments.append(Moment("end of the forward", plus(computing, all_kept, forward)))
        moments += [Moment("backward of the head", plus(computing, all_kept, each)) for each in backward]
    # A checkpointed block keeps its input, its choices and its mask until its backward is over.
    until: list[Account] = [{}]
    for kept in keeps:
        until.append(plus(until[-1], kept))
    for place in reversed(range(len(own))):
        ahead = plus(until[place + training.checkpointing], {INPUTS: sum(inputs[: place + 1])})
        if training.checkpointing and training.number_bytes == FP32:
            # The input of the block is that of its first norm.
            ahead = plus(ahead, {NORMS: -inputs[place]})
        weights = parameters.experts_of_block[place]
        needed = block_needs(own[place], M, groups, training, weights, states.keeps_expert_gradients)
        for of_moments, of_states in zip(needed, (states.before[place], states.behind[place]), strict=True):
            moments += [
                Moment(f"backward of block {place}", plus(computing, ahead, of_states, each)) for each in of_moments
            ]
    moments.append(Moment("end of the backward", plus(base, states.after)))
    moments += [Moment("optimizer step", plus(base, each)) for each in states.steps]
    return Memory(tuple(Moment(each.name, _shown(each.items)) for each in moments), _shown(states.host))


def _shown(items: Account) -> Account:
    return {item: size for item, size in items.items() if round(size)}


def _kept(
    blocks: Sequence[ModelBlock], M: int, groups: Groups, training: Training
) -> tuple[list[float], list[Account]]:
    """Return for each block the bytes of its separately kept input, and the other items that it keeps."""
    S, a = training.tokens, training.number_bytes
    if not training.checkpointing:
        return [0.0] * len(blocks), [block_keeps(each, M, groups, training) for each in blocks]
    keeps: list[Account] = []
    for block in blocks:
        # The choices, so that the same experts are chosen again; and a mask where attention is eager, one of each kind.
        chosen = S * block.experts.K * FP32 if block.experts is not None else 0.0
        masked = is_eager(block.attention, M, training) and all(
            (each.attention.kind, each.attention.window) != (block.attention.kind, block.attention.window)
            for each in blocks[: len(keeps)]
        )
        mask = a * training.samples * training.length * training.length if masked else 0.0
        keeps.append({ATTENTION: mask, INPUTS: chosen})
    return [a * S * M] * len(blocks), keeps


def _outside(groups: Groups, training: Training) -> Account:
    """Return the GPU memory besides tensors: the communicators of the default group, and of the engine if it
    measures all-to-alls.
    """
    if training.device != "gpu":
        return {}
    sends_gradients = training.early_gradients and training.zero < 3
    count = (groups.world > 1) + num_communicators(groups, sends_gradients, "auto")
    return {COMMUNICATORS: CONTEXT_BYTES + COMMUNICATOR_BYTES * count}


def largest_batch(architecture: Architecture, groups: Groups, training: Training, memory_gb: float) -> int:
    """Return the largest micro-batch that fits into ``memory_gb`` * 10^9 bytes; 0 if one sample does not fit."""

    def fits(samples: int) -> bool:
        return memory_of(architecture, groups, replace(training, samples=samples)).total <= memory_gb * GB

    if not fits(1):
        return 0
    most = 1
    while most < MOST_SAMPLES and fits(2 * most):
        most *= 2
    fitting, too_many = most, 2 * most
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fitting, too_many = (middle, too_many) if fits(middle) else (fitting, middle)
    return fitting


@dataclass(frozen=True)
class LayoutMemory:
    """Holds one layout of a model with its memory."""

    zero: int
    groups: Groups
    memory: Memory
    largest_batch: int | None = None
    """``None``: the memory of a GPU is not known."""
    fits: bool | None = None
    """Whether a GPU has as much for the batch that is asked for."""


def other_memories(
    architecture: Architecture, groups: Groups, training: Training, memory_gb: float | None
) -> list[LayoutMemory]:
    """Return the memory for other ZeRO stages and other layouts of experts, on the same ranks."""
    others = [replace(groups, ep=ep, esp=esp) for ep, esp in _layouts(architecture, groups)]
    found = _not_refused(architecture, others, training)
    return [_with_batch(architecture, each, training, memory_gb) for each in found]


def on_cards(architecture: Architecture, training: Training, memory_gb: float | None) -> list[LayoutMemory]:
    """Return, for 1, 2, 4 and 8 GPUs of one node, the ZeRO stage and EP size with the least memory."""
    found = []
    for gpus in (1, 2, 4, 8):
        sizes = (each for each in range(1, gpus + 1) if not gpus % each and not architecture.num_experts % each)
        tried = _not_refused(architecture, [Groups(gpus, gpus, ep=ep) for ep in sizes], training)
        least = min(tried, key=lambda each: each.memory.total)
        found.append(_with_batch(architecture, least, training, memory_gb))
    return found


def _not_refused(architecture: Architecture, layouts: Sequence[Groups], training: Training) -> list[LayoutMemory]:
    """Return the memory of each ZeRO stage in each layout, without refused combinations."""
    found = []
    for zero, groups in itertools.product(STAGES, layouts):
        with suppress(ValueError):
            found.append(LayoutMemory(zero, groups, memory_of(architecture, groups, replace(training, zero=zero))))
    return found


def _with_batch(
    architecture: Architecture, layout: LayoutMemory, training: Training, memory_gb: float | None
) -> LayoutMemory:
    if memory_gb is None:
        return layout
    most = largest_batch(architecture, layout.groups, replace(training, zero=layout.zero), memory_gb)
    return replace(layout, largest_batch=most, fits=most >= training.samples)


def _layouts(architecture: Architecture, groups: Groups) -> list[tuple[int, int]]:
    """Return the (ep, esp) layouts to show: the requested one, half and twice its EP size, 1 and the largest, and
    two shards.
    """
    experts = architecture.num_experts or 1
    allowed = [each for each in range(1, groups.stage + 1) if not experts % each and not groups.stage % each]
    wanted = {(each, groups.esp) for each in (groups.ep // 2, groups.ep, 2 * groups.ep)}
    wanted |= {(1, 1), (max(allowed), 1), (groups.ep, 2 * groups.esp)}
    return sorted((ep, esp) for ep, esp in wanted if ep in allowed and not groups.stage % (ep * esp))
