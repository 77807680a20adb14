# SPDX-License-Identifier: Apache-2.0
"""How many communicators a rank holds and a job makes, what NCCL is asked for so that two links may be at work at once,
and what is done where it cannot give that."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from torch import nn

import ds_fsmoe
from ds_fsmoe.components.alltoalls.two_steps import TwoStepAllToAll
from ds_fsmoe.components.experts.gpt import GPTFeedForward
from ds_fsmoe.components.hierarchical import BlockPaths, Nodes
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import ConfigError, read_block
from ds_fsmoe.distributed import launch_order, nccl
from ds_fsmoe.distributed.groups import communicator_like, make_groups, passing_communicators
from ds_fsmoe.distributed.launch_order import VARIABLE
from ds_fsmoe.engine import entry_points
from ds_fsmoe.engine.engine import FSMoEEngine
from ds_fsmoe.execution import counts_exchange
from ds_fsmoe.execution.counts_exchange import CountsExchange
from ds_fsmoe.execution.lanes import make_lanes
from ds_fsmoe.execution.row_sizes import TokenChunks
from ds_fsmoe.gradients.background_lane import make_background_lane
from ds_fsmoe.gradients.flat_buffers import FlatGradients, Scaling
from ds_fsmoe.layer.parts import exchange_in, node_links
from ds_fsmoe.layer.runtime import LayerRuntime, block_of
from ds_fsmoe.planning.groups import Groups, num_communicators
from ds_fsmoe.planning.job.measured import Slowdowns
from ds_fsmoe.planning.schedule import GRAD
from ds_fsmoe.tuning.tuned_model import TunedModel
from tests.lane_cases import INTER, INTRA, schedule_of
from tests.pretended_device import pretended, run_pretended
from tests.pretended_nccl import COLLECTIVES, fake_ranks, pretend_nccl
from tests.samples import sampled
from tests.small_model import Case, SmallModel

FIXTURES = (pretended,)  # which pytest finds by their names here
ON = {VARIABLE: "1"}
TOO_OLD = "NCCL 2.25.1 has no NCCL_LAUNCH_ORDER_IMPLICIT: use 2.26 or later"


@dataclass(frozen=True)
class Job:
    """Where an engine starts."""

    world: int
    ep: int
    esp: int = 1
    per_node: int = 8
    alltoall: str = "flat"
    mode: str = "auto"
    stage: int = 1
    rank: int = 0


@dataclass
class Made:
    """How many groups a start has made, and (what it is for, ranks) of each communicator of this rank with others."""

    calls: int = 0
    held: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)


class OneLayer(nn.Module):
    def __init__(self, ep: int) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.moe = MoE(8, GPTFeedForward(8, 16), num_experts=ep, ep_size=ep, k=1)


@contextmanager
def counted() -> Iterator[Made]:
    """Counts groups; what ranks tell each other is what this one says."""
    made, new_group = Made(), dist.new_group

    def tell_own(held: list[Any], own: Any, group: Any = None) -> None:
        held[:] = [own] * len(held)

    def counting(ranks: Any = None, *args: Any, **options: Any) -> Any:
        made.calls += 1
        of = tuple(ranks) if ranks is not None else tuple(range(dist.get_world_size()))
        if dist.get_rank() in of and len(of) > 1:
            made.held.append((options.get("group_desc") or "", of))
        return new_group(ranks, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_RANK", "0")
        # Behind this, DeepSpeed is as if it had not begun: other tests have groups of their own.
        patch.setattr(deepspeed.comm.comm, "cdb", None)
        # Compiled by DeepSpeed at its first process group, for a collective of inference only.
        patch.setitem(deepspeed.ops.__compatible_ops__, "deepspeed_shm_comm", False)
        patch.setattr(dist, "new_group", counting)
        patch.setattr(dist, "all_gather_object", tell_own)
        yield made


def start(job: Job) -> Made:
    block = {
        "enabled": True,
        "ops": "reference",
        "alltoall": job.alltoall,
        "topology": {"ranks_per_node": job.per_node},
        "esp_size": job.esp,
        "gradient_partition": {"mode": job.mode},
    }
    with counted() as made, fake_ranks(job.rank, job.world):
        deepspeed.init_distributed("fake")
        config = Case(stage=job.stage).ds_config(fsmoe=block)
        ds_fsmoe.initialize(model=OneLayer(job.ep), config=config)[0].destroy()
    return made


SIX_LAYOUTS = [
    Job(8, 8),
    Job(16, 4, 2, per_node=4),
    Job(16, 16, alltoall="node_deduplicated"),
    Job(32, 16, alltoall="2dh", rank=11),
    Job(32, 1, stage=2),
    Job(16, 4, per_node=4, mode="off"),
]
# Of a large job -> the most that a rank may hold, and the most that all may make.
LARGE = {Job(64, 4, rank=17): (10, 100), Job(1024, 8): (8, 410)}


def name_of(job: Job) -> str:
    return f"{job.world}-{job.ep}x{job.esp}-{job.per_node}-{job.alltoall}-{job.mode}-{job.stage}"


@sampled("job", [*LARGE, *SIX_LAYOUTS], kept=[1], drawn=3, ids=name_of)
def test_an_engine_makes_what_the_planner_counts_and_few_in_a_large_job(job: Job) -> None:
    made = start(job)
    most_held, most_calls = LARGE.get(job, (len(made.held), made.calls))
    assert len(made.held) <= most_held
    assert made.calls <= most_calls
    groups = Groups(job.world, job.per_node, ep=job.ep, esp=job.esp)
    assert len(made.held) == num_communicators(groups, job.mode != "off", job.alltoall), made.held


# ---- groups that are split off the default one


def made_by(patch: pytest.MonkeyPatch, rank: int, can_split: tuple[bool, ...]) -> list[tuple[str, str, Any]]:
    """What one of 8 ranks calls, in its order: (which function, what for, the ranks)."""
    calls: list[tuple[str, str, Any]] = []
    with fake_ranks(rank, 8):
        pretend_nccl(patch, reasons=can_split)
        new_group = dist.new_group

        def new(ranks: list[int], group_desc: str = "", **options: Any) -> Any:
            calls.append(("new_group", group_desc, ranks))
            return new_group(ranks, group_desc=group_desc, **options)

        def split(split_ranks: list[list[int]], group_desc: str, timeout: Any, pg_options: Any) -> Any:
            calls.append(("split_group", group_desc, split_ranks))
            own = next((each for each in split_ranks if rank in each), None)
            return None if own is None else new_group(own, group_desc=group_desc)

        patch.setattr(dist, "new_group", new)
        patch.setattr(dist, "split_group", split)
        patch.setattr(nccl, "can_split", lambda: can_split[rank])
        groups = make_groups(4, ranks_per_node=2, max_ctas=16)
        exchange_in(groups, TwoStepAllToAll())
        for kind in ("edp", "dp"):
            communicator_like(groups, kind)
            node_links(groups, kind, "gradients")
        with passing_communicators([[(0, 1), (2, 3), (4, 5), (6, 7)], [(0, 2, 4, 6), (1, 3, 5, 7)]], "links") as made:
            assert [each.size() for each in made] == [2, 4]
    return calls


@pytest.mark.parametrize(("unable", "function"), [((), "split_group"), ((5,), "new_group")])
def test_all_ranks_split_groups_of_one_purpose_off_at_once_or_make_them_one_by_one_in_one_order(
    unable: tuple[int, ...], function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for rank in range(8):
        with monkeypatch.context() as patch:
            found.append(made_by(patch, rank, tuple(each not in unable for each in range(8))))
    assert all(each == found[0] for each in found)
    assert {called for called, _, _ in found[0]} == {function}
    if not unable:
        purposes = [(purpose, str(ranks)) for _, purpose, ranks in found[0]]
        assert len(set(purposes)) == len(purposes)
        assert (function, "fsmoe_ep", [[0, 1, 2, 3], [4, 5, 6, 7]]) in found[0]
        assert (function, "fsmoe_a2a_intra", [[0, 1], [2, 3], [4, 5], [6, 7]]) in found[0]


def test_layers_with_experts_on_two_or_four_nodes_share_the_communicators_inside_them() -> None:
    with counted() as made, fake_ranks(1, 16):
        for ep_size in (4, 8):
            exchange_in(make_groups(ep_size, 2, ranks_per_node=4), TwoStepAllToAll())
    assert [ranks for name, ranks in made.held if name == "fsmoe_a2a_intra"] == [(1, 3)]


@pytest.mark.parametrize(("device", "splits"), [(0, True), (None, True), (0, False)])
def test_a_default_group_can_be_split_where_it_is_bound_and_its_backend_is_able_to(
    device: int | None, splits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = None if device is None else torch.device("cuda", device)
    world = SimpleNamespace(
        bound_device_id=bound, _get_backend=lambda device: SimpleNamespace(supports_splitting=splits)
    )
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_group", lambda: world)
    assert nccl.can_split() == (device is not None and splits)
    monkeypatch.delattr(dist, "split_group")
    assert not nccl.can_split(), "a torch without it"


# ---- counts of rows


def test_counts_with_2dh_grow_as_the_ranks_do(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[int] = []
    send = lambda into, *_, **__: received.append(into.numel())  # noqa: E731
    monkeypatch.setattr(counts_exchange, "dist", SimpleNamespace(all_to_all_single=send))
    for ranks in (16, 32):
        with fake_ranks(1, ranks):
            groups = make_groups(ranks, ranks_per_node=4)
            counts_ET, fault = torch.ones(4 * ranks, 6, dtype=torch.long), torch.zeros((), dtype=torch.long)
            forwarded = exchange_in(groups, TwoStepAllToAll()).forwarded
            CountsExchange.begin(counts_ET, fault, block_of(groups), TokenChunks(2, 3), forwarded)
    few, many = received
    assert few < 16 * (1 + 4 * 6) + 16 * 6 + 1
    assert many <= 2.2 * few


@pytest.mark.parametrize(("ep", "esp", "per_node"), [(8, 1, 4), (6, 1, 2), (4, 2, 4)])
def test_each_rank_hears_of_all_rows_that_come_by_it(
    ep: int, esp: int, per_node: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What all ranks send is delivered by hand, and compared with what they have counted."""
    world, cuts, each_E = ep * esp, TokenChunks(2, 1), 3
    counted = [torch.arange(each_E * ep * 2).reshape(-1, 2) * (7 + rank) % 11 for rank in range(world)]
    begun, pieces, hops = [], [], []
    for rank in range(world):
        sent: list[Any] = []
        with fake_ranks(rank, world), monkeypatch.context() as patch:
            groups = make_groups(ep, esp, ranks_per_node=per_node)
            exchange = exchange_in(groups, TwoStepAllToAll())

            def send(into: Any, out: Any, receives: Any, sends: Any, sent: list = sent, **_: Any) -> SimpleNamespace:
                sent[:] = [out.split(sends), receives]
                return SimpleNamespace(wait=lambda: None)

            patch.setattr(counts_exchange, "dist", SimpleNamespace(all_to_all_single=send))
            fault = torch.zeros((), dtype=torch.long)
            begun.append(CountsExchange.begin(counted[rank], fault, block_of(groups), cuts, exchange.forwarded))
            pieces.append(sent)
            nodes = Nodes.of(groups.topology.node_of_rank[each] for each in groups.ranks_of("ep"))
            ways = [BlockPaths(TwoStepAllToAll(), nodes, back) for back in (False, True)]
            hops.append([[way.hop(step, groups.index_in("ep")) for step in range(2)] for way in ways])
    for rank, (one, (_, receives)) in enumerate(zip(begun, pieces, strict=True)):
        arrived = [of_rank[0][rank] for of_rank in pieces]
        assert [len(each) for each in arrived] == receives
        one.received = torch.cat(arrived)
        sizes = one.wait()
        esp_index = one.block.esp_index
        of_ep = [counted[source] for source, (_, shard) in enumerate(one.block.places) if shard == esp_index]
        for chunk, found in enumerate(sizes.forward.chunks):
            rows = [of_rank.reshape(ep, each_E, 2)[:, :, chunk].sum(1).tolist() for of_rank in of_ep]
            there, back = ({pair for hop in way for pair in (*hop.pairs, *hop.received_pairs)} for way in hops[rank])
            assert all(found.between[source, to] == rows[source][to] for source, to in there)
            assert all(found.back.between[source, to] == rows[to][source] for source, to in back)


# ---- NCCL's order of launches


def test_the_order_of_launches_is_asked_for_in_ranks_alone_where_nobody_has_set_it_and_it_is_not_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for before, after in (({"LOCAL_RANK": "0"}, "1"), ({}, None), ({"LOCAL_RANK": "0", VARIABLE: "0"}, "0")):
        environment = dict(before)
        launch_order.ask_as_rank(environment)
        assert environment.get(VARIABLE) == after
    environment = {}
    with fake_ranks(0, 2):
        launch_order.ask(environment)
    # RCCL crashes over it.
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.11.0+rocm6.4")
    launch_order.ask(environment)
    assert environment == {}
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "RCCL" in nccl.why_not_ordered(ON)


def test_importing_the_package_asks_in_the_processes_of_a_launcher_alone_and_loads_no_torch() -> None:
    of_others = (VARIABLE, *launch_order._OF_RANKS)
    environment = {key: value for key, value in os.environ.items() if key not in of_others}
    script = f"""
import os, sys
for started_by_launcher in (False, True):
    if started_by_launcher:
        os.environ["LOCAL_RANK"] = "1"
    import ds_fsmoe
    print(os.environ.get({VARIABLE!r}), "torch" in sys.modules)
    for name in [each for each in sys.modules if each.partition(".")[0] == "ds_fsmoe"]:
        del sys.modules[name]
"""
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["None", "False", "1", "False"], done.stderr


def test_both_entry_points_ask_before_deepspeed_makes_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    seen: list[str | None] = []

    def deepspeeds_own(*_: Any, **__: Any) -> None:
        seen.append(os.environ.get(VARIABLE))
        raise InterruptedError

    monkeypatch.setattr(entry_points, "_wrapped_functions", [deepspeeds_own])
    # What finds the other ranks comes after the question, too.
    monkeypatch.setattr(entry_points.deepspeed, "init_distributed", lambda *_, **__: seen.append(os.environ[VARIABLE]))
    monkeypatch.setattr(entry_points.deepspeed, "initialize", entry_points.initialize)
    for fsmoe, expected in (({"enabled": False}, None), ({"enabled": True}, "1")):
        with pytest.raises(InterruptedError):
            entry_points.initialize(model=SmallModel(Case(), 0), config=Case().ds_config(fsmoe=fsmoe))
        assert set(seen) == {expected}
        seen.clear()
    os.environ.pop(VARIABLE)
    entry_points.install()
    assert os.environ.pop(VARIABLE) == "1"


@pytest.mark.parametrize(
    ("version", "environment", "why"),
    [
        ((2, 26, 2), ON, None),
        ((3, 0, 0), {VARIABLE: "2"}, None),
        ((2, 25, 1), ON, TOO_OLD),
        ((2, 27, 5), {VARIABLE: "yes"}, f"{VARIABLE} = yes is set in the environment: set it to 1"),
        ((2, 27, 5), {}, "the first process group was made before ds_fsmoe could set"),
    ],
)
def test_an_nccl_that_keeps_no_order_is_named_with_the_reason(
    version: tuple[int, int, int], environment: dict[str, str], why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "version", lambda: version)
    found = nccl.why_not_ordered(environment)
    assert found == why if why is None else found is not None and found.startswith(why)


# ---- one link


def test_one_rank_without_order_makes_the_links_of_all_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_ranks(0, 4):
        assert nccl.why_one_link() is None, "not NCCL"
        pretend_nccl(monkeypatch, reasons=(None, None, "too old", "switched off"))
        assert nccl.why_one_link() == "too old (rank 2)"
        pretend_nccl(monkeypatch, reasons=(None,) * 4)
        assert nccl.why_one_link() is None


def test_links_that_take_turns_are_one_stream_in_the_order_of_the_list(pretended: Any) -> None:
    _, device = pretended
    lanes = make_lanes(torch.device("cuda"), one_link=True)
    schedule = schedule_of(("A2A_IN", INTER, ()), ("GATHER", INTRA, ()), ("A2A_IN", INTER, ()), ("GATHER", INTRA, (2,)))
    found = run_pretended((lanes, device), schedule)
    assert len({id(stream) for stream, _ in found.values()}) == 1
    assert [sorted(index for _, index in seen) for _, seen in found.values()] == [[], [0], [0, 1], [0, 1, 2]]


@pytest.mark.parametrize("reason", [None, TOO_OLD])
def test_a_run_says_what_its_links_do_and_plans_for_it(
    reason: str | None, pretended: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("ds_fsmoe.layer.runtime.log_on_rank_0", lambda *texts: said.append(texts[0]))
    with fake_ranks(0, 4):
        pretend_nccl(monkeypatch, reasons=(None, None, reason, None))
        running = LayerRuntime(FSMoEBlock(enabled=True), torch.device("cuda", 0))
    num_streams = len({id(stream) for stream in running.lanes._links.values()})
    described = running.describe_links(["links side by side"])
    if reason is None:
        assert (running.links, num_streams, said) == ("reduce_first", 2, [])
        assert described == f"side by side, started in the order of issue ({VARIABLE}), at most 16 thread blocks each"
    else:
        assert (running.links, num_streams, len(said)) == ("shared", 1, 1)
        assert described == f"one after another: {TOO_OLD} (rank 2)"
        assert f"({TOO_OLD} (rank 2))" in said[0]
    running.close()


@pytest.mark.parametrize("beside", [True, False])
def test_gradients_go_in_the_callers_stream_where_links_take_turns(
    beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = torch.device("cpu")
    flat = FlatGradients(
        *(GRAD, [torch.nn.Parameter(torch.ones(3))], torch.float32, None, Scaling(), cpu),
        background=make_background_lane(cpu) if beside else None,
    )
    callers: list[int] = []
    monkeypatch.setattr(dist, "all_reduce", lambda message, group: callers.append(threading.get_ident()))
    flat.start(0, 3)()
    assert [each != threading.get_ident() for each in callers] == [beside]


@pytest.mark.parametrize(("one_link", "overlaps"), [("too old", True), ("too old", False), (None, True)])
def test_a_stream_of_deepspeeds_own_is_warned_of_where_links_take_turns(
    one_link: str | None, overlaps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("ds_fsmoe.engine.engine.log_on_rank_0", lambda *texts: said.append(texts[0]))
    block = FSMoEBlock(enabled=True, gradient_partition={"mode": "off"})
    state = SimpleNamespace(block=block, running=SimpleNamespace(one_link=one_link), groups=dict, reduction=None)
    engine = SimpleNamespace(fsmoe=state, zero_overlap_comm=lambda: overlaps, _take_over_gather=lambda *_: None)
    with fake_ranks(0, 2):
        FSMoEEngine._take_over_reduction(engine)
    warned = ["zero_optimization.overlap_comm = true"] * bool(one_link and overlaps)
    assert [each.partition(":")[0] for each in said] == warned


def test_the_tuner_takes_links_that_take_turns_for_one() -> None:
    def orders(one_link: str | None) -> set[str]:
        measured: Any = SimpleNamespace(kind_of={}, slowed=Slowdowns({}), is_serial=False, issues_ahead=False, kinds=[])
        running: Any = SimpleNamespace(one_link=one_link, links="reduce_first")
        space = TunedModel(FSMoEBlock(enabled=True), running, {}, measured, [], {}, None).search.request.space
        return {order.links for order in space.orders if order.degree == 2}

    assert orders(None) == {"shared", "paper", "reduce_first"}
    assert orders("too old") == {"shared"}


# ---- what is asked of a communicator


def test_communicators_of_lanes_alone_are_capped_and_each_is_warm_before_the_next_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # All that layers of one kind and their gradients need on 8 ranks, 2 nodes.
    with fake_ranks(5, 8):
        found = pretend_nccl(monkeypatch)
        groups = make_groups(4, 2, mp_size=2, ranks_per_node=4, max_ctas=16)
        exchange_in(groups, TwoStepAllToAll())
        for kind in ("edp", "dp"):
            communicator_like(groups, kind)
    capped = {name: options for name, _, options in found.made if options is not None}
    assert set(capped) == {"fsmoe_ep", "fsmoe_esp", "fsmoe_a2a_intra", "fsmoe_a2a_inter", "fsmoe_gradients"}
    for options in capped.values():
        assert (options.config.max_ctas, options.config.split_share, options.config.min_ctas) == (16, 0, -1)
    assert {name for name, _, options in found.made if options is None} == {"fsmoe_blocks", "fsmoe_dp", "fsmoe_mp"}
    warmed: dict[str, set[str]] = {}
    for what, name in found.events:
        if what == "make":
            making = name
        else:
            assert name == making, "the communicator that was made last"
            warmed.setdefault(name, set()).add(what)
    assert warmed == {name: set(COLLECTIVES) for name, _, _ in found.made}
    assert found.waits == len(found.made), "the host has waited for each"


def test_nothing_is_asked_or_sent_on_other_backends_nor_asked_with_auto_and_what_nccl_does_not_know_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_ranks(0, 4), monkeypatch.context() as patch:
        assert nccl.options(16, None) is None
        patch.setattr(dist, "all_to_all_single", lambda *_, **__: pytest.fail("sends"))
        make_groups(2, 2, ranks_per_node=2)
    with fake_ranks(0, 2):
        pretend_nccl(monkeypatch)
        assert nccl.options(None, None) is None
        monkeypatch.setattr(dist.ProcessGroupNCCL, "Options", object)
        assert nccl.options(16, None) is None, "a torch whose NCCL has no such option"
    assert FSMoEBlock(enabled=True, max_ctas=None).max_ctas == "auto"
    with pytest.raises(ConfigError, match=r"^fsmoe\.max_ctas = 65: must be "):
        read_block({"fsmoe": {"enabled": True, "max_ctas": 65}})


def test_layers_and_engines_of_the_same_sizes_share_their_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_ranks(3, 8):
        found = pretend_nccl(monkeypatch)
        first = make_groups(2, 2, mp_size=2, ranks_per_node=4)
        count = len(found.made)
        second = make_groups(2, 2, mp_size=2, ranks_per_node=4, same_tokens=False)
        assert (second.ep_group, second.esp_group, second.mp_group) == (first.ep_group, first.esp_group, first.mp_group)
        assert len(found.made) - count <= 1, "who has to agree may differ, nothing else"


@pytest.mark.parametrize(
    ("number", "expected"), [(23007, (2, 30, 7)), (22809, (2, 28, 9)), (2804, (2, 8, 4)), (None, (1, 0, 0))]
)
def test_the_version_is_that_of_the_library_that_is_loaded_or_torchs(
    number: int | None, expected: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    def library(name: str, mode: int) -> SimpleNamespace:
        assert name == "libnccl.so.2"
        assert mode & os.RTLD_NOLOAD, "nothing is loaded by asking"
        if number is None:
            raise OSError

        def get_version(at: Any) -> int:
            at._obj.value = number
            return 0

        return SimpleNamespace(ncclGetVersion=get_version)

    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (1, 0, 0))
    monkeypatch.setattr(ctypes, "CDLL", library)
    assert nccl.version() == expected
