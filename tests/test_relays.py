# SPDX-License-Identifier: Apache-2.0
"""Hierarchical all-to-alls on paper: where blocks go, and what each rank sends, played without a network."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from ds_fsmoe import registry
from ds_fsmoe.components.hierarchical import BlockPaths, HierarchicalAllToAll, Hop, Nodes

NAMES = [
    name for name in registry.known("alltoall") if issubclass(registry.lookup("alltoall", name), HierarchicalAllToAll)
]
LARGER = [(0, 0, 0, 1, 1, 1), (0, 1, 1, 2, 2, 2), (0, 1, 2, 0, 1, 0, 2), (0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 1, 2) * 3]


def every_shape(size: int) -> Iterator[tuple[int, ...]]:
    """All ways in which so many ranks can lie on nodes."""
    for nodes in itertools.product(range(size), repeat=size):
        if Nodes.of(nodes).node_of_rank == nodes:
            yield nodes


SHAPES = [*(shape for size in range(1, 6) for shape in every_shape(size)), *LARGER]


def made(name: str) -> HierarchicalAllToAll:
    return registry.lookup("alltoall", name)()


def play(relays: BlockPaths, inputs: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    """What ranks hold in the end that begin with these blocks."""
    held = inputs
    for step in range(len(relays.links)):
        hops = {rank: relays.hop(step, rank) for rank in range(relays.nodes.size)}
        part_of = {rank: part for part in relays.parts(step) for rank in part}
        mail: dict[tuple[int, int], list] = {}
        for rank, hop in hops.items():
            assert sorted(hop.pack) == list(range(len(held[rank]))), "every block is sent, and once"
            packed = iter([held[rank][index] for index in hop.pack])
            for other, count in zip(part_of[rank], hop.sends, strict=True):
                mail[rank, other] = list(itertools.islice(packed, count))
        held = []
        for rank, hop in hops.items():
            parcels = [mail[other, rank] for other in part_of[rank]]
            assert tuple(map(len, parcels)) == hop.receives
            received = [block for parcel in parcels for block in parcel]
            held.append([received[index] for index in hop.unpack])
    return held


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_block_arrives_on_nodes_of_every_shape(name: str, back: bool) -> None:
    assert len(SHAPES) == 1 + 2 + 5 + 15 + 52 + len(LARGER)
    for shape in SHAPES:
        size = len(shape)
        relays = BlockPaths(made(name), Nodes.of(shape), back)
        inputs = [[(rank, other) for other in range(size)] for rank in range(size)]
        assert play(relays, inputs) == [[(other, rank) for other in range(size)] for rank in range(size)], shape


@pytest.mark.parametrize("name", NAMES)
def test_the_way_back_has_the_steps_and_the_parts_of_the_way_in_from_last_to_first(name: str) -> None:
    for shape in SHAPES:
        there, back = (BlockPaths(made(name), Nodes.of(shape), each) for each in (False, True))
        steps = range(len(there.links))
        assert back.links == there.links[::-1]
        assert [back.parts(step) for step in steps] == [there.parts(step) for step in steps][::-1]
        for step, rank in itertools.product(steps, range(len(shape))):
            one, other = there.hop(step, rank), back.hop(len(steps) - 1 - step, rank)
            assert (one.sends, one.receives) == (other.receives, other.sends)


def messages_between_nodes(relays: BlockPaths) -> Counter:
    """(sender, receiver) -> blocks, over all steps between nodes."""
    found: Counter = Counter()
    for step, link in enumerate(relays.links):
        for part in relays.parts(step) if link == "inter" else ():
            for rank in part:
                for other, count in zip(part, relays.hop(step, rank).sends, strict=True):
                    found[rank, other] += count if other != rank else 0
    return +found


@pytest.mark.parametrize("name", NAMES)
def test_blocks_cross_between_nodes_only_where_they_have_to_in_steps_that_join_no_neighbours(name: str) -> None:
    for shape in SHAPES:
        nodes = Nodes.of(shape)
        relays = BlockPaths(made(name), nodes)
        # No block crosses that need not.
        assert messages_between_nodes(relays).total() == sum(one != other for one in shape for other in shape)
        for step, link in enumerate(relays.links):
            for part in relays.parts(step):
                assert link == "inter" or len({shape[rank] for rank in part}) == 1
                for rank in part if link == "inter" else ():
                    hop = relays.hop(step, rank)
                    met = {other for other, count in zip(part, hop.sends, strict=True) if count and other != rank}
                    assert all(shape[other] != shape[rank] for other in met)


def test_1dh_sends_one_message_from_node_to_node_and_2dh_one_from_each_rank() -> None:
    nodes = Nodes.of((0, 0, 0, 1, 1, 1, 2, 2, 2))
    assert messages_between_nodes(BlockPaths(made("1dh"), nodes)) == dict.fromkeys(
        itertools.permutations((0, 3, 6), 2), 9
    )
    equals = [itertools.permutations(range(local, 9, 3), 2) for local in range(3)]
    assert messages_between_nodes(BlockPaths(made("2dh"), nodes)) == {pair: 3 for each in equals for pair in each}
    one, two = (BlockPaths(made(name), Nodes.of((0, 0, 0, 1, 1, 1))) for name in ("1dh", "2dh"))
    assert one.parts(0) == one.parts(2) == two.parts(0) == ((0, 1, 2), (3, 4, 5))
    assert one.parts(1) == ((0, 3), (1,), (2,), (4,), (5,))
    assert two.parts(1) == ((0, 3), (1, 4), (2, 5))


def test_blocks_that_lie_in_order_already_as_behind_2dh_on_neighbours_are_not_copied() -> None:
    for shape in ((0, 0, 1, 1), (0, 0, 0, 1, 1, 1), (0, 1, 1, 2, 2, 2)):
        relays = BlockPaths(made("2dh"), Nodes.of(shape))
        assert {relays.hop(1, rank).unpack for rank in range(len(shape))} == {tuple(range(len(shape)))}
    blocks = torch.arange(12.0).reshape(4, 3)
    stays = Hop("intra", (0, 1, 2, 3), (4,), (4,), (0, 1, 2, 3))
    turned = Hop("intra", (2, 3, 0, 1), (4,), (4,), (1, 0, 2, 3))
    assert stays.go(blocks, None) is blocks
    assert torch.equal(turned.go(blocks, None), blocks[[3, 2, 0, 1]])


@pytest.mark.parametrize(
    ("links", "over", "sentence"),
    [
        (("intra", "inter"), None, r"Wrong sends blocks of rank 0 to rank 2 over \[2\]: from 0 to 2 on an intra"),
        (("inter", "inter"), None, "from 0 to 1 on an inter link, but they are on one node"),
        (("intra", "inter", "intra"), None, r"over \[0\]: its links need 2 of the 4 ranks"),
        (("intra", "inter"), 4, r"over \[4\]: its links need 1 of the 4 ranks"),
        (("wire", "inter"), None, r"Wrong.links = \('wire', 'inter'\): must be some of \('intra', 'inter'\)"),
        ((), None, r"Wrong.links = \(\): must be some of"),
    ],
)
def test_an_algorithm_that_contradicts_itself_is_refused(
    links: tuple[str, ...], over: int | None, sentence: str
) -> None:
    class Wrong(HierarchicalAllToAll):
        def forwarding_ranks(self, source: int, destination: int, nodes: Nodes) -> tuple[int, ...]:
            return (destination if over is None else over,)

    Wrong.links = links
    with pytest.raises(ValueError, match=sentence):
        BlockPaths(Wrong(), Nodes.of((0, 0, 1, 1)))
