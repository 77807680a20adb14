# SPDX-License-Identifier: Apache-2.0
"""Experts whose weights are one tensor of each kind compute, chunk by chunk, what their own forward computes."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ds_fsmoe.components.expert_compute import grouped_products
from ds_fsmoe.components.expert_compute.contract import Contract, ContractError, contract_of, follows_contract
from ds_fsmoe.components.expert_compute.stacked_experts import StackedExperts
from tests.covering import covering
from tests.distances import furthest

NUM_EXPERTS = 3


class Experts(nn.Module):
    """What transformers' contract says, written as a loop over experts."""

    def __init__(self, contract: Contract, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts = NUM_EXPERTS
        for name in ("has_bias", "is_transposed", "has_gate", "is_concatenated", "has_post_expert_norm"):
            setattr(self, name, getattr(contract, name))
        outs = {contract.up: (width, 2 * hidden if contract.has_gate else hidden), "down_proj": (hidden, width)}
        for name, (size_in, size_out) in outs.items():
            shape = (size_in, size_out) if contract.is_transposed else (size_out, size_in)
            setattr(self, name, nn.Parameter(torch.randn(NUM_EXPERTS, *shape) * 0.3))
            if contract.has_bias:
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(NUM_EXPERTS, size_out)))
        self.act_fn = nn.SiLU()
        if contract.has_post_expert_norm:
            self.post_expert_norm = nn.RMSNorm(width)

    def _apply_gate(self, up: torch.Tensor) -> torch.Tensor:
        gate, value = up.chunk(2, dim=-1) if self.is_concatenated else (up[..., ::2], up[..., 1::2])
        return self.act_fn(gate) * value

    def forward(self, x_SM: torch.Tensor, index_SK: torch.Tensor, weights_SK: torch.Tensor) -> torch.Tensor:
        y_SM = torch.zeros_like(x_SM)
        for token, choice in itertools.product(range(len(x_SM)), range(index_SK.shape[1])):
            y_SM[token] = y_SM[token] + weights_SK[token, choice] * self.of(int(index_SK[token, choice]), x_SM[token])
        return y_SM

    def of(self, expert: int, x_M: torch.Tensor) -> torch.Tensor:
        h = self._linear("gate_up_proj" if self.has_gate else "up_proj", expert, x_M)
        h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
        y_M = self._linear("down_proj", expert, h)
        return self.post_expert_norm(y_M) if self.has_post_expert_norm else y_M

    def _linear(self, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        weight = getattr(self, name)[expert]
        bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else None
        return F.linear(x, weight.t() if self.is_transposed else weight, bias)


@dataclass(frozen=True)
class Phase:
    of_experts: list[list[int]]
    places: list[int]
    ends: torch.Tensor

    @staticmethod
    def of(sizes: list[list[int]]) -> Phase:
        ends = torch.tensor(sizes, dtype=torch.int32).cumsum(1).to(torch.int32)
        return Phase(sizes, [*itertools.accumulate(map(sum, sizes), initial=0)], ends)


@dataclass(frozen=True)
class Rows:
    forward: Phase
    backward: Phase
    expert_order: torch.Tensor | None = None


def one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_products, "takes_grouped", lambda *_: False)


FORWARD, BACKWARD = [[2, 0, 3], [0, 0, 0], [1, 4, 0]], [[3, 1, 2], [0, 3, 1]]


def numbers_of(sizes: list[list[int]]) -> list[int]:
    """Of each row, chunk by chunk and expert by expert, its number: expert by expert over all chunks."""
    totals = [sum(each) for each in zip(*sizes, strict=True)]
    starts = [sum(totals[:expert]) for expert in range(len(totals))]
    found = []
    for of_experts in sizes:
        for expert, size in enumerate(of_experts):
            found += range(starts[expert], starts[expert] + size)
            starts[expert] += size
    return found


def off_by(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """How far numbers are from others that are rounded at the same places, as a share: sums may have other orders."""
    return furthest(ours, theirs, order=2)


FLAGS = [
    Contract(
        has_bias=bias, is_transposed=transposed, has_gate=gate, is_concatenated=concatenated, has_post_expert_norm=norm
    )
    for bias, transposed, gate, concatenated, norm in itertools.product([False, True], repeat=5)
    if gate or concatenated
]


@pytest.mark.parametrize(
    ("flags", "way", "other_cuts"), covering(FLAGS, ("written", "recomputed", "called"), (False, True)), ids=str
)
def test_chunks_have_the_numbers_of_single_rows(flags: Contract, way: str, other_cuts: bool) -> None:
    torch.manual_seed(0)
    module = Experts(flags, 8, 12).double()
    assert follows_contract(module)
    experts = StackedExperts(module, contract_of(module), module.forward if way == "called" else None)
    totals = [sum(each) for each in zip(*FORWARD, strict=True)]
    of_row = [expert for expert, total in enumerate(totals) for _ in range(total)]
    x_RM = torch.randn(len(of_row), 8, dtype=torch.float64, requires_grad=True)
    dy_RM = torch.randn_like(x_RM)
    y_RM = torch.stack([module.of(expert, row) for expert, row in zip(of_row, x_RM, strict=True)])
    wanted = torch.autograd.grad(y_RM, [x_RM, *module.parameters()], dy_RM)

    sent, returned = numbers_of(FORWARD), numbers_of(BACKWARD if other_cuts else FORWARD)
    order = torch.tensor([sent.index(each) for each in returned]) if other_cuts else None
    forward = Phase.of(FORWARD)
    rows = Rows(forward, Phase.of(BACKWARD) if other_cuts else forward, order)
    call = experts.call(True, rows, x_RM.detach(), same_chunks=not other_cuts, recompute=way == "recomputed")
    found_y, found_dx = torch.empty_like(x_RM), torch.empty_like(x_RM)
    for start, stop in itertools.pairwise(rows.forward.places):
        found_y[sent[start:stop]] = call.forward(start, stop, x_RM.detach()[sent[start:stop]])
    call.restore(call.release())
    for start, stop in itertools.pairwise(rows.backward.places):
        found_dx[returned[start:stop]] = call.backward(start, stop, dy_RM[returned[start:stop]])
    torch.testing.assert_close(found_y, y_RM.detach(), rtol=1e-12, atol=1e-12)
    for ours, theirs in zip((found_dx, *call.gradients()), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("flags", FLAGS[::5], ids=str)
def test_grouped_products_have_the_numbers_of_a_loop_and_large_gradients_are_written_once(
    flags: Contract, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of large weights the later chunks add to the first one's. In half precision four are added up at a time."""
    grouped_mm, weight_gradient = F.grouped_mm, grouped_products.weight_gradient
    uses: list[Any] = []
    written: list[Any] = []
    monkeypatch.setattr(F, "grouped_mm", lambda *args, **how: (uses.append(args), grouped_mm(*args, **how))[1])
    monkeypatch.setattr(
        grouped_products, "weight_gradient", lambda *args: (written.append(args), weight_gradient(*args))[1]
    )
    sizes, results = [[2, 0, 3], [0, 0, 0], [1, 4, 0], [0, 1, 1], [3, 0, 0], [1, 1, 1]], []
    for is_grouped, limit in itertools.product((True, False), (2**60, 0)):
        if not is_grouped:
            one_by_one(monkeypatch)
        monkeypatch.setattr(grouped_products, "_WORTH_A_LAUNCH_BYTES", limit)
        written.clear()
        uses.clear()
        torch.manual_seed(0)
        module = Experts(flags, 16, 24).to(dtype)
        rows = Rows(phase := Phase.of(sizes), phase)
        call = StackedExperts(module, contract_of(module)).call(True, rows, torch.empty(0, 16, dtype=dtype))
        found = []
        for way in (call.forward, call.backward):
            for start, stop in itertools.pairwise(phase.places):
                found.append(way(start, stop, torch.randn(stop - start, 16).to(dtype)))
        results.append([torch.cat(found), *call.gradients()])
        assert bool(uses) == is_grouped
        whole = 2 * len(sizes) if is_grouped and limit else 2 if dtype == torch.float32 else 4
        assert len(written) == whole
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 5e-3}[dtype]
    for other in results[1:]:
        assert max(map(off_by, other, results[0])) < tolerance


def test_a_rank_without_rows_has_gradients_of_zeros_and_frozen_weights_have_none_and_keep_no_rows() -> None:
    """ZeRO 3 counts the gradients that come."""
    module = Experts(FLAGS[-1], 8, 12)
    call = StackedExperts(module, contract_of(module)).call(True)
    empty = torch.empty(2, NUM_EXPERTS, 0, 8)
    call.backward(0, 0, call.forward(0, 0, empty))
    gradients = call.gradients()
    assert all(each is not None and not each.any() for each in gradients)
    assert [each.shape for each in gradients] == [each.shape for each in module.parameters()]
    module = Experts(FLAGS[0], 8, 12)
    getattr(module, contract_of(module).up).requires_grad_(False)
    experts = StackedExperts(module, contract_of(module))
    call = experts.call(True)
    call.backward(0, 4, call.forward(0, 4, torch.randn(1, NUM_EXPERTS, 4, 8)))
    assert [each is None for each in call.gradients()] == [True, False]
    assert experts.kept_of_a_row(recompute=False)[0] == 0


def test_a_weight_that_changes_before_its_backward_is_refused() -> None:
    module = Experts(FLAGS[0], 8, 12)
    call = StackedExperts(module, contract_of(module)).call(True)
    y_NecM = call.forward(0, 4, torch.randn(1, NUM_EXPERTS, 4, 8))
    with torch.no_grad():
        module.down_proj.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place between the forward and its backward"):
        call.backward(0, 4, y_NecM)


def test_autocast_computes_in_its_type_and_gives_gradients_in_the_weights_own() -> None:
    torch.manual_seed(0)
    module = Experts(Contract(has_bias=False, is_transposed=False), 16, 24)
    x_NecM = torch.randn(1, NUM_EXPERTS, 4, 16)
    with torch.autocast("cpu", torch.bfloat16):
        call = StackedExperts(module, contract_of(module)).call(True)
        y_NecM = call.forward(0, 4, x_NecM)
    dx_NecM = call.backward(0, 4, torch.ones_like(y_NecM))
    assert y_NecM.dtype == torch.bfloat16
    assert dx_NecM.dtype == torch.float32
    gradients = call.gradients()
    assert {each.dtype for each in gradients} == {torch.float32}
    x_ecM = x_NecM[0].requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        own = torch.stack([module.of(expert, x_ecM[expert]) for expert in range(NUM_EXPERTS)])
    wanted = own, *torch.autograd.grad(own, [x_ecM, *module.parameters()], torch.ones_like(own))
    for ours, theirs in zip((y_NecM[0], dx_NecM[0], *gradients), wanted, strict=True):
        assert off_by(ours, theirs.detach()) < 5e-3


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda module: delattr(module, "down_proj"), "has no down_proj"),
        (lambda module: setattr(module, "num_experts", 7), "declares 7 experts, but its weights have 3"),
        (lambda module: setattr(module, "is_transposed", True), "shapes do not match its flags"),
        (lambda module: setattr(module, "has_post_expert_norm", True), "has no post_expert_norm"),
        (lambda module: setattr(module, "up_proj", nn.Parameter(torch.ones(3, 2, 2))), "more weights than known"),
    ],
)
def test_a_module_that_breaks_its_word_is_told_apart(change: Any, sentence: str) -> None:
    module = Experts(Contract(has_bias=False, is_transposed=False), 8, 12)
    contract_of(module)
    change(module)
    with pytest.raises(ContractError, match=sentence):
        contract_of(module)


def test_a_forward_of_its_own_that_is_called_again_draws_the_same_numbers_and_none_besides() -> None:
    torch.manual_seed(0)
    module = Experts(FLAGS[0], 8, 12)

    def own_forward(x_SM: torch.Tensor, index_SK: torch.Tensor, weights_SK: torch.Tensor) -> torch.Tensor:
        return module(F.dropout(x_SM, 0.5), index_SK, weights_SK)

    x_NecM, found = torch.randn(1, NUM_EXPERTS, 4, 8), []
    for recompute in (False, True):
        torch.manual_seed(1)
        call = StackedExperts(module, contract_of(module), own_forward).call(True, recompute=recompute)
        y_NecM = call.forward(0, 4, x_NecM)
        drawn = torch.rand(3)
        dx_NecM = call.backward(0, 4, torch.ones_like(y_NecM))
        found.append([y_NecM, dx_NecM, *call.gradients(), drawn, torch.rand(3)])
    assert all(map(torch.equal, *found))


def test_a_forward_of_its_own_gives_its_rows_to_be_held_and_lets_weights_go_after_the_backward() -> None:
    """On streams, rows that came over a link stay until the streams are joined."""
    module, seen = Experts(FLAGS[0], 8, 12), []

    def own_forward(x_SM: torch.Tensor, index_SK: torch.Tensor, weights_SK: torch.Tensor) -> torch.Tensor:
        seen.append(weakref.ref(getattr(module, contract_of(module).up)))
        return module(x_SM, index_SK, weights_SK)

    rows = Rows(phase := Phase.of([[2, 0, 3], [1, 4, 0]]), phase)
    chunks = [torch.randn(5, 8) for _ in range(2)]
    call = StackedExperts(module, contract_of(module), own_forward).call(True, rows, chunks[0])
    results = [call.forward(5 * place, 5 * place + 5, each) for place, each in enumerate(chunks)]
    call.restore(call.release())
    assert [each.data_ptr() for each in call.rows()] == [each.data_ptr() for each in chunks]

    def go_back(_: torch.Tensor) -> None:  # within a backward that does not retain its graph, as in a layer
        for place, each in enumerate(results):
            call.backward(5 * place, 5 * place + 5, torch.ones_like(each))

    leaf = torch.zeros(1, requires_grad=True)
    leaf.register_hook(go_back)
    leaf.sum().backward()
    assert all(each is not None for each in call.gradients())
    assert len(seen) == 2
    assert all(each() is None for each in seen)
