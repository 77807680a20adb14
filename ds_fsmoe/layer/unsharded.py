# SPDX-License-Identifier: Apache-2.0
"""Keeps experts whole until their shards can be cut.

A script fills the experts of a layer by DeepSpeed's rule: rank r has those of EP rank ``r % ep`` (``r // (ranks / ep)``
with ``use_data_before_expert_parallelism``), and of all ranks with the same ones DeepSpeed lets the first decide. Where
experts are sharded, the layout differs: neighbours share the experts of one EP rank. So each rank keeps its experts
whole until the process groups are there, and then every shard is cut from the expert that DeepSpeed would have trained.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.checkpoint_files.numbering import Cut, cut_out
from ds_fsmoe.components.expert_compute.shards import cuts_of
from ds_fsmoe.distributed.fail_together import on_every_rank
from ds_fsmoe.distributed.waits import waiting
from ds_fsmoe.log import log_on_rank_0

_SAMPLES = 1024
"""The elements of a tensor by which experts are told apart, for a warning only."""


class UnshardedExperts:
    """Keeps the experts of one layer as the script has filled them, until their shards have been handed out.

    Args:
        experts: the whole experts of this rank.
    """

    def __init__(self, experts: Sequence[nn.Module]) -> None:
        self._experts = experts

    @torch.no_grad()
    def hand_out(
        self, shards: Sequence[nn.Module], group: dist.ProcessGroup, rules: Sequence[int], esp: int, path: str
    ) -> None:
        """Fill this rank's shards from the experts of the ranks that decide on them. Collective over the block.

        Args:
            shards: the shards of this rank, as many as its whole experts; in their final types and on their device.
            group: the block: rank i of it holds shard ``i % esp`` of the experts of EP rank ``i // esp``.
            rules: for each rank of the block, the EP rank whose experts it has by DeepSpeed's rule.
            esp: the number of shards of an expert.
            path: the path of the layer, for messages.
        """
        own, ep = dist.get_rank(group), len(rules) // esp
        deciding = [rules.index(ep_rank) for ep_rank in range(ep)]
        self._warn_if_filled_otherwise(group, rules, deciding, esp, path)
        receivers = range(rules[own] * esp, (rules[own] + 1) * esp) if deciding[rules[own]] == own else ()
        for whole, shard in zip(self._experts, shards, strict=True):
            cuts, targets = cuts_of(whole), dict(_tensors(shard))
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
                # A copy, as a part of a larger buffer need not begin where an element of its type may.
                target.copy_(values.clone().view(target.dtype).view(target.shape))

    def _warn_if_filled_otherwise(
        self, group: dist.ProcessGroup, rules: Sequence[int], deciding: Sequence[int], esp: int, path: str
    ) -> None:
        """Warn if ranks have equal experts where shards share one, but not where DeepSpeed's rule makes them equal."""
        digests = on_every_rank(self._digest(), group)
        by_rule = all(digests[rank] == digests[deciding[rule]] for rank, rule in enumerate(rules))
        by_shards = all(digests[rank] == digests[rank // esp * esp] for rank in range(len(rules)))
        if by_shards and not by_rule:
            log_on_rank_0(
                f"{path}: runs of {esp} neighbouring ranks have the same experts, and ranks that should have the "
                "same ones by DeepSpeed's rule have not. With fsmoe.expert_tensor_parallel_size = "
                f"{esp}, too, rank r has to be filled with the experts of EP rank r % ep_size before "
                "initialize(), and what ranks have by another rule is lost: if these are pretrained weights, "
                "fill them by that rule",
                logging.WARNING,
            )

    def _digest(self) -> str:
        digest = hashlib.sha256()
        for expert in self._experts:
            for _, tensor in _tensors(expert):
                flat = tensor.detach().reshape(-1)
                sample = flat[:: max(1, flat.numel() // _SAMPLES)].contiguous().cpu()
                digest.update(_as_bytes(sample).numpy().tobytes())
        return digest.hexdigest()


def _bytes_of_shard(
    whole: nn.Module, targets: Mapping[str, torch.Tensor], cuts: Mapping[str, Cut], index: int, count: int
) -> torch.Tensor:
    """Return the contents of an expert's shard, in the types and on the device of this rank's shard."""
    parts = (
        cut_out(tensor.detach(), cuts.get(name, "whole"), index, count).to(targets[name])
        for name, tensor in _tensors(whole)
    )
    return torch.cat([_as_bytes(each) for each in parts])


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def facts_of_experts(layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return what, besides the shapes of parameters, has to be alike on all ranks so that each can take over the
    experts of another, as short texts by name."""
    facts = {}
    for name, layer in layers.items():
        for index, expert in enumerate(layer.deepspeed_moe.experts.deepspeed_experts):
            frozen = [each for each, parameter in expert.named_parameters() if not parameter.requires_grad]
            buffers = [f"{each} {list(buffer.shape)}" for each, buffer in expert.named_buffers()]
            facts[f"{name}: frozen parameters of expert {index}"] = ", ".join(frozen) or "none"
            facts[f"{name}: buffers of expert {index}"] = ", ".join(buffers) or "none"
    return facts
