# SPDX-License-Identifier: Apache-2.0
"""``fsmoe.alltoall`` in a training run: the numbers do not depend on it, and the trace shows what is run."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ds_fsmoe import registry
from ds_fsmoe.checkpoint.plan_state import plans_of, read_plans
from ds_fsmoe.components.hierarchical import HierarchicalAllToAll
from ds_fsmoe.config.blocks import PipelineDegreeBlock
from ds_fsmoe.files.traces import merge_traces
from ds_fsmoe.layer.stock_layer import FSMoELayer
from ds_fsmoe.planning.decide.candidates import Search
from ds_fsmoe.tuning.layer_kinds import LayerKind
from ds_fsmoe.tuning.summary import summarize
from tests.hurry import hurry
from tests.ranks import run_on_ranks
from tests.samples import draw, sampled
from tests.small_model import BATCH, LENGTH, Case, SmallModel, batch, small_engine, train_steps
from tests.test_chunked_training import degrees

CASE = Case(4, 1, "fp32", 2, 2, False, moe_options=(("top2_2nd_expert_sampling", False),))


def block(alltoall: str, **others: Any) -> dict[str, Any]:
    """Two nodes of two ranks, cut differently forward and backward; degrees that are asked for are not tuned."""
    how = {"alltoall": alltoall, "schedule": "fsmoe", "topology": {"ranks_per_node": 2}, "autotune": {"enabled": False}}
    return degrees(3, 2, **how | others)


def started(case: Case, rank: int, block: dict[str, Any]) -> tuple[Any, SmallModel]:
    torch.manual_seed(0)
    engine = small_engine(case, rank, block)
    return engine, engine.module


def train(rank: int, block: dict[str, Any]) -> list[torch.Tensor]:
    """Losses and parameters of three steps; in the last the last rank has no second batch."""
    engine, model = started(CASE, rank, block)
    losses = [torch.tensor(train_steps(engine, rank, range(5)))]
    if rank == 3:
        engine.backward(engine.fsmoe_dummy_forward())
        engine.step()
    else:
        losses.append(torch.tensor(train_steps(engine, rank, [5])))
    found = losses + [each.detach().clone() for each in model.parameters()]
    engine.destroy()
    return found


DOUBTFUL = "tests.test_chunked_training.Doubtful"
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in registry.known("alltoall") if name != "flat"},
    "2dh, one after another": ("2dh", {"overlap": False}),
    "2dh, recomputed, with hooks": ("2dh", {"recompute": True, "hooks": [DOUBTFUL]}),
    "2dh in nodes of one rank": ("2dh", {"topology": {"ranks_per_node": 1}}),
    "2dh in one node": ("2dh", {"topology": {"ranks_per_node": 4}}),
    "once per node, of slots": ("node_deduplicated", {"dispatch": "padded"}),
}


def train_all(rank: int, world_size: int, folder: str, ways: list[str]) -> dict[str, bool]:
    trace = {"enabled": True, "start_step": 1, "num_steps": 1, "path": f"{folder}/trace", "cluster": "testbed_a"}
    # Otherwise some sums are in the order in which their terms arrive.
    alike = {"deterministic": True}
    flat = train(rank, block("flat", **alike))
    assert all(each.isfinite().all() for each in flat)
    equal = {}
    for way in ways:
        alltoall, others = WAYS[way]
        found = train(rank, block(alltoall, **others, **alike))
        if way == "node_deduplicated":  # sums in another order
            equal[way] = all(torch.allclose(*each, rtol=0.0, atol=1e-5) for each in zip(found, flat, strict=True))
            continue
        # On other nodes gradients are summed in another order, too.
        equal[way] = all(map(torch.equal, found, train(rank, block("flat", **others, **alike)) if others else flat))
    # The cluster has no costs for gradients in two levels: a backward that has such is not predicted.
    train(rank, block("2dh", trace=trace, gradient_partition={"levels": 1}))
    return equal


@pytest.mark.long
@sampled("ways", [draw("way of a training run", list(WAYS), 1), list(WAYS)], kept=[0], drawn=0, ids=["one", "all"])
def test_the_all_to_all_changes_no_number_of_a_training_run_and_is_traced(ways: list[str], tmp_path: Path) -> None:
    for equal in run_on_ranks(train_all, 4, tmp_path / "ranks", str(tmp_path), ways):
        assert equal == dict.fromkeys(ways, True)
    events = json.loads(merge_traces(tmp_path / "trace").read_text())["traceEvents"]
    # Gradients are sent beside the all-to-alls, and are traced as well.
    tasks = [each for each in events if each["ph"] == "X" and "GRAD" not in each["args"]["kind"]]
    for category in ("measured", "predicted"):
        seen = {(each["args"]["kind"], each["args"]["lane"]) for each in tasks if each["cat"] == category}
        assert seen == {
            *(("A2A_IN_NODE", "intra"), ("A2A_IN", "inter"), ("A2A_OUT", "inter"), ("A2A_OUT_NODE", "intra")),
            ("EXPERT", "compute"),
        }
    # Of each rank, micro step and layer, measured and predicted: 3 chunks forward, 2 backward, of five tasks each.
    assert len(tasks) == 2 * 4 * 2 * 2 * (3 + 2) * 5


class Direct(HierarchicalAllToAll):
    """Contradicts itself."""

    links = ("intra", "inter")

    def forwarding_ranks(self, source: int, destination: int, nodes: Any) -> tuple[int, ...]:
        return (destination,)


def contradicting(rank: int, world_size: int) -> None:
    import ds_fsmoe

    ds_fsmoe.register_alltoall("direct")(Direct)
    with pytest.raises(ds_fsmoe.ConfigError, match=r'^fsmoe\.alltoall = "direct": Direct sends blocks of rank 0'):
        train(rank, block("direct"))


def test_one_that_contradicts_itself_is_refused_on_every_rank_with_path_and_value(tmp_path: Path) -> None:
    run_on_ranks(contradicting, 4, tmp_path)


def tuned(rank: int, world_size: int, folder: str) -> tuple[set[str], list[Any], list[list[list[int]]]]:
    """What the autotuner compared, the crossings it planned with, and the experts of this rank's tokens in the first
    forward."""
    hurry()
    planned_with: list[Any] = []
    chosen: list[list[list[int]]] = []
    sizes: Any = LayerKind.sizes.fget

    def seen(kind: LayerKind) -> Any:
        found = sizes(kind)
        planned_with.append(found.crossings and (found.crossings.nodes, found.crossings.ranks))
        return found

    def look(module: Any, args: Any, routed: tuple[torch.Tensor, ...]) -> None:
        # Stock's gate returns [K, S], the experts of each token; -1 where one was dropped.
        chosen.append([[expert for expert in experts if expert >= 0] for experts in routed[3].t().tolist()])

    others = {"dispatch": "unpadded", "autotune": {"enabled": True, "trials": 0, "cache_dir": folder}}
    asked = {name: value for name, value in block("auto", **others).items() if name != "pipeline_degree"}
    engine, model = started(CASE, rank, asked)
    hooks = [each.gate.register_forward_hook(look) for each in model.modules() if isinstance(each, FSMoELayer)]
    with patch.object(LayerKind, "sizes", property(seen)):
        for step in range(6):
            train_steps(engine, rank, [step])
            for hook in hooks:
                hook.remove()
    compared = set(engine.fsmoe.autotune.result.rows[0].alltoalls_ms)
    engine.destroy()
    return compared, planned_with, chosen


@pytest.mark.daily("the autotuner in trainings", 2)
def test_the_autotuner_compares_once_per_node_where_rows_are_sent(tmp_path: Path) -> None:
    """It plans with the crossings that the tokens of the first forward had."""
    found = run_on_ranks(tuned, 4, tmp_path / "ranks", str(tmp_path / "cache"))
    # One expert on each of four ranks, two ranks in each of two nodes.
    tokens = [experts for _, _, chosen in found for layer in chosen for experts in layer]
    assert len(tokens) == 4 * 2 * BATCH * LENGTH
    choices = sum(map(len, tokens))
    in_nodes = sum(len({expert // 2 for expert in experts}) for experts in tokens)
    assert choices > in_nodes
    for compared, planned_with, _ in found:
        assert compared == set(registry.known("alltoall"))
        assert planned_with
        for crossings in planned_with:
            assert crossings == pytest.approx((in_nodes / choices, 1.0))


# ---- layers that drop tokens: padded by the config, and unpadded where the autotuner has found that to be faster


DROPS = replace(CASE, k=1, drop_tokens=True, moe_options=(("use_rts", False),))


def by_choice(rank: int, world_size: int) -> dict[str, Any]:
    """Train a model that drops tokens: padded, in one chunk, and as the autotuner would with rows."""
    hurry()

    def rows_everywhere(search: Search, *_: int | None) -> list[Any]:
        names = ("unpadded node_deduplicated",) * len(search.request.options)
        found = search.planner.plan(replace(search.request, alltoalls=names))
        return [found, search.stock()]

    found: dict[str, Any] = {}
    tuned = {"enabled": True, "topology": {"ranks_per_node": 2}, "autotune": {"enabled": True, "trials": 0}}
    for name, others in {
        "padded": {"dispatch": "padded", "autotune": False},
        "by choice": {},
        "one chunk": {"num_chunks": 1},
        "named": {"alltoall": "node_deduplicated"},
    }.items():
        engine, model = started(DROPS, rank, tuned | others)
        layer, kept = engine.fsmoe.inner_layers["L00"], []
        layer.gate.register_forward_hook(lambda *of, kept=kept: kept.append(of[2][3]))
        with patch.object(Search, "to_try", rows_everywhere) if name == "by choice" else nullcontext():
            losses = train_steps(engine, rank, range(8))
        values = [torch.tensor(losses), *(each.detach().clone() for each in model.parameters())]
        tuner = engine.fsmoe.autotune
        ways = set() if tuner is None else {way for row in tuner.result.rows for way in row.alltoalls_ms}
        found[name] = {"values": values, "kept": kept, "ways": ways, "sends_rows": layer.fsmoe.sends_rows(layer.gate)}
        found[name]["said"] = engine.fsmoe.chosen()["dispatch"]
        if name == "by choice":
            found["summary"] = str(summarize(tuner.result.rows, tuner.result.context, tuner.result.outcome))
            found["alltoall"] = layer.pipeline.forward.alltoall
            data = json.loads(json.dumps(plans_of(engine.fsmoe)))
            running = engine.fsmoe.running
            read = []
            of_block = running.block
            for change in ({"deterministic": True}, {"pipeline_degree": PipelineDegreeBlock(max=1)}, {}):
                running.block = of_block.model_copy(update=change)
                read.append(read_plans(engine.fsmoe, data).layers["L00"].is_unpadded)
            found["read"] = read
            layer.fsmoe.run_unchunked("this test has found a reason")
            found["whole"] = layer.fsmoe.sends_rows(layer.gate), layer.pipeline.forward.alltoall
            engine(*batch(0, rank, torch.float32))
            engine.fsmoe._plan_again("this test wants it")
            found["again"] = [each.fsmoe.sends_rows(each.gate) for each in engine.fsmoe.inner_layers.values()]
        engine.destroy()
    return found


@pytest.mark.daily("the autotuner in trainings", 2)
def test_the_autotuner_sends_no_empty_slots_equal_to_rounding_and_never_where_bits_are_kept(tmp_path: Path) -> None:
    for found in run_on_ranks(by_choice, 4, tmp_path):
        padded, chosen = found["padded"], found["by choice"]
        # Slots are compared as they are sent now; rows through every all-to-all.
        assert chosen["ways"] == {"flat", *(f"unpadded {each}" for each in registry.known("alltoall"))}
        assert (chosen["sends_rows"], found["alltoall"]) == (True, "node_deduplicated")
        found_share = r"unpadded, chosen by the autotuner: \d+% of the slots are empty; equal to padded to rounding"
        assert re.fullmatch(found_share, chosen["said"])
        assert "  dispatch: L00, L01 unpadded: " in found["summary"]
        # The same tokens are dropped, and there are some.
        assert all(map(torch.equal, chosen["kept"], padded["kept"]))
        assert any((each < 0).any() for each in padded["kept"])
        for ours, slots in zip(chosen["values"], padded["values"], strict=True):
            torch.testing.assert_close(ours, slots, rtol=1e-5, atol=1e-5)
        # Where bits are kept, nothing is compared and nothing changes.
        assert found["one chunk"]["sends_rows"] is False
        assert not any(each.startswith("unpadded") for each in found["one chunk"]["ways"])
        assert all(map(torch.equal, found["one chunk"]["values"], padded["values"]))
        # An all-to-all that was named is compared with slots, for which it is flat, and with rows.
        assert found["named"]["ways"] == {"node_deduplicated", "unpadded node_deduplicated"}
        # A checkpoint's plan is gone on with, unless the config does not allow it any more.
        assert found["read"] == [False, False, True]
        # A layer that must run in one chunk, and one that is measured again, sends slots.
        assert found["whole"] == (False, "flat")
        assert found["again"] == [False, False]


def test_equal_layers_are_sent_the_mean_of_their_rows() -> None:
    """Two experts with eight slots: of one layer all are full, of the other two each."""
    subject: Any = SimpleNamespace(num_local_experts=2, num_experts=2, sizes=SimpleNamespace(capacity=8))
    subject.collectives = SimpleNamespace(ep_group=None)
    choices = [torch.tensor([[0, 1] * 8]), torch.tensor([[0, 1] * 2 + [2] * 12])]
    kind: Any = LayerKind(["L00", "L01"], None, subject, 16, choices=choices, may_be_unpadded=True)
    kind.count_rows(None)
    assert kind.rows == (16 + 4) / (2 * 2)


KEPT: dict[str, tuple[bool, dict[str, Any]]] = {
    "by default": (True, {}),
    "two chunks": (True, {"num_chunks": {"forward": 2}}),
    "deterministic": (False, {"deterministic": True}),
    "one chunk": (False, {"num_chunks": 1}),
    "one chunk forward": (False, {"num_chunks": {"forward": 1}}),
    "a schedule by name": (False, {"schedule": "tutel"}),
    "padded": (False, {"dispatch": "padded"}),
    "unpadded": (False, {"dispatch": "unpadded"}),
    "hooks": (False, {"hooks": ["ds_fsmoe.BFloat16Communication"]}),
    "8 bits": (False, {"comm_dtype": "fp8"}),
    "slots alone": (False, {"gate": {"type": "expert_choice"}}),
    "nothing dropped": (False, {"gate": {"type": "topk", "drop_tokens": False}}),
}


def may_choose(rank: int, world_size: int) -> dict[str, bool]:
    found = {}
    for name, (_, others) in KEPT.items():
        engine, _ = started(Case(1, 0, "fp32", 1, 2, True), rank, {"enabled": True} | others)
        layer = engine.fsmoe.inner_layers["L00"]
        found[name] = layer.fsmoe.may_be_unpadded(layer.gate)
        layer.fsmoe.run_unchunked("this test has found a reason")
        assert not layer.fsmoe.may_be_unpadded(layer.gate)
        engine.destroy()
    return found


def test_dispatch_stays_padded_where_slots_bits_shapes_or_dtypes_depend_on_it(tmp_path: Path) -> None:
    assert run_on_ranks(may_choose, 1, tmp_path) == [{name: may for name, (may, _) in KEPT.items()}]
