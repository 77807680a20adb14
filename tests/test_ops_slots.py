# SPDX-License-Identifier: Apache-2.0
"""From scores to slots: the reference equals a loop over choices; test_gpu_ops.py holds compiled ops against it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("deepspeed")

from torch import Tensor  # noqa: E402

from ds_fsmoe.ops.reference import PRIORITIES  # noqa: E402
from tests.ops_cases import ops_named  # noqa: E402

# (S, E, k, C): odd and prime, k up to E, k above what is found by insertion, no token, no slot, room for all, threads.
SHAPES_SEkC = [
    (1, 1, 1, 1),
    (13, 3, 1, 3),
    (31, 7, 2, 5),
    (29, 5, 5, 11),
    (37, 23, 17, 7),
    (37, 23, 23, 37),
    (0, 3, 2, 5),
    (11, 3, 2, 0),
    (1021, 67, 8, 61),
]


def make_scores(num_tokens: int, num_experts: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """With many equal values, both zeros, infinities and nan."""
    generator = torch.Generator().manual_seed(seed)
    scores_SE = torch.randn(num_tokens, num_experts, generator=generator, dtype=dtype)
    scores_SE[::2] = scores_SE[::2].round()
    special = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan")], dtype=dtype)
    picks = torch.randint(0, 50, scores_SE.shape, generator=generator)
    return torch.where(picks < len(special), special[picks.clamp(max=len(special) - 1)], scores_SE)


def loop(scores_SE: Tensor, k: int, capacity: int, used: list[bool], priority: str) -> tuple[list, list, list]:
    """The definition, one choice at a time."""
    num_experts = scores_SE.shape[1]

    def better(score: float, number: int) -> tuple:
        return (score == score, -score if score == score else 0.0, number)  # nan first, then the highest

    rows = scores_SE.tolist()
    experts_SK = [sorted(range(num_experts), key=lambda e, row=row: better(row[e], e))[:k] for row in rows]
    queue = [(s, j) for s in range(len(rows)) for j in range(k) if used[s]]
    if priority == "choice":
        queue.sort(key=lambda choice: (choice[1], choice[0]))
    counts = [0] * num_experts
    for s, j in queue:
        counts[experts_SK[s][j]] += 1
    if priority == "score":
        staying = set()
        for e in range(num_experts):
            mine = [(s, j) for s, j in queue if experts_SK[s][j] == e]
            staying |= set(sorted(mine, key=lambda choice, e=e: better(rows[choice[0]][e], choice[0]))[:capacity])
        queue = [choice for choice in queue if choice in staying]
    slots_KS, filled = [[num_experts * capacity] * len(rows) for _ in range(k)], [0] * num_experts
    for s, j in queue:
        e = experts_SK[s][j]
        if filled[e] < capacity:
            slots_KS[j][s] = e * capacity + filled[e]
        filled[e] += 1
    return [[row[j] for row in experts_SK] for j in range(k)], slots_KS, counts


@pytest.mark.parametrize("priority", PRIORITIES)
@pytest.mark.parametrize("shape_SEkC", SHAPES_SEkC[:-1], ids=str)
def test_reference_equals_a_loop_over_choices(shape_SEkC: tuple[int, int, int, int], priority: str) -> None:
    reference = ops_named("reference")
    num_tokens, num_experts, k, capacity = shape_SEkC
    for seed in range(3):
        scores_SE = make_scores(num_tokens, num_experts, seed)
        used_S = torch.rand(num_tokens, generator=torch.Generator().manual_seed(seed)) < 0.8 if seed else None
        used = [True] * num_tokens if used_S is None else used_S.tolist()
        found = reference.top_k_slots(scores_SE, k, capacity, used_S, priority)
        assert [each.tolist() for each in found] == list(loop(scores_SE, k, capacity, used, priority))
