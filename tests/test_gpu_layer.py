# SPDX-License-Identifier: Apache-2.0
"""A layer on a GPU computes what it computes in float64 on the CPU, and torch's grouped product is as we take it to be.
The same bodies run here on the CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ds_fsmoe import LinearGate, MOELayer, SimpleOrder
from ds_fsmoe.ops import load_ops
from tests.distances import furthest
from tests.gpu_cases import ON_DEVICE, every_case_on_a_gpu
from tests.lane_cases import CPU
from tests.test_gpu_one_rank import errors_at_waits

CASES = [
    *(
        (sent, 8, at, of)
        for of in (torch.float32, torch.bfloat16)
        for sent, at in (("unpadded", (1, 1)), ("padded", (3, 2)))
    ),
    *(("unpadded", 8, (3, 2), dtype) for dtype in (torch.float32, torch.bfloat16)),
    # A queue for each expert and segment: 1536 and 11520.
    ("unpadded", 128, (8, 5), torch.float32),
    ("unpadded", 384, (16, 15), torch.float32),
]
"""(dispatch, experts, degrees, dtype)."""
ENDS = (5, 5, 37, 64)
"""Where groups of rows end; the second has none."""


def distance(
    device: torch.device, dispatch: str, num_experts: int, degrees: tuple[int, int], dtype: torch.dtype
) -> float:
    """Return how far a layer on the device is from the same in float64: the largest share of a norm, of any tensor."""
    layers, found = [], []
    for where, of in ((device, dtype), (CPU, torch.float64)):
        ops = load_ops("reference" if of == torch.float64 else "required", where.type)
        gate = LinearGate(k=2, drop_tokens=False, top2_2nd_expert_sampling=False)
        sizes: dict[str, Any] = {"model_dim": 64, "expert_dim": 128, "num_experts": num_experts}
        sizes |= {"pipeline_degree": degrees, "dispatch": dispatch, "expert_impl": "mixtral", "ops": ops}
        layers.append(MOELayer(gate, SimpleOrder(), **sizes).to(where, of))
    torch.manual_seed(0)
    with torch.no_grad():  # experts that are copies of one teach a router nothing
        for one, other in zip(*(each.parameters() for each in layers), strict=True):
            one.normal_(std=0.1)
            other.copy_(one)
    x, dy = (torch.randn(256, 64).to(dtype) for _ in range(2))
    for layer, where, of in ((layers[0], device, dtype), (layers[1], CPU, torch.float64)):
        own = x.detach().to(where, of).requires_grad_()
        y = layer(own)
        y.backward(dy.to(where, of))
        assert y.device.type == where.type
        found.append([y, own.grad, *(each.grad for each in layer.parameters())])
    pairs = [[each.detach().double().cpu() for each in pair] for pair in zip(*found, strict=True)]
    most = max(furthest(*pair, order=2) for pair in pairs)
    # Between experts that are nearly as good, a low precision may choose the other.
    assert most < (1e-4 if dtype == torch.float32 else 0.2)
    return most


@every_case_on_a_gpu("case", CASES, drawn=2)
def test_a_layer_on_the_device_is_that_of_float64(device: torch.device, case: tuple[Any, ...]) -> None:
    distance(device, *case)


def grouped_products(device: torch.device) -> dict[str, str]:
    """Return what torch's grouped product does with each type; bf16 is right, also of a group without rows."""
    found = {}
    ends = torch.tensor(ENDS, dtype=torch.int32, device=device)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        x, weight = (torch.randn(*size, device=device).to(dtype) for size in ((64, 32), (4, 32, 48)))
        wanted = [rows @ w for rows, w in zip(x.float().tensor_split(ENDS[:-1]), weight.float(), strict=True)]
        try:
            y = F.grouped_mm(x, weight, offs=ends)
            poison = [torch.full((4, 32, 48), float("nan"), device=device, dtype=dtype) for _ in range(3)]
            del poison
            of_none = F.grouped_mm(x.t(), y, offs=ends)[1]
            off = float((y - torch.cat(wanted)).norm() / torch.cat(wanted).norm())
            found[str(dtype)] = f"off by {off:.1e}, of no rows {float(of_none.abs().max()):.1g}"
            assert (off < 1e-2 and not of_none.any()) or dtype != torch.bfloat16
            with errors_at_waits(device):
                F.grouped_mm(x, weight, offs=ends)
        except RuntimeError as error:
            found[str(dtype)] = f"{found.get(str(dtype), '')} {error}"[:200]
    return found


@ON_DEVICE
def test_a_grouped_product_of_no_rows_is_zero_and_of_bf16_one_kernel(device: torch.device) -> None:
    found = grouped_products(device)["torch.bfloat16"]
    if device.type == "cpu" or torch.cuda.get_device_capability(device) >= (9, 0):
        assert found.endswith("of no rows 0")
