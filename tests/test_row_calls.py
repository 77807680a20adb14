# SPDX-License-Identifier: Apache-2.0
"""Experts on rows, some together and some alone, chunk by chunk, against autograd on all rows of each."""

from __future__ import annotations

import itertools

import pytest
import torch

from ds_fsmoe.components.expert_compute import grouped_products
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.expert_call import sizes_of_call
from ds_fsmoe.components.expert_compute.gradient_sums import make_contiguous
from ds_fsmoe.components.expert_compute.saved import SavedTensors
from tests.expert_cases import make_experts, rows
from tests.live_memory import LiveMemory

M, H = 8, 16
KINDS = (("gpt relu", 2), ("mixtral", 3), ("bottleneck", 1), ("gpt relu", 2))
"""Two structures together, one expert alone, and one of them again."""
SIZES = [[3, 1, 0, 4, 2, 5, 1, 2], [0, 2, 3, 1, 0, 1, 4, 0], [0] * 8, [2, 0, 5, 0, 1, 3, 0, 6]]
"""Chunk -> the rows of each expert."""


@pytest.mark.parametrize("way", ["backward", "recomputed"])
def test_runs_of_experts_of_several_structures_have_their_own_rows_in_every_chunk(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = {"products": 0}
    grouped_mm = torch.nn.functional.grouped_mm

    def counted(*args, **options) -> torch.Tensor:
        counts["products"] += 1
        return grouped_mm(*args, **options)

    monkeypatch.setattr(grouped_products.F, "grouped_mm", counted)
    experts = []
    for kind, count in KINDS:
        made = make_experts(kind, count, M, H, torch.float32)
        assert kind == "bottleneck" or make_contiguous(made)
        experts += made
    sizes = torch.tensor(SIZES)
    sizes_of_chunks = sizes_of_call(SIZES, sizes.cumsum(1).to(torch.int32))
    x, dy = (rows(int(sizes.sum()), M, seed=seed, dtype=torch.float32) for seed in (1, 2))
    call = ExpertSet(experts).call(True, sizes_of_chunks, x, recompute=way == "recomputed")
    chunks = list(itertools.pairwise([0, *sizes.sum(1).cumsum(0).tolist()]))
    y = torch.cat([call.forward(start, stop, x[start:stop]) for start, stop in chunks])
    dx = torch.cat([call.backward(start, stop, dy[start:stop]) for start, stop in chunks])
    assert counts["products"] > 0, "nothing was computed together"
    # Of each row its expert: chunk by chunk, expert by expert.
    of_row = torch.arange(len(experts)).repeat(len(SIZES)).repeat_interleave(sizes.flatten())
    leaf, wanted = x.clone().requires_grad_(), torch.zeros_like(y)
    for index, expert in enumerate(experts):
        result = expert(leaf[of_row == index])
        wanted = wanted.index_put((of_row == index,), result[0] if isinstance(result, tuple) else result)
    parameters = [each for expert in experts for each in expert.parameters()]
    gradients = torch.autograd.grad(wanted, [leaf, *parameters], dy, allow_unused=True)
    for ours, theirs in zip((y, dx, *call.gradients()), (wanted.detach(), *gradients), strict=True):
        if theirs is None:
            assert ours is None
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("order", [None, torch.tensor([4, 0, 1, 3, 2])], ids=["same chunks", "other chunks"])
def test_what_was_kept_goes_when_the_last_chunk_that_needs_it_has_read_it(order: torch.Tensor | None) -> None:
    saved, left = SavedTensors(order), []
    cuts = (0, 3), (3, 5)
    with LiveMemory() as memory:
        for start, stop in cuts:
            saved.put(start, stop, (torch.ones(stop - start, M), None))
        saved.restore(iter(saved.release()))
        for start, stop in cuts:
            left.append(memory.live)
            saved.take(start, stop)
        left.append(memory.live)
    # Chunks of other rows need those of all.
    whole, second = 5 * M * 4, 2 * M * 4
    assert left == [whole, second if order is None else whole, 0]
