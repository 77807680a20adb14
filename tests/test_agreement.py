# SPDX-License-Identifier: Apache-2.0
"""Ranks that differ are told so, all of them, before they hang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

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
HEAD = "the ranks disagree about the job, and would hang if they went on:"

# Name of a case -> what each of two ranks states, and the lines of the message that are expected, if any.
TWO_RANKS: dict[str, tuple[Stated, list[str]]] = {
    "the same in another order": ([ALIKE, dict(reversed(ALIKE.items()))], []),
    # One rank has far more facts, and far longer ones.
    "another number of layers": (
        [
            {"dtypes": "bfloat16", "number of MoE layers": "2"},
            ALIKE | {"number of MoE layers": ""} | {f"plan L{layer:02d} forward": "c" * 1009 for layer in range(2, 5)},
        ],
        [
            "  fsmoe.schedule: rank 0: not stated; rank 1: 'fsmoe'",
            "  number of MoE layers: rank 0: '2'; rank 1: ''",
            *(f"  plan L0{each} forward: rank 0: not stated; rank 1: '{'c' * 72}...'" for each in (2, 3, 4)),
        ],
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


def said_and_sent(facts: Mapping[str, str], group: dist.ProcessGroup) -> tuple[str | None, list[int], int]:
    """The message; the bytes that a rank gave, one number per gather; and how often objects were gathered."""
    given_bytes: list[int] = []
    num_objects = 0
    gather, gather_objects = dist.all_gather, dist.all_gather_object

    def counted(into: list[torch.Tensor], own: torch.Tensor, **options: object) -> object:
        given_bytes.append(own.nbytes)
        return gather(into, own, **options)

    def counted_objects(*args: object, **options: object) -> None:
        nonlocal num_objects
        num_objects += 1
        gather_objects(*args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_gather", counted)
        patch.setattr(dist, "all_gather_object", counted_objects)
        return message_of(facts, group), given_bytes, num_objects


def check_four(rank: int, world_size: int) -> tuple[dict[str, Any], dict[str, str | None]]:
    """What each case of two says on this rank, one after the other, so that one that sends too much spoils the next;
    and what is said of four ranks."""
    two = dist.new_group([0, 1])
    of_two = {name: said_and_sent(stated[rank], two) for name, (stated, _) in TWO_RANKS.items()} if rank < 2 else {}
    pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    own = pairs[rank % 2]
    alone = [dist.new_group([each]) for each in range(world_size)]
    said = {
        "one odd": message_of(ALIKE | {"plan L00 forward": "3 chunks" if rank == 2 else "2"}),
        "two and two": message_of({"dtypes": "float32" if rank in (0, 3) else "bfloat16"}, what="dtypes after step 7"),
        # Of different pairs, so each pair is of one mind.
        "pairs agree": message_of({"pair": str(rank % 2)}, own),
        "one pair does not": message_of({"pair": "x" if rank % 2 else str(rank)}, own),
        # A group that this rank is not in.
        "others": message_of({"rank": str(rank)}, pairs[1 - rank % 2]),
        "alone": message_of({"rank": str(rank)}, alone[rank]),
    }
    dist.barrier()
    return of_two, said


def test_all_ranks_name_what_differs_and_those_that_agree_send_32_bytes_alone(tmp_path: Path) -> None:
    assert message_of({"without": "a process group"}) is None
    of_two, of_four = zip(*run_on_ranks(check_four, 4, tmp_path), strict=True)
    for name, (_, lines) in TWO_RANKS.items():
        expected = "\n".join([HEAD, *lines]) if lines else None
        assert of_two[0][name] == of_two[1][name] == (expected, [32], 1 if lines else 0), name
    by_name = {name: [said[name] for said in of_four] for name in of_four[0]}
    # By their numbers in the job, not in the group.
    by_pair = f"{HEAD}\n  pair: rank 0: '0'; rank 2: '2'"
    after_a_step = HEAD.replace("the job", "dtypes after step 7")
    assert by_name == {
        "one odd": [f"{HEAD}\n  plan L00 forward: ranks 0-1, 3: '2'; rank 2: '3 chunks'"] * 4,
        "two and two": [f"{after_a_step}\n  dtypes: ranks 0, 3: 'float32'; ranks 1-2: 'bfloat16'"] * 4,
        "pairs agree": [None] * 4,
        "one pair does not": [by_pair, None, by_pair, None],
        "others": [None] * 4,
        "alone": [None] * 4,
    }


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


def test_plans_that_run_otherwise_have_other_facts_and_no_other_do() -> None:
    plans = [
        phase_plan(),
        phase_plan(3),
        phase_plan(links="shared"),
        replace(phase_plan(), groups=Groups(world=4, gpus_per_node=2, ep=4)),
        replace(phase_plan(), groups=Groups(world=4, gpus_per_node=4, ep=2, esp=2)),
    ]
    facts = [facts_of_plan("L03", plan) for plan in plans]
    assert {name for each in facts for name in each} == {"plan L03 forward"}
    assert len({each["plan L03 forward"] for each in facts}) == len(plans)
    assert facts_of_plan("L03", phase_plan()) == facts[0]
    # A backward has the tasks of the forward; the name tells them apart.
    assert list(facts_of_plan("L03", phase_plan(backward=True))) == ["plan L03 backward"]


def test_the_text_of_a_schedule_is_short_and_sees_every_part_of_a_task() -> None:
    tasks = (Task("A2A_IN", Lane.INTER), Task("EXPERT", Lane.COMPUTE, after=(0,)), Task("REDUCE", Lane.INTRA))
    text = text_of_schedule(Schedule(tasks))
    assert len(text) < 60
    assert text.startswith("1 chunks, 3 tasks, ")
    assert text == text_of_schedule(Schedule(tuple(replace(task) for task in tasks)))
    changes = ({"lane": Lane.INTRA}, {"chunk": 1}, {"layer": 1}, {"after": ()}, {"kind": "SPREAD"})
    others = {text_of_schedule(Schedule((tasks[0], replace(tasks[1], **change), tasks[2]))) for change in changes}
    others.add(text_of_schedule(Schedule((tasks[0], tasks[2], tasks[1]))))
    assert len(others - {text}) == len(changes) + 1


def test_facts_are_those_of_the_config_by_path_of_layers_and_of_versions() -> None:
    values = {"schedule": "best", "gate": {"k": 2, "type": "topk"}, "hooks": ["a.b"], "order": None}
    assert facts_of_config(values) == {
        "fsmoe.schedule": "best",
        "fsmoe.gate.k": "2",
        "fsmoe.gate.type": "topk",
        "fsmoe.hooks": "['a.b']",
        "fsmoe.order": "None",
    }
    layers = {"b.moe": nn.Linear(3, 5), "a.moe": nn.Linear(3, 7, bias=False).bfloat16()}
    assert facts_of_layers(layers) == {
        "number of MoE layers": "2",
        "order of MoE layers": "b.moe, a.moe",
        "dtypes": "bfloat16, float32",
        "parameters of L00": "weight float32 [5, 3], bias float32 [5]",
        "parameters of L01": "weight bfloat16 [7, 3]",
    }
    versions = facts_of_versions(["torch", "no-such-package-here"])
    assert versions["version of no-such-package-here"] == "not installed"
    assert versions["version of torch"].split("+")[0] == torch.__version__.split("+")[0]
