# SPDX-License-Identifier: Apache-2.0
"""The named systems as schedules: the orders of the paper's figure 3, and what each switch is worth."""

from __future__ import annotations

import random

import pytest

from ds_fsmoe.planning.cost import LinearCost
from ds_fsmoe.planning.presets import PRESETS, LayerSizes, Switches, layer_schedule, preset
from ds_fsmoe.planning.schedule import (
    A2A_IN,
    A2A_OUT,
    EXPERT,
    EXPERT_DW,
    EXPERT_DX,
    GATHER,
    GRAD,
    REDUCE,
    Lane,
    Schedule,
)
from ds_fsmoe.planning.timeline import Contention, simulate

SIZES = LayerSizes(a2a=4.0, gather=3.0, expert=6.0, reduce=3.0, expert_dw=3.0)
COSTS = dict.fromkeys([A2A_IN, A2A_OUT, GATHER, REDUCE, EXPERT, EXPERT_DX, EXPERT_DW, GRAD], LinearCost(0.1, 1.0))


def row(schedule: Schedule, lane: Lane) -> str:
    """The tasks of a lane, as the figure writes them: D for dispatch, C for combine, and so on, with the chunk."""
    letters = {
        A2A_IN: "D",
        A2A_OUT: "C",
        GATHER: "G",
        REDUCE: "R",
        EXPERT: "E",
        GRAD: "A",
        EXPERT_DX: "X",
        EXPERT_DW: "W",
    }
    return " ".join(letters[schedule.tasks[i].kind] + str(schedule.tasks[i].chunk + 1) for i in schedule.lanes[lane])


def rows(name_or_switches: str | Switches, degree: int, grads: tuple[float, ...] = ()) -> dict[str, str]:
    switches = preset(name_or_switches) if isinstance(name_or_switches, str) else name_or_switches
    schedule = layer_schedule(SIZES, degree, switches, grads)
    return {lane.value: row(schedule, lane) for lane in Lane}


def test_figure_3a_runs_one_task_after_another() -> None:
    assert rows("deepspeed", 1) == {"inter": "D1 G1 R1 C1", "compute": "E1", "intra": ""}
    timeline = simulate(layer_schedule(SIZES, 1, preset("deepspeed")), COSTS)
    assert timeline.makespan_ms == pytest.approx(2 * 4.1 + 2 * 3.1 + 6.1)


def test_figure_3b_overlaps_experts_with_one_stream_of_traffic() -> None:
    assert rows("tutel_improved", 4) == {
        "inter": "D1 G1 D2 G2 D3 G3 D4 G4 R1 C1 R2 C2 R3 C3 R4 C4",
        "compute": "E1 E2 E3 E4",
        "intra": "",
    }


def test_figure_3d_has_three_lanes_and_the_gradient_behind_the_last_dispatch() -> None:
    assert rows("fsmoe", 4, grads=(2.0,)) == {
        "inter": "D1 D2 D3 D4 A1 C1 C2 C3 C4",
        "intra": "G1 G2 G3 G4 R1 R2 R3 R4",
        "compute": "E1 E2 E3 E4",
    }


def test_without_intra_inter_overlap_all_traffic_shares_a_lane() -> None:
    assert rows("fsmoe_no_iio", 2, grads=(2.0,))["inter"] == "D1 G1 D2 G2 A1 R1 C1 R2 C2"


def test_reduce_first_sends_a_reduce_ahead_of_later_gathers() -> None:
    assert rows(Switches("per_phase", "reduce_first"), 4)["intra"] == "G1 G2 R1 G3 R2 G4 R3 R4"


def test_split_weight_gradients_fill_the_end() -> None:
    assert rows(Switches("per_phase", "paper", split_dw=True), 3)["compute"] == "X1 X2 X3 W1 W2 W3"


def random_costs(rng: random.Random) -> tuple[dict[str, LinearCost], LayerSizes]:
    costs = {kind: LinearCost(0.05 * rng.random(), rng.random()) for kind in COSTS}
    costs[A2A_OUT] = costs[A2A_IN]
    costs[EXPERT_DX] = costs[EXPERT_DW] = costs[EXPERT]
    expert = 30 * rng.random()
    return costs, LayerSizes(20 * rng.random(), 20 * rng.random(), expert, 20 * rng.random(), expert / 2)


def best_ms(costs: dict, sizes: LayerSizes, switches: Switches) -> float:
    degrees = [1] if switches.pipeline == "off" else range(1, 9)
    return min(simulate(layer_schedule(sizes, d, switches), costs).makespan_ms for d in degrees)


def test_with_ideal_links_a_system_is_never_slower_than_the_one_it_improves_on() -> None:
    rng = random.Random(0)
    for _ in range(100):
        costs, sizes = random_costs(rng)
        deepspeed, tutel, fsmoe = (best_ms(costs, sizes, preset(name)) for name in ("deepspeed", "tutel", "fsmoe"))
        assert fsmoe <= tutel + 1e-9
        assert tutel <= deepspeed + 1e-9


def test_links_that_contend_can_turn_overlap_into_a_loss() -> None:
    """Two tasks of equal length side by side at kappa > 1 take longer than one after the other."""
    costs, sizes = COSTS, LayerSizes(a2a=10.0, gather=10.0, expert=0.1, reduce=10.0)
    overlapped, shared = Switches("per_phase", "paper"), Switches("per_phase", "shared")
    assert best_ms(costs, sizes, overlapped) < best_ms(costs, sizes, shared)
    at_four = {
        switches: simulate(layer_schedule(sizes, 4, switches), costs, Contention(1.2)).makespan_ms
        for switches in (overlapped, shared)
    }
    assert at_four[overlapped] > at_four[shared]


def test_every_preset_has_a_degree_only_if_it_has_a_pipeline() -> None:
    assert list(PRESETS) == ["deepspeed", "tutel", "tutel_improved", "pipemoe_lina", "fsmoe_no_iio", "fsmoe"]
    with pytest.raises(ValueError, match="degree = 2 with pipeline = 'off': must be 1"):
        layer_schedule(SIZES, 2, preset("deepspeed"))
    with pytest.raises(ValueError, match="no preset is called 'fastmoe': the choices are deepspeed, tutel"):
        preset("fastmoe")
