# SPDX-License-Identifier: Apache-2.0
"""What NCCL is asked for so that two links may be at work at once, and what is done where it cannot give that."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_fsmoe.components.alltoalls.two_steps import TwoStepAllToAll
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import ConfigError, read_block
from ds_fsmoe.distributed import launch_order, nccl
from ds_fsmoe.distributed.groups import FSMoEGroups, communicator_like, make_groups
from ds_fsmoe.distributed.launch_order import VARIABLE
from ds_fsmoe.engine import entry_points
from ds_fsmoe.engine.engine import FSMoEEngine
from ds_fsmoe.execution.lanes import make_lanes
from ds_fsmoe.gradients.background_lane import make_background_lane
from ds_fsmoe.gradients.flat_buffers import FlatGradients, Scaling
from ds_fsmoe.layer.parts import exchange_in
from ds_fsmoe.layer.runtime import LayerRuntime
from ds_fsmoe.planning.job.measured import Slowdowns
from ds_fsmoe.planning.schedule import GRAD
from ds_fsmoe.tuning.tuned_model import TunedModel
from tests.covering import covering
from tests.lane_cases import INTER, INTRA, schedule_of
from tests.pretended_device import pretended, run_pretended
from tests.pretended_nccl import Pretended, fake_ranks, pretend_nccl
from tests.ranks import run_on_ranks
from tests.small_model import Case, SmallModel

FIXTURES = (pretended,)  # which pytest finds by their names here
ON = {VARIABLE: "1"}
TOO_OLD = "NCCL 2.25.1 has no NCCL_LAUNCH_ORDER_IMPLICIT: use 2.26 or later"


# ---- the variable


@pytest.mark.parametrize(
    ("before", "after"),
    [({"LOCAL_RANK": "0"}, "1"), ({}, None), ({"LOCAL_RANK": "0", VARIABLE: "0"}, "0")],
    ids=["a launcher has started the process", "nobody has", "the user has set it"],
)
def test_the_order_of_launches_is_asked_for_in_ranks_alone_and_what_a_user_has_set_is_kept(
    before: dict[str, str], after: str | None
) -> None:
    environment = dict(before)
    launch_order.ask_as_rank(environment)
    assert environment.get(VARIABLE) == after


def test_where_a_group_is_there_already_nothing_is_set_that_would_come_too_late() -> None:
    environment: dict[str, str] = {}
    with fake_ranks(0, 2):
        launch_order.ask(environment)
    assert environment == {}


def test_rccl_is_not_asked_as_it_crashes_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr("importlib.metadata.version", lambda name: "2.11.0+rocm6.4")
    launch_order.ask(environment)
    assert environment == {}


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

    def deepspeeds_own(**_: Any) -> None:
        seen.append(os.environ.get(VARIABLE))
        raise InterruptedError

    monkeypatch.setattr(entry_points, "_wrapped_functions", [deepspeeds_own])
    # What finds the other ranks comes after the question, too.
    monkeypatch.setattr(entry_points.deepspeed, "init_distributed", lambda *_, **__: seen.append(os.environ[VARIABLE]))
    monkeypatch.setattr(entry_points.deepspeed, "initialize", entry_points.initialize)
    model = SmallModel(Case(), 0)
    for fsmoe, expected in (({"enabled": False}, None), ({"enabled": True}, "1")):
        with pytest.raises(InterruptedError):
            entry_points.initialize(model=model, config=Case().ds_config(fsmoe=fsmoe))
        assert set(seen) == {expected}
        seen.clear()
    os.environ.pop(VARIABLE)
    entry_points.install()
    assert os.environ.pop(VARIABLE) == "1"


@pytest.mark.parametrize(
    ("version", "environment", "why"),
    [
        ((2, 26, 2), ON, None),
        ((2, 27, 5), {VARIABLE: "2"}, None),
        ((3, 0, 0), ON, None),
        ((2, 25, 1), ON, TOO_OLD),
        ((2, 27, 5), {VARIABLE: "0"}, f"{VARIABLE} = 0 is set in the environment: set it to 1"),
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


def test_on_rocm_there_is_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "RCCL" in nccl.why_not_ordered(ON)


# ---- one link


def test_one_rank_without_order_makes_the_links_of_all_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_ranks(0, 4):
        assert nccl.why_one_link() is None, "not NCCL"
        pretend_nccl(monkeypatch, reasons=(None, None, "too old", "switched off"))
        assert nccl.why_one_link() == "too old (rank 2)"
        pretend_nccl(monkeypatch, reasons=(None,) * 4)
        assert nccl.why_one_link() is None


def reason_on_a_rank(rank: int, world_size: int) -> str | None:
    """Gloo stands for NCCL; rank 1 has the order switched off. And a communicator is warmed in earnest."""
    nccl.warm(dist.group.WORLD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend_config", lambda group=None: "cuda:nccl")
        patch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
        patch.setenv(VARIABLE, "10"[rank])
        return nccl.why_one_link()


def test_ranks_agree_on_whether_links_take_turns(tmp_path: Path) -> None:
    reasons = run_on_ranks(reason_on_a_rank, 2, tmp_path)
    assert reasons == [f"{VARIABLE} = 0 is set in the environment: set it to 1 (rank 1)"] * 2


def test_links_that_take_turns_are_one_stream_in_the_order_of_the_list(pretended: Any) -> None:
    _, device = pretended
    lanes = make_lanes(torch.device("cuda"), one_link=True)
    schedule = schedule_of(("A2A_IN", INTER, ()), ("GATHER", INTRA, ()), ("A2A_IN", INTER, ()), ("GATHER", INTRA, (2,)))
    found = run_pretended((lanes, device), schedule)
    assert len({id(stream) for stream, _ in found.values()}) == 1
    assert [sorted(index for _, index in seen) for _, seen in found.values()] == [[], [0], [0, 1], [0, 1, 2]]


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_run_says_what_its_links_do_and_plans_for_it(
    is_ordered: bool, pretended: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said: list[str] = []
    monkeypatch.setattr("ds_fsmoe.layer.runtime.log_on_rank_0", lambda *texts: said.append(". ".join(texts[::2])))
    with fake_ranks(0, 4):
        pretend_nccl(monkeypatch, reasons=(None,) * 4 if is_ordered else (None, None, TOO_OLD, None))
        running = LayerRuntime(FSMoEBlock(enabled=True), torch.device("cuda", 0))
    streams = {id(stream) for stream in running.lanes._links.values()}
    if is_ordered:
        assert (running.links, len(streams), said) == ("reduce_first", 2, [])
        how = f"started in the order of issue ({VARIABLE}), at most 16 thread blocks each"
        assert running.describe_links(["links side by side"]) == f"side by side, {how}"
    else:
        assert (running.links, len(streams)) == ("shared", 1)
        assert running.describe_links(["links side by side"]) == f"one after another: {TOO_OLD} (rank 2)"
        assert said[0].startswith(f"links are used one at a time ({TOO_OLD} (rank 2)). NCCL may start")
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
    monkeypatch.setattr("ds_fsmoe.engine.engine.log_on_rank_0", lambda *texts: said.append(". ".join(texts[::2])))
    block = FSMoEBlock(enabled=True, gradient_partition={"mode": "off"})
    state = SimpleNamespace(block=block, running=SimpleNamespace(one_link=one_link), groups=dict, reduction=None)
    none: Any = lambda *_: None  # noqa: E731
    engine = SimpleNamespace(fsmoe=state, zero_overlap_comm=lambda: overlaps, _take_over_gather=none)
    with fake_ranks(0, 2):
        FSMoEEngine._take_over_reduction(engine)
    assert [each.partition(":")[0] for each in said] == ["zero_optimization.overlap_comm = true"] * (
        one_link is not None and overlaps
    )


def test_the_tuner_takes_links_that_take_turns_for_one() -> None:
    def orders(one_link: str | None) -> set[str]:
        measured: Any = SimpleNamespace(kind_of={}, slowed=Slowdowns({}), is_serial=False, issues_ahead=False, kinds=[])
        running: Any = SimpleNamespace(one_link=one_link, links="reduce_first")
        space = TunedModel(FSMoEBlock(enabled=True), running, {}, measured, [], {}, None).search.request.space
        return {order.links for order in space.orders if order.degree == 2}

    assert orders(None) == {"shared", "paper", "reduce_first"}
    assert orders("too old") == {"shared"}


# ---- communicators


def made_on(
    patch: pytest.MonkeyPatch, rank: int, sizes: dict[str, int], max_ctas: int | None = 16
) -> tuple[Pretended, FSMoEGroups]:
    """All that layers of one kind and their gradients need on 8 ranks, 2 nodes."""
    with fake_ranks(rank, 8):
        found = pretend_nccl(patch)
        groups = make_groups(**sizes, ranks_per_node=4, max_ctas=max_ctas)
        exchange_in(groups, TwoStepAllToAll())
        for kind in ("edp", "dp"):
            communicator_like(groups, kind)
    return found, groups


def test_communicators_of_lanes_are_capped_and_the_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = made_on(monkeypatch, 5, {"ep_size": 4, "esp_size": 2, "mp_size": 2})
    capped = {name: options for name, _, options in found.made if options is not None}
    assert set(capped) == {"fsmoe_ep", "fsmoe_esp", "fsmoe_a2a_intra", "fsmoe_a2a_inter", "fsmoe_gradients"}
    for options in capped.values():
        assert (options.config.max_ctas, options.config.split_share, options.config.min_ctas) == (16, 0, -1)
    assert {name for name, _, options in found.made if options is None} == {"fsmoe_blocks", "fsmoe_dp", "fsmoe_mp"}


def test_nothing_is_asked_of_other_backends_nor_with_auto_and_what_nccl_does_not_know_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fake_ranks(0, 2):
        assert nccl.options(16, None) is None
        pretend_nccl(monkeypatch)
        assert nccl.options(None, None) is None
        monkeypatch.setattr(dist.ProcessGroupNCCL, "Options", object)
        assert nccl.options(16, None) is None, "a torch whose NCCL has no such option"
    assert FSMoEBlock(enabled=True, max_ctas=None).max_ctas == "auto"
    for wrong in (0, 65, "8", True):
        with pytest.raises(ConfigError, match=f"^fsmoe.max_ctas = {json.dumps(wrong)}: must be "):
            read_block({"fsmoe": {"enabled": True, "max_ctas": wrong}})


def test_each_communicator_is_warm_before_the_next_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = made_on(monkeypatch, 5, {"ep_size": 4, "esp_size": 2})
    kinds = {"all_to_all_single", "all_reduce", "_gather", "_scatter"}
    warmed: dict[str, set[str]] = {}
    making = ""
    for what, name in found.events:
        if what == "make":
            making = name
        else:
            assert name == making, "the communicator that was made last"
            warmed.setdefault(name, set()).add(what)
    assert warmed == dict.fromkeys([name for name, _, _ in found.made], kinds)
    assert found.waits == len(found.made), "the host has waited for each"


def test_on_other_backends_nothing_is_sent_when_a_communicator_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_ranks(0, 4):
        monkeypatch.setattr(dist, "all_to_all_single", lambda *_, **__: pytest.fail("sends"))
        make_groups(2, 2, ranks_per_node=2)


MOST_COMMUNICATORS = 11
"""Of a rank, for all layers of one size: 8 of ours, 3 that are DeepSpeed's where it is in use; beside the default
group and DeepSpeed's copies of it."""


def test_a_rank_has_no_more_communicators_than_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for ep_size, esp_size, mp_size in covering(
        (1, 2, 4, 8), (1, 2, 4), (1, 2, 4, 8), allowed=lambda e, s, m: e * s <= 8
    ):
        for rank in (0, 5):
            with monkeypatch.context() as patch:
                found, _ = made_on(patch, rank, {"ep_size": ep_size, "esp_size": esp_size, "mp_size": mp_size})
            assert all(len(ranks) > 1 for _, ranks, _ in found.made)
            of_lanes = [(name, ranks) for name, ranks, options in found.made if options is not None]
            assert len(of_lanes) == len(set(of_lanes)), "two with the same ranks and traffic"
            assert len(found.made) <= MOST_COMMUNICATORS
    for ep_size, count in (
        (8, 6),  # blocks, dp, ep, the two links of its all-to-all, gradients
        (1, 3),  # edp, dp, and one for gradients of experts and of the rest
    ):
        with monkeypatch.context() as patch:
            found, _ = made_on(patch, 5, {"ep_size": ep_size, "esp_size": 1, "mp_size": 1})
        assert len(found.made) == count


def test_layers_and_engines_of_the_same_sizes_share_their_communicators(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_ranks(3, 8):
        found = pretend_nccl(monkeypatch)
        first = make_groups(2, 2, mp_size=2, ranks_per_node=4)
        count = len(found.made)
        second = make_groups(2, 2, mp_size=2, ranks_per_node=4, same_tokens=False)
        assert (second.ep_group, second.esp_group, second.mp_group) == (first.ep_group, first.esp_group, first.mp_group)
        assert len(found.made) - count <= 1, "who has to agree may differ, nothing else"


@pytest.mark.parametrize(("number", "expected"), [(23007, (2, 30, 7)), (22809, (2, 28, 9)), (2804, (2, 8, 4))])
def test_the_version_is_that_of_the_library_that_is_loaded(
    number: int, expected: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    def library(name: str, mode: int) -> SimpleNamespace:
        assert name == "libnccl.so.2"
        assert mode & os.RTLD_NOLOAD, "nothing is loaded by asking"

        def get_version(at: Any) -> int:
            at._obj.value = number
            return 0

        return SimpleNamespace(ncclGetVersion=get_version)

    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (1, 0, 0))
    monkeypatch.setattr(ctypes, "CDLL", library)
    assert nccl.version() == expected


def test_where_no_library_is_loaded_the_version_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_library(*_: Any, **__: Any) -> None:
        raise OSError

    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.setattr(ctypes, "CDLL", no_library)
    assert nccl.version() == (2, 27, 5)
