# SPDX-License-Identifier: Apache-2.0
"""What a call of the experts keeps until its backward, and when it lets it go."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
from torch import nn

from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.saved import SavedTensors
from tests.expert_cases import EVERY, EVERY_WRITTEN, GRAPH, WRITTEN, C, H, M, forward, make_experts, rows
from tests.live_memory import LiveMemory


def tensors_within(thing: object) -> dict[int, torch.Tensor]:
    """Storage -> a tensor on it, for all that an object holds, parameters and what they hold left out."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()

    def visit(each: object) -> None:
        if id(each) in seen or isinstance(each, (nn.Module, nn.Parameter, str, int, torch.device, torch.dtype)):
            return
        seen.add(id(each))
        if isinstance(each, torch.Tensor):
            found[each.untyped_storage().data_ptr()] = each
        elif type(each).__module__.startswith("ds_fsmoe"):
            visit(vars(each))
        elif isinstance(each, (dict, list, tuple, set)):
            for one in each.values() if isinstance(each, dict) else each:
                visit(one)

    visit(thing)
    return found


@EVERY_WRITTEN
def test_no_more_is_kept_than_autograd_keeps(name: str) -> None:
    for (num_ranks, count), frozen in itertools.product(((1, 3), (2, 1), (2, 3)), ("none", "up", "down", "all")):
        experts = make_experts(name, count)
        for linear in (module for expert in experts for module in expert.modules() if isinstance(module, nn.Linear)):
            is_up = linear.out_features == H
            linear.requires_grad_(not (frozen == "all" or frozen == ("up" if is_up else "down")))
        kept: dict[int, int] = {}
        parameters = {each.untyped_storage().data_ptr() for expert in experts for each in expert.parameters()}
        leaf_NeCM = rows(num_ranks, count, C, M).requires_grad_()

        def note(tensor: torch.Tensor, kept=kept) -> torch.Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            results = [expert(leaf_NeCM[:, i]) for i, expert in enumerate(experts)]
        theirs = sum(nbytes for storage, nbytes in kept.items() if storage not in parameters)
        assert len(results) == count
        for sizes in ([13], [5, 5, 3]):
            call = ExpertSet(experts).call(True)
            forward(call, x_NeCM := rows(num_ranks, count, C, M), sizes)
            ours = sum(each.untyped_storage().nbytes() for each in tensors_within(call).values())
            assert 0 < ours <= theirs
            hidden = num_ranks * count * C * H * 8 * (2 if name == "mixtral" else 1)
            assert ours == hidden + (x_NeCM.nbytes if frozen in ("none", "down") else 0)


def test_without_a_backward_nothing_is_kept() -> None:
    calls, watched = [], []
    for name in (*WRITTEN, *GRAPH):
        call = ExpertSet(make_experts(name)).call(False)
        x_NeCM = rows(2, 3, C, M)
        forward(call, x_NeCM, [6, 7])
        watched.append(weakref.ref(x_NeCM))
        del x_NeCM
        assert tensors_within(call) == {}, name
        with pytest.raises(RuntimeError, match="needs_backward=False"):
            call.backward(0, 6, rows(2, 3, 6, M))
        calls.append(call)
    gc.collect()
    assert [each() for each in watched] == [None] * len(calls)


@EVERY
def test_recompute_keeps_the_rows_alone(name: str) -> None:
    experts = ExpertSet(make_experts(name))
    call = experts.call(True, recompute=True)
    x_NeCM = rows(2, 3, C, M)
    forward(call, x_NeCM, [6, 7])
    # States of random-number generators apart: they are bytes, rows are not.
    kept = [each for each in tensors_within(call).values() if each.dtype is not torch.uint8]
    memory = {each.untyped_storage().data_ptr() for each in kept}
    assert memory - {each.untyped_storage().data_ptr() for each in experts.parameters} == {
        x_NeCM.untyped_storage().data_ptr()
    }


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
