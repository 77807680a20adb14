# SPDX-License-Identifier: Apache-2.0
"""Two layers on a pretended GPU, trained for two steps: which rules they break, and the numbers they compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_fsmoe import BFloat16Communication, LinearGate, SimpleOrder
from ds_fsmoe.components.callback import CallbackArgs, CallbackBase
from ds_fsmoe.components.expert_compute.calls import ExpertSet
from ds_fsmoe.distributed.groups import FSMoEGroups, make_groups
from ds_fsmoe.execution import counts_exchange
from ds_fsmoe.execution.lanes import Lanes, make_lanes
from ds_fsmoe.execution.pipeline import LayerPipeline, WholeExperts
from ds_fsmoe.execution.row_sizes import RowSizes
from ds_fsmoe.execution.stream_lanes import StreamLanes
from ds_fsmoe.layer.parts import exchange_in
from ds_fsmoe.layer.runtime import block_of
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.registry import lookup
from ds_fsmoe.two_batch.run import TwoBatchRun
from tests.layer_runs import token_path
from tests.pretended_gpu import Gpu, pretending
from tests.pretended_nccl import fake_ranks
from tests.reference import LayerSettings
from tests.test_layer_against_loop import DROP, OF_SHARDS, local_experts, problem_of
from tests.test_layer_against_loop import Case as LayerCase

LAYERS, STEPS = 2, 2


@dataclass(frozen=True)
class Layout:
    """Where experts are; this rank is the second of the world."""

    ranks: int
    ep: int
    esp: int = 1
    ranks_per_node: int | None = None
    alltoall: str = "flat"


@dataclass(frozen=True)
class Case:
    """How the layers are run."""

    layout: Layout = Layout(2, 2)
    forward: int = 2
    backward: int = 2
    expert: str = "gpt"
    settings: LayerSettings = DROP
    links: str = "paper"
    recompute: bool = False
    checkpointing: str = ""
    """Of each layer: "", "reentrant" or "saved"."""
    hooks: str = ""
    """"", "rounding" (the wire is narrower) or "copying" (new tensors at every point)."""
    whole: bool = False
    """The experts of a rank are called as one module, as where somebody has put a hook on it."""
    in_rows: bool = False
    """Rows travel instead of slots."""
    halves: str = ""
    """"", "turns" (of two halves of the tokens) or "again" (whose layers are checkpointed, too)."""


class Copying(CallbackBase):
    """Gives a new tensor at each point of a chunk's way."""

    def _copied(self, args: CallbackArgs) -> torch.Tensor:
        return args.tensor * 1.0

    before_dispatch_hook = after_dispatch_hook = before_combine_hook = after_combine_hook = _copied


HOOKS: dict[str, tuple[type[CallbackBase], ...]] = {"": (), "rounding": (BFloat16Communication,), "copying": (Copying,)}


def pipelines_of(case: Case, groups: FSMoEGroups, lanes: Lanes) -> list[LayerPipeline]:
    """One for each layer."""
    exchange = exchange_in(groups, lookup("alltoall", case.layout.alltoall)())
    assert exchange.planned == case.layout.alltoall
    collectives = replace(exchange, reduces=((0, "backend"),), block=block_of(groups))
    plans = [
        PhasePlan(BlockPlan(degree, case.links), groups.planned, is_backward, exchange.planned, bool(case.halves))
        for degree, is_backward in ((case.forward, False), (case.backward, True))
    ]
    return [LayerPipeline(lanes, collectives, *plans, f"L{layer}", case.recompute) for layer in range(LAYERS)]


def _as_one(experts: list[nn.Module]) -> WholeExperts:
    def forward(x_NecM: torch.Tensor) -> torch.Tensor:
        return torch.stack([expert(x_NecM[:, number]) for number, expert in enumerate(experts)], dim=1)

    return WholeExperts(forward, tuple(p for each in experts for p in each.parameters()), "experts")


def train(case: Case, lanes: Lanes) -> list[torch.Tensor]:
    """What two steps compute: the result and every gradient of each."""
    layout = case.layout
    groups = make_groups(layout.ep, layout.esp, ranks_per_node=layout.ranks_per_node)
    problem = problem_of(LayerCase(1, 1, case.expert, case.settings, hidden=OF_SHARDS), layout.ranks)
    pipelines = pipelines_of(case, groups, lanes)
    gates, experts, callbacks = [], [], []
    for _ in range(LAYERS):
        gate = LinearGate(**asdict(case.settings), top2_2nd_expert_sampling=False)
        gate.build_once(problem.weight_EM.shape[1], len(problem.experts))
        gate.double().load_state_dict({"wg.weight": problem.weight_EM})
        gate.needs_capacity = not case.in_rows
        gates.append(gate.to("cuda"))
        experts.append([each.to("cuda") for each in local_experts(problem.experts, groups, layout.ep, layout.esp)])
        callbacks.append([each() for each in HOOKS[case.hooks]])
    sets = [_as_one(each) if case.whole else ExpertSet(each, keep_expert_dim=True) for each in experts]

    def layer(number: int, x_SM: torch.Tensor) -> torch.Tensor:
        parts = {"gate": gates[number], "order": SimpleOrder(), "pipeline": pipelines[number]}
        group = groups.block_group
        of_layer = {"experts": sets[number], "group": group, "callbacks": callbacks[number]}
        return token_path(x_SM, None, **parts, **of_layer, in_rows=case.in_rows).output

    parameters = [p for modules in experts for module in modules for p in module.parameters()]
    parameters += [p for gate in gates for p in gate.parameters()]
    x_SM = problem.x_per_rank[groups.rank].to("cuda").requires_grad_()
    dy_SM = problem.dy_per_rank[groups.rank].to("cuda")
    torch.manual_seed(5)
    found = []
    for _ in range(STEPS):
        y_SM = _in_halves(layer, x_SM, case.halves == "again") if case.halves else x_SM
        for number in () if case.halves else range(LAYERS):
            if case.checkpointing:
                reentrant = case.checkpointing == "reentrant"
                y_SM = y_SM + checkpoint(layer, number, y_SM, use_reentrant=reentrant, preserve_rng_state=False)
            else:
                y_SM = y_SM + layer(number, y_SM)
        (y_SM * dy_SM).sum().backward()
        found += [y_SM.detach(), *(each.grad for each in (x_SM, *parameters))]
        for each in (x_SM, *parameters):
            each.grad = None
        del y_SM
    return found


def _in_halves(layer: Callable[[int, torch.Tensor], torch.Tensor], x_SM: torch.Tensor, again: bool) -> torch.Tensor:
    """Run the layers by halves of the tokens in turns."""

    def block(number: int, x_B1M: torch.Tensor) -> torch.Tensor:
        return x_B1M + layer(number, x_B1M[:, 0])[:, None]

    run = TwoBatchRun(x_SM[:, None])
    for number in range(LAYERS):
        run.add(partial(block, number), [((), {})] * 2, again)
        run.advance()
    return run.complete()[:, 0]


@contextmanager
def counts_come_back() -> Iterator[None]:
    """Nothing is sent, so that there are counts at all each rank is taken to send this one as much as it is sent."""

    def exchange(received: torch.Tensor, sent: torch.Tensor, *splits: Any, group: Any, async_op: bool) -> Any:
        dist.all_to_all_single(received, sent, *splits, group=group)
        received.copy_(sent)
        return SimpleNamespace(wait=lambda: None)

    def sizes(counts: Any, own_ET: np.ndarray, host_NeT: np.ndarray, passed_XT: np.ndarray, *args: Any) -> RowSizes:
        if counts.forwarded is not None and (pairs := counts_exchange._pairs(counts.forwarded)):
            # What any rank sends any other, where rows are passed on: as far as they are apart.
            ranks, own = counts.block.num_exchanging, counts.block.ep_index
            own_GT = own_ET.reshape(ranks, -1, counts.token_chunks.num_segments).sum(1)
            passed_XT = np.stack([own_GT[(source + to - own) % ranks] for source, to in pairs])
        return counted(counts, own_ET, host_NeT, passed_XT, *args)

    counted = counts_exchange.CountsExchange.sizes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(counts_exchange, "dist", SimpleNamespace(all_to_all_single=exchange))
        patch.setattr(counts_exchange.CountsExchange, "sizes", sizes)
        yield


def watched(case: Case, gpu: Gpu | None = None, overlap: bool = True) -> tuple[Gpu, list[Any]]:
    """(the device, what was computed) of a case, on streams or one task after another."""
    with fake_ranks(1 % case.layout.ranks, case.layout.ranks), counts_come_back(), pretending(gpu) as gpu:
        lanes = make_lanes(torch.device("cuda"), overlap)
        assert isinstance(lanes, StreamLanes) == overlap
        found = train(case, lanes)
        found = [None if each is None else each.cpu() for each in found]
        lanes.close()
    return gpu, found


def differences(one: list[Any], other: list[Any]) -> list[int]:
    """Which of two lists of tensors differ in a bit, or are not numbers."""
    return [
        number
        for number, (a, b) in enumerate(zip(one, other, strict=True))
        if (a is None) != (b is None) or (a is not None and not torch.equal(a, b))
    ]


def assert_kept(gpu: Gpu) -> None:
    """Every rule was kept, by a program that did something."""
    assert gpu.num_operations > 50
    if gpu.breaches:
        pytest.fail(f"{len(gpu.breaches)} breaches, such as:\n" + "\n".join(map(str, gpu.breaches[:4])))
