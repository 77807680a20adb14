# SPDX-License-Identifier: Apache-2.0
"""What a run sees of its batches is compared with what ``ep_size`` was chosen for, and kept for the next start."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("transformers")

from ds_fsmoe import cli
from ds_fsmoe.distributed.fail_together import MeasuringError
from ds_fsmoe.distributed.topology import topology_of_size
from ds_fsmoe.engine import auto_ep_size
from ds_fsmoe.engine.auto_ep_size import choice_of, watched_lengths
from ds_fsmoe.files import learned_batches
from ds_fsmoe.planning.decide.ep_size import EpSize
from ds_fsmoe.tuning.predicted_ep_size import BatchLengths, EpSizePredictor
from tests.ep_size_cases import FAST, SLOW, call, choice, chosen, links, run_steps
from tests.hf_families import NUM_EXPERTS
from tests.sgd_engines import ds_config


def lengths(length: int, **known: bool) -> BatchLengths:
    """What compares the batches of a job on these links, which has this length and 2 ranks for its experts."""
    known = {"is_known": True, "is_given": False} | known
    return BatchLengths(choice({})._predictor(length), 2, "L00", **known)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens for which sizes are predicted, on made-up links."""
    found: list[int] = []

    def predicted(self: EpSizePredictor, usual: int, used_bytes: float = 0.0) -> tuple[list[EpSize], str]:
        found.append(self.tokens)
        return self.planned(links(SLOW, FAST), usual, used_bytes), "these links"

    monkeypatch.setattr(EpSizePredictor, "predicted", predicted)
    return found


def test_the_next_start_uses_the_size_for_the_batches_that_were_seen(
    asked: list[int], caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.INFO, "ds_fsmoe")
    watched = lengths(1, is_known=False)
    run_steps(watched, 10, 3096, 5096)
    assert asked == [4096]
    (line,) = (each.message for each in caplog.records if "next start" in each.message)
    assert "micro-batches have 4096 tokens on average: the next start will use ep_size = 1 (predicted to be " in line
    size, said = chosen({})
    assert (size, said.partition(";")[0]) == (1, "1 of 1, 2, 4 for 4096 tokens a micro-batch on what the last run saw")
    # Another batch, model or cluster is another job, and nothing is known of it; nor where it may not be used.
    config = ds_config(1)
    no_overlap = {"zero_optimization": config["zero_optimization"] | {"overlap_comm": False}}
    others: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"ds_config": config | {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1}}),
        ({}, {"ds_config": config | {"gradient_accumulation_steps": 4}}),
        ({}, {"ds_config": ds_config(3)}),
        ({}, {"ds_config": config | no_overlap}),
        ({}, {"ds_config": {}}),
        ({"gradient_partition": {"levels": 1}}, {}),
        ({}, {"topology": topology_of_size(4, 4)}),
        ({"deterministic": True, "trace": {"cluster": "testbed_b"}}, {}),
    ]
    for block, changes in others:
        size, said = chosen(block, **changes)
        assert (size, "set" in said) == (2, True)
    # It can be looked at and forgotten; an old file is ignored with a line.
    assert cli.main(["remembered"]) == 0
    listed = capsys.readouterr().out
    name, *numbers = listed.splitlines()[-1].split()
    assert numbers[:3] == ["2", str(NUM_EXPERTS), "4"]
    assert numbers[-5:-1] == ["4096", "1", "2", "takes"]
    assert [cli.main(["remembered", "--forget", each]) for each in ("other", name)] == [1, 0]
    assert choice({}).choose() == 2
    capsys.readouterr()
    assert cli.main(["remembered"]) == 0
    assert capsys.readouterr().out == "nothing is remembered\n"
    run_steps(lengths(1, is_known=False), 10, 4096)
    (file,) = learned_batches.all_files()
    file.write_text(file.read_text().replace('"format": 1', '"format": 2'))
    assert choice({}).choose() == 2
    assert "what the last run has learned is ignored: " in caplog.text
    assert cli.main(["remembered"]) == 0
    assert "ignored: " in capsys.readouterr().out


def test_batches_about_as_long_as_assumed_need_no_prediction_and_others_do(asked: list[int]) -> None:
    watched = lengths(1000)
    # From step 100 on its mean is what is assumed; then it looks at steps 1000, 2000, ...
    for steps, tokens, wanted in ((10, (800, 1200), []), (90, (700,), [700]), (900, (700,), [700])):
        run_steps(watched, steps, *tokens)
        assert asked == wanted
    run_steps(watched, 1000, 300)
    assert asked == [700, 300]


def test_it_waits_for_plans_and_counts_each_batch_once(asked: list[int]) -> None:
    watched = lengths(1)
    run_steps(watched, 25, 500, is_tuned=False)
    assert asked == []
    watched.begin_forward(has_batch=False)
    call(watched, 10_000)  # the rows of a rank without a batch are made up
    watched.end_forward()
    watched.begin_forward(has_batch=True)
    call(watched, 10_000)  # it ends in an error
    watched.begin_forward(has_batch=True)
    call(watched, 10_000, is_training=False)
    call(watched, 10_000, label="L01")
    call(watched, 500)
    watched.end_forward()
    call(watched, 10_000)  # the script generates with the model itself, which may be in training mode
    run_steps(watched, 1, (250, 250), 500)
    assert asked == [500]


def test_a_length_that_is_exceeded_is_said_once_and_sizes_are_predicted_again(
    asked: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ds_fsmoe")
    watched = lengths(128, is_given=True)
    for tokens, steps in ((120, 10), (128, 90), (140, 2000)):
        run_steps(watched, steps, tokens)
    assert asked == [140]
    (line,) = (each.message for each in caplog.records)
    assert line.endswith(
        'micro-batches have 140 tokens on average, 140 at the most, not 128 ("sequence_length": 128); 2 is predicted '
        "to be the best size all the same"
    )
    caplog.clear()
    watched = lengths(128, is_given=True)
    run_steps(watched, 10, 4000, 4192)
    (line,) = (each.message for each in caplog.records)
    assert '4192 at the most, not 128 ("sequence_length": 128): 1 is predicted to be ' in line
    assert line.endswith('times as fast as 2; set "sequence_length": 4096 and restart from a checkpoint to have it')
    # What the config has is not remembered.
    assert list(learned_batches.all_files()) == []


def test_a_length_that_is_exceeded_is_said_once_also_where_no_size_can_be_predicted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise MeasuringError("no link")

    monkeypatch.setattr(EpSizePredictor, "predicted", fails)
    run_steps(lengths(128, is_given=True), 2000, 140)
    (line,) = (each.message for each in caplog.records)
    seen = 'micro-batches have 140 tokens on average, 140 at the most, not 128 ("sequence_length": 128)'
    assert line == f"ep_size: {seen}, and no size is predicted for them: no link"


def test_a_remembered_size_is_predicted_again_in_each_run(asked: list[int], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ds_fsmoe")
    choice({})._predictor(1).keep(learned_batches.LearnedBatches(4096, 4))
    for size, lines in ((4, 1), (1, 0)):
        caplog.clear()
        made = choice({})
        assert made.choose() == size
        running: Any = SimpleNamespace(block=made.block, instruments=[])
        watched = watched_lengths(made.modules, ds_config(1), size, "L00", running)
        assert watched is not None
        run_steps(watched, 100, 4096)
        assert [each.message for each in caplog.records if "the next start will use ep_size = 1" in each.message] == [
            each.message for each in caplog.records
        ]
        assert len(caplog.records) == lines
    assert asked == [4096, 4096]


def test_where_no_folder_can_be_had_nothing_is_remembered_and_a_line_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    learned = learned_batches.LearnedBatches(4096, 1)

    def homeless() -> None:
        raise RuntimeError("Could not determine home directory.")

    (tmp_path / "file").write_text("")
    for name, folder in (("set", str(tmp_path / "file")), ("no home", "")):
        caplog.clear()
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        monkeypatch.setattr(Path, "home", homeless)
        choice({})._predictor(1).keep(learned)
        assert "ep_size: the next start will not know of this: " in caplog.text, name
        assert choice({}).choose() == 2
        assert cli.main(["remembered"]) == 0
        assert capsys.readouterr().out == "nothing is remembered\n"
    assert [cli.main(["remembered", "--forget", *names]) for names in ([], ["one"])] == [0, 1]


def test_a_remembered_size_that_does_not_fit_is_ignored_with_a_line(caplog: pytest.LogCaptureFixture) -> None:
    choice({})._predictor(1).keep(learned_batches.LearnedBatches(4096, 3))
    assert choice({}).choose() == 2
    assert "what the last run has learned is ignored: its ep_size = 3 is none of 1, 2, 4" in caplog.text


def test_a_batch_is_that_of_the_first_rank_and_one_that_is_not_known_makes_no_use_of_a_length(
    asked: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = {name: value for name, value in ds_config(1).items() if name not in auto_ep_size._BATCH}
    made = choice({"sequence_length": 64}, ds_config=unknown)
    assert made.choose() == 2
    predictor = choice_of(made.modules).predictor
    assert predictor is not None
    run_steps(BatchLengths(predictor, 2, "L00", is_known=False, is_given=False), 10, 4096)
    size, said = chosen({"sequence_length": 64}, ds_config=unknown)
    assert (size, said.partition(";")[0]) == (1, "1 of 1, 2, 4 for 4096 tokens a micro-batch on what the last run saw")
    first = {"train_micro_batch_size_per_gpu": 3}
    monkeypatch.setattr(auto_ep_size, "from_first_rank", lambda batch: dict.fromkeys(batch) | first)
    made = choice({})
    made.choose()
    predictor = choice_of(made.modules).predictor
    assert predictor is not None
    assert {(each.B, predictor.job.micro_batches) for each in predictor.job.shapes} == {(3, 1)}


def test_what_a_trainer_writes_after_the_choice_counts_for_the_next_start_and_the_job_is_found_without_it(
    asked: list[int],
) -> None:
    unknown = {name: value for name, value in ds_config(1).items() if name not in auto_ep_size._BATCH}
    written = {"train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 16}
    made = choice({}, ds_config=unknown)
    made.choose()
    running = SimpleNamespace(block=made.block, instruments=[])
    watched = watched_lengths(made.modules, unknown | written, 2, "L00", running)
    run_steps(watched, 10, 4096)
    job = watched._predictor.job
    assert ({(each.B, each.L) for each in job.shapes}, job.micro_batches, asked) == ({(8, 512)}, 16, [4096])
    # A length that the config has stays with other samples.
    made = choice({"sequence_length": 512}, ds_config=ds_config(1) | {"train_micro_batch_size_per_gpu": 8})
    made.choose()
    of_length = watched_lengths(
        made.modules, ds_config(1) | {**written, "train_micro_batch_size_per_gpu": 4}, 2, "L00", running
    )._predictor
    assert ({(each.B, each.L) for each in of_length.job.shapes}, of_length.tokens) == ({(4, 512)}, 2048)
    assert "for 4096 tokens a micro-batch on what the last run saw" in chosen({}, ds_config=unknown)[1]
