# SPDX-License-Identifier: Apache-2.0
"""One list of training runs of whole engines, for what no order of devices may break: deadlocks and races.

Each kind of job records what every rank issues (``tests/recorded_collectives.py``). :data:`RUNS` are trained on a
pretended GPU as well (``tests/test_races.py``). Registered parts are in them by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ds_fsmoe.components.routing import kind_of
from ds_fsmoe.planning.decide.presets import PRESETS
from ds_fsmoe.registry import known, lookup
from tests.covering import covering
from tests.deadlocks import Program
from tests.gradient_cases import LOOPS, Run, let_deepspeed_read_nothing, training
from tests.ranks import run_on_ranks
from tests.recorded_collectives import engines_on_streams

TWO_NODES = (("deterministic", True), ("topology.ranks_per_node", 2))
CUT = (*TWO_NODES, ("pipeline_degree.forward", 2), ("pipeline_degree.backward", 3))
SHARDED = (*CUT, ("esp_size", 2))
GPT = frozenset({"gpt"})
OVERLAP = (("zero_optimization.overlap_comm", True), ("zero_optimization.contiguous_gradients", True))
GATE_OPTIONS: dict[str, dict[str, Any]] = {
    "deepseek": {"num_groups": 2, "kept_groups": 1},
    "expert_choice": {"k": 2, "capacity_factor": 1.1, "causal": False},
    "softmoe": {"causal": False},
}
"""What gates have to be told beside their names."""
MODES = ("adaptive", "fixed_chunk", "micro_ops", "dense_only", "off")


def _run_of(stage: int, mode: str, alltoall: str, gate: str, order: str, ways: str, esp: int) -> Run:
    block = (*CUT, ("alltoall", alltoall), ("gate", {"type": gate, **GATE_OPTIONS.get(gate, {})}), ("order", order))
    block += (("esp_size", esp),) if esp > 1 else ()
    run = Run(stage, mode=mode, block=block, features=GPT if esp > 1 else frozenset())
    if ways == "recomputed":
        return replace(run, block=(*block, ("recompute", True)))
    if ways == "hooked":
        return replace(run, block=(*block, ("hooks", ("ds_fsmoe.BFloat16Communication",))))
    return replace(run, checkpointing="saved", config=OVERLAP if stage else ()) if ways == "checkpointed" else run


def _can_be_run(stage: int, mode: str, alltoall: str, gate: str, order: str, ways: str, esp: int) -> bool:
    return issubclass(kind_of(lookup("gate", gate)), lookup("order", order).reads)


WAYS = ("", "checkpointed", "recomputed", "hooked")
AXES = ((0, 1, 2), MODES, known("alltoall"), known("gate"), known("order"), WAYS, (1, 2))
RUNS = [_run_of(*values) for values in covering(*AXES, allowed=_can_be_run)]
"""Runs of four ranks in two nodes: every pair of values of any two axes occurs."""
EQUALLY = (*TWO_NODES, ("pipeline_degree.forward", 2), ("pipeline_degree.backward", 2), ("esp_size", 2))
RUNS += [
    Run(
        stage,
        features=GPT,
        block=(("schedule", name), *(EQUALLY if name != "deepspeed" else (*TWO_NODES, EQUALLY[-1]))),
    )
    for stage, name in zip((0, 1, 2) * len(PRESETS), PRESETS, strict=False)
]


@dataclass(frozen=True)
class Step:
    """Training steps of a script with DeepSpeed's layers, once its gradients travel in windows."""

    run: Run
    one_link: bool = False
    count: int = 1
    """The steps that are recorded."""
    ends_gathers: bool = True
    """Whether gradients wait for updated parameters that this rank has not read."""
    moves: bool = False
    """Whether experts have moved, and move on at the end of the step."""

    def __str__(self) -> str:
        return self.run.name

    def record(self, rank: int) -> list[Program]:
        """Return what this rank issues."""
        with engines_on_streams(self.one_link) as (patch, tape):
            if not self.ends_gathers:
                patch.setattr("ds_fsmoe.gradients.reducer.end_gathers", lambda: None)
            if "tail" in self.run.features:
                patch.setattr("ds_fsmoe.gradients.updated_parameters.FEWEST_NUMEL", 64)
                let_deepspeed_read_nothing(patch)
            with training(self.run, rank) as script:
                for _ in range(2):  # the first backward is looked at, and gradients travel from the second on
                    LOOPS[self.run.loop](script)
                if (updated := script.engine.fsmoe.updated) is not None:
                    updated.wait()
                if self.moves:
                    _move_experts(script.engine)
                tape.take()
                for _ in range(self.count):
                    LOOPS[self.run.loop](script)
                return [tape.take()]


def _move_experts(engine: Any) -> None:
    placement, watch = engine.fsmoe.placement, engine.fsmoe.placement_watch
    placement.go_to({label: now.swapped(1, now.num_local) for label, now in placement.now.items()})
    watch.wanted = {label: now.swapped(0, now.num_local) for label, now in placement.now.items()}
    watch._mover = placement.mover()


PLACED = (*CUT, ("dispatch", "unpadded"), ("placement.policy", "balanced"))
TAIL = Step(Run(1, mode="fixed_chunk", block=CUT, features=frozenset({"tail"})), count=2)
"""Rank 0 reads parameters that the others do not."""
STEPS = [
    *map(Step, RUNS),
    *(Step(Run(stage, ep_size=ep, block=PLACED), moves=True) for stage, ep in ((1, 2), (0, 4))),
    Step(Run(0, block=SHARDED, features=GPT), one_link=True),
]

AHEAD = {
    "overlap_comm": True,
    "stage3_max_live_parameters": 15000,
    "stage3_max_reuse_distance": 0,
    "stage3_param_persistence_threshold": 0,
    "reduce_bucket_size": 3001,
}
COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator"


class ByAddress(set):
    """A set of parameters, in the order that their addresses may have on a rank: the other way round on some."""

    is_turned = False

    def __iter__(self) -> Any:
        return iter(sorted(super().__iter__(), key=lambda each: getattr(each, "ds_id", each), reverse=self.is_turned))


@dataclass(frozen=True)
class OfModel:
    """A training step of a Hugging Face model, when batches run by halves and parameters are gathered ahead."""

    family: str = "olmoe"
    stage: int = 1
    alltoall: str = "node_deduplicated"
    ep_size: int = 4
    per_node: int = 2
    checkpoints: bool = False
    halves: str = "on"
    ahead: int = 0
    """At stage 3: how many numbers DeepSpeed gathers ahead: 1000 are one parameter, 5000 dense ones and experts'."""
    is_fenced: bool = True

    def record(self, rank: int) -> list[Program]:
        """Return what this rank issues."""
        from deepspeed.comm import comm

        from tests.hf_families import batch, loss_of, model_of
        from tests.sgd_engines import ds_config, engine_of

        model = model_of(self.family)  # transformers looks at streams when it is imported
        if self.checkpoints:
            model.gradient_checkpointing_enable()
        with engines_on_streams() as (patch, tape):
            block = {"num_chunks": {"forward": 2, "backward": 3}, "two_batch_overlap": self.halves, "autotune": False}
            block |= {"topology": {"ranks_per_node": self.per_node}, "alltoall": self.alltoall}
            config = ds_config(self.stage, ep_size=self.ep_size, **block)
            if self.stage == 3:
                # Taken when it was made.
                patch.setattr(comm.cdb, "all_gather_function", dist.all_gather_into_tensor)
                patch.setattr(comm.cdb, "reduce_scatter_function", dist.reduce_scatter_tensor)
            if self.ahead:
                turned = type("Addresses", (ByAddress,), {"is_turned": rank >= 2})
                patch.setattr(f"{COORDINATOR}.set", turned, raising=False)
                config["zero_optimization"] |= AHEAD | {"stage3_prefetch_bucket_size": self.ahead}
            if not self.is_fenced:
                patch.setattr("ds_fsmoe.engine.engine.fence_gathers", lambda *_: None)
            engine = engine_of(model, config)
            for number in range(4):  # from the fourth on DeepSpeed knows what to gather ahead
                if (updated := engine.fsmoe.updated) is not None:
                    updated.wait()
                tape.take()
                x = batch(10 * number + rank, 2)
                # With a cache, nothing is run by halves.
                by_halves = self.halves == "on"
                loss = engine(input_ids=x, labels=x, use_cache=False).loss if by_halves else loss_of(engine, x)
                engine.backward(loss)
                engine.step()
            program, splitter = tape.take(), engine.fsmoe.splitter
            assert (splitter.num_runs if splitter else 0) == (3 if by_halves else 0)
            engine.destroy()
        return [program]


FAMILIES = ("qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "muse_spark")
"""With a norm that has weights, biases, shared experts, modules within experts."""
GATHERED = [OfModel(each, 3, "flat", 2, 1, halves="off", ahead=1000) for each in FAMILIES]
MODELS = [
    OfModel(),
    OfModel(checkpoints=True),
    OfModel("olmoe", 2, "flat", ep_size=2),
    OfModel("olmoe", 3, "flat", checkpoints=True),
    OfModel("mixtral", 1, "2dh", checkpoints=True),
    OfModel("olmoe", 3, ep_size=2),
    *GATHERED,
]


@dataclass(frozen=True)
class Batches:
    """Batches through pipeline stages, and the making of the engine."""

    stages: tuple[str, ...]
    """What its pairs of layers have, equally many a stage."""
    accumulation: int
    zero_stage: int = 0
    num_stages: int = 2
    how: str = "early"
    count: int = 3
    shares_weights: bool = False

    def record(self, rank: int) -> list[Program]:
        """Return what this rank issues while the engine is made, and batch by batch."""
        from tests.test_pipeline_stages import CHUNKED, EARLY, TUNED, batches, make_engine

        block = {
            "early": EARLY,
            "uncut": {"enabled": True, "autotune": False, "deterministic": True},
            "stock's reduction": CHUNKED | {"autotune": False, "gradient_partition": {"mode": "off"}},
            "tuned": TUNED,
            "sharded": EARLY | {"esp_size": 2, "topology": {"ranks_per_node": 2}},
        }[self.how]
        with engines_on_streams() as (_, tape):
            how = {"accumulation": self.accumulation, "num_stages": self.num_stages}
            engine = make_engine(rank, self.zero_stage, self.stages, block, shares_weights=self.shares_weights, **how)
            batch = batches(engine.grid.data_parallel_id)
            programs = [tape.take()]
            for _ in range(self.count):
                engine.train_batch(batch)
                programs.append(tape.take())
            engine.destroy()
        return programs


FOUR_LAYERS = ("moe",) * 4
BATCHES = [
    Batches(("moe", "dense"), 1, zero_stage=1, count=2),
    Batches(("moe", "moe", "dense", "moe"), 7, num_stages=4, count=2),
    *(Batches(("moe", "moe"), accumulation, zero_stage) for accumulation in (1, 7) for zero_stage in (0, 1)),
    *(Batches(FOUR_LAYERS, 4, zero_stage, how=how) for zero_stage in (0, 1) for how in ("uncut", "stock's reduction")),
    *(Batches(FOUR_LAYERS, accumulation, num_stages=4) for accumulation in (1, 4)),
    Batches(("dense", "moe"), 4),
    *(Batches(FOUR_LAYERS, 4, zero_stage, shares_weights=True) for zero_stage in (0, 1)),
    # Measured ahead of the third batch, and tried in those after it.
    *(Batches(stages, 2, how="tuned", count=16) for stages in (("moe", "moe"), ("dense", "moe"))),
]

Job = Step | OfModel | Batches


def record_jobs(rank: int, world_size: int, jobs: list[Job]) -> list[list[Program]]:
    """Return what this rank issues in each job, in parts between which the device is idle."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    return [each.record(rank) for each in jobs]


def recorded(folder: Path, *jobs: Job, ranks: int = 4) -> list[list[tuple[Program, ...]]]:
    """Return job -> part -> program of each rank; jobs with other groups of DeepSpeed want a call of their own."""
    of_ranks = run_on_ranks(record_jobs, ranks, folder, list(jobs))
    return [list(zip(*of_job, strict=True)) for of_job in zip(*of_ranks, strict=True)]
