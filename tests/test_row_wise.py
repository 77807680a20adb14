# SPDX-License-Identifier: Apache-2.0
"""The check that an expert treats each row by itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ds_fsmoe.layer.expert_checks import check_row_wise
from tests.expert_cases import EVERY, H, M, make_experts


class CentersRows(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean(dim=-2, keepdim=True)


class LooksBack(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.roll(x, 1, dims=-2)


class MixesRanks(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x.flip(0)


class AddsPlace(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(x.shape[-2], dtype=x.dtype).unsqueeze(-1)


class Widens(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x], dim=-1)


class DropsRows(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x[:, :-1], None


class NormalisesOverRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(M)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.reshape(-1, M)).view(x.shape)


@pytest.mark.parametrize("keep_expert_dim", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "expert", [CentersRows, LooksBack, MixesRanks, AddsPlace, NormalisesOverRows], ids=lambda each: each.__name__
)
def test_an_expert_that_is_not_row_wise_is_named(
    expert: type[nn.Module], dtype: torch.dtype, keep_expert_dim: bool
) -> None:
    with pytest.raises(ValueError, match=f"expert {expert.__name__} is not row-wise"):
        check_row_wise(expert().to(dtype), M, dtype=dtype, keep_expert_dim=keep_expert_dim)


@pytest.mark.parametrize("expert", [Widens, DropsRows], ids=lambda each: each.__name__)
def test_an_expert_of_another_shape_is_named_by_the_check(expert: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match=rf"expert {expert.__name__} returned \(2, \d, \d+\) for \(2, 5, 7\)"):
        check_row_wise(expert(), M)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@EVERY
def test_row_wise_experts_pass_the_check(name: str, dtype: torch.dtype) -> None:
    check_row_wise(make_experts(name, 1, dtype=dtype)[0], M)
    check_row_wise(make_experts(name, 1, dtype=dtype)[0], M, keep_expert_dim=True)


def test_dropout_passes_the_check_and_nothing_is_disturbed_by_it() -> None:
    expert = nn.Sequential(nn.Linear(M, H), nn.Dropout(0.5), nn.Linear(H, M))
    normalises = nn.Sequential(NormalisesOverRows(), nn.Dropout(0.5))
    for parameter in [*expert.parameters(), *normalises.parameters()]:
        parameter.grad = torch.full_like(parameter, 3.0)
    buffers = {name: (buffer, buffer.clone()) for name, buffer in normalises.named_buffers()}
    assert len(buffers) == 3
    state = torch.get_rng_state()
    check_row_wise(expert, M)
    with pytest.raises(ValueError, match="expert Sequential is not row-wise"):
        check_row_wise(normalises, M)
    check_row_wise(normalises.eval(), M)
    assert torch.equal(torch.get_rng_state(), state)
    assert all((each.grad == 3).all() for each in [*expert.parameters(), *normalises.parameters()])
    for name, buffer in normalises.named_buffers():
        was, values = buffers[name]
        assert buffer is was
        assert torch.equal(buffer, values)
