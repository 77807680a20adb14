# SPDX-License-Identifier: Apache-2.0
"""The placement of experts in training: what is decided from loads, what is done, and what is refused. Placements are
saved, resumed and read from files, also between two moves and after a job that ended in one; and what a run tells."""

from __future__ import annotations

import csv
import json
import os
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers")

import ds_fsmoe
from ds_fsmoe.config.reading import ConfigError, read_block
from ds_fsmoe.files.runs import PLACEMENT, RUN, append_lines, read_run, write_json
from ds_fsmoe.offline.report.decisions import decisions_of, rows_of_ranks
from ds_fsmoe.offline.report.decisions import placement as placement_section
from ds_fsmoe.offline.report.page import Page
from ds_fsmoe.placement.moving import PlacementError
from ds_fsmoe.placement.watch import Event, PlacementWatch, _left_in
from ds_fsmoe.planning.expert_placement import ExpertPlacement
from tests.placed_models import BALANCED, made, trained
from tests.ranks import run_on_ranks
from tests.report_runs import charts_of, without_programs
from tests.samples import sampled
from tests.small_model import BATCH, Case, batch, small_engine
from tests.test_moved_experts import everywhere


def hot_experts_spread(rank: int, world_size: int, stage: int) -> dict[str, Any]:
    """Experts 0 and 1, at home on the first rank, are all that tokens choose; the config is one of 0.2.0."""
    losses, norms, events, said = {}, {}, [], []
    for placement in (None, BALANCED | {"spare_experts": 2}):
        with patch("ds_fsmoe.engine.set_up.log_on_rank_0", lambda text, *level: said.append(text)):
            engine = made(stage, world_size, placement)
        name = "placed" if placement else "stays"
        if placement:
            engine.fsmoe.placement_watch.on_event.append(events.extend)
        losses[name] = trained(engine, rank, range(9), (0, 1), world_size)
        norms[name] = engine.get_global_grad_norm()
        if placement:
            now = {label: each.as_dict() for label, each in engine.fsmoe.placement.now.items()}
        engine.destroy()
    return {"losses": losses, "norms": norms, "events": events, "now": now, "said": said}


@sampled(("world_size", "stage"), [(2, 2), (4, 2), (2, 0), (4, 3), (2, 1)])
def test_experts_move_to_where_the_tokens_are_and_losses_stay_and_spare_places_of_before_are_one_warning(
    world_size: int, stage: int, tmp_path: Path
) -> None:
    found = run_on_ranks(hot_experts_spread, world_size, tmp_path, stage)
    for of_rank in found:
        (line,) = of_rank["said"]
        assert line.startswith("fsmoe.placement.spare_experts = 2 is ignored: remove it (no replicas since 0.2.0)")
        losses = of_rank["losses"]
        assert np.allclose(losses["placed"], losses["stays"], rtol=2e-5)
        assert of_rank["norms"]["placed"] == pytest.approx(of_rank["norms"]["stays"], rel=1e-4)
        assert of_rank["now"] == found[0]["now"]
        events: list[Event] = of_rank["events"]
        moved = [each for each in events if each.num_swaps]
        assert moved
        assert all(each.balance == pytest.approx(world_size) for each in moved)
        for label, each in of_rank["now"].items():
            placement = ExpertPlacement.from_dict(each)
            assert placement.rank_of_place(placement.place_of_expert[0]) != placement.rank_of_place(
                placement.place_of_expert[1]
            ), label


def states_out_of_reach(rank: int, world_size: int) -> str:
    engine = made(2, world_size, BALANCED)
    trained(engine, rank, range(2), (0, 1), world_size)
    try:
        with patch("ds_fsmoe.placement.moving.live_groups", return_value=None if rank == 1 else []):
            engine.fsmoe.placement.mover()
    except PlacementError as error:
        return str(error)
    return "moved"


@pytest.mark.long
def test_states_that_one_rank_cannot_reach_are_an_error_on_every_rank(tmp_path: Path) -> None:
    found = run_on_ranks(states_out_of_reach, 2, tmp_path)
    assert found[0] == found[1]
    assert "rank 1" in found[0]
    assert "not in memory" in found[0]


@pytest.mark.parametrize(
    ("first", "second", "moves"),
    [
        ((60.0, 44.0, 4.0, 4.0), (40.0, 20.0, 10.0, 6.0), True),
        # What would pay by the mean would not have in the first, or in the second.
        ((40.0, 0.0, 40.0, 0.0), (100.0, 80.0, 0.0, 0.0), False),
        ((100.0, 80.0, 0.0, 0.0), (40.0, 0.0, 40.0, 0.0), False),
    ],
)
def test_places_are_decided_by_both_of_the_last_two_stretches_of_steps(
    first: tuple[float, ...], second: tuple[float, ...], moves: bool
) -> None:
    now = ExpertPlacement((0, 1, 2, 3), 4, 2)
    groups = SimpleNamespace(topology=SimpleNamespace(node_of_rank=(0, 0)), ranks_of=lambda kind: (0, 1))
    layer, mover = SimpleNamespace(fsmoe=SimpleNamespace(groups=groups)), SimpleNamespace(bytes_of_expert=lambda _: 1)
    placements: Any = SimpleNamespace(now={"L00": now}, layer=lambda label: layer, mover=lambda: mover)
    block = read_block({"fsmoe": {"enabled": True, "placement": {"policy": "balanced", "every": 1}}}).placement
    watch, events = PlacementWatch(block, placements, None), []
    watch.on_event.append(events.extend)
    stretches = iter([first, second])
    watch._loads = SimpleNamespace(  # type: ignore[assignment]
        begin=lambda: None,
        shared=lambda: {"L00": (np.array([next(stretches)] * 2) / 2, ())},
    )
    for step in range(3):
        watch.step_is_over(step, is_tuned=True)
    (event,) = events
    mean = np.add(first, second) / 2
    assert event.rows_E == tuple(mean)
    assert event.balance == pytest.approx(mean[:2].sum() / mean.sum() * 2)
    assert list(watch.wanted) == ["L00"] * moves
    for placed in watch.wanted.values():
        assert placed.rank_of_place(placed.place_of_expert[0]) != placed.rank_of_place(placed.place_of_expert[1])


def test_moves_that_were_left_go_on_and_are_decided_anew_if_ranks_had_spare_places() -> None:
    now = ExpertPlacement((0, 1, 2, 3), 4, 2)
    wanted, rows = now.swapped(0, 2), {"L00": [[4, 3, 2, 1]] * 2}
    # Version 0.2.0 wrote the exchanges that are left, too.
    of_now = {"since": 6, "before": rows, "wanted": {"L00": wanted.as_dict()}}
    of_earlier = of_now | {"pending": {"L00": [[0, 2]]}}
    places = {"expert_of_place": [2, 1, -1, 0, 3, 1]}
    of_before = of_now | {"pending": {"L00": [[0, 3]]}, "wanted": {"L00": wanted.as_dict() | places}}
    placements: Any = SimpleNamespace(now={"L00": now})
    for found, left in ((of_now, {"L00": wanted}), (of_earlier, {"L00": wanted}), (of_before, {})):
        since, before, placed = _left_in(found, placements)
        assert (since, placed) == (6, left)
        assert before["L00"].tolist() == rows["L00"]


def spoiled_expert(rank: int, world_size: int) -> str:
    """Expert 5 makes nan where it has been moved to."""
    from ds_fsmoe.checks.expert_results import ExpertResultError

    placed = {"policy": "balanced", "every": 1000}
    engine = made(1, world_size, placed, debug={"check_results": True})
    trained(engine, rank, range(1), (0, 5), world_size)
    placement, wanted = engine.fsmoe.placement, {}
    for label, now in placement.now.items():
        wanted[label] = now.swapped(now.place_of_expert[5], now.place_of_expert[6])
    placement.go_to(wanted)
    trained(engine, rank, range(1, 2), (0, 5), world_size)
    label = max(placement.now)
    home, index = divmod(placement.now[label].place_of_expert[5], placement.now[label].num_local)
    if placement.expert_ranks()[label].ep_rank == home:
        with torch.no_grad():
            ds_fsmoe.own_part(placement.layer(label).down_proj)[index, 0, 0] = float("nan")
    try:
        trained(engine, rank, range(2, 3), (0, 5), world_size)
    except ExpertResultError as error:
        return str(error)
    return "nothing was found"


@pytest.mark.long
def test_an_expert_that_has_moved_is_named_by_its_own_number(tmp_path: Path) -> None:
    found = run_on_ranks(spoiled_expert, 2, tmp_path)
    assert found[0] == found[1]
    assert "expert 5 returned nan or infinity for finite rows" in found[0]


# ---- files


def resumed(rank: int, world_size: int, folder: str, stage: int) -> list[str]:
    """A checkpoint between two moves; a job that resumes has the losses of the job that goes on."""
    said = []
    engine = made(stage, world_size, BALANCED)
    trained(engine, rank, range(6), (0, 1, 2), world_size)
    watch = engine.fsmoe.placement_watch
    if not watch.wanted or all(each.is_at_start for each in engine.fsmoe.placement.now.values()):
        said.append("the checkpoint is not between two moves")
    before, where = everywhere(engine.fsmoe.placement), dict(engine.fsmoe.placement.now)
    engine.save_checkpoint(folder, tag="between")
    if everywhere(engine.fsmoe.placement) != before or engine.fsmoe.placement.now != where:
        said.append("saving has changed where experts are, or what they hold")
    wanted = trained(engine, rank, range(6, 10), (0, 1, 2), world_size)
    at_end = dict(engine.fsmoe.placement.now)
    engine.destroy()
    again = made(stage, world_size, BALANCED)
    again.load_checkpoint(folder, tag="between")
    if everywhere(again.fsmoe.placement) != before or again.fsmoe.placement.now != where:
        said.append("loading has not brought everything back")
    found = trained(again, rank, range(6, 10), (0, 1, 2), world_size)
    if found != wanted:
        said.append(f"losses {found} for {wanted}")
    if again.fsmoe.placement.now != at_end:
        said.append("experts went elsewhere")
    again.destroy()
    # One whose experts stay reads the same checkpoint.
    plain = made(stage, world_size, None)
    plain.load_checkpoint(folder, tag="between")
    if not np.allclose(trained(plain, rank, range(6, 10), (0, 1, 2), world_size), wanted, rtol=2e-5):
        said.append("a job whose experts stay goes on otherwise")
    plain.destroy()
    return said


@pytest.mark.long
@sampled(("world_size", "stage"), [(2, 2), (2, 3), (4, 0)], kept=[0])
def test_a_checkpoint_between_two_moves_is_whole_and_resumes(world_size: int, stage: int, tmp_path: Path) -> None:
    assert run_on_ranks(resumed, world_size, tmp_path, str(tmp_path / "saved"), stage) == [[]] * world_size


def files_of_placements(rank: int, world_size: int, folder: str) -> list[str]:
    said = []
    file = Path(folder) / "placement.json"
    engine = made(2, world_size, BALANCED)
    trained(engine, rank, range(8), (0, 1), world_size)
    engine.fsmoe.placement.save(file)
    dist.barrier()
    where = dict(engine.fsmoe.placement.now)
    engine.destroy()
    engine = made(2, world_size, {"file": str(file)})
    if engine.fsmoe.placement.now != where or engine.fsmoe.placement_watch is not None:
        said.append("experts are not where the file says")
    engine.destroy()
    whole = json.loads(file.read_text())
    paths = list(whole["layers"])
    of_others = {
        "other.json": {"format": 1, "layers": {"model.other": whole["layers"][paths[0]]}},
        "fewer.json": {
            "format": 1,
            "layers": {each: ExpertPlacement.at_start(4 * world_size, world_size).as_dict() for each in paths},
        },
    }
    for name, content in of_others.items():
        bad = Path(folder) / name
        if rank == 0:
            bad.write_text(json.dumps(content))
        dist.barrier()
        try:
            made(2, world_size, {"file": str(bad)})
            said.append(f"{name} was taken")
        except ConfigError as error:
            if str(bad) not in str(error) or "fsmoe.placement.file" not in str(error):
                said.append(f"{name}: {error}")
    return said


@pytest.mark.long
def test_a_placement_is_read_from_a_file_and_one_of_another_model_is_refused(tmp_path: Path) -> None:
    assert run_on_ranks(files_of_placements, 2, tmp_path, str(tmp_path)) == [[]] * 2


def ends_while_moving(rank: int, world_size: int, folder: str) -> None:
    engine = made(2, world_size, BALANCED)
    trained(engine, rank, range(3), (0, 1, 2), world_size)
    engine.save_checkpoint(folder, tag="before")

    def ends(operations: Any) -> Any:
        if rank == 1:
            os._exit(9)
        return exchange(operations)

    exchange, dist.batch_isend_irecv = dist.batch_isend_irecv, ends
    trained(engine, rank, range(3, 9), (0, 1, 2), world_size)


def goes_on(rank: int, world_size: int, folder: str) -> tuple[list[float], list[float], bool]:
    losses, has_moved = [], False
    for placement in (BALANCED, None):
        engine = made(2, world_size, placement)
        engine.load_checkpoint(folder)
        losses.append(trained(engine, rank, range(3, 9), (0, 1, 2), world_size))
        if placement is not None:
            has_moved = not all(each.is_at_start for each in engine.fsmoe.placement.now.values())
        engine.destroy()
    return losses[0], losses[1], has_moved


@pytest.mark.long
def test_the_last_checkpoint_is_whole_after_a_rank_has_ended_in_the_middle_of_a_move(tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    with pytest.raises(RuntimeError):
        run_on_ranks(ends_while_moving, 2, tmp_path / "first", folder)
    for placed, stays, moved in run_on_ranks(goes_on, 2, tmp_path / "second", folder):
        assert moved
        assert np.allclose(placed, stays, rtol=2e-5)


# ---- what a run tells

ROOT = Path(__file__).resolve().parents[1]


def row(step: int, layer: str, balance: float, expected: float | None = None, **others: Any) -> dict[str, Any]:
    """A line of the record; without an expected balance nothing changes."""
    changes = expected is not None
    found = {"step": step, "layer": layer, "rows_E": [3.0, 1.0, 2.0], "balance": balance}
    found |= {"expected_balance": expected if changes else balance, "num_swaps": int(changes)}
    return found | {"gain_ms": 2.0 if changes else 0.0, "why": f"{layer} at {step}"} | others


def test_a_decision_is_measured_by_the_next_one_in_the_layer_that_was_fullest_as_it_was_done_last() -> None:
    rows = [row(10, "a", 2.5), row(10, "b", 2.0, 1.1), row(30, "b", 1.2), row(30, "a", 2.4, 1.3)]
    first, last = decisions_of(rows)
    assert (first.step, first.fullest["layer"], first.measured) == (10, "b", 1.2)
    assert (last.step, last.fullest["layer"], last.measured) == (30, "a", None)
    assert [each["layer"] for each in first.changed] == ["b"]
    before, again = decisions_of([row(10, "a", 2.0, 1.0), row(20, "a", 1.5), row(20, "a", 1.1), row(20, "b", 1.3)])
    assert before.measured == 1.1
    assert set(again.rows) == {"a", "b"}
    # Of one that changes nothing the fullest layer is told.
    assert (again.changed, again.fullest["why"]) == ([], "b at 20")


def page_of(tmp_path: Path, rows: list[dict[str, Any]]) -> str:
    tmp_path.mkdir(exist_ok=True)
    write_json(tmp_path / RUN, {"format": 1, "schedule": "best"})
    append_lines(tmp_path / PLACEMENT, rows)
    page = Page("a run")
    page.section(placement_section, read_run(tmp_path))
    return without_programs(page.html())


@pytest.mark.long
def test_of_many_changes_the_last_ones_are_shown_and_of_none_the_reason(tmp_path: Path) -> None:
    page = page_of(tmp_path / "stays", [row(10, "a", 1.2), row(10, "b", 1.0)])
    assert "was decided once, 0 times with a change" in page
    assert "Last decision: a at 10." in page
    assert "<table>" not in page
    assert not charts_of(page)
    rows = [row(10 * at, "a", 2.0, 1.5, gain_ms=None) for at in range(1, 42)]
    page = page_of(tmp_path, rows)
    assert "The last 30 changes of 41 are shown." in page
    steps = [int(each) for each in re.findall(r"<tr><td>(\d+)</td>", page)]
    assert steps == [10 * at for at in range(12, 42)]
    # Without times there is no gain to tell, and after the last decision nothing was measured.
    assert page.count("<td>1.50</td><td>2.00</td><td>-</td>") == 29
    assert page.count("<td>1.50</td><td>-</td><td>-</td>") == 1
    # Records of before may have replicas.
    places = {"before": [0, 1, -1, 2, 3, -1], "after": [0, 2, -1, 1, 3, 0], "node_of_rank": [0, 0]}
    of_before = row(10, "a", 2.0, 1.0, rows_E=[4.0, 3.0, 2.0, 1.0], places=places, num_replicas=1)
    said = "Experts had replicas on other ranks in this run"
    assert [said in page_of(tmp_path / f"{at}", [each]) for at, each in enumerate((of_before, rows[0]))] == [
        True,
        False,
    ]


@pytest.mark.long
def test_the_picture_of_the_docs_is_of_the_policy_that_comes_along(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the page says of its picture is what the script computes, and draws."""
    script = runpy.run_path(str(ROOT / "tools" / "draw_placement.py"), run_name="draw_placement")
    words = (ROOT / "docs" / "placement.md").read_text().split("![")[1].split("## ")[0]
    found, rows_GE, nodes = [], script["rows"](), script["NODE_OF_RANK"]
    for each in script["placements"]().values():
        loads = [sum(part for _, part in parts) for parts in rows_of_ranks(each, rows_GE.sum(axis=0))]
        found.append(f"{max(loads) / (sum(loads) / len(loads)):.2f}")
        assert sum(loads) == len(nodes) * script["NUM_TOKENS"] * script["K"]
    assert re.findall(r"\b\d\.\d\d\b", words) == found
    assert float(found[1]) < float(found[0])
    script["main"].__globals__["FILE"] = tmp_path / "drawn.png"
    script["main"]()
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.count("fullest rank") == 2


STEPS, EVERY = 12, 2


def train_recorded(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Some steps in which all tokens but every third choose the experts of the first rank."""
    case = Case(ep_size=2, stage=1, k=2, drop_tokens=False)
    block = {"metrics": "detailed", "record": {"dir": f"{folder}/run"}}
    block |= {"placement": {"policy": "balanced", "every": EVERY}, "autotune": False}
    monitor = {"enabled": True, "output_path": folder, "job_name": "job"}
    engine = small_engine(case, rank, block, csv_monitor=monitor)
    model = engine.module
    tokens = len(batch(0, rank, next(model.parameters()).dtype)[0].flatten(0, -2))
    hot = np.arange(tokens) % 3 > 0
    indices = np.where(hot[:, None, None], [[[0, 1]]], [[[2, 3]]]).repeat(len(engine.fsmoe.layers), axis=1)
    seen = []
    for step in range(STEPS):
        engine.fsmoe.replay(indices)
        loss, _ = engine(*batch(step, rank, next(model.parameters()).dtype))
        engine.backward(loss)
        engine.step()
        seen.append({label: each.expert_of_place for label, each in engine.fsmoe.placement.now.items()})
    engine.destroy()
    return {"places": seen, "tokens": tokens}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("placed")
    return SimpleNamespace(folder=folder, ranks=run_on_ranks(train_recorded, 2, folder / "ranks", str(folder)))


@pytest.mark.long
def test_every_decision_is_recorded_with_what_came_of_it(job: SimpleNamespace) -> None:
    run = read_run(job.folder / "run")
    assert not run.problems
    first, *others = decisions_of(run.placement)
    assert others
    assert first.step < STEPS
    tokens = sum(each["tokens"] for each in job.ranks)
    hot = sum(sum(at % 3 > 0 for at in range(each["tokens"])) for each in job.ranks)
    for label, each in first.rows.items():
        assert each["rows_E"] == [hot, hot, tokens - hot, tokens - hot]
        assert each["balance"] == pytest.approx(2 * hot / tokens)
        assert each["expected_balance"] == pytest.approx(1.0)
        assert (each["num_swaps"], each["gain_ms"]) == (1, None)
        assert each["places"]["before"] == [0, 1, 2, 3]
        assert sorted(each["places"]["after"]) == [0, 1, 2, 3]
        assert each["places"]["node_of_rank"] == [0, 0]
        before, *_, after = (each[label] for each in job.ranks[0]["places"])
        # It has come to be as was decided, and so was measured.
        assert [list(before), list(after)] == [each["places"]["before"], each["places"]["after"]]
        assert others[0].rows[label]["balance"] == pytest.approx(1.0)
        assert "places" not in others[0].rows[label]
    assert job.ranks[0]["places"] == job.ranks[1]["places"]


@pytest.mark.long
def test_monitors_are_told_at_each_decision(job: SimpleNamespace) -> None:
    def written(name: str, column: int = 1) -> list[float]:
        with (job.folder / "job" / f"fsmoe_{name}.csv").open() as file:
            return [float(each[column]) for each in list(csv.reader(file))[1:]]

    decisions = decisions_of(read_run(job.folder / "run").placement)
    of_layers = [list(each.rows.values()) for each in decisions]
    assert written("placement_balance") == pytest.approx([max(each["balance"] for each in rows) for rows in of_layers])
    assert written("placement_moved") == [sum(each["num_swaps"] for each in rows) for rows in of_layers]
    assert written("L00_placement_expected_balance")[0] == pytest.approx(1.0)
    assert written("placement_moved", 0) == [2 * BATCH * each.step for each in decisions]
