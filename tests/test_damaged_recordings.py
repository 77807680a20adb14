# SPDX-License-Identifier: Apache-2.0
"""Recordings of routing have checksums: nothing that was changed is read as what was recorded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ds_fsmoe.routes.recorded import RoutingFileError, read_routing
from ds_fsmoe.routes.written import Part, RankFacts, RoutedLayer, part_file, saved, sealed
from tests.test_damaged_files import read_all, routing, routing_of_before


def test_no_changed_byte_of_a_recording_is_read_as_what_was_recorded(tmp_path: Path) -> None:
    file = part_file(routing(tmp_path), 0, 0)
    whole = file.read_bytes()
    assert len(read_routing(tmp_path)) == 2
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        file.write_bytes(changed)
        with pytest.raises(RoutingFileError, match=str(file)):
            read_all(tmp_path)


def test_a_cut_recording_is_read_as_far_as_it_goes_and_says_that_it_was_not_closed(tmp_path: Path) -> None:
    file = part_file(routing(tmp_path), 0, 0)
    whole = file.read_bytes()
    assert read_routing(tmp_path).problems == ()
    lengths = set()
    for end in range(len(whole) // 4, len(whole)):
        file.write_bytes(whole[:end])
        try:
            recording = read_routing(tmp_path)
        except RoutingFileError:  # not even its first lines are there
            assert not lengths
            continue
        lengths.add(len(recording))
        for key in recording:
            assert recording.choices(*key).indices_SK.tolist() == [[0, 3], [0, 1], [2, 0]]
        assert len(recording.problems) == 1
        assert any(words in recording.problems[0] for words in ("was not closed", "it ends at byte"))
    assert lengths == {0, 1, 2}


def test_recordings_that_do_not_fit_together_or_go_on_behind_their_end_are_refused(tmp_path: Path) -> None:
    longer, twice, two_jobs = (routing(tmp_path / name) for name in ("longer", "twice", "two jobs"))
    file = part_file(longer, 0, 0)
    file.write_bytes(file.read_bytes() + saved(sealed([5, 0, 0, 0, 0, 0])))
    shutil.copy(part_file(twice, 0, 0), part_file(twice, 1, 0))
    Part(part_file(two_jobs, 1, 1), RankFacts(1, 2, (RoutedLayer("blocks.0.moe", 8),))).close()
    for folder, words in (
        (longer, "was changed after it was written"),
        (twice, "it is of rank 0"),
        (two_jobs, "jobs of different sizes"),
    ):
        with pytest.raises(RoutingFileError, match=words):
            read_routing(folder)


def test_a_recording_of_before_is_read_with_one_line_that_it_has_no_checksums(tmp_path: Path) -> None:
    recording = read_routing(routing_of_before(tmp_path / "routing"))
    assert [recording.choices(*key).indices_SK.tolist() for key in recording] == [[[0, 3], [0, 1], [2, 0]]] * 2
    (problem,) = recording.problems
    assert problem.endswith("was written before recordings had checksums: a change in it is not noticed")
