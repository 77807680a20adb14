# SPDX-License-Identifier: Apache-2.0
"""Experts, rows, and walks through their chunks, beside what autograd makes of the whole capacity at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import pytest
import torch
from torch import nn

from ds_fsmoe import registry
from ds_fsmoe.components.expert_compute.autograd_call import AutogradCall
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.components.expert_compute.expert_call import ExpertCall
from ds_fsmoe.components.experts.gpt import GPTFeedForward
from ds_fsmoe.components.experts.mixtral import MixtralFeedForward

M, H, C = 7, 11, 13


def sequential(activation: nn.Module, bias: bool = True, width: int = M, hidden: int = H) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden, bias=bias), activation, nn.Linear(hidden, width, bias=bias))


# Name -> expert of width M and hidden width H.
WRITTEN: dict[str, Callable[[int, int], nn.Module]] = {
    **{
        f"gpt {activation}{'' if bias else ' without bias'}": lambda m, h, a=activation, b=bias: GPTFeedForward(
            m, h, a, b
        )
        for activation in ("relu", "gelu", "silu")
        for bias in (True, False)
    },
    "mixtral": MixtralFeedForward,
    "sequential relu": lambda m, h: sequential(nn.ReLU(), width=m, hidden=h),
    "sequential relu in place": lambda m, h: sequential(nn.ReLU(inplace=True), False, m, h),
    "sequential gelu": lambda m, h: sequential(nn.GELU(), width=m, hidden=h),
    "sequential gelu tanh": lambda m, h: sequential(nn.GELU(approximate="tanh"), width=m, hidden=h),
    "sequential silu": lambda m, h: sequential(nn.SiLU(), False, m, h),
}


class Bottleneck(nn.Module):
    """An expert nobody has written out: a normalisation, a parameter that is not used, a tuple as its result."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Linear(width, hidden)
        self.unused = nn.Parameter(torch.ones(3))
        self.outer = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + self.outer(torch.tanh(self.inner(self.norm(x)))), self.outer.bias


GRAPH: dict[str, Callable[[int, int], nn.Module]] = {
    "bottleneck": Bottleneck,
    "identity": lambda m, h: nn.Identity(),
    "linear": lambda m, h: nn.Linear(m, m),
    "three layers": lambda m, h: nn.Sequential(nn.Linear(m, h), nn.Tanh(), nn.Linear(h, m)),
}
for name in registry.known("expert"):
    if name not in ("gpt", "mixtral"):  # which are among those above in more ways
        make_one = registry.lookup("expert", name)
        (GRAPH if make_one(M, H).written() is None else WRITTEN)[name] = make_one
EVERY = pytest.mark.parametrize("name", [*WRITTEN, *GRAPH])
EVERY_WRITTEN = pytest.mark.parametrize("name", WRITTEN)


def make_experts(name: str, count: int = 3, width: int = M, hidden: int = H, dtype=torch.float64) -> list[nn.Module]:
    torch.manual_seed(3)
    make = {**WRITTEN, **GRAPH}[name]
    return [make(width, hidden).to(dtype) for _ in range(count)]


def rows(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    return list(itertools.pairwise(itertools.accumulate(sizes, initial=0)))


def by_autograd(
    experts: Sequence[nn.Module], x_NeCM: torch.Tensor, dy_NeCM: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor | None]]:
    """Results, gradient of the rows, gradients of the parameters, of the experts called on the whole capacity."""
    x_NeCM = x_NeCM.detach().requires_grad_()
    results = [expert(x_NeCM[:, i]) for i, expert in enumerate(experts)]
    y_NeCM = torch.stack([each[0] if isinstance(each, tuple) else each for each in results], dim=1)
    parameters = [each for expert in experts for each in expert.parameters() if each.requires_grad]
    dx_NeCM, *gradients = torch.autograd.grad(y_NeCM, [x_NeCM, *parameters], dy_NeCM, allow_unused=True)
    by_parameter = dict(zip(parameters, gradients, strict=True))
    return y_NeCM.detach(), dx_NeCM, [by_parameter.get(each) for expert in experts for each in expert.parameters()]


def walk(sizes: Sequence[int], order: str) -> tuple[list[tuple[int, int]], list[int]]:
    """The cuts in this order, and where each of them, as they lie, comes in it."""
    cuts = bounds(sizes)
    places = list(range(len(cuts)))
    places = {"from the first": places, "from the last": places[::-1], "from the second": places[1:] + places[:1]}[
        order
    ]
    return [cuts[place] for place in places], [places.index(place) for place in range(len(cuts))]


def forward(
    call: ExpertCall, x_NeCM: torch.Tensor, sizes: Sequence[int], order: str = "from the first"
) -> torch.Tensor:
    return _in_chunks(call.forward, x_NeCM, sizes, order)


def backward(
    call: ExpertCall, dy_NeCM: torch.Tensor, sizes: Sequence[int], order: str = "from the first"
) -> torch.Tensor:
    return _in_chunks(call.backward, dy_NeCM, sizes, order)


def _in_chunks(
    run: Callable[[int, int, torch.Tensor], torch.Tensor], rows_NeCM: torch.Tensor, sizes: Sequence[int], order: str
) -> torch.Tensor:
    cuts, places = walk(sizes, order)
    results = [run(a, b, rows_NeCM[:, :, a:b]) for a, b in cuts]
    return torch.cat([results[place] for place in places], dim=2)


def assert_as_autograd(
    call: ExpertCall,
    experts: Sequence[nn.Module],
    forward_sizes: Sequence[int] = (6, 7),
    backward_sizes: Sequence[int] = (6, 7),
    *orders: str,
) -> None:
    """The call's results and gradients, cut like this, are those of the experts called on the whole capacity."""
    x_NeCM, dy_NeCM = rows(2, len(experts), C, M), rows(2, len(experts), C, M, seed=2)
    y_NeCM, dx_NeCM, gradients = by_autograd(experts, x_NeCM, dy_NeCM)
    forwards, backwards = orders or ("from the first", "from the first")
    torch.testing.assert_close(forward(call, x_NeCM, forward_sizes, forwards), y_NeCM, rtol=0, atol=1e-12)
    torch.testing.assert_close(backward(call, dy_NeCM, backward_sizes, backwards), dx_NeCM, rtol=0, atol=1e-12)
    assert_gradients(call.gradients(), gradients, atol=1e-12)


def is_written(layer: ExpertSet) -> bool:
    """Whether a call made now computes every expert by a written-out form."""
    return None not in layer.written_now()


def calls_modules(call: ExpertCall) -> bool:
    """Whether autograd differentiates an expert of it."""
    return any(isinstance(run.call, AutogradCall) for run in call._runs)


def assert_gradients(
    found: Iterable[torch.Tensor | None], expected: Iterable[torch.Tensor | None], atol: float
) -> None:
    for one, other in zip(found, expected, strict=True):
        if other is None:
            assert one is None
        else:
            torch.testing.assert_close(one, other, rtol=0, atol=atol)
