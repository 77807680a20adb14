# SPDX-License-Identifier: Apache-2.0
"""What one rank of a layer computes, as tasks with real products and kernels behind them.

The planner's work of a layer (``ds_fsmoe.planning.workload``), with two differences: a task is one piece of work
however many kernels it launches, since that is how it is timed here, and what the backward computes has kinds of its
own. Attention includes its softmax. Tensors are those of one rank: attention is split by heads, experts by their width.

Letters: B samples, L positions, S tokens on this rank, M width, H expert width on this rank, E experts, e of them on
this rank, K choices, C slots, N = E * C, R rows of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.expert_call import sizes_of_call
from ds_fsmoe.components.experts.gpt import GPTFeedForward
from ds_fsmoe.components.experts.mixtral import MixtralFeedForward
from ds_fsmoe.ops import Ops
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.schedule import (
    ATTENTION,
    EXPERT,
    ORDER,
    RESTORE,
    ROUTE,
    SOFTMAX,
    Lane,
    Task,
)
from ds_fsmoe.planning.workload import BlockWork, Layer, Shape, Work, layer_work

BACK = "_BACK"
"""Behind the kind of what is computed in the backward."""
EXPERT_BACK = EXPERT + BACK
KINDS = tuple(kind + phase for phase in ("", BACK) for kind in (ATTENTION, ROUTE, ORDER, EXPERT, RESTORE))
"""All that is computed."""
CUT = (EXPERT, EXPERT_BACK)
"""What is cut into chunks."""
DTYPES = {4: torch.float32, 2: torch.bfloat16}
Done = Callable[[], object]


def whole_tasks(shape: Shape, groups: Groups) -> Layer:
    """The work of a layer, as tasks of this module's kinds."""
    layer = layer_work(shape, groups)
    return replace(layer, forward=_phase(layer.forward, ""), backward=_phase(layer.backward, BACK))


def _phase(block: BlockWork, suffix: str) -> BlockWork:
    def one(work: Any) -> Any:
        return replace(work, kind=work.kind + suffix if Lane.COMPUTE in work.lanes else work.kind, launches=1)

    def all_of(works: tuple[Work, ...]) -> tuple[Work, ...]:
        return tuple(one(each) for each in works if each.kind != SOFTMAX)

    moe = block.moe.each(one)
    return BlockWork(all_of(block.before), replace(moe, expert=one(moe.expert)), all_of(block.after))


class Computation:
    """The tasks that one rank of a layer computes, ready to be done any number of times.

    Nothing is passed from task to task: each works on tensors of its own that are there before, so that any order of
    tasks can be run, and that of a layer in the middle of many.

    Args:
        shape: of the layer.
        groups: of the ranks.
        device: on which it is computed.
        ops: for gate, order and back.
    """

    def __init__(self, shape: Shape, groups: Groups, device: torch.device, ops: Ops) -> None:
        self.shape, self.groups, self.device, self._ops = shape, groups, device, ops
        self.dtype = DTYPES[shape.dtype_bytes]
        layer = whole_tasks(shape, groups)
        works = [each for block in (layer.forward, layer.backward) for each in _works(block)]
        self.whole_size = {work.kind: work.size for work in works if Lane.COMPUTE in work.lanes}
        """Kind -> size of an uncut task of it: floating-point operations, for ORDER and RESTORE bytes."""
        tokens_S = shape.B * shape.L // groups.mp
        self._local_e = shape.E // groups.ep
        self._amount = dict.fromkeys(KINDS, tokens_S)
        """Kind -> of what an uncut task has so many: rows, positions, tokens."""
        self._amount |= dict.fromkeys(CUT, round(shape.F * tokens_S * groups.esp / self._local_e))
        self._amount |= dict.fromkeys((ATTENTION, ATTENTION + BACK), shape.L)
        self._done: dict[tuple[str, int], Done] = {}

    def __call__(self, task: Task) -> None:
        """The body of every kind that computes."""
        self.of(task.kind, task.size / self.whole_size[task.kind])[1]()

    def of(self, kind: str, share: float) -> tuple[float, Done]:
        """The size of a part of a task, and what does it. What is made ready for it stays, for the next time."""
        amount = max(1, round(share * self._amount[kind]))
        if (kind, amount) not in self._done:
            self._done[kind, amount] = self._made(kind, amount)
        if kind.startswith(ATTENTION):
            return self.whole_size[kind] * self._attention_share(amount), self._done[kind, amount]
        return self.whole_size[kind] * amount / self._amount[kind], self._done[kind, amount]

    def forget(self) -> None:
        """Give back what was made ready."""
        self._done.clear()

    def _made(self, kind: str, amount: int) -> Done:
        if kind in CUT:
            return self._experts_together(amount, kind == EXPERT_BACK)
        made = {ATTENTION: self._attention, ROUTE: self._route, ORDER: self._order, RESTORE: self._restore}
        forward, inputs = made[kind.removesuffix(BACK)](amount)
        if not kind.endswith(BACK):
            return _without_grad(forward)
        with torch.enable_grad():
            y = forward()
        dy = torch.randn_like(y)
        return lambda: torch.autograd.grad(y, inputs, dy, retain_graph=True)

    def _randn(self, *sizes: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.randn(*sizes, device=self.device, dtype=dtype or self.dtype)

    # ---- attention

    def _attention_share(self, positions: int) -> float:
        shape = self.shape

        def flops(length: int) -> float:
            return length * shape.attention_weights + 2 * length**2 * shape.M

        return flops(positions) / flops(shape.L)

    def _attention(self, positions: int) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
        """The heads of this rank, over all tokens of its group."""
        shape = self.shape
        width = shape.M // shape.heads
        heads = shape.heads // self.groups.mp
        kv_heads = max(1, (shape.kv_heads or shape.heads) // self.groups.mp)
        x_BLM = self._randn(shape.B, positions, shape.M).requires_grad_()
        weights = [(heads + 2 * kv_heads) * width, shape.M], [shape.M, heads * width]
        qkv, out = (self._randn(*size).mul_(shape.M**-0.5).requires_grad_() for size in weights)

        def forward() -> torch.Tensor:
            parts = F.linear(x_BLM, qkv).view(shape.B, positions, -1, width).transpose(1, 2)
            query, key, value = parts.split([heads, kv_heads, kv_heads], dim=1)
            seen = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=heads != kv_heads)
            return F.linear(seen.transpose(1, 2).flatten(2), out)

        return forward, [x_BLM, qkv, out]

    # ---- gate, order and back

    def _route(self, tokens: int) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
        shape = self.shape
        x_SM = self._randn(tokens, shape.M).requires_grad_()
        weight_EM = self._randn(shape.E, shape.M, dtype=torch.float32).requires_grad_()
        capacity = self._capacity(tokens)

        def forward() -> torch.Tensor:
            probs_SE = F.softmax(F.linear(x_SM.float(), weight_EM), dim=1)
            if not torch.is_grad_enabled():  # the backward has nothing to do with it
                self._ops.top_k_slots(probs_SE, shape.K, capacity)
            return probs_SE

        return forward, [x_SM, weight_EM]

    def _order(self, tokens: int) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
        x_SM = self._randn(tokens, self.shape.M).requires_grad_()
        slots_KS, num_slots = self._slots(tokens)
        return lambda: self._ops.arrange(x_SM, slots_KS, num_slots), [x_SM]

    def _restore(self, tokens: int) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
        slots_KS, num_slots = self._slots(tokens)
        y_NM = self._randn(num_slots, self.shape.M).requires_grad_()
        weights_KS = torch.rand(self.shape.K, tokens, device=self.device).requires_grad_()
        return lambda: self._ops.restore(y_NM, slots_KS, weights_KS), [y_NM, weights_KS]

    def _capacity(self, tokens: int) -> int:
        return -(-round(self.shape.F * tokens) // self.shape.E)

    def _slots(self, tokens: int) -> tuple[torch.Tensor, int]:
        """[K, S], every expert chosen as often as any other; and N."""
        shape = self.shape
        capacity = max(self._capacity(tokens), -(-shape.K * tokens // shape.E))
        number_KS = torch.arange(shape.K * tokens, device=self.device).view(tokens, shape.K).t()
        return (number_KS % shape.E * capacity + number_KS // shape.E).contiguous(), shape.E * capacity

    # ---- experts

    @cached_property
    def _modules(self) -> list[nn.Module]:
        kind = {"gpt": GPTFeedForward, "mixtral": MixtralFeedForward}[self.shape.ffn]
        hidden = self.shape.H // self.groups.esp
        return [kind(self.shape.M, hidden).to(self.device, self.dtype) for _ in range(self._local_e)]

    def _experts_together(self, num_rows: int, is_backward: bool) -> Done:
        """All experts as a layer computes them, so many rows each."""
        experts, width = ExpertSet(self._modules), self.shape.M
        ends_e = torch.arange(1, self._local_e + 1, dtype=torch.int32, device=self.device) * num_rows
        rows = sizes_of_call([[num_rows] * self._local_e], ends_e.unsqueeze(0))
        x_RM = self._randn(self._local_e * num_rows, width)
        if not is_backward:
            return lambda: experts.call(False, rows, x_RM).forward(0, len(x_RM), x_RM)
        call, dy_RM = experts.call(True, rows, x_RM), self._randn(len(x_RM), width)
        call.forward(0, len(x_RM), x_RM)
        return lambda: (call.backward(0, len(x_RM), dy_RM), call.gradients())


def _works(block: BlockWork) -> list[Work]:
    return [*block.before, block.moe.expert, *block.after]


def _without_grad(work: Done) -> Done:
    def done() -> object:
        with torch.no_grad():
            return work()

    return done
