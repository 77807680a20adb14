# SPDX-License-Identifier: Apache-2.0
"""Describes an architecture in the lines that ``ds_fsmoe plan`` prints."""

from __future__ import annotations

from collections import Counter

from ds_fsmoe.offline.models.architecture import Architecture, Attention, Experts


def describe(architecture: Architecture) -> list[tuple[str, str]]:
    """Return the lines about a model, each with its name: its blocks and parameters, its experts, its attention."""
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


def _of_experts(experts: Experts) -> str:
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
    """Return kinds in one line; with their numbers where there are several."""
    if len(texts) == 1:
        return next(iter(texts))
    return "; ".join(f"{count} x {text}" for text, count in texts.items())
