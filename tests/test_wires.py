# SPDX-License-Identifier: Apache-2.0
"""Rows that travel as 8-bit numbers with a scale for each row."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from ds_fsmoe import registry
from ds_fsmoe.components.callback import CallbackArgs, CallbackBase
from ds_fsmoe.config.reading import ConfigError, read_block
from ds_fsmoe.distributed.groups import make_groups
from ds_fsmoe.execution.collectives import FULL, Collectives, CommDtypes, dequantized_rows, quantized_rows
from ds_fsmoe.execution.lanes import make_lanes
from ds_fsmoe.execution.node_links import NodeLinks
from tests.covering import covering
from tests.distances import furthest
from tests.ranks import run_on_ranks
from tests.small_model import Case as Training
from tests.small_model import small_engine, train_steps
from tests.test_alltoalls import on_nodes
from tests.test_rows import WIDTH, Case, differences, mixtral, run_layer

EVERY = [CommDtypes(*each) for each in itertools.product(("model", "fp8"), repeat=2)]
BOTH = CommDtypes("fp8", "fp8")


def there_and_back(x_RM: torch.Tensor) -> torch.Tensor:
    return dequantized_rows(quantized_rows(x_RM), x_RM.dtype, x_RM.shape[1:])


def by_hand(x_RM: torch.Tensor) -> torch.Tensor:
    """Row by row, to the nearest of all numbers of the format."""
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    every = every[every.isfinite()]
    rows = []
    for row in x_RM.float():
        largest = row.abs().max()
        scale = (largest / 448.0).double() if largest else torch.ones((), dtype=torch.float64)
        nearest = (row.double().unsqueeze(1) / scale - every).abs().argmin(dim=1)
        rows.append(every[nearest] * scale)
    return torch.stack(rows).to(x_RM.dtype) if rows else x_RM


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_row_becomes_the_nearest_8_bit_numbers_times_its_scale(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    for rows, width in ((0, 5), (1, 1), (7, 13), (5, 64)):
        x_RM = (torch.randn(rows, width) * torch.logspace(-3, 3, max(1, rows))[:rows, None]).to(dtype)
        found = there_and_back(x_RM)
        assert (found.shape, found.dtype) == (x_RM.shape, dtype)
        # Where a quotient lies half-way between two, either is as near.
        torch.testing.assert_close(found, by_hand(x_RM), rtol=0.13, atol=1e-6)
        largest_R1 = x_RM.abs().amax(dim=1, keepdim=True).float() if rows else x_RM.float()
        off = (found.float() - x_RM.float()).abs()
        # Half of the last of four bits; below the least normal number half of the least one.
        assert bool((off <= 0.0645 * x_RM.float().abs() + largest_R1 / 448 * 2**-9).all())


def test_rows_of_zeros_and_of_tiny_and_huge_numbers_survive_and_the_largest_of_a_row_is_the_largest_8_bit_number() -> (
    None
):
    x_RM = torch.tensor([[0.0, 0.0], [1e-38, -1e-38], [3e38, 1e38], [448.0, -448.0], [1e-45, 0.0]])
    found = there_and_back(x_RM)
    assert found.isfinite().all()
    assert found[0].tolist() == [0.0, 0.0]
    torch.testing.assert_close(found[1:4], x_RM[1:4], rtol=0.065, atol=0)
    # Over a scale that was rounded down it is more than 448 by a bit.
    largest = torch.linspace(1.0, 2.0, 10_001)
    beyond = largest[largest / (largest / 448) > 448]
    assert len(beyond) > 100
    x_RM = torch.stack([beyond, -beyond], dim=1)
    torch.testing.assert_close(there_and_back(x_RM), x_RM, rtol=3e-7, atol=0)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_stays_seen_and_spoils_no_other_row(wrong: float) -> None:
    x_RM = torch.ones(3, 4)
    x_RM[1, 2] = wrong
    found = there_and_back(x_RM)
    assert not found[1].isfinite().any()
    assert torch.equal(found[[0, 2]], x_RM[[0, 2]])


def test_a_row_travels_as_its_width_and_four_bytes() -> None:
    assert quantized_rows(torch.ones(3, 13)).shape == (3, 17)
    assert there_and_back(torch.ones(2, 3, 4)).shape == (2, 3, 4)
    assert CommDtypes("fp8", "model").shares(60, 2) == (64 / 120, 1.0)


# ---- layers on ranks


class Rounding(CallbackBase):
    """Rounds what is about to be sent, in the place of the wires."""

    def __init__(self, wires: CommDtypes) -> None:
        self._wires = wires

    def before_dispatch_hook(self, args: CallbackArgs) -> torch.Tensor:
        return args.tensor if self._wires.of(args.direction)[0] == "model" else there_and_back(args.tensor)

    def before_combine_hook(self, args: CallbackArgs) -> torch.Tensor:
        return args.tensor if self._wires.of(args.direction)[1] == "model" else there_and_back(args.tensor)


def once(rank: int, world_size: int) -> list[tuple[str, float]]:
    """How far once per node is from itself uncut, and from rows in their own type, as a share of the largest number."""
    with on_nodes(0, 0, 1, 1):
        groups = make_groups(4, 1)
    lanes, found = make_lanes(torch.device("cpu")), []

    def off(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
        # Of the output and the tokens' gradients: those that have come over wires last.
        return max(map(furthest, ours[:2], theirs[:2]))

    for wires in EVERY:
        whole = run_layer(Case((1, 1), k=4), groups, lanes, True, alltoall="node_deduplicated", wires=wires)
        full = run_layer(Case((1, 1), k=4), groups, lanes, True, alltoall="node_deduplicated")
        for degrees in ((3, 2), (2, 5)):
            cut = run_layer(Case(degrees, k=4), groups, lanes, True, alltoall="node_deduplicated", wires=wires)
            found.append(("uncut", off(cut, whole)))
        found.append((f"{wires.dispatch} {wires.combine}", off(whole, full)))
    lanes.close()
    return found


def test_once_per_node_a_row_means_the_same_in_every_chunk_and_is_as_near_as_its_bits(tmp_path: Path) -> None:
    for found in run_on_ranks(once, 4, tmp_path):
        assert all(off < 1e-12 for name, off in found if name == "uncut")
        errors = {name: off for name, off in found if name != "uncut"}
        assert errors.pop("model model") == 0.0
        assert all(1e-4 < off < 0.15 for off in errors.values()), errors


@contextmanager
def noting_messages() -> Iterator[list[bytes]]:
    """Note the bytes of every message of rows that leaves in an all-to-all."""
    sent: list[bytes] = []
    send = dist.all_to_all_single

    def noted(y: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dim() == 2 and (x.dtype == torch.uint8 or x.is_floating_point()):
            sent.append(bytes(x.contiguous().view(torch.uint8).flatten().tolist()))
        return send(y, x, *args, **kwargs)

    with patch.object(dist, "all_to_all_single", noted):
        yield sent


def converting_where_they_send(replaced: pytest.MonkeyPatch) -> None:
    """Let what sends rows of layers in their own type convert them, as part of its task."""

    def around(send: Any, rows_at: int) -> Any:
        def converting(*args: Any) -> Any:
            x_RM = args[rows_at]
            if x_RM.dim() != 2 or x_RM.shape[1] != WIDTH or not x_RM.is_floating_point():
                return send(*args)
            given = (*args[:rows_at], quantized_rows(x_RM), *args[rows_at + 1 :])
            return dequantized_rows(send(*given), x_RM.dtype, x_RM.shape[1:])

        return converting

    replaced.setattr(Collectives, "send_rows", around(Collectives.send_rows, 1))
    for name in ("exchange_between", "exchange_inside"):
        replaced.setattr(NodeLinks, name, around(getattr(NodeLinks, name), 1))


CUTS = [
    Case((1, 1), dtype=torch.bfloat16),
    Case((3, 2), k=4),
    Case((4, 3), links="shared", recompute=True, expert=mixtral),
    Case((2, 2), links="reduce_first", tokens=(0, 7, 0, 5)),
]


def can_be(number: int, alltoall: str, conversions: str, overlap: bool, wires: CommDtypes) -> bool:
    # Once per node, sums are rounded as well, which no hook sees.
    return wires == BOTH or (wires != FULL and alltoall != "node_deduplicated")


def on_the_wire(rank: int, world_size: int, esp: int) -> list[str]:
    with on_nodes(0, 0, 1, 1):
        groups = make_groups(4 // esp, esp)
    serial, lanes, found = make_lanes(torch.device("cpu"), overlap=False), make_lanes(torch.device("cpu")), []
    names = registry.known("alltoall") if esp == 1 else ("flat",)
    ways = covering(range(len(CUTS)), names, ("links", "compute"), (False, True), EVERY, allowed=can_be)
    for number, alltoall, conversions, overlap, wires in ways:
        name = f"{CUTS[number]}, {wires}, {alltoall}, conversions on {conversions}{', overlapped' * overlap}"
        how = {"alltoall": alltoall, "wires": wires, "conversions": conversions}
        with noting_messages() as sent:
            ours = run_layer(CUTS[number], groups, lanes if overlap else serial, True, **how)
        if wires != BOTH:
            wanted = run_layer(CUTS[number], groups, serial, True, callbacks=(Rounding(wires),))
            found += [f"{name}: {each}" for each in differences(ours, wanted, 1e-12)]
            continue
        # An all-to-all in two parts brings the rows of the flat one.
        ahead = "flat" if alltoall == "2dh" else alltoall
        with noting_messages() as wanted_bytes, pytest.MonkeyPatch.context() as replaced:
            converting_where_they_send(replaced)
            results = run_layer(CUTS[number], groups, serial, True, alltoall=ahead)
        if not all(map(torch.equal, ours, results)):
            found.append(f"{name}: another result")
        if alltoall != "2dh" and sorted(sent) != sorted(wanted_bytes):
            found.append(f"{name}: other bytes")
        if alltoall != "2dh" and not overlap and conversions == "links" and sent != wanted_bytes:
            found.append(f"{name}: another order")
    lanes.close()
    return found


@pytest.mark.parametrize("esp", [1, 2])
def test_every_byte_on_the_wire_and_every_number_is_that_of_conversions_inside_the_links_tasks(
    esp: int, tmp_path: Path
) -> None:
    assert [each for found in run_on_ranks(on_the_wire, 4, tmp_path, esp) for each in found][:3] == []


# ---- in a config


def test_wires_are_written_as_one_word_or_two() -> None:
    for written, wanted in (("fp8", BOTH), ({"dispatch": "fp8"}, CommDtypes("fp8"))):
        wires = read_block({"fsmoe": {"enabled": True, "comm_dtype": written}}).wires
        assert (wires.dispatch, wires.combine) == (wanted.dispatch, wanted.combine)
    with pytest.raises(ConfigError, match=r"fsmoe\.comm_dtype\.combine = \"fp4\": unknown value; did you mean 'fp8'"):
        read_block({"fsmoe": {"enabled": True, "comm_dtype": {"combine": "fp4"}}})


def losses(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    case = Training(2, 0, "fp32", 2, 2, False)
    for name, block in (
        ("model", {"dispatch": "unpadded"}),
        ("fp8", {"dispatch": "unpadded", "comm_dtype": "fp8"}),
        ("slots", {"dispatch": "padded", "comm_dtype": "fp8"}),
        ("in slots", {"dispatch": "padded"}),
    ):
        torch.manual_seed(0)
        said: list[str] = []
        with patch("ds_fsmoe.layer.runtime.log_on_rank_0", lambda sentence, *_, said=said: said.append(sentence)):
            engine = small_engine(case, rank, block)
        of_run = train_steps(engine, rank, range(3))
        engine.destroy()
        found[name] = of_run, sum("fsmoe.comm_dtype" in each for each in said)
    return found


def test_training_goes_on_nearly_as_before_and_slots_say_that_they_stay_wide(tmp_path: Path) -> None:
    for found in run_on_ranks(losses, 2, tmp_path):
        (model, _), (fp8, said_of_rows) = found["model"], found["fp8"]
        assert fp8 != model
        assert fp8 == pytest.approx(model, rel=0.05)
        assert found["slots"][0] == found["in slots"][0]
        assert (said_of_rows, found["slots"][1], found["in slots"][1]) == (0, 1, 0)
