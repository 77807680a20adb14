# SPDX-License-Identifier: Apache-2.0
"""Checks what ``fsmoe.placement`` asks for, together with the rest of the block."""

from __future__ import annotations

from ds_fsmoe.config.blocks import FSMoEBlock, PlacementBlock
from ds_fsmoe.config.words import BLOCK, shown
from ds_fsmoe.planning.placement_policies import policy

STAY = ("off", "lina")
"""The policies by which no expert moves while training goes on."""
_OF_MOVES = ("every", "moves_per_step", "pays_within")


def unfit_placement(block: FSMoEBlock) -> list[str]:
    """Return what cannot be of the placement that a block asks for.

    Args:
        block: the whole block, enabled.
    """
    asked, path = block.placement, f"{BLOCK}.placement"
    problems = []
    if asked.policy not in STAY:
        try:
            policy(asked.policy)
        except ValueError as error:
            return [f"{path}.policy = {shown(asked.policy)}: {error}; lina chooses ep_size at start"]
        if block.esp_size > 1:
            problems.append(
                f"{path}.policy = {shown(asked.policy)}: experts that are sharded stay where they are; use "
                f'{BLOCK}.expert_tensor_parallel_size = 1, or "off"'
            )
    else:
        idle = PlacementBlock()
        problems += [
            f"{path}.{name} = {shown(getattr(asked, name))}: only with a policy by which experts move, such as "
            f"balanced, and it is {shown(asked.policy)}; leave it out"
            for name in _OF_MOVES
            if name in asked.model_fields_set and getattr(asked, name) != getattr(idle, name)
        ]
    return problems
