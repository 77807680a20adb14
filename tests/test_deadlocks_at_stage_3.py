# SPDX-License-Identifier: Apache-2.0
"""Whole steps of Hugging Face models at stage 3: DeepSpeed gathers parameters ahead, beside our lanes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from ds_fsmoe.execution.stream_lanes import StreamLanes
from tests.deadlocks import Devices, Program, common_order, difference, search_at_random
from tests.hf_families import WIDTH, batch, loss_of, model_of
from tests.ranks import run_on_ranks
from tests.recorded_collectives import record, record_deepspeed
from tests.samples import sampled
from tests.test_deadlocks_in_steps import check
from tests.test_hugging_face import OfTwice, Twice, ds_config, engine_of, gradients

pytestmark = pytest.mark.long

AHEAD = {
    "overlap_comm": True,
    "stage3_max_live_parameters": 15000,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
    "reduce_bucket_size": 3001,
}
COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"


@dataclass(frozen=True)
class Step:
    """The fourth training step of a family, when DeepSpeed knows what to gather ahead."""

    family: str = "qwen3_moe"
    ahead: int = 1000
    """How many numbers are gathered ahead at a time: one parameter, or dense ones and experts' with 5000."""
    is_fenced: bool = True


class ByAddress(set):
    """A set of parameters, in the order that their addresses may have on a rank: the other way round on some."""

    is_turned = False

    def __iter__(self) -> Any:
        return iter(sorted(super().__iter__(), key=lambda each: getattr(each, "ds_id", each), reverse=self.is_turned))


def issued(rank: int, world_size: int, steps: list[Step]) -> list[Program]:
    """What this rank issues in each."""
    return [_issued(rank, each) for each in steps]


def _issued(rank: int, step: Step) -> Program:
    import deepspeed
    from deepspeed.comm import comm

    model = model_of(step.family)  # transformers looks at streams when it is imported
    with pytest.MonkeyPatch.context() as patch:
        tape = record(patch)
        record_deepspeed(patch, tape)
        # On a CPU lanes would be threads.
        patch.setattr("ds_fsmoe.layer.runtime.make_lanes", lambda *_: StreamLanes(device=torch.device("cuda", 0)))
        patch.setattr(f"{COORDINATOR}.set", type("Addresses", (ByAddress,), {"is_turned": rank >= 2}), raising=False)
        if not step.is_fenced:
            patch.setattr("ds_fsmoe.engine.engine.fence_gathers", lambda *_: None)
        cuts = {"forward": 2, "backward": 3}
        config = ds_config(3, ep_size=2, num_chunks=cuts, topology={"ranks_per_node": 1})
        config["zero_optimization"] |= AHEAD | {"stage3_prefetch_bucket_size": step.ahead}
        deepspeed.init_distributed("gloo")
        # Taken when it was made.
        patch.setattr(comm.cdb, "all_gather_function", torch.distributed.all_gather_into_tensor)
        patch.setattr(comm.cdb, "reduce_scatter_function", torch.distributed.reduce_scatter_tensor)
        engine = engine_of(model, config)
        for number in range(4):
            tape.take()
            engine.backward(loss_of(engine, batch(10 * number + rank, 1)))
            engine.step()
        program = tape.take()
        engine.destroy()
    return program


# One parameter ahead, and several.
@sampled("ahead", [5000, 1000], kept=[0])
def test_gathers_ahead_come_in_one_order_on_all_ranks(ahead: int, tmp_path: Path) -> None:
    [fenced] = zip(*run_on_ranks(issued, 4, tmp_path, [Step(ahead=ahead)]), strict=True)
    check(fenced)
    kinds = [each.kind.partition(" ")[0] for each in fenced[0]]
    gathers = [at for at, kind in enumerate(kinds) if kind.startswith("all_gather")]
    rows = [at for at, each in enumerate(fenced[0]) if each.stream == "link 1"]
    assert any(rows[0] < at < rows[-1] for at in gathers), "nothing is gathered between the lanes' collectives"
    groups = {fenced[0][at].group for at in gathers}
    assert len(groups) == 2, "dense parameters and experts' are gathered in communicators of their own"


def test_gathers_ahead_get_stuck_without_the_fence(tmp_path: Path) -> None:
    [as_it_comes] = zip(*run_on_ranks(issued, 4, tmp_path, [Step(ahead=5000, is_fenced=False)]), strict=True)
    # Each communicator's collectives are the same on all of its ranks; they are mixed in other orders.
    assert difference(as_it_comes) is None
    assert common_order(as_it_comes) is None
    assert search_at_random(Devices(as_it_comes, 1, implicit=True), range(20)).stuck is not None


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 4])
def test_other_families_at_stage_3(world_size: int, tmp_path: Path) -> None:
    steps = [Step(each) for each in ("mixtral", "gpt_oss", "deepseek_v3", "muse_spark")]
    for programs in zip(*run_on_ranks(issued, world_size, tmp_path, steps, limit_s=600), strict=True):
        check(programs)


class OnlyHit(Twice):
    """As families write it: an expert without a token is not computed, nor its activation called."""

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.Sigmoid()

    def _apply_gate(self, up: torch.Tensor) -> torch.Tensor:
        gate, value = up.chunk(2, dim=-1)
        return self.act_fn(gate) * value

    def forward(self, x_SM: torch.Tensor, index_SK: torch.Tensor, weights_SK: torch.Tensor) -> torch.Tensor:
        y_SM = torch.zeros_like(x_SM)
        for expert in index_SK.unique().tolist():
            tokens, choices = torch.where(index_SK == expert)
            h = self._apply_gate(x_SM[tokens] @ self.gate_up_proj[expert].t())
            y = 2 * h @ self.down_proj[expert].t() * weights_SK[tokens, choices, None]
            y_SM = y_SM.index_add(0, tokens, y)
        return y_SM


def lopsided(rank: int, world_size: int) -> list[str]:
    """Four steps in which all tokens choose two experts of the first rank; what is off of the losses."""
    reference = OfTwice(OnlyHit)
    with torch.no_grad():
        reference.router.bias.copy_(torch.tensor([9.0, 7.0, 0.0, 5.0]))
    engine = engine_of(copy.deepcopy(reference), ds_config(3, lr=0.1, ep_size=2))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    said = []
    for step in range(4):
        xs = torch.randn(world_size, 5, WIDTH, generator=torch.Generator().manual_seed(step)) / 10
        losses = torch.stack([reference(each) for each in xs])
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        loss = engine(xs[rank])
        engine.backward(loss)
        engine.step()
        if not abs(loss.item() - losses[rank].item()) <= 1e-5 * losses[rank].item():
            said.append(f"step {step}: loss {loss.item()} for {losses[rank].item()}")
    engine.destroy()
    return said


def called_within(rank: int, world_size: int) -> list[list[str]]:
    """What is off: with activations called as often as there are experts hit, with a norm that has weights."""
    cuts = {"forward": 2, "backward": 3}
    return [lopsided(rank, world_size), gradients(rank, world_size, ["muse_spark"], 3, cuts)]


def test_modules_within_experts_may_be_called_a_different_number_of_times_on_each_rank(tmp_path: Path) -> None:
    assert run_on_ranks(called_within, 2, tmp_path) == [[[], []]] * 2
