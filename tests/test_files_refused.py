# SPDX-License-Identifier: Apache-2.0
"""Whatever lies in the place of a file, or stands in it: it is read, or refused in one line; it takes little memory,
and nothing waits."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ds_fsmoe.planning.cluster import cluster_as_json, load_cluster
from ds_fsmoe.routes.recorded import RoutingFileError, read_routing, write_packed
from ds_fsmoe.routes.written import Choices, Part, RankFacts, RoutedLayer, as_text, part_file, saved, sealed
from ds_fsmoe.untrusted import MOST_EXPERTS, MOST_LAYERS, MOST_RANKS
from tests.limited import run_limited
from tests.report_runs import record, record_details
from tests.test_fuzz import spoilt_file

MODEL = {
    "model_type": "qwen3_moe",
    **{"vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64},
    **{"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
    **{"max_position_embeddings": 512, "tie_word_embeddings": False},
}
PLAN = ("plan", "--max-degree", "2", "--cluster")
NESTED = "[" * 100_000


def routing(folder: Path, num_experts: int = 8, num_layers: int = 1, world_size: int = 1, part: int = 0) -> Path:
    """A recording of two steps of one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = tuple(RoutedLayer(f"blocks.{number}.moe", num_experts) for number in range(num_layers))
    file = Part(part_file(folder, 0, part), RankFacts(0, world_size, layers))
    for step in range(2):
        file.add(step, 0, 0, Choices(np.array([[0, 3], [0, 1], [2, 0]])))
    file.close()
    return folder


def routing_of_before(folder: Path, num_experts: int = 8) -> Path:
    """The same as versions before checksums have written it."""
    folder.mkdir(parents=True)
    layer = {"path": "blocks.0.moe", "num_experts": num_experts, "ep_ranks": [0]}
    facts = {"format": 1, "ranks": [{"rank": 0, "world_size": 1, "layers": [layer], "node": 0}]}
    data = saved(as_text(facts))
    for step in range(2):
        data += saved(np.array([step, 0, 0, False], dtype=np.int64))
        data += saved(np.array([[0, 3], [0, 1], [2, 0]], dtype=np.uint8))
    part_file(folder, 0, 0).write_bytes(data)
    return folder


def pipe(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return str(path)


def written(path: Path, content: Any) -> str:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


def cases_of(folder: Path) -> dict[str, tuple[tuple[str, ...], str]]:
    """Name -> (arguments, what the one line says)."""
    cluster = cluster_as_json(load_cluster("testbed_a"))
    found: dict[str, tuple[tuple[str, ...], str]] = {}
    loads = (*PLAN, "testbed_b", "--nodes", "2", "--width", "64", "--hidden", "64", "--length", "64", "--layers", "2")
    loads = (*loads, "--mp", "1", "--esp", "1", "--ep", "8", "--experts", "8", "--capacity-factor", "none", "--loads")

    pipe(folder / "routing" / "rank_00000.0000.npy")
    found["recording: pipe"] = ("report", str(folder / "routing")), "is not a regular file"
    run = record(folder / "run", "best")
    pipe(run / "routing" / "rank_00000.0000.npy")
    found["run with a recording: pipe"] = ("report", str(run)), "is not a regular file"
    found["loads: pipe"] = (*loads, pipe(folder / "loads.json")), "is not a regular file"
    found["cluster: pipe"] = (*PLAN, pipe(folder / "cluster.json")), "no cluster or file"
    found["model: pipe"] = (*PLAN, "testbed_a", "--model", pipe(folder / "model.json")), "there is no file"

    for exponent in (9, 13):
        path = routing(folder / f"experts{exponent}", 10**exponent)
        found[f"recording: 10^{exponent} experts"] = ("report", str(path)), f"from 1 to {MOST_EXPERTS}"
        path = routing_of_before(folder / f"before{exponent}", 10**exponent)
        found[f"old recording: 10^{exponent} experts"] = ("report", str(path)), f"from 1 to {MOST_EXPERTS}"
    found["recording: layers"] = ("report", str(routing(folder / "layers", 8, 100_000))), f"at most {MOST_LAYERS}"
    path = routing(folder / "ranks", world_size=10**9)
    found["recording: ranks"] = ("report", str(path)), f"from 1 to {MOST_RANKS}"
    path = routing(folder / "loads", MOST_EXPERTS, MOST_LAYERS)
    found["recording: loads"] = ("report", str(path)), "their loads would need"

    for name, value in (
        *(("num_experts", each) for each in (10**6, 10**9, 10**30)),
        *(("num_hidden_layers", each) for each in (10**6, 10**9)),
        *(("moe_intermediate_size", 2**31), ("hidden_size", 10**15), ("hidden_size", 2**64), ("vocab_size", 2**64)),
        *(("num_attention_heads", 10**12), ("num_experts_per_tok", 10**12), ("max_position_embeddings", 10**18)),
    ):
        path = written(folder / f"{name}_{value}.json", MODEL | {name: value})
        found[f"model: {name} = {value}"] = (*PLAN, "testbed_a", "--model", path), "must be at most"
    for value in ([], {}, 5, ["qwen3_moe"]):
        path = written(folder / f"type{len(found)}.json", MODEL | {"model_type": value})
        found[f"model_type = {value}"] = (*PLAN, "testbed_a", "--model", path), "model_type = "
    for name, value in (("gpus_per_node", 10**7), ("gpus_per_node", 10**9), ("num_nodes", 2**70)):
        path = written(folder / f"{name}_{value}.json", cluster | {name: value})
        found[f"cluster: {name} = {value}"] = (*PLAN, path, "--model", "olmoe"), f"less than or equal to {MOST_RANKS}"
    path = written(folder / "many.json", cluster | {"gpus_per_node": 1024, "num_nodes": 10_000})
    found["cluster: GPUs"] = (*PLAN, path, "--model", "olmoe"), f"at most {MOST_RANKS}"

    nested = written(folder / "nested.json", NESTED)
    found["cluster: nested"] = (*PLAN, nested), "nested too deeply"
    found["model: nested"] = (*PLAN, "testbed_a", "--model", nested), "nested too deeply"
    found["loads: nested"] = (*loads, nested), "nested too deeply"
    for name, rows in (("huge", [[2**70] * 8] * 8), ("odd", [[1] * 8, [2] * 7]), ("texts", [["a"] * 8])):
        found[f"loads: {name}"] = (*loads, written(folder / f"{name}.json", {"moe": rows})), "must be"
    large = folder / "large.json"
    with large.open("wb") as file:
        file.truncate(1 << 40)
    found["cluster: large"] = (*PLAN, str(large)), "is larger than 64 MiB"
    found["model: large"] = (*PLAN, "testbed_a", "--model", str(large)), "is larger than 64 MiB"
    return found


def test_absurd_files_are_one_line_and_take_neither_memory_nor_time(tmp_path: Path) -> None:
    cases = cases_of(tmp_path)
    ends = run_limited([arguments for arguments, _ in cases.values()], tmp_path)
    for (name, (_, words)), (status, text) in zip(cases.items(), ends, strict=True):
        said = [each for each in text.splitlines() if "error:" in each]
        assert (status, len(said)) == (2, 1), (name, status, text[-2000:])
        assert words in said[0], (name, said)
        assert len(said[0]) < 1000, name


# ---- any files


def files_to_spoil(folder: Path) -> dict[str, tuple[Path, Callable[[Path], tuple[str, ...]]]]:
    """Kind -> (a whole file, what reads it)."""
    folder.mkdir()
    model = folder / "model.json"
    model.write_text(json.dumps(MODEL))
    cluster = folder / "cluster.json"
    cluster.write_text(json.dumps(cluster_as_json(load_cluster("testbed_b"))))
    loads = folder / "loads.json"
    loads.write_text(json.dumps({"moe": np.arange(64).reshape(8, 8).tolist()}))
    how = (*PLAN, "testbed_b", "--nodes", "2", "--width", "64", "--hidden", "64", "--length", "64", "--layers", "2")
    how = (*how, "--mp", "1", "--esp", "1", "--ep", "8", "--experts", "8", "--capacity-factor", "none", "--loads")
    packed = folder / "packed.npz"
    write_packed(packed, read_routing(routing(folder / "whole")))
    found = {
        "model": (model, lambda path: (*PLAN, "testbed_b", "--model", str(path))),
        "cluster": (cluster, lambda path: (*PLAN, str(path), "--model", str(model))),
        "loads": (loads, lambda path: (*how, str(path))),
        "packed": (packed, lambda path: ("report", str(path))),
        "part": (part_file(folder / "whole", 0, 0), lambda path: ("report", str(path.parent))),
        "old part": (
            part_file(routing_of_before(folder / "old"), 0, 0), lambda path: ("report", str(path.parent))
        ),
    }  # fmt: skip
    run = record(folder / "run", "best")
    record_details(run)
    for name in ("run.json", "steps.jsonl", "plans.json", "routers.jsonl", "compared.jsonl", "trace/rank0.json"):
        found[f"run: {name}"] = (run / name, lambda path: ("report", str(folder_of_run(path))))
    return found


def folder_of_run(path: Path) -> Path:
    return path.parent.parent if path.parent.name == "trace" else path.parent


def spoilt_bytes(data: bytes, draw: random.Random) -> bytes:
    """With other bytes in it, cut short, or with bytes in it twice."""
    changed = bytearray(data)
    for _ in range(draw.choice([1, 1, 3, 30])):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    way, at = draw.random(), draw.randrange(len(changed))
    return bytes(changed[:at] if way < 0.3 else changed + changed[at:] if way < 0.4 else changed)


def test_spoilt_files_of_every_kind_are_read_or_refused_in_one_line(tmp_path: Path) -> None:
    kinds, commands = files_to_spoil(tmp_path / "whole"), []
    for number, (kind, (file, command)) in enumerate(kinds.items()):
        draw = random.Random(number)
        for turn in range(2 if kind.startswith("run: ") else 8):  # pages take seconds
            place = tmp_path / f"{number}_{turn}"
            top = folder_of_run(file) if kind.startswith("run: ") else file.parent
            shutil.copytree(top, place) if kind.startswith("run: ") else place.mkdir()
            at = place / file.relative_to(top)
            is_text = file.suffix == ".json"
            at.write_bytes(spoilt_file(file.read_text(), draw) if is_text else spoilt_bytes(file.read_bytes(), draw))
            commands.append(command(at))
    ends = run_limited(commands, tmp_path)
    read = 0
    for command, (status, text) in zip(commands, ends, strict=True):
        assert status in (0, 2), (command, status, text[-3000:])
        assert "Traceback" not in text, (command, text[-3000:])
        if status == 2:
            assert sum("error:" in each for each in text.splitlines()) == 1, (command, text)
        read += status == 0
    assert 0 < read < len(commands)


# ---- checksums of recordings


def read_all(folder: Path) -> None:
    recording = read_routing(folder)
    for key in recording:
        recording.choices(*key)


def test_no_changed_byte_of_a_recording_is_read_as_what_was_recorded(tmp_path: Path) -> None:
    folder = routing(tmp_path / "routing")
    file, draw = part_file(folder, 0, 0), random.Random(0)
    whole = file.read_bytes()
    wanted = {key: read_routing(folder).choices(*key).indices_SK.tolist() for key in read_routing(folder)}
    assert len(wanted) == 2
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << draw.randrange(8)
        file.write_bytes(changed)
        with pytest.raises(RoutingFileError, match=str(file)):
            read_all(folder)


def test_a_cut_recording_is_read_as_far_as_it_goes_and_says_that_it_was_not_closed(tmp_path: Path) -> None:
    folder = routing(tmp_path / "routing")
    file = part_file(folder, 0, 0)
    whole = file.read_bytes()
    assert read_routing(folder).problems == ()
    lengths = set()
    for end in range(len(whole) // 4, len(whole)):
        file.write_bytes(whole[:end])
        try:
            recording = read_routing(folder)
        except RoutingFileError:  # not even its first lines are there
            assert not lengths
            continue
        lengths.add(len(recording))
        for key in recording:
            assert recording.choices(*key).indices_SK.tolist() == [[0, 3], [0, 1], [2, 0]]
        assert len(recording.problems) == 1
        assert any(words in recording.problems[0] for words in ("was not closed", "it ends at byte"))
    assert lengths == {0, 1, 2}


def test_a_recording_that_goes_on_behind_its_end_is_refused(tmp_path: Path) -> None:
    folder = routing(tmp_path / "routing")
    file = part_file(folder, 0, 0)
    file.write_bytes(file.read_bytes() + saved(sealed([5, 0, 0, 0, 0, 0])))
    with pytest.raises(RoutingFileError, match="was changed after it was written"):
        read_routing(folder)


def test_a_recording_of_before_is_read_with_one_line_that_it_has_no_checksums(tmp_path: Path) -> None:
    recording = read_routing(routing_of_before(tmp_path / "routing"))
    assert [recording.choices(*key).indices_SK.tolist() for key in recording] == [[[0, 3], [0, 1], [2, 0]]] * 2
    (problem,) = recording.problems
    assert problem.endswith("was written before recordings had checksums: a change in it is not noticed")


def test_files_of_ranks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder = routing(tmp_path / "routing")
    shutil.copy(part_file(folder, 0, 0), part_file(folder, 1, 0))
    with pytest.raises(RoutingFileError, match="it is of rank 0"):
        read_routing(folder)
    file = Part(part_file(folder, 1, 1), RankFacts(1, 1 + 1, (RoutedLayer("blocks.0.moe", 8),)))
    file.close()
    part_file(folder, 1, 0).unlink()
    with pytest.raises(RoutingFileError, match="jobs of different sizes"):
        read_routing(folder)
