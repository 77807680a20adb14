# SPDX-License-Identifier: Apache-2.0
"""Ranks that differ are told so, all of them, before they hang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ds_fsmoe.distributed.agreement import (
    DisagreementError,
    check_agreement,
    describe_disagreement,
    facts_of_config,
    facts_of_layers,
    facts_of_plan,
    facts_of_versions,
    text_of_schedule,
)
from ds_fsmoe.planning.block import BlockPlan
from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.phase_plan import PhasePlan
from ds_fsmoe.planning.schedule import Lane, Schedule, Task
from tests.ranks import run_on_ranks

ALIKE = {"fsmoe.schedule": "fsmoe", "number of MoE layers": "2", "dtypes": "bfloat16"}
Stated = list[Mapping[str, str]]

# Name of a case -> what each of two ranks states, and the lines of the message that are expected, if any.
TWO_RANKS: dict[str, tuple[Stated, list[str]]] = {
    "the same": ([ALIKE, ALIKE], []),
    "nothing": ([{}, {}], []),
    "the same in another order": ([ALIKE, dict(reversed(ALIKE.items()))], []),
    "another value": (
        [ALIKE, ALIKE | {"fsmoe.schedule": "tutel"}],
        ["  fsmoe.schedule: rank 0: 'fsmoe'; rank 1: 'tutel'"],
    ),
    "another number of layers": (
        [
            ALIKE | {"plan L00 forward": "a", "plan L01 forward": "b"},
            ALIKE
            | {"number of MoE layers": "3", "plan L00 forward": "a", "plan L01 forward": "b"}
            # Far more facts, and far longer ones, than the other rank has.
            | {f"plan L{layer:02d} forward": "c" * 1009 for layer in range(2, 5)},
        ],
        [
            "  number of MoE layers: rank 0: '2'; rank 1: '3'",
            *(f"  plan L0{each} forward: rank 0: not stated; rank 1: '{'c' * 72}...'" for each in (2, 3, 4)),
        ],
    ),
    "a rank that lacks a field": (
        [{"dtypes": "bfloat16"}, ALIKE | {"number of MoE layers": ""}],
        [
            "  fsmoe.schedule: rank 0: not stated; rank 1: 'fsmoe'",
            "  number of MoE layers: rank 0: not stated; rank 1: ''",
        ],
    ),
    "a rank without facts": (
        [{}, {"dtypes": "bfloat16"}],
        ["  dtypes: rank 0: not stated; rank 1: 'bfloat16'"],
    ),
    "letters that move from a name to its value": (
        [{"ab": "c"}, {"a": "bc"}],
        ["  a: rank 0: not stated; rank 1: 'bc'", "  ab: rank 0: 'c'; rank 1: not stated"],
    ),
}


def message_of(facts: Mapping[str, str], group: dist.ProcessGroup | None = None, what: str = "the job") -> str | None:
    try:
        check_agreement(facts, group, what)
    except DisagreementError as error:
        return str(error)
    return None


class Traffic:
    """What is gathered while it is in use: bytes a rank gave, one number per call, and how often objects were."""

    def __enter__(self) -> Traffic:
        self.given_bytes: list[int] = []
        self.num_objects = 0
        self._stock = dist.all_gather, dist.all_gather_object

        def gather(into: list[torch.Tensor], own: torch.Tensor, **options: object) -> object:
            self.given_bytes.append(own.numel() * own.element_size())
            return self._stock[0](into, own, **options)

        def gather_objects(*args: object, **options: object) -> None:
            self.num_objects += 1
            self._stock[1](*args, **options)

        dist.all_gather, dist.all_gather_object = gather, gather_objects
        return self

    def __exit__(self, *error: object) -> None:
        dist.all_gather, dist.all_gather_object = self._stock


def check_all_of_two(rank: int, world_size: int) -> dict[str, tuple[str | None, list[int], int]]:
    """What each case says on this rank; one after the other, so that a case that sends too much spoils the next."""
    said = {}
    for name, (stated, _) in TWO_RANKS.items():
        with Traffic() as traffic:
            message = message_of(stated[rank])
        said[name] = message, traffic.given_bytes, traffic.num_objects
    dist.barrier()
    return said


@pytest.fixture(scope="module")
def said_by_two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[str | None, list[int], int]]]:
    return run_on_ranks(check_all_of_two, 2, tmp_path_factory.mktemp("two"))


def test_ranks_give_one_digest_of_32_bytes_and_more_only_if_they_differ(said_by_two: list) -> None:
    for said in said_by_two:
        for name, (_, lines) in TWO_RANKS.items():
            assert said[name][1:] == ([32], 1 if lines else 0), name


def test_two_ranks_pass_where_they_agree_and_say_the_same_where_they_do_not(said_by_two: list) -> None:
    said = [{name: message for name, (message, *_) in each.items()} for each in said_by_two]
    assert said[0] == said[1]
    head = "the ranks disagree about the job, and would hang if they went on:"
    for name, (_, lines) in TWO_RANKS.items():
        assert said[0][name] == ("\n".join([head, *lines]) if lines else None), name


def check_four(rank: int, world_size: int) -> dict[str, str | None]:
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = pairs[rank % 2]
    alone = [dist.new_group([each]) for each in range(world_size)]
    said = {
        "one odd": message_of(ALIKE | ({"plan L00 forward": "3 chunks"} if rank == 2 else {"plan L00 forward": "2"})),
        "two and two": message_of({"dtypes": "float32" if rank in (0, 3) else "bfloat16"}, what="dtypes after step 7"),
        "each its own": message_of({"seed": f"{rank}", "same": "x"}),
        "agree again": message_of(ALIKE),
        # Of different pairs, so each pair is of one mind.
        "pairs agree": message_of({"pair": str(rank % 2)}, own),
        "one pair does not": message_of({"pair": "x" if rank % 2 else str(rank)}, own),
        # A group that this rank is not in.
        "others": message_of({"rank": str(rank)}, pairs[1 - rank % 2]),
        "alone": message_of({"rank": str(rank)}, alone[rank]),
    }
    dist.barrier()
    return said


def test_four_ranks_name_the_odd_one_out(tmp_path: Path) -> None:
    said = run_on_ranks(check_four, 4, tmp_path)
    for name in ("one odd", "two and two", "each its own", "agree again"):
        assert len({each[name] for each in said}) == 1, name
    assert "\n  plan L00 forward: ranks 0-1, 3: '2'; rank 2: '3 chunks'" in said[0]["one odd"]
    assert "fsmoe.schedule" not in said[0]["one odd"]
    assert said[0]["two and two"].splitlines() == [
        "the ranks disagree about dtypes after step 7, and would hang if they went on:",
        "  dtypes: ranks 0, 3: 'float32'; ranks 1-2: 'bfloat16'",
    ]
    assert "\n  seed: rank 0: '0'; rank 1: '1'; rank 2: '2'; rank 3: '3'" in said[0]["each its own"]
    assert said[0]["agree again"] is None
    assert [each["pairs agree"] for each in said] == [None] * 4
    assert [each["others"] for each in said] == [None] * 4
    assert [each["alone"] for each in said] == [None] * 4
    # By their numbers in the job, not in the group.
    assert said[0]["one pair does not"] == said[2]["one pair does not"]
    assert "\n  pair: rank 0: '0'; rank 2: '2'" in said[0]["one pair does not"]
    assert said[1]["one pair does not"] is said[3]["one pair does not"] is None


def test_without_a_process_group_there_is_nobody_to_disagree_with() -> None:
    assert not dist.is_initialized()
    assert message_of({"any": "thing"}) is None


# ---- messages


def test_long_values_are_cut_where_they_part() -> None:
    same, tail = "a" * 997, "z" * 499
    message = describe_disagreement({0: {"field": f"{same}x{tail}"}, 1: {"field": f"{same}y{tail}"}})
    assert "rank 0: '..." + "a" * 24 + "x" + "z" * 47 + "...'; rank 1" in message
    assert "rank 1: '..." + "a" * 24 + "y" + "z" * 47 + "...'" in message


def test_a_message_stays_readable_for_a_thousand_ranks() -> None:
    stated_by = {rank: {f"field {each:03d}": f"{rank}" * 7 for each in range(101)} for rank in range(1009)}
    message = describe_disagreement(stated_by)
    assert message.count("\n") == 21
    assert message.endswith("\n  and 81 more fields")
    assert "; and 1001 more values\n" in message
    assert len(message) < 20_000
    every_other = describe_disagreement({rank: {"parity": str(rank % 2)} for rank in range(1009)})
    assert "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, ... (505 ranks): '0'; ranks 1, 3," in every_other


@given(st.dictionaries(st.integers(0, 6), st.dictionaries(st.sampled_from("abcde"), st.sampled_from(("", "x", "yy")))))
def test_a_message_names_each_field_that_differs_and_no_other(stated_by: dict[int, dict[str, str]]) -> None:
    named = [line.split(":")[0].strip() for line in describe_disagreement(stated_by).splitlines()[1:]]
    differing = {
        field
        for field in "abcde"
        if len({facts.get(field) for facts in stated_by.values()}) > 1  # None: it lacks the field
    }
    assert named == sorted(differing)


# ---- facts


def phase_plan(degree: int = 2, links: str = "reduce_first", backward: bool = False, **options: object) -> PhasePlan:
    block = BlockPlan(degree, links, **options)
    return PhasePlan(block, Groups(world=4, gpus_per_node=2, ep=2, esp=2), backward)


def test_plans_that_run_otherwise_have_other_facts() -> None:
    plans = {
        "as it is": phase_plan(),
        "another degree": phase_plan(3),
        "another order of traffic": phase_plan(links="shared"),
        "the other phase": phase_plan(backward=True),
        "other groups": replace(phase_plan(), groups=Groups(world=4, gpus_per_node=2, ep=4)),
        "other lanes": replace(phase_plan(), groups=Groups(world=4, gpus_per_node=4, ep=2, esp=2)),
    }
    values = {name: next(iter(facts_of_plan("L03", plan).values())) for name, plan in plans.items()}
    by_value = {value: name for name, value in values.items()}
    alike = {frozenset((name, by_value[value])) for name, value in values.items() if by_value[value] != name}
    # A backward has the tasks of the forward; the name tells them apart.
    assert alike <= {frozenset(("as it is", "the other phase"))}
    assert list(facts_of_plan("L03", plans["as it is"])) == ["plan L03 forward"]
    assert list(facts_of_plan("L03", plans["the other phase"])) == ["plan L03 backward"]
    assert facts_of_plan("L03", phase_plan()) == facts_of_plan("L03", phase_plan())


def test_the_text_of_a_schedule_is_short_and_sees_every_part_of_a_task() -> None:
    tasks = (Task("A2A_IN", Lane.INTER), Task("EXPERT", Lane.COMPUTE, after=(0,)), Task("REDUCE", Lane.INTRA))
    text = text_of_schedule(Schedule(tasks))
    assert len(text) < 60
    assert text.startswith("1 chunks, 3 tasks, ")
    assert text == text_of_schedule(Schedule(tuple(replace(task) for task in tasks)))
    changes = (
        {"lane": Lane.INTRA},
        {"chunk": 1},
        {"layer": 1},
        {"after": ()},
        {"kind": "SPREAD"},
    )
    others = {text_of_schedule(Schedule((tasks[0], replace(tasks[1], **change), tasks[2]))) for change in changes}
    others.add(text_of_schedule(Schedule((tasks[0], tasks[2], replace(tasks[1])))))
    assert len(others - {text}) == len(changes) + 1
    assert text_of_schedule(Schedule(())) == text_of_schedule(Schedule(()))


def test_facts_of_a_config_go_by_path() -> None:
    values = {"schedule": "best", "gate": {"k": 2, "type": "topk"}, "hooks": ["a.b"], "order": None}
    assert facts_of_config(values) == {
        "fsmoe.schedule": "best",
        "fsmoe.gate.k": "2",
        "fsmoe.gate.type": "topk",
        "fsmoe.hooks": "['a.b']",
        "fsmoe.order": "None",
    }


def test_facts_of_layers_tell_their_number_order_types_and_shapes() -> None:
    layers = {"b.moe": nn.Linear(3, 5), "a.moe": nn.Linear(3, 7, bias=False).bfloat16()}
    assert facts_of_layers(layers) == {
        "number of MoE layers": "2",
        "order of MoE layers": "b.moe, a.moe",
        "dtypes": "bfloat16, float32",
        "parameters of L00": "weight float32 [5, 3], bias float32 [5]",
        "parameters of L01": "weight bfloat16 [7, 3]",
    }


def test_facts_of_versions_say_what_is_not_there() -> None:
    facts = facts_of_versions(["torch", "no-such-package-here"])
    assert facts["version of no-such-package-here"] == "not installed"
    assert facts["version of torch"].split("+")[0] == torch.__version__.split("+")[0]
