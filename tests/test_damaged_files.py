# SPDX-License-Identifier: Apache-2.0
"""Whatever lies in the place of a file, or stands in it, every reader of the package reads it or refuses it in words
that name it: no error from inside, little memory, and nothing waits."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import sys
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ds_fsmoe.checkpoint_files import pieces
from ds_fsmoe.checkpoint_files.huggingface import read_tensors
from ds_fsmoe.checkpoint_files.manifest import FileSum, LayerSizes, Manifest, Sizes, read_manifest
from ds_fsmoe.checkpoint_files.pieces import Group, Index, Piece, read_index
from ds_fsmoe.checkpoint_files.reading import read_file
from ds_fsmoe.checkpoint_files.tags import CheckpointError
from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.reading import ConfigError, read_block
from ds_fsmoe.engine.command_line import read_given
from ds_fsmoe.files.learned_batches import UselessLearnedError, read_learned
from ds_fsmoe.files.runs import NoRunError, read_run
from ds_fsmoe.files.traces import read_trace
from ds_fsmoe.files.whole_files import OWNER, Ownership, owner_of
from ds_fsmoe.measuring.cache import Measurements, UselessFileError, read_measurements, write_measurements
from ds_fsmoe.offline.models.hf_config import read_hf_config
from ds_fsmoe.offline.plan.placement import read_loads
from ds_fsmoe.placement.placements import Placements
from ds_fsmoe.planning.cluster import cluster_as_json, load_cluster
from ds_fsmoe.planning.expert_placement import ExpertPlacement
from ds_fsmoe.planning.job.measured import Timing
from ds_fsmoe.routes.recorded import RoutingFileError, read_routing, write_packed
from ds_fsmoe.routes.written import Choices, Part, RankFacts, RoutedLayer, as_text, part_file, saved, sealed
from ds_fsmoe.untrusted import MOST_EXPERTS, MOST_LAYERS, MOST_RANKS
from tests.ranks import run_on_ranks
from tests.report_runs import record, record_details
from tests.samples import draw, sampled

# ---- what damage there is

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 17, 2**31, 2**64, 10**30, 0.0, 1.5, -0.25, float("nan"), float("inf"), 1e-300),
    *("", "auto", "a", "fsmoe", "0", "best", "../..", "/etc/passwd", "os.system", "ds_fsmoe", "\udcff", "a" * 5000),
    *("∞", [], [1], ["a"], [[]], [None], {}, {"a": 1}, {"": None}, {"enabled": True}),
)
KEYS = st.sampled_from(("enabled", "type", "k", "max", "x", ""))
SOME_VALUE = st.recursive(
    st.sampled_from(ODD), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=2)
)


@st.composite
def with_one_place_changed(draw: st.DrawFn, value: Any) -> Any:
    """The same but for one place somewhere in it: changed, left out, or added."""
    if isinstance(value, dict) and value and draw(st.integers(0, 9)) < 8:
        name, way = draw(st.sampled_from(sorted(value))), draw(st.integers(0, 9))
        if way < 7:
            return value | {name: draw(with_one_place_changed(value[name]))}
        if way < 9:
            return {key: each for key, each in value.items() if key != name}
        return value | {draw(st.sampled_from(("x", f"{name}s", ""))): draw(SOME_VALUE)}
    if isinstance(value, list) and value and draw(st.integers(0, 9)) < 8:
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], draw(with_one_place_changed(value[at])), *value[at + 1 :]]
    return draw(SOME_VALUE)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """With other values in its JSON, if it is that; cut short, with other bytes, or with its end twice."""
    texts = _json_lines(whole)
    way = draw(st.sampled_from(("values",) * 5 + ("cut", "bytes", "twice") if texts else ("cut", "bytes", "twice")))
    if way == "values":
        at = draw(st.integers(0, len(texts) - 1))
        value = json.loads(texts[at])
        for _ in range(draw(st.integers(1, 2))):
            value = draw(with_one_place_changed(value))
        texts[at] = json.dumps(value)
        return "\n".join(texts).encode("utf-8", "surrogatepass")
    at = draw(st.integers(0, len(whole) - 1))
    if way == "cut":
        return whole[:at]
    if way == "twice":
        return whole + whole[at:]
    changed = bytearray(whole)
    for _ in range(draw(st.sampled_from((1, 1, 4, 30)))):
        changed[draw(st.integers(0, len(whole) - 1))] = draw(st.integers(0, 255))
    return bytes(changed)


def _json_lines(whole: bytes) -> list[str]:
    """The text as JSON objects: one, or one in each line; empty where it is neither."""
    try:
        text = whole.decode()
        texts = [text] if isinstance(json.loads(text), dict) else []
    except ValueError:
        try:
            texts = [each for each in whole.decode().split("\n") if each]
            [json.loads(each) for each in texts]
        except ValueError:
            texts = []
    return texts


# ---- every reader


class Reader(NamedTuple):
    write: Callable[[Path], Path]
    """Write a whole file into a folder, and return it."""
    read: Callable[[Path], Any]
    refusal: type[Exception]
    """What it raises, and nothing else. ``NoRunError`` and no error at all are for files that are passed over."""


MODEL = {
    "model_type": "qwen3_moe",
    **{"vocab_size": 1000, "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64},
    **{"num_key_value_heads": 4, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512},
    **{"max_position_embeddings": 512, "tie_word_embeddings": False},
}
MANIFEST = Manifest(
    Sizes(world=2, mp=1, pp=1, zero_stage=1, esp=1, dtype="float32"),
    (LayerSizes("a.moe", 4, 2, {"fc1.weight": 0, "fc2.bias": "first"}),),
    {"torch": "2.13"},
    {"x.pt": FileSum(70, "00")},
)
ITEMS = {"fp32": ("a", 0), "exp_avg": ("b", "state", 1)}
INDEX = Index("Adam", (Group("x.pt", ITEMS, {"step": 3.0}, {"lr": 0.1}, (Piece("w", 0, 4, 2),)),), {"cur_scale": 1.0})
FINGERPRINT = {"device": "cpu"}
PLACES = ExpertPlacement.at_start(8, 2).as_dict()


def written(path: Path, content: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def routing(folder: Path, num_experts: int = 8, num_layers: int = 1, world_size: int = 1) -> Path:
    """A recording of two steps of one rank."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = tuple(RoutedLayer(f"blocks.{number}.moe", num_experts) for number in range(num_layers))
    file = Part(part_file(folder, 0, 0), RankFacts(0, world_size, layers))
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


def read_all(path: Path) -> None:
    recording = read_routing(path)
    for key in recording:
        recording.choices(*key)


def packed(folder: Path) -> Path:
    write_packed(folder / "packed.npz", read_routing(routing(folder / "whole")))
    return folder / "packed.npz"


def cache(folder: Path) -> Path:
    timings = {"gemm": Timing("flop", (1.0, 2.0, 4.0), (0.5, 0.7, 1.1))}
    measured = Measurements(timings, {"a number": 1.5})
    write_measurements(folder / "cache.json", FINGERPRINT, measured, load_cluster("testbed_a"))
    return folder / "cache.json"


def manifest(folder: Path) -> Path:
    MANIFEST.write(folder)
    return folder / "fsmoe.json"


def weights(folder: Path) -> Path:
    torch.save({"module": {"w": torch.ones(5)}, "num_experts": [4], "text": "x" * 50}, folder / "x.pt")
    return folder / "x.pt"


def pickled(folder: Path) -> Path:
    """What is pickled in a file of a checkpoint with arrays; torch's own checksum does not stand before it."""
    torch.save({"a": np.arange(3, dtype="i2"), "s": np.float32(2), "t": torch.ones(2)}, folder / "arrays.pt")
    with zipfile.ZipFile(folder / "arrays.pt") as opened:
        name = next(each for each in opened.namelist() if each.endswith("data.pkl"))
        (folder / "data.pkl").write_bytes(opened.read(name))
    return folder / "data.pkl"


def read_pickled(path: Path) -> None:
    """Whatever is read has as many bytes as were there."""
    file = path.with_name("data.pkl.pt")
    with zipfile.ZipFile(path.with_name("arrays.pt")) as whole, zipfile.ZipFile(file, "w") as changed:
        for name in whole.namelist():
            changed.writestr(name, path.read_bytes() if name.endswith("data.pkl") else whole.read(name))
    found = read_file(file)
    values = list(found.values()) if isinstance(found, dict) else []
    assert all(each.nbytes <= 8 for each in values if isinstance(each, (np.ndarray, np.generic)))


def tensors(folder: Path) -> Path:
    save_file({"a.experts.0.w1.weight": torch.ones(2)}, folder / "x.safetensors")
    return folder / "x.safetensors"


def tensors_of_index(folder: Path) -> Path:
    tensors(folder)
    return written(folder / "model.safetensors.index.json", {"weight_map": {"a": "x.safetensors"}})


def owner(folder: Path) -> Path:
    Ownership(folder, "01234567").release()
    return folder / OWNER


def placements() -> Any:
    """Those of a job of one layer of eight experts, on two ranks."""
    found: Any = Placements.__new__(Placements)
    found.now, found._paths, found._group = {"L00": ExpertPlacement.at_start(8, 2)}, {"L00": "moe"}, None
    found.go_to = lambda wanted: None
    found._model_order = dict
    return found


def json_of(content: Any, name: str = "file.json") -> Callable[[Path], Path]:
    return lambda folder: written(folder / name, content)


def run_file(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        record_details(record(folder / "run", "best"))
        return folder / "run" / name

    return write


LEARNED = {"tokens": 4096, "ep_size": 4, "runner_up": 2, "runner_up_costs": 1.5}
BLOCK = json.loads(FSMoEBlock(enabled=True).model_dump_json())
BLOCK |= {"gate": {"type": "gshard", "k": 2}, "metrics": "off", "schedule": "fsmoe"}
CLUSTER = cluster_as_json(load_cluster("testbed_a"))
READERS: dict[str, Reader] = {
    "cluster": Reader(json_of(CLUSTER), lambda path: load_cluster(str(path)), ValueError),
    "model": Reader(json_of(MODEL), read_hf_config, ValueError),
    "loads": Reader(json_of({"moe": [[*range(8)]] * 8}), lambda path: read_loads(path, 8), ValueError),
    "block": Reader(json_of(BLOCK), lambda path: read_given(str(path)), ValueError),
    "placement": Reader(
        json_of({"format": 1, "layers": {"moe": PLACES}}), lambda path: placements().load(str(path)), ConfigError
    ),
    "cache": Reader(cache, lambda path: read_measurements(path, FINGERPRINT), UselessFileError),
    "learned batches": Reader(
        json_of({"format": 1, "job": {"ranks": 4}, "learned": LEARNED}), read_learned, UselessLearnedError
    ),
    "recording": Reader(lambda at: part_file(routing(at), 0, 0), lambda path: read_all(path.parent), RoutingFileError),
    "old recording": Reader(
        lambda at: part_file(routing_of_before(at / "old"), 0, 0), lambda path: read_all(path.parent), RoutingFileError
    ),
    "packed recording": Reader(packed, read_all, RoutingFileError),
    "manifest": Reader(manifest, lambda path: read_manifest(path.parent), CheckpointError),
    "index": Reader(json_of(INDEX.as_json(), pieces.NAME), lambda path: read_index(path.parent, None), CheckpointError),
    "weights": Reader(weights, read_file, CheckpointError),
    "pickle": Reader(pickled, read_pickled, CheckpointError),
    "tensors": Reader(tensors, read_tensors, CheckpointError),
    "index of tensors": Reader(tensors_of_index, lambda path: read_tensors(path.parent), CheckpointError),
    "trace": Reader(lambda at: record(at / "run", "best") / "trace" / "rank0.json", read_trace, ValueError),
    "owner": Reader(owner, lambda path: owner_of(path.parent), NoRunError),
    **{
        f"run: {name}": Reader(run_file(name), lambda path: read_run(path.parent), NoRunError)
        for name in ("run.json", "steps.jsonl", "plans.json", "routers.jsonl", "compared.jsonl")
    },
}
FAST = settings(max_examples=50, suppress_health_check=list(HealthCheck), database=None, report_multiple_bugs=False)


@sampled("name", list(READERS), drawn=12)
def test_a_damaged_file_is_read_or_refused_in_words_that_name_it(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    file = reader.write(tmp_path)
    whole, said, differs = file.read_bytes(), [], []
    undamaged = repr(reader.read(file))
    if reader.refusal is NoRunError or name == "index of tensors":
        named: Any = file.parent
    else:
        named = "" if name == "cache" else file  # whoever reads a cache says which it is

    @FAST
    @given(damaged(whole))
    def look(changed: bytes) -> None:
        file.write_bytes(changed)
        try:
            differs.append(repr(reader.read(file)) != undamaged)
        except reader.refusal as error:
            said.append(str(error))
            assert str(named) in said[-1]
            assert "Traceback" not in said[-1]
            assert len(said[-1]) < 50_000

    look()
    # Where nothing is refused and nothing differs, nothing can be told from a reader that looks at nothing.
    assert said or (reader.refusal is NoRunError and any(differs))


def test_a_block_is_read_or_refused_in_words() -> None:
    read, refused = [], []

    @settings(FAST, max_examples=120)
    @given(st.data())
    def look(data: st.DataObject) -> None:
        block: Any = data.draw(st.sampled_from((BLOCK, BLOCK, {"enabled": True})))
        for _ in range(data.draw(st.integers(1, 3))):
            block = data.draw(with_one_place_changed(block))
        try:
            read.append(read_block({"train_batch_size": 8, "fsmoe": block}))
        except ConfigError as error:
            refused.append(str(error))
            assert "fsmoe" in refused[-1]
            assert "Traceback" not in refused[-1]
            assert len(refused[-1]) < 50_000

    look()
    assert read
    assert len(refused) > 50


# ---- recordings of routing have checksums


def test_no_changed_byte_of_a_recording_is_read_as_what_was_recorded(tmp_path: Path) -> None:
    file = part_file(routing(tmp_path), 0, 0)
    whole = file.read_bytes()
    assert len(read_routing(tmp_path)) == 2
    for at in draw("changed bytes", range(len(whole)), 500):
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
    for end in [*range(len(whole) // 4, len(whole), 7), len(whole) - 1]:
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


# ---- files that are none, and absurd sizes

PLAN = ("plan", "--max-degree", "2", "--cluster")
LOADS = (*PLAN, "testbed_b", "--nodes", "2", "--width", "64", "--hidden", "64", "--length", "64", "--layers", "2")
LOADS = (*LOADS, "--mp", "1", "--esp", "1", "--ep", "8", "--experts", "8", "--capacity-factor", "none", "--loads")
COMMANDS: dict[str, Callable[[Any], tuple[str, ...]]] = {
    "model": lambda path: (*PLAN, "testbed_a", "--model", str(path)),
    "cluster": lambda path: (*PLAN, str(path), "--model", "olmoe"),
    "loads": lambda path: (*LOADS, str(path)),
    "recording": lambda path: ("report", str(path)),
}
NESTED = "[" * 100_000


def pipe(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return str(path)


def absurd(folder: Path) -> list[tuple[str, Any, str]]:
    """Each a kind of file, where it is, and what the one line says of it."""
    pipe(folder / "routing" / "rank_00000.0000.npy")
    pipe(record(folder / "run", "best") / "routing" / "rank_00000.0000.npy")
    nested, large = written(folder / "nested.json", NESTED), folder / "large.json"
    with large.open("wb") as file:
        file.truncate(1 << 40)
    most = f"from 1 to {MOST_EXPERTS}"
    found: list[tuple[str, Any, str]] = [
        ("recording", folder / "routing", "is not a regular file"),
        ("recording", folder / "run", "is not a regular file"),
        ("loads", pipe(folder / "loads.json"), "is not a regular file"),
        ("cluster", pipe(folder / "cluster.json"), "no cluster or file"),
        ("model", pipe(folder / "model.json"), "there is no file"),
        ("recording", routing(folder / "experts", 10**13), most),
        ("recording", routing_of_before(folder / "before", 10**9), most),
        ("recording", routing(folder / "layers", 8, 100_000), f"at most {MOST_LAYERS}"),
        ("recording", routing(folder / "ranks", world_size=10**9), f"from 1 to {MOST_RANKS}"),
        ("recording", routing(folder / "many loads", MOST_EXPERTS, MOST_LAYERS), "their loads would need"),
        *((kind, nested, "nested too deeply") for kind in ("cluster", "model", "loads")),
        *((kind, large, "is larger than 64 MiB") for kind in ("cluster", "model", "loads")),
    ]

    def of(kind: str, content: Any, words: str) -> None:
        found.append((kind, written(folder / f"{kind}{len(found)}.json", content), words))

    for name, value in (
        *(("num_experts", 10**6), ("num_experts", 10**30), ("num_hidden_layers", 10**9)),
        *(("moe_intermediate_size", 2**31), ("hidden_size", 10**15), ("vocab_size", 2**64)),
        *(("num_attention_heads", 10**12), ("num_experts_per_tok", 10**12), ("max_position_embeddings", 10**18)),
    ):
        of("model", MODEL | {name: value}, "must be at most")
    for value in ({}, 5, ["qwen3_moe"]):
        of("model", MODEL | {"model_type": value}, "model_type = ")
    for changed in ({"gpus_per_node": 10**7}, {"num_nodes": 2**70}):
        of("cluster", CLUSTER | changed, f"less than or equal to {MOST_RANKS}")
    of("cluster", CLUSTER | {"gpus_per_node": 1024, "num_nodes": 10_000}, f"at most {MOST_RANKS}")
    for rows in ([[2**70] * 8] * 8, [[1] * 8, [2] * 7], [["a"] * 8]):
        of("loads", {"moe": rows}, "must be")
    return found


def ends(rank: int, world_size: int, commands: list[tuple[str, ...]]) -> list[tuple[int, str]]:
    """(status, output) of commands one after another, in little memory; a minute of computing ends the rank."""
    # Its engine of JavaScript reserves more addresses than there may be; no file reaches what it bundles.
    sys.modules["vl_convert"] = types.SimpleNamespace(javascript_bundle=lambda: "")  # type: ignore[assignment]
    import scipy.optimize  # noqa: F401

    import ds_fsmoe.offline.plan.report
    import ds_fsmoe.offline.report.run_page  # noqa: F401
    from ds_fsmoe import cli

    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (3 << 28),) * 2)
    found = []
    for each in commands:
        text = io.StringIO()
        signal.setitimer(signal.ITIMER_PROF, 60)
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            try:
                status = cli.main(list(each))
            except SystemExit as end:
                status = int(end.code or 0)
        found.append((status, text.getvalue()))
    signal.setitimer(signal.ITIMER_PROF, 0)
    return found


def test_absurd_files_are_one_line_and_take_neither_memory_nor_time(tmp_path: Path) -> None:
    cases = absurd(tmp_path)
    commands = [COMMANDS[kind](path) for kind, path, _ in cases]
    found = run_on_ranks(ends, 1, tmp_path / "ranks", commands)[0]
    for case, (status, text) in zip(cases, found, strict=True):
        said = [each for each in text.splitlines() if "error:" in each]
        assert (status, len(said)) == (2, 1), (case, status, text[-2000:])
        assert case[2] in said[0], (case, said)
        assert len(said[0]) < 1000, case
