# SPDX-License-Identifier: Apache-2.0
"""What a variant costs: its own tensors among those of all in the process, and the steps until tuning has paid."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import report
from benchmarks.harness.cases import Case
from benchmarks.harness.result_files import append_rows
from benchmarks.models.step_costs import (
    ADDED_TO_TUNING,
    NEVER,
    StepMemory,
    paid_after_steps,
    step_memory,
    storages_now,
    write_memory,
    write_tuning,
)
from benchmarks.reporting.rows import read
from ds_fsmoe.execution.lanes import Observer
from ds_fsmoe.tuning.summary import Outcome
from tests.ranks import run_on_ranks

NUMBERS = 1000
BYTES = 4 * NUMBERS


class Trained:
    """A parameter with its gradient and a state, and a step that replaces the gradient beside one more tensor."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(NUMBERS))
        self.state = torch.zeros(NUMBERS)
        self.half = self.state[:10]
        self()

    def __call__(self) -> None:
        self.weight.grad = None
        (self.weight * self.weight).sum().backward()


def test_a_variant_has_what_it_holds_and_what_its_step_makes_and_nothing_of_another() -> None:
    other = Trained()
    before = storages_now()
    own = Trained()
    found = step_memory(own, [], before)
    # Weight, state and gradient, which autograd has made; views are nothing more.
    assert found.held == 3 * BYTES
    # In the step the old gradient goes before two products with the weight are made, and added up; and two numbers.
    assert found.peak == 5 * BYTES + 8
    assert step_memory(other, [], storages_now()) == StepMemory(0, found.peak - 2 * BYTES)


def test_a_buffer_as_large_as_the_config_says_is_told_apart() -> None:
    before = storages_now()
    made = []

    def step() -> None:
        made[:] = [torch.ones(NUMBERS), torch.empty(7 * NUMBERS), torch.ones(3 * NUMBERS)]

    assert step_memory(step, [], before, 7 * NUMBERS) == StepMemory(0, 4 * BYTES, 7 * BYTES)
    assert step_memory(made.clear, [], before, 7 * NUMBERS) == StepMemory(4 * BYTES, 4 * BYTES, 7 * BYTES)


def test_what_is_replaced_in_a_step_is_not_counted_twice() -> None:
    class Replaced:
        def __init__(self) -> None:
            self.kept = torch.ones(NUMBERS)

        def __call__(self) -> None:
            self.kept = torch.ones(0)
            self.kept = torch.ones(NUMBERS)

    before = storages_now()
    assert step_memory(Replaced(), [], before) == StepMemory(BYTES, BYTES)


@dataclass
class Layer:
    """A layer of ours as far as it is asked."""

    pipeline: Any
    attached: list[Any] = field(default_factory=list)

    @property
    def fsmoe(self) -> Any:
        return SimpleNamespace(attach=lambda window, observer: self.attached.append((window, observer)))


def test_who_watched_a_layer_goes_on_watching() -> None:
    watching, window = Observer(), object()
    layers = [Layer(SimpleNamespace(window=window, observer=each)) for each in (watching, None)]
    step_memory(lambda: None, layers, storages_now())
    for layer, observer in zip(layers, (watching, None), strict=True):
        (first_window, counting), last = layer.attached
        assert first_window is window
        assert counting not in (watching, None)
        assert last == (window, observer)


def outcome(**others: Any) -> Outcome:
    # Ten steps of 130 ms in the trials, in which the plan that stays took 80.
    return Outcome(
        **{"took_s": 2.0, "num_steps": 10, "total_ms": 1300.0, "kept_ms": 80.0, "baseline_ms": 110.0} | others
    )


def test_tuning_has_paid_when_the_gain_is_what_measuring_and_slower_plans_have_taken() -> None:
    # A step is 100 ms now and was 150; in the trials 150, as all but forward and backward is as before: no loss there.
    assert paid_after_steps(outcome(), 150.0, 100.0) == 40
    # Beside a step of 120, trials have lost 10 times 30 besides.
    assert paid_after_steps(outcome(), 120.0, 100.0) == (2000 + 300) / 20
    assert paid_after_steps(outcome(took_s=0.0), 200.0, 100.0) == 0
    # DeepSpeed's schedule stays, so that is what a step in the trials is told from.
    assert paid_after_steps(outcome(is_stock=True), 120.0, 100.0) == 2000 / 20
    assert paid_after_steps(outcome(kept_ms=None), 120.0, 100.0) == (2000 - 200) / 20


@pytest.mark.parametrize("now_ms", [150.0, 151.0])
def test_what_gains_nothing_never_pays(now_ms: float) -> None:
    assert paid_after_steps(outcome(), 150.0, now_ms) is None


def written(rank: int, world_size: int, folder: str) -> None:
    case = Case("a case", StepMemory(1, 1))
    memories = {
        "stock": StepMemory(1_000_000, 4_000_000, 9_000_000),
        "ours": StepMemory(2_000_000 + rank, (5 + rank) * 1_000_000),
    }
    write_memory(case, memories, Path(folder) / "memory.csv")
    if rank:
        return
    chosen = SimpleNamespace(outcome=outcome(), num_measured=3, step=None)
    tuner = SimpleNamespace(result=chosen, describe=lambda: "said")
    tuned = SimpleNamespace(fsmoe=SimpleNamespace(autotune=tuner))
    engines = {"stock": object(), "ours": tuned, "ours, over all ranks": tuned}
    times_ms = {"stock": 150.0, "ours": 100.0, "ours, over all ranks": 160.0, "deepspeed": 120.0}
    result = SimpleNamespace(variants=[SimpleNamespace(name=name, p50_ms=ms) for name, ms in times_ms.items()])
    file = Path(folder) / "tuning.csv"
    write_tuning(case, engines, result, file)
    columns = tuple(read(file)[0])
    assert columns[-2:] == ADDED_TO_TUNING
    # A file of before gets the new columns.
    file.unlink()
    append_rows(file, columns[:-2], [dict.fromkeys(columns[:-2], "old")])
    write_tuning(case, engines, result, file)


def test_rows_say_the_memory_of_the_fullest_rank_and_when_tuning_has_paid(tmp_path: Path) -> None:
    run_on_ranks(written, 2, tmp_path / "ranks", str(tmp_path))
    stock, ours = read(tmp_path / "memory.csv")
    assert (stock["variant"], ours["variant"]) == ("stock", "ours")
    assert [stock[each] for each in ("held", "peak", "bucket", "times_stock")] == ["1", "4", "9", "1.0000"]
    assert (ours["held"], ours["peak"], ours["times_stock"], ours["unit"]) == ("2", "6", "1.5000", "MB")
    old, ours, over_all = read(tmp_path / "tuning.csv")
    assert [old[each] for each in ADDED_TO_TUNING] == ["", ""]
    assert [ours[each] for each in ADDED_TO_TUNING] == ["40", "115"]
    # Nobody has run the same layers in that layout without tuning.
    assert [over_all[each] for each in ADDED_TO_TUNING] == [NEVER, ""]


def test_the_report_shows_memory_and_tuning_and_rows_of_before(tmp_path: Path) -> None:
    made = {"hardware": "a machine", "commit": "abc", "date": "2026-01-02 03:04", "case": "one", "variant": "ours"}
    row = made | {"unit": "MB", "held": "10", "peak": "25.25", "bucket": "2000", "times_stock": "1.2500"}
    append_rows(tmp_path / "memory.csv", tuple(row), [row])
    row = made | {"measured_s": "12.0", "steps_of_trials": "30", "predicted_ms": "1", "bound_ms": "1"}
    append_rows(tmp_path / "before.csv", tuple(row), [row])
    row |= {"paid_after_steps": "77", "paid_after_steps_untuned": NEVER}
    append_rows(tmp_path / "tuning.csv", tuple(row), [row])
    last = {}
    for name in ("memory", "before", "tuning"):
        (shown,) = report.sections(name, read(tmp_path / f"{name}.csv"), tmp_path)
        last[name] = shown.splitlines()[-1]
    assert last["memory"] == "| one: ours | 10.0 | 25.2 | 2000.0 | 1.25 |"
    assert last["before"] == "| one: ours | 12.0 | 30 |  |  |"
    assert last["tuning"] == "| one: ours | 12.0 | 30 | 77 | never |"
