# SPDX-License-Identifier: Apache-2.0
"""Reading a file of a checkpoint runs nothing, gives no memory away and comes to an end, whatever is in the file."""

from __future__ import annotations

import argparse
import os
import re
import struct
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from ds_fsmoe.checkpoint_files.expert_parts import parts_file
from ds_fsmoe.checkpoint_files.manifest import (
    NAME,
    FileSum,
    LayerSizes,
    Manifest,
    PartSizes,
    Sizes,
    faults,
    omissions,
    read_described,
    sum_of,
)
from ds_fsmoe.checkpoint_files.numbering import StageOfLayers
from ds_fsmoe.checkpoint_files.reading import read_file
from ds_fsmoe.checkpoint_files.tags import CheckpointError

# ---- pickles by hand, in protocol 2

REDUCE, BUILD, NEWOBJ = b"R", b"b", b"\x81"


def named(path: str) -> bytes:
    module, _, name = path.rpartition(".")
    return f"c{module}\n{name}\n".encode()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value)


def pack(*items: bytes) -> bytes:
    return b"(" + b"".join(items) + b"t"


def call(path: str, *arguments: bytes) -> bytes:
    return named(path) + pack(*arguments) + REDUCE


def raw(value: bytes, codec: str = "latin1") -> bytes:
    return call("_codecs.encode", text(value.decode("latin1")), text(codec))


def kind(name: str, *state: bytes) -> bytes:
    """A dtype, and its state if one is given."""
    return call("numpy.dtype", text(name), b"\x89", b"\x88") + (pack(*state) + BUILD if state else b"")


def state(order: str = "<", inner: bytes = b"N", names: bytes = b"N", fields: bytes = b"N", size: int = -1) -> list:
    return [number(3), text(order), inner, names, fields, number(size), number(-1), number(0)]


def scalar(of: bytes, value: bytes) -> bytes:
    return call("numpy._core.multiarray.scalar", of, raw(value))


def filling(of: bytes, size: int, value: bytes) -> bytes:
    return pack(number(1), pack(number(size)), of, b"\x89", raw(value)) + BUILD


EMPTY = call("numpy._core.multiarray._reconstruct", named("numpy.ndarray"), pack(number(0)), raw(b"b"))
"""An array of which its content is not said yet."""
PUT, GET = b"q\x00", b"h\x00"
EIGHT = b"AAAAAAAA"
BAD = {
    "text with an itemsize below zero": scalar(kind("S8", *state("|", size=-8)), EIGHT),
    "dates without metadata": scalar(kind("M8[ns]", *state()), EIGHT),
    "an itemsize changed through the memo": pack(
        EMPTY + filling(kind("S8") + PUT, 1, EIGHT), GET + pack(*state(size=4_000_000)) + BUILD
    ),
    "an array looking into another": call(
        "numpy.ndarray", pack(number(1)), kind("f8"), EMPTY + filling(kind("f8"), 1, EIGHT)
    ),
    "a subarray of a number": kind("f8", *state(inner=pack(kind("f8"), pack(number(1000))))),
    "fields beyond a number": kind(
        "f8", *state(names=pack(text("a")), fields=b"}" + text("a") + pack(kind("i8"), number(4000)) + b"s")
    ),
    "an array filled twice": EMPTY + filling(kind("f8"), 1, EIGHT) + filling(kind("f8"), 2, EIGHT * 2),
    "more elements than bytes": EMPTY + filling(kind("f8"), 1000, EIGHT),
    "a dtype made past its checks": named("numpy.dtype") + pack(text("S8")) + NEWOBJ + pack(*state(size=-8)) + BUILD,
    "an array made past its checks": named("numpy.ndarray") + pack(pack(number(1000)), text("f8")) + NEWOBJ,
    "a dtype's class": named("numpy.dtypes.Float64DType") + b")" + REDUCE,
    "objects": scalar(kind("O"), EIGHT),
    "records": scalar(kind("V8"), EIGHT),
    "a dtype that is none": scalar(named("argparse.Namespace") + b")R}" + text("dtype") + text("f8") + b"sb", EIGHT),
    "bytes that are an array's": EMPTY + pack(number(1), pack(number(1)), kind("f8"), b"\x89", EMPTY) + b"b",
    "a scalar of other bytes": scalar(kind("f8"), b"AAAA"),
    "a slow codec": raw(b"a" * 20_000, "punycode"),
    "bytes of any length": call("__builtin__.bytes", number(2**31 - 1)),
}


def write(path: Path, pickled: bytes) -> None:
    torch.save({}, path)
    with zipfile.ZipFile(path) as opened:
        records = {each: opened.read(each) for each in opened.namelist()}
    with zipfile.ZipFile(path, "w") as opened:
        for name, data in records.items():
            opened.writestr(name, b"\x80\x02" + pickled + b"." if name.endswith("data.pkl") else data)


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("is_trusted_by_script", [False, True])
def test_what_numpy_would_take_without_a_look_is_refused(case: str, is_trusted_by_script: bool, tmp_path: Path) -> None:
    write(tmp_path / "x.pt", BAD[case])
    known = [np.ndarray, np.dtype, np._core.multiarray.scalar, np._core.multiarray._reconstruct]
    with (
        torch.serialization.safe_globals(known if is_trusted_by_script else []),
        pytest.raises(CheckpointError, match=r"x\.pt (cannot be read|holds objects of)"),
    ):
        read_file(tmp_path / "x.pt")


def test_what_is_refused_differs_from_what_is_read_in_nothing_else(tmp_path: Path) -> None:
    for pickled in (scalar(kind("f8", *state()), EIGHT), EMPTY + filling(kind("f8", *state()), 1, EIGHT)):
        write(tmp_path / "x.pt", pickled)
        assert read_file(tmp_path / "x.pt").tobytes() == EIGHT


def test_a_file_that_names_a_function_is_not_run(tmp_path: Path) -> None:
    proof = tmp_path / "proof"

    class Evil:
        def __reduce__(self) -> Any:
            return (os.mkdir, (str(proof),))

    torch.save({"module": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match=r"holds objects of posix.mkdir, .*fsmoe.*trusted"):
        read_file(tmp_path / "evil.pt")
    assert not proof.exists()


class Mine:
    """A class of the script."""


@pytest.mark.parametrize("is_zip", [True, False])
def test_what_people_keep_beside_their_weights_comes_back(is_zip: bool, tmp_path: Path) -> None:
    kept = {
        "floats": np.arange(6.0).reshape(2, 3),
        "columns": np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
        "empty": np.zeros((0, 3)),
        "single": np.array(5),
        "bools": np.array([True, False]),
        "complex": np.array([1j]),
        "scalar": np.float64(0.1),
        "bytes": b"\x00\xff",
        "no bytes": b"",
        "generator": np.random.default_rng(0).bit_generator.state,
    }
    path = tmp_path / "x.pt"
    rest = {
        "names": argparse.Namespace(a=np.int8(3), b=np.arange(2)),
        "state": np.random.RandomState(0).get_state(),
        "kind": np.dtype("f4"),
    }
    torch.save(kept | rest | {"weight": torch.ones(3)}, path, _use_new_zipfile_serialization=is_zip)
    for in_place in (False, True) if is_zip else (False,):
        found = read_file(path, in_place=in_place)
        for name, value in kept.items():
            assert type(found[name]) is type(value)
            assert np.all(found[name] == value), name
        assert found["names"].a == 3
        assert type(found["names"].b) is np.ndarray
        assert found["kind"] == np.dtype("f4")
        assert np.array_equal(found["state"][1], rest["state"][1])
        assert torch.equal(found["weight"], torch.ones(3))
    mine = Mine()
    mine.itself, mine.array = [mine], kept["floats"]
    torch.save({"mine": mine, "array": kept["floats"]}, path, _use_new_zipfile_serialization=is_zip)
    found = read_file(path, trusted=(Mine,))
    assert isinstance(found["mine"], Mine)
    assert type(found["mine"].array) is np.ndarray
    assert found["mine"].itself == [found["mine"]]
    assert np.array_equal(found["array"], kept["floats"])
    with torch.serialization.safe_globals([Mine]):
        assert isinstance(read_file(path)["mine"], Mine)
        assert Mine in torch.serialization.get_safe_globals()


class Pair(NamedTuple):
    left: Any
    right: Any


def test_what_holds_arrays_comes_back_as_it_was_and_can_be_saved_again(tmp_path: Path) -> None:
    """Wherever arrays and their types lie, and however often."""
    array, nested = np.arange(3.0), (np.float64(1),)
    for _ in range(40):
        nested = (nested, nested)
    value = {"a": array, "b": array, "pair": Pair(array, np.dtype("f4")), np.dtype("f4"): 1, "nested": nested}
    path = tmp_path / "x.pt"
    for _ in range(2):
        torch.save(value, path)
        value = read_file(path, trusted=(Pair,))
        assert value["a"] is value["b"]
        assert type(value["pair"].left) is np.ndarray
        assert value["pair"].right == np.dtype("f4")
        assert value[np.dtype("f4")] == 1
        assert value["nested"][0] is value["nested"][1]


def test_other_arrays_are_refused_with_what_to_do(tmp_path: Path) -> None:
    others = (np.array(["a"]), np.array([b"a"]), np.array(["2020"], "M8[ns]"), np.zeros(1, "i4,f4"), np.str_("a"))
    for value in others:
        torch.save({"x": value}, tmp_path / "x.pt")
        words = r"those of numbers and booleans are read.*lists hold these as well"
        with pytest.raises(CheckpointError, match=words) as caught:
            read_file(tmp_path / "x.pt")
        assert "weights_only" not in str(caught.value)


# ---- files that are none


def test_only_regular_files_of_the_folder_are_opened(tmp_path: Path) -> None:
    folder = tmp_path / "tag"
    folder.mkdir()
    (tmp_path / "secret").write_text("")
    os.mkfifo(folder / "fifo")
    for name, target in {"device": "/dev/zero", "link": "../secret", "deep": "..", "circle": "circle"}.items():
        (folder / name).symlink_to(target)
    (folder / "folder").mkdir()
    for name, words in {
        "fifo": "fifo is a FIFO, not a regular file",
        "device": "device is a device, not a regular file",
        "link": "link is a link to .*secret, outside of",
        "deep/secret": "secret is a link to .*secret, outside of",
        "circle": "circle cannot be read",
        "folder": "folder is a folder",
        "nothing": "nothing is missing",
    }.items():
        (found,) = faults(folder, {name: FileSum(0, "")}, [name])
        assert re.search(words, found)
        if "/" not in name:
            with pytest.raises(CheckpointError, match=words):
                read_file(folder / name)
        if name not in ("nothing", "deep/secret"):
            with pytest.raises(CheckpointError, match=words):
                read_described(folder / name, 1, dict)
    # A link within the folder is a file of it, and the folder itself may lie anywhere.
    (folder / "real").write_text("x")
    (folder / "other name").symlink_to("real")
    (tmp_path / "place").symlink_to(folder)
    assert faults(tmp_path / "place", {"other name": sum_of(folder / "real")}, ["other name"]) == []


def test_a_checkpoint_of_ours_names_all_its_files_or_is_refused(tmp_path: Path) -> None:
    names = ["mp_rank_00_model_states.pt", "fsmoe_rank_00000.pt", "fsmoe_pieces.json"]
    names += [f"layer_0_expert_{number}_mp_rank_00_model_states.pt" for number in range(4)]
    for name in names:
        (tmp_path / name).write_text("x")
    (tmp_path / "tokenizer.json").write_text("mine")
    sizes = Sizes(world=1, mp=1, pp=1, zero_stage=0, esp=2, dtype="float32")
    layers = (LayerSizes("a.moe", 2, 1),)

    def with_files(*kept: str) -> list[str]:
        return omissions(tmp_path, Manifest(sizes, layers, {}, {name: FileSum(1, "") for name in kept}))

    assert with_files(*names) == []
    for name in names:
        (said,) = with_files(*(each for each in names if each != name))
        assert str(tmp_path) in said
    assert len(with_files()) == 4
    (said,) = omissions(tmp_path, None)
    assert f"{tmp_path / NAME} is missing, and fsmoe_pieces.json says that ds_fsmoe has saved" in said
    for name in names[1:3]:
        (tmp_path / name).unlink()
    assert omissions(tmp_path, None) == []  # as stock's


def test_a_manifest_that_leaves_out_a_stage_or_a_ranks_experts_is_refused(tmp_path: Path) -> None:
    names = ["mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"]
    names += [parts_file(number, stage=1) for number in range(2)]
    sizes = Sizes(world=4, mp=1, pp=2, zero_stage=1, esp=1, dtype="float32")
    stages, parts = (StageOfLayers(0, 1), StageOfLayers(1, 2)), {"1.experts": PartSizes("stacked", 4, ep=2, stage=1)}
    for left_out in (None, *names):
        kept = {name: FileSum(1, "") for name in names if name != left_out}
        said = omissions(tmp_path, Manifest(sizes, (), {}, kept, parts, stages))
        assert [each.partition("does not name ")[2].partition(",")[0] for each in said] == [left_out] * len(said)
        assert len(said) == (left_out is not None)


def test_a_name_that_stands_twice_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"format": 1, "files": {"a": 1}, "files": {}}')
    with pytest.raises(CheckpointError, match="'files' is listed twice"):
        read_described(tmp_path / "x.json", 1, dict)
