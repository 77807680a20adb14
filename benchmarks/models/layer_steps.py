# SPDX-License-Identifier: Apache-2.0
"""An engine over the models of ``layers.py`` and its steps: stock's or ours, in either layout, with the same tokens."""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

import ds_fsmoe
from benchmarks.harness import routing
from benchmarks.models.layers import Layer, Layout, Model, Mpu, StockGroups, ranks_per_node
from ds_fsmoe.gradients.reduction import OBSERVED_ROUNDS
from ds_fsmoe.planning.block import BlockPlan

HOT_SHARE = 0.5
"""Of the tokens, where routing is skewed."""
HOT_LENGTH = 6.0
"""Of what is added to those tokens, of which each element is about 1."""


@dataclass(frozen=True)
class Found:
    """What stock is fastest with, and the same for ours; by default as ``bench_layer.py --sweep`` has found it."""

    stage: int = 0
    bucket: int = 1 << 20
    chunk_bytes: int = 1 << 17
    """Slices of ``pipemoe_lina``."""


@functools.cache
def _groups(layout: Layout, stock: bool) -> StockGroups:
    """The same for all engines of one kind: every group of ranks on gloo is a thread that wakes up a hundred times a
    second, and takes processor time from what is measured."""
    return StockGroups()


class Steps:
    """An engine over a model, and a step of it; the same tokens for everybody.

    Args:
        layer: sizes.
        layout: of the ranks.
        mpu: of the node layout.
        found: settings.
        block: ``fsmoe``; ``None`` for stock.
        prepare: called with the model before an engine has it.
        make_model: of what the engine trains.
        batches: what each step is given; by default the same random tokens.
        lr: learning rate of SGD; tiny by default, so that all steps of a benchmark are alike.

    Attributes:
        losses: of this rank, one for each step.
    """

    def __init__(
        self,
        layer: Layer,
        layout: Layout,
        mpu: Mpu | None,
        found: Found,
        block: dict[str, Any] | None,
        prepare: Callable[[Model], None] = lambda _: None,
        make_model: type[Model] = Model,
        batches: Iterator[tuple[torch.Tensor, ...]] | None = None,
        lr: float = 1e-4,
    ) -> None:
        # The ranks of a node need equal gates where they see the same tokens.
        torch.manual_seed(0)
        stock = block is None
        mpu = mpu if layout == "node" else None
        self.groups = _groups(layout, stock)
        self.groups.put()
        module = make_model(layer, layout, mpu, stock)
        prepare(module)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": lr}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": found.stage, "reduce_bucket_size": found.bucket},
            # Stock clips by a norm that depends on how experts are spread, ours by the true one: losses would part.
            "gradient_clipping": 0.0,
            "steps_per_print": 1_000_000,
        }
        if not stock:
            config["fsmoe"] = {"enabled": True, "autotune": False} | block
        initialize: Any = deepspeed.initialize if stock else ds_fsmoe.initialize
        self.engine = initialize(model=module, model_parameters=list(module.parameters()), config=config, mpu=mpu)[0]
        self.groups.take()
        self.losses: list[torch.Tensor] = []
        if routing.forced is not None:
            routing.forced.tokens_of_node = layer.B * layer.L
        self.batches = batches or tokens(layer, all_of_node=layout == "node" and stock)
        for _ in range(1 if stock else OBSERVED_ROUNDS):
            self()
        # Until it has tried the plans it thinks of, and planned gradients by the one it keeps.
        while not stock and self._is_trying():
            self()

    def _is_trying(self) -> bool:
        state = self.engine.fsmoe
        if state.autotune is not None and state.autotune.trials is not None:
            return True
        return state.reduction is not None and state.reduction.reducer.plan is None

    def __call__(self) -> None:
        self.groups.put()
        loss = self.engine(*next(self.batches))
        self.losses.append(getattr(self.engine.module, "loss", loss).detach())
        self.engine.backward(loss)
        self.engine.step()

    def finish(self) -> None:
        """Wait for what the last step has left under way."""
        wait_for_parameters(self.engine)

    def timed_s(self, steps: int = 3) -> float:
        """The median of some steps, of the slowest rank."""
        times = []
        for _ in range(steps):
            dist.barrier()
            start = time.perf_counter()
            self()
            self.finish()
            times.append(time.perf_counter() - start)
        slowest = torch.tensor(times)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return float(slowest.median())

    def set_degree(self, degree: int) -> None:
        """Of both phases."""
        set_degree(self.engine, degree)

    def change_blocks(self, change: Callable[[BlockPlan], BlockPlan]) -> None:
        """Run both phases of every layer otherwise."""
        change_blocks(self.engine, change)

    def close(self) -> None:
        self.engine.destroy()


def tokens(layer: Layer, all_of_node: bool) -> Iterator[tuple[torch.Tensor]]:
    """[S, M] of this rank for each step: of the same tokens per node, all or its own part."""
    node, rank_inside = divmod(dist.get_rank(), ranks_per_node())
    generator = torch.Generator().manual_seed(node)
    x_SM = torch.randn(layer.B * layer.L, layer.M, generator=generator)
    is_hot_S1 = torch.rand(len(x_SM), 1, generator=generator) < HOT_SHARE
    some_S = torch.randint(max(1, layer.E // dist.get_world_size()), (len(x_SM),), generator=generator)
    toward_EM = layer.directions() * HOT_LENGTH
    for step in itertools.count():
        aim = {"": None, "hot expert": 0, "hot rank": some_S, "rotating": step % layer.E}[layer.skew]
        y_SM = x_SM if aim is None else x_SM + is_hot_S1 * toward_EM[aim]
        yield (y_SM if all_of_node else y_SM.chunk(ranks_per_node())[rank_inside],)


def wait_for_parameters(engine: Any) -> None:
    """Wait for updated parameters, which ours sends under the next forward of the same engine; stock leaves nothing."""
    state = getattr(engine, "fsmoe", None)
    if state is not None:
        state.wait_for_parameters()


def set_degree(engine: Any, degree: int) -> None:
    """Cut the layers of an engine into so many chunks, in both phases."""
    change_blocks(engine, lambda block: BlockPlan(degree, block.links))


def change_blocks(engine: Any, change: Callable[[BlockPlan], BlockPlan]) -> None:
    """Run both phases of every layer of an engine otherwise."""
    for layer in engine.fsmoe.inner_layers.values():
        plan = layer.fsmoe.plan
        layer.fsmoe.apply(replace(plan, forward=change(plan.forward), backward=change(plan.backward)))
