# SPDX-License-Identifier: Apache-2.0
"""What tests for a GPU share. Each has a body that takes a device, and runs it on the CPU as well, on lanes that are
threads in place of streams: a test is not ready while none of its lines has been executed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.execution.collectives import Collectives
from ds_fsmoe.execution.lanes import Lanes, Observer, SerialLanes, make_lanes
from ds_fsmoe.execution.pipeline import LayerPipeline
from ds_fsmoe.planning.block import ORDERS, BlockPlan
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import A2A_IN, A2A_IN_NODE, A2A_OUT, A2A_OUT_NODE, EXPERT, Task
from ds_fsmoe.planning.workload import AllToAll
from tests.expert_cases import make_experts
from tests.lane_cases import CPU, NEEDS_GPU, pause
from tests.samples import draw

ON_DEVICE = pytest.mark.parametrize(
    "device", [pytest.param(torch.device("cuda"), marks=NEEDS_GPU), torch.device("cpu")], ids=["cuda", "cpu"]
)
BODY_ON_CPU = pytest.mark.daily("bodies of GPU tests on the CPU", 2)
"""What ranks and processes of tests for a GPU do, done on the CPU: what it computes has tests of its own there."""


def every_case_on_a_gpu(name: str, cases: Sequence[Any], drawn: int) -> pytest.MarkDecorator:
    """Parametrize a test by a device and a case: on the CPU by those that are drawn today, the others are slow."""
    today = draw(name, range(len(cases)), drawn)
    values = [pytest.param(torch.device("cuda"), each, marks=NEEDS_GPU, id=f"cuda-{each}") for each in cases]
    for number, each in enumerate(cases):
        marks = () if number in today else pytest.mark.slow
        values.append(pytest.param(CPU, each, marks=marks, id=f"cpu-{each}"))
    return pytest.mark.parametrize(("device", name), values)


SEEDS = 200
NUM_EXPERTS, CAPACITY = 4, 64
SHARING = 2
"""P, of emulated links."""
DEGREES = ((2, 2), (4, 4), (2, 4), (4, 2))


@dataclass(frozen=True)
class EmulatedWires(Collectives):
    """Wires that lead back to this rank. Each collective is a copy on the lane's stream, behind a delay: like a real
    one it writes memory that the allocator has just given it, and not before its time has come."""

    busy: Callable[[torch.Tensor], None] = lambda _: None
    """Keeps the lane busy; is told what is sent."""
    is_sharing: bool = False

    @property
    def num_sharing(self) -> int:
        return SHARING if self.is_sharing else 1

    def to_experts(self, x_EcM: torch.Tensor) -> torch.Tensor:
        return self.sent(x_EcM)

    def sent(self, x: torch.Tensor) -> torch.Tensor:
        """The same, somewhere else."""
        received = torch.empty_like(x)
        self.busy(x)
        return received.copy_(x)

    def gather(self, x_GecM: torch.Tensor) -> torch.Tensor:
        if not self.is_sharing:
            return x_GecM
        x_NecM = x_GecM.new_empty(SHARING * x_GecM.shape[0], *x_GecM.shape[1:])
        self.busy(x_GecM)
        for rank, block in enumerate(x_NecM.chunk(SHARING)):
            # No two alike, as tokens of different ranks are.
            torch.mul(x_GecM, 1.0 + 0.5 * rank, out=block)
        return x_NecM

    def reduce(self, y_NecM: torch.Tensor) -> torch.Tensor:
        if not self.is_sharing:
            return y_NecM
        self.busy(y_NecM)
        return y_NecM.view(SHARING, -1, *y_NecM.shape[1:]).sum(dim=0)


@dataclass(frozen=True)
class Case:
    """How a layer is run."""

    degrees: tuple[int, int]
    kind: str = "plain"
    """Of :data:`KINDS`."""
    links: str = "paper"
    expert: str = "gpt gelu"
    seed: int = 0

    @property
    def groups(self) -> Groups:
        """Over both kinds of links."""
        if self.kind == "two legs":
            return Groups(world=4, gpus_per_node=2, ep=4)
        return Groups(world=4, gpus_per_node=2, ep=2, esp=2) if self.kind == "esp" else Groups(4, 1, ep=4)

    @property
    def alltoall(self) -> AllToAll:
        """In one task or in two."""
        return "2dh" if self.kind == "two legs" else "flat"


KINDS = ("plain", "esp", "hooks", "recompute", "two legs")


def case_of(seed: int) -> Case:
    """All degrees with all kinds in 20 seeds, the rest in turns."""
    degrees, kind = DEGREES[seed % 4], KINDS[seed // 4 % 5]
    expert = ("gpt gelu", "mixtral", "bottleneck")[seed % 3]
    return Case(degrees, kind, ORDERS[seed // 5 % len(ORDERS)], expert, seed)


@dataclass
class Delays(Observer):
    """Keeps experts busy before they begin, so that whatever overwrites what they are about to read is in time to."""

    device: torch.device
    seed: int
    is_off: bool = False
    delayed: int = 0
    random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def begin(self, index: int, task: Task) -> None:
        if task.kind == EXPERT and not self.is_off:
            self.delayed += 1
            # On a GPU as long as ten of its own products, or more.
            pause(self.random.choice((0.0, 0.1, 0.3)), self.device)

    def busy(self, tensor: torch.Tensor) -> None:
        """Keep a link busy, for less: it is to be there first."""
        if not self.is_off:
            pause(self.random.choice((0.0, 0.0, 0.02)), self.device)


def run_layer(case: Case, lanes: Lanes, device: torch.device, width: int, is_off: bool = False) -> list[torch.Tensor]:
    """The result, the gradient of the rows and those of the experts' parameters, of two calls of a layer.

    Two, so that what the first leaves behind is given to the second while the device is at work for the first.
    """
    delays = Delays(device, case.seed, is_off)
    copy = EmulatedWires(lambda x, group: x, None, None, busy=delays.busy, is_sharing=case.kind == "esp")
    legs = dict.fromkeys((A2A_IN_NODE, A2A_IN, A2A_OUT, A2A_OUT_NODE), copy.sent)
    collectives = replace(copy, legs=legs if case.kind == "two legs" else {})
    blocks = [BlockPlan(degree, case.links) for degree in case.degrees]
    plans = [PhasePlan(block, case.groups, i == 1, case.alltoall) for i, block in enumerate(blocks)]
    pipeline = LayerPipeline(lanes, collectives, *plans, recompute=case.kind == "recompute", observer=delays)
    experts = nn.ModuleList(make_experts(case.expert, NUM_EXPERTS, width, 2 * width, torch.float32)).to(device)
    generator = torch.Generator().manual_seed(case.seed)
    rows = NUM_EXPERTS * CAPACITY

    def drawn() -> torch.Tensor:
        return torch.randn(rows, width, generator=generator).to(device)

    def hook(point: str, tensor: torch.Tensor, direction: str, chunk: int) -> torch.Tensor:
        return tensor * 2.0 if point == "after_dispatch_hook" else tensor.clone()

    found = []
    for _ in range(2):
        x_RM, dy_RM = drawn().requires_grad_(), drawn()
        used = ExpertSet(list(experts))
        y_RM = pipeline(x_RM, NUM_EXPERTS, CAPACITY, used, hook if case.kind == "hooks" else None)
        y_RM.backward(dy_RM)
        found += [y_RM.detach(), x_RM.grad]
    assert is_off or delays.delayed
    return found + [each.grad for each in experts.parameters() if each.grad is not None]


def differing_seeds(device: torch.device, seeds: range, width: int) -> list[Case]:
    """The cases in which lanes that overlap give other bits than one task after another on one stream."""
    differing = []
    with closing(make_lanes(device)) as lanes:
        for seed in seeds:
            case = case_of(seed)
            expected = run_layer(case, SerialLanes(), device, width, is_off=True)
            found = run_layer(case, lanes, device, width)
            if len(found) != len(expected) or not all(map(torch.equal, found, expected)):
                differing.append(case)
    return differing


def checksums(device: torch.device, seeds: range, width: int) -> list[list[float]]:
    """Return those of lanes that overlap, of each tensor."""
    with closing(make_lanes(device)) as lanes:
        results = [run_layer(case_of(seed), lanes, device, width) for seed in seeds]
    return [[checksum(each) for each in tensors] for tensors in results]


def checksum(tensor: torch.Tensor) -> float:
    """Return a number that is exact enough to tell other bits in any element."""
    weights = torch.arange(1, tensor.numel() + 1, device=tensor.device, dtype=torch.float64).view(tensor.shape)
    return (tensor.double() * weights).sum().item()
