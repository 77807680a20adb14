# SPDX-License-Identifier: Apache-2.0
"""Puts the weights of a Tutel layer into a layer of DeepSpeed's, before ``initialize``."""

import torch


def load_tutel(moe: torch.nn.Module, state: dict[str, torch.Tensor], prefix: str = "") -> None:
    """Copy a rank's experts and the gate of a Tutel layer into a ``deepspeed.moe.layer.MoE``.

    Args:
        moe: a layer whose experts are Linear, activation, Linear.
        state: the rank's state dict, with all its experts in one tensor for each matrix.
        prefix: of the layer's names in ``state``.
    """
    with torch.no_grad():
        moe.deepspeed_moe.gate.wg.weight.copy_(state[f"{prefix}gates.0.wg.weight"])  # [E, M]
        for i, expert in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
            first, second = expert[0], expert[-1]
            first.weight.copy_(state[f"{prefix}experts.batched_fc1_w"][i])  # [H, M]
            first.bias.copy_(state[f"{prefix}experts.batched_fc1_bias"][i])
            second.weight.copy_(state[f"{prefix}experts.batched_fc2_w"][i].T)  # [H, M] there
            second.bias.copy_(state[f"{prefix}experts.batched_fc2_bias"][i])
