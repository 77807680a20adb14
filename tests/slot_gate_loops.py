# SPDX-License-Identifier: Apache-2.0
"""The oracle for gates in which slots choose: whole layers of one rank as plain loops, in one process, for float64.

Nothing here has slots in memory, a top-k or a softmax: numbers are compared and added up one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

Expert = Callable[[torch.Tensor], torch.Tensor]


def softmax(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Of scalars."""
    highest = max(value.item() for value in values)
    powers = [torch.exp(value - highest) for value in values]
    total = sum(powers)
    return [power / total for power in powers]


def expert_choice_layer(
    x_SM: torch.Tensor,
    weight_EM: torch.Tensor,
    experts: Sequence[Expert],
    num_taken: int,
    used_S: Sequence[bool] | None = None,
) -> tuple[torch.Tensor, list[list[int]]]:
    """Each expert takes ``num_taken`` of the tokens.

    Returns:
        The output [S, M]; for each expert its tokens, best first.
    """
    used = [token for token in range(len(x_SM)) if used_S is None or used_S[token]]
    scores = [softmax([(weight_M * x_M).sum() for weight_M in weight_EM]) for x_M in x_SM]
    rows_SM = [0 * x_M for x_M in x_SM]
    taken = []
    for number, expert in enumerate(experts):
        best_first = sorted(used, key=lambda token: -scores[token][number].item())
        taken.append(best_first[:num_taken])
        for token in taken[-1]:
            rows_SM[token] = rows_SM[token] + scores[token][number] * expert(x_SM[token : token + 1])[0]
    return torch.stack(rows_SM), taken


def softmoe_layer(
    x_SM: torch.Tensor,
    weight_RM: torch.Tensor,
    experts: Sequence[Expert],
    slots_per_expert: int,
    used_S: Sequence[bool] | None = None,
) -> torch.Tensor:
    """Each slot gets a mixture of the tokens, each token one of the slots' results; the output [S, M]."""
    used = [token for token in range(len(x_SM)) if used_S is None or used_S[token]]
    logits = {token: [(weight_M * x_SM[token]).sum() for weight_M in weight_RM] for token in used}
    results = []
    for slot in range(len(weight_RM)):
        shares = softmax([logits[token][slot] for token in used]) if used else []
        mixed_M = torch.zeros(x_SM.shape[1], dtype=x_SM.dtype)
        for token, share in zip(used, shares, strict=True):
            mixed_M = mixed_M + share * x_SM[token]
        results.append(experts[slot // slots_per_expert](mixed_M.unsqueeze(0))[0])
    rows_SM = [0 * x_M for x_M in x_SM]
    for token in used:
        for share, result_M in zip(softmax(logits[token]), results, strict=True):
            rows_SM[token] = rows_SM[token] + share * result_M
    return torch.stack(rows_SM)
