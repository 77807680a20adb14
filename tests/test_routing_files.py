# SPDX-License-Identifier: Apache-2.0
"""Recorded routing is read as it was written, and what is no recording says so. Made-up routing has the skew that its
name says, and is the same wherever it is made."""

from __future__ import annotations

import itertools
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from ds_fsmoe.cli import main
from ds_fsmoe.offline.report.routing import loads_of, mean_of
from ds_fsmoe.routes.made import DRIFT_STEPS, HOT_SHARE, NAMES, choices
from ds_fsmoe.routes.made import choices as made
from ds_fsmoe.routes.recorded import RoutingFileError, read_routing, write_packed
from ds_fsmoe.routes.written import Choices, Part, RankFacts, RoutedLayer, index_type, part_file, parts_of
from ds_fsmoe.telemetry.routing_recorder import RoutingRecorder
from tests.report_runs import charts_of

RANKS, STEPS, MICRO_BATCHES, TOKENS = 4, (0, 3, 6), 2, 11
LAYERS = ((("blocks.0.moe", 6, 2)), ("blocks.1.moe", 300, 3))


def facts(rank: int) -> RankFacts:
    # Ranks 0 and 1 share the experts of the first layer, and ranks 2 and 3; all share those of the second.
    pair = (0, 1) if rank < 2 else (2, 3)
    layers = tuple(RoutedLayer(path, E, pair if E == 6 else (0, 1, 2, 3)) for path, E, _ in LAYERS)
    return RankFacts(rank, RANKS, layers, node=rank // 2)


def indices(rank: int, step: int, micro_batch: int, layer: int) -> np.ndarray:
    _, E, k = LAYERS[layer]
    return made("zipf_1.0", num_tokens=TOKENS, num_experts=E, k=k, step=10 * step + micro_batch, rank=rank, layer=layer)


def write(folder: Path, steps: tuple[int, ...] = STEPS, part: int = 0) -> None:
    folder.mkdir(exist_ok=True)
    for rank in range(RANKS):
        file = Part(part_file(folder, rank, part), facts(rank))
        for step in steps:
            for micro_batch in range(MICRO_BATCHES):
                for layer in range(len(LAYERS)):
                    weights = np.full((TOKENS, LAYERS[layer][2]), 0.5) if layer else None
                    found = Choices(indices(rank, step, micro_batch, layer), weights)
                    file.add(step, micro_batch, layer, found)
        file.close()


@pytest.mark.parametrize("is_packed", [False, True])
def test_what_is_read_is_what_was_written(is_packed: bool, tmp_path: Path) -> None:
    write(tmp_path / "routing")
    recording = read_routing(tmp_path / "routing")
    if is_packed:
        write_packed(tmp_path / "some.npz", recording, steps=STEPS[1:])
        recording = read_routing(tmp_path / "some.npz")
    steps = STEPS[1:] if is_packed else STEPS
    assert recording.steps == steps
    assert recording.world_size == RANKS
    assert [each.path for each in recording.layers] == [path for path, _, _ in LAYERS]
    assert recording.problems == ()
    assert len(recording) == RANKS * len(steps) * MICRO_BATCHES * len(LAYERS)
    for rank, step, micro_batch, layer in recording:
        found = recording.choices(rank, step, micro_batch, layer)
        assert np.array_equal(found.indices_SK, indices(rank, step, micro_batch, layer))
        assert found.indices_SK.dtype == index_type(LAYERS[layer][1])
        assert (found.weights_SK is None) is (layer == 0)
    with pytest.raises(RoutingFileError, match="no routing was recorded of rank 1, step 99"):
        recording.choices(1, 99, 0, 0)


def test_a_job_that_goes_on_adds_a_file_and_one_that_begins_replaces_all(tmp_path: Path) -> None:
    def record(*steps: int) -> None:
        recorder = RoutingRecorder(tmp_path, RankFacts(0, 1, (RoutedLayer("moe", 6, (0,)),)), {"L00": 0})
        for step in steps:
            recorder._writer.put((step, 0, 0), torch.tensor([[0, 1, 5]]), None)
        recorder.close()

    for at, steps in enumerate(((0, 1, 2), (2, 3), (4,))):
        record(*steps)
        assert [part for _, part, _ in parts_of(tmp_path)] == [*range(at + 1)]
    assert read_routing(tmp_path).steps == (0, 1, 2, 3, 4)
    record(0)
    assert read_routing(tmp_path).steps == (0,)
    # Steps that are done again replace what a job had done.
    write(tmp_path / "again")
    write(tmp_path / "again", steps=(3, 4), part=1)
    assert read_routing(tmp_path / "again").steps == (0, 3, 4)


def test_loads_are_those_of_a_loop_over_tokens(tmp_path: Path) -> None:
    write(tmp_path / "routing")
    for load, layer in zip(loads_of(read_routing(tmp_path / "routing")), range(len(LAYERS)), strict=True):
        _, E, k = LAYERS[layer]
        num_groups, group_size = (2, 2) if E == 6 else (1, 4)
        wanted = np.zeros((len(STEPS), E), dtype=int)
        of_groups = np.zeros((len(STEPS), num_groups, group_size), dtype=int)
        for (row, step), rank, micro_batch in itertools.product(enumerate(STEPS), range(RANKS), range(MICRO_BATCHES)):
            for expert in indices(rank, step, micro_batch, layer).reshape(-1):
                wanted[row, expert] += 1
                of_groups[row, rank // 2 if E == 6 else 0, expert // (E // group_size)] += 1
        assert np.array_equal(load.load_NE, wanted)
        assert load.num_choices == k
        assert load.skew_N == pytest.approx([each.max() / each.mean() for each in wanted])
        fullest = [max(group.max() / group.mean() for group in groups) for groups in of_groups]
        assert load.fullest_rank_N == pytest.approx(fullest)
        shares = [each / each.sum() for each in wanted]
        drift = [np.abs(b - a).sum() / 2 for a, b in itertools.pairwise(shares)]
        assert load.drift_N[1:] == pytest.approx(drift)
        assert np.isnan(load.drift_N[0])
        assert load.drift_over_all == pytest.approx(np.abs(shares[0] - shares[-1]).sum() / 2)
        assert load.num_idle == sum(wanted.sum(axis=0) == 0)
        assert mean_of(load.drift_N) == pytest.approx(np.mean(drift))


@pytest.mark.parametrize("kind", ["folder", "packed", "run"])
def test_the_report_has_a_row_for_each_layer_and_a_page(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "routing")
    path = tmp_path / "routing"
    if kind == "packed":
        path = tmp_path / "some.npz"
        write_packed(path, read_routing(tmp_path / "routing"))
    if kind == "run":
        path = tmp_path
        (tmp_path / "run.json").write_text('{"format": 1, "schedule": "best"}')
    page = tmp_path / "page.html"
    assert main(["report", str(path), "--out", str(page)]) == 0
    text, out = page.read_text("utf-8"), capsys.readouterr().out
    assert "fullest expert" in text
    assert len(charts_of(text)) == 2 + len(LAYERS)
    for layer, E, k in LAYERS:
        assert layer in text
        if kind != "run":
            row = next(line for line in out.splitlines() if line.startswith(layer))
            assert row.split()[1:3] == [str(E), str(k)]


def test_a_place_without_routing_is_an_error_that_names_it(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing", tmp_path / "text.npz"):
        (tmp_path / "text.npz").write_text("no archive")
        with pytest.raises(RoutingFileError, match=str(path)):
            read_routing(path)


# ---- made-up routing


S, E, K, EP = 4099, 32, 4, 8


def counts(name: str, num_experts: int = E, k: int = K, **more: int) -> np.ndarray:
    made = choices(name, num_tokens=S, num_experts=num_experts, k=k, **{"ep_size": EP} | more)
    return np.bincount(made.reshape(-1), minlength=num_experts)


def skew(counts_E: np.ndarray) -> float:
    return counts_E.max() / counts_E.mean()


def distance(first: np.ndarray, second: np.ndarray) -> float:
    """Total variation between two loads."""
    return np.abs(first / first.sum() - second / second.sum()).sum() / 2


@pytest.mark.parametrize("name", NAMES)
def test_tokens_choose_different_experts_in_range(name: str) -> None:
    for num_tokens, num_experts, k in ((0, 5, 2), (1, 1, 1), (17, 7, 7), (23, 6, 1), (101, 64, 8)):
        made = choices(name, num_tokens=num_tokens, num_experts=num_experts, k=k, step=3, rank=2)
        assert (made.shape, made.dtype) == ((num_tokens, k), np.int64)
        assert ((made >= 0) & (made < num_experts)).all()
        assert (np.diff(np.sort(made, axis=1), axis=1) > 0).all()


def test_each_has_the_skew_that_its_name_says() -> None:
    for num_experts, k in ((32, 4), (7, 3), (5, 5), (64, 8)):
        balanced = counts("balanced", num_experts, k, ep_size=1)
        assert balanced.max() - balanced.min() <= 1
    hot_expert = counts("hot_expert")
    hot = hot_expert.argmax()
    # Of the tokens that are not given it, k / E choose it by themselves; others are chosen evenly.
    assert hot_expert[hot] / S == pytest.approx(HOT_SHARE + (1 - HOT_SHARE) * K / E, abs=0.03)
    assert skew(np.delete(hot_expert, hot)) < 1.2
    # A hot rank gets all choices of its share of tokens.
    of_ranks = counts("hot_rank").reshape(EP, -1).sum(axis=1)
    assert of_ranks.max() / of_ranks.sum() == pytest.approx(HOT_SHARE + (1 - HOT_SHARE) / EP, abs=0.03)
    for exponent in (1.0, 1.5):
        zipf = np.sort(counts(f"zipf_{exponent}", k=1))[::-1]
        assert zipf[0] / zipf[3] == pytest.approx(4**exponent, rel=0.3)
    assert skew(counts("zipf_1.5")) > skew(counts("zipf_1.0")) > 2


def test_drifting_moves_a_little_in_a_step_and_to_another_expert_in_time() -> None:
    first, next_step, later = (counts("drifting", step=step) for step in (0, 1, 3 * DRIFT_STEPS))
    noise = distance(first, counts("drifting", rank=1))
    assert distance(first, next_step) < noise + 0.03
    assert distance(first, later) > 5 * noise
    assert first.argmax() != later.argmax()


def test_rotating_has_another_hot_expert_in_every_step_and_all_in_turn() -> None:
    assert {counts("rotating", step=step).argmax() for step in range(E)} == set(range(E))


def test_ranks_steps_layers_and_seeds_differ_and_the_same_numbers_give_the_same_in_another_process_too() -> None:
    size = {"num_tokens": 97, "num_experts": E, "k": K, "ep_size": EP}
    made = {name: choices(name, **size) for name in NAMES}
    for name, other in ((name, {each: 1}) for name in NAMES for each in ("rank", "step", "layer", "seed")):
        assert not np.array_equal(made[name], choices(name, **size, **other))
    code = (
        "from ds_fsmoe.routes.made import *; import zlib;"
        "print([zlib.crc32(choices(n, num_tokens=97, num_experts=32, k=4, ep_size=8).tobytes()) for n in NAMES])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert found.strip() == str([zlib.crc32(made[name].tobytes()) for name in NAMES])


@pytest.mark.parametrize(
    ("name", "sizes", "error"),
    [
        ("zipf", {}, "unknown routing 'zipf': did you mean 'zipf_1"),
        ("balanced", {"k": 33}, "k = 33: must be between 1 and the 32 experts"),
        ("hot_rank", {"ep_size": 5}, "ep_size = 5: must divide the 32 experts"),
    ],
)
def test_what_cannot_be_is_an_error_that_names_the_choices(name: str, sizes: dict[str, int], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        choices(name, **{"num_tokens": 5, "num_experts": E, "k": K} | sizes)
