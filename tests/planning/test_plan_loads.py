# SPDX-License-Identifier: Apache-2.0
"""``ds_fsmoe plan --loads``: what placing experts by measured rows would give, as a user types it."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from ds_fsmoe import cli
from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.planning.placement_costs import ObservedRouting, pressure_of
from ds_fsmoe.routes.recorded import in_memory, write_packed
from ds_fsmoe.routes.written import Choices, RankFacts, RoutedLayer
from tests.planning.placements import fullest, load

OLMOE = str(Path(__file__).parents[2] / "benchmarks" / "routing" / "olmoe.npz")
SMALL = ["--width", "1024", "--hidden", "4096", "--length", "2048", "--layers", "2", "--max-degree", "2"]
ALONE = ["--mp", "1", "--esp", "1"]
ON_TWO_NODES = [
    *("plan", "--cluster", "testbed_b", "--nodes", "2", *SMALL, *ALONE, "--ep", "8"),
    *("--experts", "16", "--capacity-factor", "none"),
]


def written(path: Path, **layers: np.ndarray) -> str:
    path.write_text(json.dumps({name: rows_RE.tolist() for name, rows_RE in layers.items()}))
    return str(path)


def as_recording(path: Path, counts_NRE: np.ndarray, ep_ranks: dict[int, tuple[int, ...]]) -> str:
    """A recording in which tokens of each rank chose so many experts in each step."""
    num_experts, choices = counts_NRE.shape[2], {}
    for step, rank in np.ndindex(*counts_NRE.shape[:2]):
        experts = np.repeat(np.arange(num_experts), counts_NRE[step, rank]).astype(np.uint8)
        choices[rank, step, 0, 0] = Choices(experts[:, None])
    layers = {rank: (RoutedLayer("moe", num_experts, group),) for rank, group in ep_ranks.items()}
    facts = [RankFacts(rank, len(ep_ranks), of_rank) for rank, of_rank in layers.items()]
    write_packed(path, in_memory(facts, choices))
    return str(path)


def test_a_table_says_what_placing_experts_would_give(capsys, tmp_path) -> None:
    hot, even = load("hot_rank", 16, 8, 4), load("equal", 16, 8, 4)
    file = written(tmp_path / "rows.json", first=hot.rows_GE, second=even.rows_GE)
    out = tmp_path / "plan.json"
    assert cli.main([*ON_TWO_NODES, "--loads", file, "--json", str(out)]) == 0
    text = capsys.readouterr().out
    found = json.loads(out.read_text())["placement"]
    first, second = found["layers"]
    now, placed = ExpertPlacement.at_start(16, 8), ExpertPlacement.from_dict(first["placement"])
    for name, placement in (("fullest_now", now), ("fullest_placed", placed)):
        assert first[name] == pytest.approx(fullest(placement, hot) / hot.rows_GE.sum() * 8)
    assert first["fullest_placed"] < first["fullest_now"]
    assert first["experts_move"] > 0
    gain_ms = first["now_ms"] - first["placed_ms"]
    assert first["pays_after_steps"] == max(1, np.ceil(first["moves_ms"] / gain_ms))
    assert ExpertPlacement.from_dict(second["placement"]) == now
    assert second["pays_after_steps"] is None
    # The model has two layers, as the file does.
    steps = found["step_ms"]
    assert steps["now"] - steps["placed"] == pytest.approx(gain_ms)
    assert steps["balanced"] < steps["placed"] < steps["now"]

    rows = {line.split()[0]: line.split() for line in text.splitlines() if line.split()[:1]}
    cells = [f"{first[name]:.2f}" for name in ("fullest_now", "fullest_placed")] + [str(first["experts_move"])]
    cells += [f"{first[name]:.3f}" for name in ("now_ms", "placed_ms")] + [f"{first['moves_ms']:.2f}"]
    assert rows["first"][1:9] == [*cells, "after", str(first["pays_after_steps"])]
    assert (rows["second"][1:4], rows["second"][-1]) == (["1.00", "1.00", "0"], "stays")
    assert f"{steps['now']:.2f} ms with these loads, {steps['placed']:.2f} ms placed" in text
    assert f"moving an expert sends {2 * 1024 * 4096 * 12 / 1e6:.1f} MB" in text


def test_even_rows_take_what_the_plan_says(capsys, tmp_path) -> None:
    file, out = written(tmp_path / "rows.json", only=load("equal", 16, 8).rows_GE), tmp_path / "plan.json"
    for others in ([], ["--alltoall", "2dh"], ["--alltoall", "node_deduplicated"], ["--recompute"]):
        assert cli.main([*ON_TWO_NODES, "--loads", file, "--json", str(out), *others]) == 0
        said = json.loads(out.read_text())
        steps = said["placement"]["step_ms"]
        assert steps["balanced"] == steps["now"] == steps["placed"] == said["presets"]["best"]["step_ms"]
        # The experts' part of a layer is what the plan says of it, in its reasons.
        forward, backward = (
            float(re.search(r"the MoE part takes ([\d.]+) ms", row["why"])[1])
            for row in said["plan"]["layers"]
            if row["layer"] == 1
        )
        once_more = forward if "--recompute" in others else 0.0
        layer_ms = said["placement"]["layers"][0]["now_ms"]
        assert layer_ms == pytest.approx(forward + once_more + backward, abs=0.002)
    capsys.readouterr()


def test_an_option_of_before_for_spare_places_is_said_to_mean_nothing(capsys, tmp_path) -> None:
    rows_GE = load("hot_rank", 16, 8, 4).rows_GE
    rows_GE[0, 1] = 0  # an expert that nobody chooses
    file, outs = written(tmp_path / "rows.json", hot=rows_GE), []
    for others in ([], ["--spare-experts", "1"]):
        assert cli.main([*ON_TWO_NODES, "--loads", file, *others]) == 0
        outs.append(capsys.readouterr())
    assert (outs[0].out, outs[0].err, outs[1].err.count("\n")) == (outs[1].out, "", 1)
    assert "--spare-experts 1: is ignored, as experts have no replicas since version 0.2.0" in outs[1].err


def test_a_recording_counts_by_its_groups_of_ranks_and_rows_of_others_are_spread_evenly(capsys, tmp_path) -> None:
    rng = np.random.default_rng(0)
    counts_NRE = rng.integers(0, 9, size=(3, 4, 6)) * (1 + 3 * (np.arange(6) == 1))
    # Two groups of ranks share the experts, each with every other rank.
    groups = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    file, out = as_recording(tmp_path / "rows.npz", counts_NRE, groups), tmp_path / "plan.json"
    of_six = ["plan", "--cluster", "testbed_b", "--nodes", "1", "--experts", "6", "--capacity-factor", "none", *SMALL]
    assert cli.main([*of_six, *ALONE, "--ep", "2", "--loads", file, "--json", str(out)]) == 0
    spread = "the file is for another number of ranks than 8: its rows are distributed evenly over these"
    assert "distributed evenly" not in capsys.readouterr().out
    found = json.loads(out.read_text())["placement"]["layers"][0]
    mean_RE = counts_NRE.mean(axis=0)
    seen = ObservedRouting((mean_RE[[0, 2]] + mean_RE[[1, 3]]) / 2, (0, 0))
    assert found["layer"] == "moe"
    assert found["fullest_now"] == pytest.approx(pressure_of(ExpertPlacement.at_start(6, 2), seen).compute)
    assert cli.main([*ON_TWO_NODES, "--experts", "64", "--top-k", "8", "--loads", OLMOE]) == 0
    text = capsys.readouterr().out
    assert spread in text
    assert all(f"model.layers.{layer}.mlp.experts" in text for layer in range(4))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--loads", OLMOE], "layer model.layers.0.mlp.experts has 64 experts, and the model 16: the choices are a "),
        (["--loads", "/no/such.npz"], "/no/such.npz: no such folder or file of recorded routing"),
        (["--loads", "/no/such.json"], "--loads = /no/such.json: cannot be read as JSON"),
        (["--loads", OLMOE, "--capacity-factor", "1.2"], "needs --capacity-factor none;"),
        (["--loads", OLMOE, "--imbalance", "2"], "--imbalance = 2: cannot be combined with --loads"),
        (["--loads", OLMOE, "--ep", "1"], "needs experts on several ranks"),
    ],
)
def test_what_cannot_be_placed_is_one_sentence(arguments: list[str], sentence: str, capsys) -> None:
    assert cli.main([*ON_TWO_NODES, *arguments]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith("ds_fsmoe plan: error: ")
    assert sentence in captured.err


@pytest.mark.parametrize("said", ["[]", "{}", '{"a": 3}', '{"a": [[1, 2], [1]]}', '{"a": [[-1, 2]]}', '{"a": [["1"]]}'])
def test_a_file_that_says_something_else_or_has_no_choices_is_refused(said: str, capsys, tmp_path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(said)
    assert cli.main([*ON_TWO_NODES, "--loads", str(path)]) == 2
    assert 'must be {"layer": [[rows of rank 0 for each expert], ...]}' in capsys.readouterr().err
    file = as_recording(tmp_path / "rows.npz", np.zeros((1, 2, 16), dtype=int), {0: (0, 1), 1: (0, 1)})
    assert cli.main([*ON_TWO_NODES, "--loads", file]) == 2
    assert f"--loads = {file}: contains no choices of tokens" in capsys.readouterr().err
