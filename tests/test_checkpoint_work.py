# SPDX-License-Identifier: Apache-2.0
"""Describing a checkpoint takes work in proportion to its files and ranks, and to the pieces of its index."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

import ds_fsmoe
from ds_fsmoe.checkpoint import checkpoints, saving
from ds_fsmoe.checkpoint import ranks as ranks_of_job
from ds_fsmoe.checkpoint.plan_state import RankState
from ds_fsmoe.checkpoint_files import pieces
from ds_fsmoe.checkpoint_files.manifest import FileSum, LayerSizes, Manifest, Sizes, omissions
from ds_fsmoe.checkpoint_files.pieces import Group, Index, OpenFiles, Piece, SavedPieces, merged, read_index
from ds_fsmoe.checkpoint_files.tags import CheckpointError

_PACKAGE = str(Path(ds_fsmoe.__file__).parent / "checkpoint")


class Name(str):
    """A name that counts how often it is compared, ordered or looked up."""

    uses = 0

    def __eq__(self, other: object) -> bool:
        Name.uses += 1
        return str.__eq__(self, other)

    def __lt__(self, other: str) -> bool:
        Name.uses += 1
        return str.__lt__(self, other)

    def __hash__(self) -> int:
        Name.uses += 1
        return str.__hash__(self)


def work_of(call: Callable[[], Any]) -> int:
    """The lines of the package's checkpoint folders that a call executes, and what it does with names."""
    lines, before = 0, Name.uses

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        lines += event == "line"
        return trace

    outer = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(outer)
    return lines + Name.uses - before


def stock_files(layers: int, experts: int, world: int) -> list[Name]:
    """The files of DeepSpeed's own MoE layers, sorted."""
    found = [f"layer_{at}_expert_{each}_mp_rank_00_model_states.pt" for at in range(layers) for each in range(experts)]
    found += [f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(world)]
    found += [f"fsmoe_rank_{rank:05d}.pt" for rank in range(world)]
    return [Name(each) for each in sorted([*found, "mp_rank_00_model_states.pt", "fsmoe_pieces.json"])]


def manifest_of(files: list[Name], layers: int, experts: int, ep: int = 8) -> Manifest:
    """A manifest that names these files."""
    sizes = Sizes(world=1, mp=1, pp=1, zero_stage=1, esp=1, dtype="bfloat16")
    of_layers = tuple(LayerSizes(f"blocks.{at}.moe", experts, ep) for at in range(layers))
    return Manifest(sizes, of_layers, {}, {each: FileSum(1, "") for each in files})


def states_file(rank: int) -> str:
    """The file with a rank's optimizer states at ZeRO 3."""
    return f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


NAMES = "blocks.{}.weight"


def shared_out(rank: int, parameters: int, world: int, size: int = 4, names: str = NAMES) -> Index:
    """The index of one rank at ZeRO 3: a piece of each parameter, end to end."""
    own = tuple(Piece(Name(names.format(at)), rank * size, size, at * size) for at in range(parameters))
    items = {item: ("optimizer_state_dict", item, 0) for item in ("fp32", "exp_avg", "exp_avg_sq")}
    return Index("Adam", (Group(states_file(rank), items, {"step": 1.0}, {"lr": 0.1}, own),), {})


MOST = 2.2
"""The work that twice the input may take, in that of the input."""


def saving_alone(monkeypatch: pytest.MonkeyPatch, world: int, names: list[Name]) -> tuple[saving.Saving, list[Any]]:
    """A save on rank 0 of so many ranks, which all see these files; and what it tells all ranks."""
    sizes, told = manifest_of([], 0, 8).sizes, []
    others = [({each: FileSum(1, "") for each in names[rank::world]}, None) for rank in range(1, world)]
    monkeypatch.setattr(saving, "on_every_rank", lambda value: told.append(value) or [value] * world)
    monkeypatch.setattr(saving.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(saving, "on_first_rank", lambda own: [own, *others])
    monkeypatch.setattr(saving.manifests, "names_in", lambda _: names)
    monkeypatch.setattr(saving.manifests, "sum_of", lambda _: FileSum(1, ""))
    monkeypatch.setattr(saving, "sizes_of", lambda _: replace(sizes, dtype="this rank's"))
    monkeypatch.setattr(saving.Saving, "_of_stage", lambda _: (sizes, 0, None, [], {}))
    monkeypatch.setattr(Manifest, "write", lambda *_: None)
    found = object.__new__(saving.Saving)
    found._engine, found._place, found._tag = None, Path("place"), "tag"
    found._ranks = SimpleNamespace(
        together=lambda _, act: act(), on_leaders=lambda _, act: act(), for_leaders=lambda value: value
    )
    return found, told


def test_a_save_is_described_in_work_linear_in_files_and_in_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(world: int, layers: int) -> int:
        found, told = saving_alone(monkeypatch, world, stock_files(layers, 128, 8))
        size = work_of(found._describe)
        assert [len(each) for each in told] == [64], "ranks that see the same files tell each other one digest"
        return size

    small = work(64, 12)
    assert work(64, 24) <= MOST * small
    assert work(128, 12) <= MOST * small
    # Of 256 ranks and 47 layers, a few for each file and rank.
    assert work(256, 47) <= 30 * (47 * 128 + 256)


def test_every_leader_writes_the_manifest_with_rank_0s_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = saving_alone(monkeypatch, 2, [])
    sizes = manifest_of([], 0, 8).sizes
    of_stages = [({}, (replace(sizes, dtype=dtype), stage, None, [], {})) for stage, dtype in enumerate(("a", "b"))]
    assert found._manifest(of_stages).sizes.dtype == "a"


def test_what_a_manifest_leaves_out_is_found_in_one_pass_over_its_files_and_counted_by_layer(tmp_path: Path) -> None:
    def work(layers: int, experts: int) -> int:
        return work_of(lambda: omissions(tmp_path, manifest_of(stock_files(layers, experts, 8), layers, experts)))

    small = work(24, 16)
    assert work(48, 16) <= MOST * small
    assert work(24, 32) <= MOST * small
    files = stock_files(3, 8, 1)
    assert omissions(tmp_path, manifest_of(files, 3, 8)) == []
    files.remove("layer_1_expert_3_mp_rank_00_model_states.pt")
    files.append(Name("layer_1_expert_8_mp_rank_00_model_states.pt"))  # one that the layer cannot have
    (said,) = omissions(tmp_path, manifest_of(files, 3, 8))
    assert said == f"{tmp_path} has 7 files of experts of blocks.1.moe, and should have 8 by its fsmoe.json"


def test_a_rank_checks_the_files_of_its_node_and_misses_none_of_other_nodes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(checkpoints.dist, "get_rank", lambda: 2)
    found = manifest_of(["here.pt", "there.pt"], 0, 8)
    (tmp_path / "here.pt").write_text("x")
    for is_local, said in ((True, ["here.pt"]), (False, ["here.pt", "there.pt"])):
        engine = SimpleNamespace(use_node_local_storage=partial(bool, is_local), local_rank=0, global_rank=2)
        with pytest.raises(CheckpointError) as caught:
            checkpoints.Checkpoints(engine)._check_files(tmp_path, found, True, [2])
        assert [name for name in found.files if name in str(caught.value)] == said


@pytest.mark.parametrize(
    ("of_ranks", "changed", "wanted"),
    [
        ([True, True], "", [("plans", False)]),
        ([True, True], "num_chunks", [("plans", True)]),  # on another rank, whose stage has layers
        ([True, False], "", []),
    ],
)
def test_plans_of_a_checkpoint_are_taken_on_all_ranks_or_on_none(
    of_ranks: list[bool], changed: str, wanted: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking them makes communicators."""
    taken: list[Any] = []
    monkeypatch.setattr(checkpoints, "on_every_rank", lambda own: of_ranks if own is True else [own, changed])
    monkeypatch.setattr(checkpoints, "go_on_with", lambda _, plans, places_alone: taken.append((plans, places_alone)))
    engine = SimpleNamespace(use_node_local_storage=lambda: False, local_rank=0, global_rank=0, fsmoe=None)
    plans: Any = "plans"
    checkpoints.Checkpoints(engine)._go_on(RankState(None, plans))
    assert taken == wanted


# ---- the index


def index_of_all(parameters: int, world: int) -> Index:
    return merged(shared_out(rank, parameters, world) for rank in range(world))


def manifest_for(world: int, size_bytes: int = 10**9) -> Manifest:
    found = manifest_of([], 0, 8)
    files = {states_file(rank): FileSum(size_bytes, "") for rank in range(world)}
    return replace(found, sizes=replace(found.sizes, world=world, zero_stage=3), files=files)


def written(folder: Path, index: Index) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / pieces.NAME).write_text(index.as_json())
    return folder


@pytest.mark.parametrize("way", ["made", "read", "looked up by a rank"])
def test_an_index_takes_work_linear_in_its_pieces(way: str, tmp_path: Path) -> None:
    def work(parameters: int, world: int) -> int:
        if way == "looked up by a rank":
            index, place = index_of_all(parameters, world), Path("folder")

            def look_up() -> None:
                found = SavedPieces(index, 0, OpenFiles(place, lambda path: None), place)
                for each in range(parameters):
                    assert [source.size for source in found.sources(NAMES.format(each), "fp32", 3, 2)] == [1, 1]

            return work_of(look_up)
        if way == "made":
            own = [shared_out(rank, parameters, world) for rank in range(world)]
            return work_of(lambda: merged(own).as_json())
        written(tmp_path, index_of_all(parameters, world))
        return work_of(lambda: read_index(tmp_path, manifest_for(world)))

    small = work(40, 16)
    assert work(80, 16) <= MOST * small
    assert work(40, 32) <= MOST * small


SHARED = 8
"""The ranks of the index that is spoilt."""
FIRST, SIZE, AT = 1, 2, 3


def spoilt(change: Callable[[list[Any]], Any], rank: int = 3, names: str = NAMES) -> Index:
    """An index in which the pieces of one rank, as lists, are changed."""
    index = merged(shared_out(each, 3, SHARED, names=names) for each in range(SHARED))
    of_rank = [[each.name, each.first, each.size, each.at] for each in index.groups[rank].pieces]
    change(of_rank)
    group = replace(index.groups[rank], pieces=tuple(pieces.Piece(*each) for each in of_rank))
    return replace(index, groups=(*index.groups[:rank], group, *index.groups[rank + 1 :]))


def with_value(item: int, value: int, **where: Any) -> Index:
    return spoilt(lambda of: of[1].__setitem__(item, value), **where)


def in_another_file() -> Index:
    alone = index_of_all(3, 1)
    return replace(index_of_all(3, SHARED), groups=tuple(replace(each, file="x.pt") for each in alone.groups))


EXPERT = "moe.deepspeed_moe.experts.deepspeed_experts.{}.fc1.weight"
BAD: dict[str, Callable[[], Index]] = {
    "blocks.1.weight from element 12 on is there twice in": lambda: spoilt(lambda of: of.append([*of[1][:AT], 12])),
    "pieces of blocks.1.weight leave a hole at element 12": lambda: spoilt(lambda of: of.pop(1)),
    "pieces of blocks.1.weight leave a hole at element 15": lambda: with_value(SIZE, 3),
    "1.fc1.weight have 31 elements, and another expert's have 32": lambda: with_value(SIZE, 3, rank=7, names=EXPERT),
    "pieces of blocks.1.weight overlap at element 12": lambda: with_value(FIRST, 11),
    "blocks.1.weight overlaps another parameter in": lambda: with_value(AT, 2),
    "pieces in 'x.pt', which fsmoe.json does not name": in_another_file,
    "which has 100 bytes": lambda: index_of_all(30, SHARED),
    "48 pieces, and its parameters on 8 ranks have at most 24": lambda: index_of_all(3, 2 * SHARED),
}
"""What is said of an index -> the index."""


@pytest.mark.parametrize("words", BAD)
def test_an_index_that_cannot_be_is_refused_in_one_line(words: str, tmp_path: Path) -> None:
    written(tmp_path, BAD[words]())
    with pytest.raises(CheckpointError) as caught:
        read_index(tmp_path, manifest_for(SHARED, size_bytes=100))
    said = str(caught.value)
    assert said.startswith(f"{tmp_path / pieces.NAME} is damaged, or not a manifest: ")
    assert words in said
    assert "\n" not in said


def test_a_missing_end_is_refused_where_the_index_says_how_many_elements_there_were(tmp_path: Path) -> None:
    short = json.loads(with_value(SIZE, 3, rank=SHARED - 1).as_json()) | {"numel": index_of_all(3, SHARED).numel}
    path = tmp_path / pieces.NAME
    path.write_text(json.dumps(short))
    with pytest.raises(CheckpointError, match=r"damaged.*pieces of 95 elements, of 96 that were saved"):
        read_index(tmp_path, manifest_for(SHARED))
    # What 0.2.0 has written does not say.
    path.write_text(json.dumps({name: each for name, each in short.items() if name != "numel"}))
    found = read_index(tmp_path, manifest_for(SHARED))
    assert found is not None
    assert found.numel == 95


def test_copies_empty_parameters_and_padding_are_no_faults(tmp_path: Path) -> None:
    """Without ZeRO each file has a copy; with it there is padding between pieces; an empty parameter has nothing."""
    whole = shared_out(0, 3, 1).groups[0]
    padded = tuple(each._replace(at=2 * each.at) for each in whole.pieces)
    copies = tuple(replace(whole, file=states_file(rank), pieces=padded) for rank in range(2))
    empty = replace(whole, items={"fp32": ("other",)}, pieces=(pieces.Piece("empty", 0, 0, 0),))
    index = Index("Adam", (*copies, empty), {})
    assert read_index(written(tmp_path, index), manifest_for(2)) == index


# ---- who sums up


def shares_of(monkeypatch: pytest.MonkeyPatch, views: list[list[str]]) -> list[list[str]]:
    """What each rank sums up of what it sees. All ranks are asked in turn, until each has heard what all have said."""
    rounds: list[list[Any]] = []
    while True:
        found, said = [], []
        for rank, names in enumerate(views):
            heard = iter(rounds)

            def on_every_rank(value: Any, heard: Any = heard) -> list[Any]:
                told = next(heard, None)
                if told is None:
                    raise StopIteration(value)
                return told

            monkeypatch.setattr(saving, "on_every_rank", on_every_rank)
            monkeypatch.setattr(saving.dist, "get_rank", lambda rank=rank: rank)
            try:
                found.append(saving._share(names))
            except StopIteration as waits:
                said.append(waits.value)
        if not said:
            return found
        rounds.append(said)


ALL = [f"file {number:02d}" for number in range(20)]


@pytest.mark.parametrize(
    "views",
    [[ALL] * 8, [ALL[:10]] * 3 + [ALL[10:]] * 5, [ALL[:12], ALL[8:]] * 4, [ALL[:19]] + [ALL] * 7, [ALL[:3]] * 8],
    ids=["shared", "two nodes", "two nodes with a copy", "one lags", "few files"],
)
def test_each_file_is_summed_up_by_one_of_the_ranks_that_see_it(
    views: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = shares_of(monkeypatch, views)
    assert sorted(each for share in found for each in share) == sorted({each for view in views for each in view})
    assert all(set(share) <= set(view) for share, view in zip(found, views, strict=True))
    of_first = [share for share, view in zip(found, views, strict=True) if view == views[0]]
    assert max(map(len, of_first)) - min(map(len, of_first)) <= 1


@pytest.mark.parametrize(
    ("places", "groups"),
    [
        ([("a", 0), ("a", 1), ("b", 0), ("b", 1)], [[0, 1], [2, 3]]),
        ([("a", 0), ("b", 0), ("a", 1), ("b", 1)], [[0, 2], [1, 3]]),
        ([("x", 0), ("x", 1), ("x", 0), ("x", 1)], [[0, 1], [2, 3]]),  # containers whose hosts have one name
    ],
)
def test_ranks_beside_this_one_are_those_of_its_node(
    places: list[tuple[str, int]], groups: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks_of_job, "on_every_rank", lambda _: places)
    for rank, (_, local_rank) in enumerate(places):
        monkeypatch.setattr(ranks_of_job.dist, "get_rank", lambda rank=rank: rank)
        for is_local, beside in ((True, next(each for each in groups if rank in each)), (False, [0, 1, 2, 3])):
            monkeypatch.setattr(ranks_of_job.dist, "get_world_size", lambda: 4)
            engine = SimpleNamespace(
                use_node_local_storage=lambda is_local=is_local: is_local, local_rank=local_rank, global_rank=rank
            )
            assert ranks_of_job.Ranks(engine).sharing_files() == beside
