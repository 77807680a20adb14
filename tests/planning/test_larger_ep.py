# SPDX-License-Identifier: Apache-2.0
"""A measured job predicts itself with its experts over more ranks: fewer gradients, longer all-to-alls."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ds_fsmoe.planning.groups import Groups
from ds_fsmoe.planning.job.other_ranks import OtherRanks, on_other_ranks
from ds_fsmoe.planning.job.recorded_costs import RecordedJob
from ds_fsmoe.planning.job.what_if import WhatIf, larger_ep_sizes, sizes_from
from tests.planning.measured_layers import SIZES
from tests.planning.test_recorded_costs import job_of
from tests.planning.test_what_if import CLUSTER

INSIDE = Groups(4, 2, ep=2)
"""Experts over the two ranks of each of two nodes."""


def job_inside(num_weights: int, num_tokens: int | None = None) -> RecordedJob:
    shape = replace(SIZES, num_weights=num_weights, num_tokens=num_tokens)
    kind = replace(job_of().kinds[0], groups=INSIDE, shape=shape)
    sent = {"EXPERT_GRAD": 3 * num_weights * SIZES.dtype_bytes}
    return job_of(kinds=(kind,), gradients_bytes=sent)


@pytest.mark.parametrize(
    ("groups", "num_experts", "sizes"),
    [
        (INSIDE, [4], [2, 4]),
        (INSIDE, [4, 6], [2]),
        (Groups(8, 2, ep=1), [24], [1, 2, 4, 8]),
        (Groups(6, 2, ep=1), [12, 9], [1, 3]),
        (Groups(8, 2, esp=2, ep=2), [8], [2, 4]),
        (Groups(4, 2, ep=4), [8], [4]),
    ],
)
def test_sizes_divide_ranks_and_experts(groups: Groups, num_experts: list[int], sizes: list[int]) -> None:
    assert sizes_from(groups, num_experts) == sizes


def test_many_weights_and_few_tokens_are_faster_on_more_ranks_and_few_weights_are_not() -> None:
    heavy, light = (larger_ep_sizes(job_inside(count), CLUSTER) for count in (50_000_000, 8))
    assert list(heavy) == list(light) == [2, 4]
    assert heavy[4] < heavy[2]
    assert light[4] > light[2]


def test_as_it_is_a_job_is_predicted_as_ever() -> None:
    job = replace(job_inside(1000), gradients_bytes={})
    assert larger_ep_sizes(job, CLUSTER)[2] == pytest.approx(WhatIf(job).by_schedule("best").step_ms)


def test_rows_may_cross_to_a_node_once_and_slots_may_not() -> None:
    rows, slots = (larger_ep_sizes(job_inside(1000, count), CLUSTER)[4] for count in (11, None))
    flat, once = (
        WhatIf(on_other_ranks(job_inside(1000, 11), CLUSTER, OtherRanks(ep=4, alltoall=name))).by_schedule("best")
        for name in ("flat", "node_deduplicated")
    )
    assert rows == pytest.approx(min(flat.step_ms, once.step_ms))
    assert slots == pytest.approx(flat.step_ms)


def test_nothing_is_said_where_no_larger_size_or_no_number_is_known() -> None:
    assert larger_ep_sizes(job_of(), CLUSTER) == {}
    assert larger_ep_sizes(job_inside(1000), replace(CLUSTER, operations={})) == {}
    of_two = replace(job_inside(1000).kinds[0], labels=("L02",), groups=Groups(4, 2, ep=4))
    both = job_of(kinds=(replace(job_inside(1000).kinds[0], labels=("L00", "L01")), of_two))
    assert larger_ep_sizes(both, CLUSTER) == {}
