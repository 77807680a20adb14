# SPDX-License-Identifier: Apache-2.0
"""Lina's own decisions: what is expected of experts by the paths of tokens, the ranks that they get for it, and how
many share a rank."""

from __future__ import annotations

import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from ds_fsmoe.planning.lina.expert_ranks import differs, num_top, ranks_of_experts, top_experts
from ds_fsmoe.planning.lina.packing import pack, packings
from ds_fsmoe.planning.lina.popularity import PathProfile


def tokens(seed: int, num_tokens: int, length: int, num_experts: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Paths [S, length] and choices [S, k] that depend on them, with numbers for none among both."""
    draw = np.random.default_rng(seed)
    paths = draw.integers(0, num_experts + 1, (num_tokens, length)) // draw.integers(1, 3, (num_tokens, length))
    choices = (paths.sum(1, keepdims=True) + draw.integers(0, 3, (num_tokens, k))) % (num_experts + 1)
    return paths, choices


def by_loops(
    counted: list[tuple[np.ndarray, np.ndarray]], asked_SL: np.ndarray, k: int, num_experts: int, most: int
) -> list[float]:
    """The popularity of each expert, token by token out of dictionaries."""
    counts: dict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for paths, choices in counted:
        for path, chosen in zip(paths.tolist(), choices.tolist(), strict=True):
            whole = [num_experts] * (most - len(path)) + path
            for expert in chosen:
                if 0 <= expert < num_experts:
                    for length in range(most + 1):
                        counts[tuple(whole[most - length :])][expert] += 1
    found = [0.0] * num_experts
    for path in asked_SL.tolist():
        if path and path[-1] == num_experts:
            continue
        whole = [num_experts] * (most - len(path)) + path
        lengths = range(most, 0, -1) if path else ()
        known = next((whole[most - length :] for length in lengths if counts[tuple(whole[most - length :])]), [])
        of_path = counts[tuple(known)]
        best = sorted(of_path.items(), key=lambda each: (-each[1], each[0]))[: k if known else None]
        for expert, count in best:
            found[expert] += count / sum(of_path.values())
    return found


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("length", [0, 1, 2, 3])
def test_the_estimate_is_that_of_plain_dictionaries(length: int, k: int) -> None:
    # Of other tokens, of whose paths some or all were never seen, or nothing was counted at all; and of no tokens.
    for num_tokens in (0, 3, 211):
        profile = PathProfile(7, 3)
        counted = [tokens(seed, num_tokens, length, 7, k) for seed in range(3)]
        for each in counted:
            profile.add(*each)
        asked, _ = tokens(9, 101, length, 7, k)
        assert profile.estimate(asked, k) == pytest.approx(by_loops(counted, asked, k, 7, 3), rel=1e-12)
        assert profile.estimate(asked[:0], k).tolist() == [0] * 7


def test_profiles_of_ranks_add_up_to_that_of_all_tokens_and_are_the_same_after_they_were_stored() -> None:
    parts, whole = [PathProfile(11, 3) for _ in range(3)], PathProfile(11, 3)
    for seed, part in enumerate(parts):
        part.add(*tokens(seed, 97, 3, 11, 2))
        whole.add(*tokens(seed, 97, 3, 11, 2))
    merged = PathProfile.merged(parts)
    asked, more = tokens(5, 50, 3, 11, 2)
    for each in (merged, PathProfile.from_arrays(whole.as_arrays())):
        assert (each.estimate(asked, 2) == whole.estimate(asked, 2)).all()
        assert each.num_counted == whole.num_counted
        assert each.num_paths == whole.num_paths > 1
        each.add(asked, more)
        assert each.num_counted > whole.num_counted
    for others in ([PathProfile(4), PathProfile(5)], []):
        with pytest.raises(ValueError, match="must be of one layer"):
            PathProfile.merged(others)


WRONG = {
    "pairs": [np.array([3, 3, 4]), np.array([-1, 3, 4]), np.array([1, 2, 10**6]), np.zeros((1, 3))],
    "counts": [np.array([1, 0, 1]), np.array([1, 1]), np.array([0.5, 1, 1]), np.array([1, 1, 9])],
    "experts": [np.array([1, 1]), np.array([0, 0, 0, 0])],
    "num_experts": [0, "4", 3.0, True],
    "path_length": [-1, None, 40],
}


@pytest.mark.parametrize("name", WRONG)
def test_arrays_of_another_kind_are_refused(name: str) -> None:
    arrays = {"num_experts": 4, "path_length": 1, "pairs": np.array([1, 6, 19]), "counts": np.array([1, 1, 1])}
    arrays["experts"] = np.array([0, 1, 1, 1])
    assert PathProfile.from_arrays(arrays).num_counted == 3
    for value in WRONG[name]:
        with pytest.raises(ValueError, match=r"profile of paths|must be at least|more paths"):
            PathProfile.from_arrays(arrays | {name: value})
    with pytest.raises(ValueError, match=f"a profile of paths lacks {name}"):
        PathProfile.from_arrays({each: value for each, value in arrays.items() if each != name})


def test_paths_and_choices_of_other_shapes_are_refused() -> None:
    profile = PathProfile(4, 2)
    for paths, choices in (((3, 3), (3, 1)), ((3, 2), (2, 1)), ((3, 2), (3,))):
        with pytest.raises(ValueError, match=r"must be|numbers outside"):
            profile.add(np.zeros(paths, int), np.zeros(choices, int))
    for number in (5, -1):
        with pytest.raises(ValueError, match=r"must be|numbers outside"):
            profile.add(np.full((3, 2), number), np.zeros((3, 1), int))
    with pytest.raises(ValueError, match="k = 0"):
        profile.estimate(np.zeros((1, 1), int), 0)
    with pytest.raises(ValueError, match="2\\^63"):
        PathProfile(511, 7)


def test_of_too_many_paths_the_rarer_ones_go_and_the_counts_of_experts_stay() -> None:
    profile = PathProfile(16, 2, most_pairs=10)
    profile.add(np.array([[1, 2]] * 5 + [[3, 4]] * 3), np.array([[7]] * 5 + [[8]] * 3))
    profile.add(np.array([[each, each] for each in range(16)]), np.array([[0]] * 16))
    assert profile.num_paths == 5
    assert profile.estimate(np.array([[1, 2]]), 1)[7] == profile.estimate(np.array([[3, 4]]), 1)[8] == 1
    assert profile.num_counted == 24
    PathProfile.from_arrays(profile.as_arrays())


def loads_of(ranks: tuple[tuple[int, ...], ...], popularity: np.ndarray) -> list[float]:
    """The load of each rank over the mean, where rows of an expert are dealt out evenly."""
    copies = Counter(expert for experts in ranks for expert in experts)
    loads = [sum(popularity[expert] / copies[expert] for expert in experts) for experts in ranks]
    return [each * len(ranks) / sum(popularity) for each in loads]


@pytest.mark.parametrize("most", [1, 4, 9])
@pytest.mark.parametrize(("num_experts", "num_ranks"), [(1, 1), (4, 4), (7, 3), (64, 4), (2, 5), (30, 1)])
def test_every_expert_is_somewhere_and_no_rank_has_more_than_it_may(
    num_experts: int, num_ranks: int, most: int
) -> None:
    for seed in range(20):
        draw = np.random.default_rng(seed)
        popularity = draw.integers(0, 5, num_experts) ** draw.integers(0, 6)
        ranks = ranks_of_experts(popularity, num_ranks, most)
        assert len(ranks) == num_ranks
        assert set().union(*ranks) == set(range(num_experts))
        assert all(list(each) == sorted(set(each)) for each in ranks)
        assert max(map(len, ranks)) <= max(most, 2 * -(-num_experts // num_ranks))
        # Only proportions count.
        assert ranks_of_experts(popularity * 2.0**900, num_ranks, most) == ranks


def test_unpopular_experts_are_packed_on_few_ranks_and_ranks_keep_what_they_have_where_loads_are_the_same() -> None:
    assert (3, 4, 5, 6) in ranks_of_experts(np.array([2, 2, 2, 0.5, 0.5, 0.5, 0.5]), 4)
    assert ranks_of_experts(np.zeros(5), 2) == ((0, 1, 2), (3, 4))
    assert ranks_of_experts(np.zeros(3), 2, now=[(2,), (1, 0)]) == ((2,), (0, 1))
    assert ranks_of_experts(np.ones(6), 3) == ((0, 1), (2, 3), (4, 5))
    now = [(4, 5), (0, 1), (2, 3)]
    assert ranks_of_experts(np.ones(6), 3, now=now) == tuple(now)


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(8, 4), (16, 16), (64, 8), (35, 7)])
def test_loads_are_as_even_as_copies_allow(num_experts: int, num_ranks: int) -> None:
    for seed in range(10):
        popularity = np.random.default_rng(seed).permutation(1 / np.arange(1, num_experts + 1) ** 1.2)
        at_home = tuple(tuple(each.tolist()) for each in np.array_split(np.arange(num_experts), num_ranks))
        assert max(loads_of(at_home, popularity)) > 1.4
        assert max(loads_of(ranks_of_experts(popularity, num_ranks), popularity)) < 1.2


def test_lists_of_top_experts_differ_by_their_members_twice_as_many_as_a_token_chooses() -> None:
    assert top_experts(np.array([2, 5, 5, 1]), 3) == (1, 2, 0)
    assert not differs(np.array([4, 3, 2, 1]), np.array([30, 40, 10, 20]), 2)
    assert differs(np.array([4, 3, 2, 1]), np.array([40, 20, 30, 10]), 2)
    assert [num_top(*each) for each in ((1, 16), (8, 64), (2, 4), (4, 6), (1, 1))] == [2, 16, 2, 3, 1]


def by_loop(experts: int, ranks: int, experts_ms: dict[int, float], alltoall_ms: dict[int, float]) -> int:
    """The number of ranks, as the paper tells it: from the fewest experts per rank on, twice as many each time."""
    while experts_ms[ranks] < alltoall_ms[ranks]:
        if ranks % 2 or experts % (ranks // 2):
            break
        ranks //= 2
    return ranks


@pytest.mark.parametrize("experts", [1, 2, 3, 6, 8, 12, 13, 64])
def test_the_rule_is_that_of_a_loop(experts: int) -> None:
    rng = random.Random(experts)
    for world_size in (1, 2, 3, 4, 6, 8, 12, 16, 31):
        sizes = [each for each in range(1, world_size + 1) if world_size % each == 0 and experts % each == 0]
        for most_ms in (0.0, *[3.0] * 10):
            computed = {each: rng.uniform(0, most_ms) for each in sizes}
            sent = {each: rng.uniform(0, 3) if each > 1 else 0.0 for each in sizes}
            found = pack([experts], sizes, computed.__getitem__, sent.__getitem__)
            assert found.ep_size == by_loop(experts, max(sizes), computed, sent)
            assert found.experts_per_rank(found.ep_size) == (experts // found.ep_size,)
            assert [row.experts_ms for row in found.rows] == [computed[row.ep_size] for row in found.rows]


def test_packing_goes_by_halves_and_times_are_asked_for_no_further_than_the_choice() -> None:
    asked: list[tuple[str, int]] = []

    def experts_ms(ranks: int) -> float:
        asked.append(("experts", ranks))
        return 1.0

    def alltoall_ms(ranks: int) -> float:
        asked.append(("all-to-all", ranks))
        return {16: 4.0, 8: 2.0, 4: 1.0}[ranks]

    assert pack([16], [1, 2, 4, 8, 16], experts_ms, alltoall_ms).ep_size == 4
    assert asked == [(what, ranks) for ranks in (16, 8, 4) for what in ("experts", "all-to-all")]
    for sizes, halves in (([1], (1,)), ([1, 3], (3,)), ([1, 2, 3, 4, 6, 12], (12, 6, 3)), ([4, 16], (16,))):
        assert packings(sizes) == halves


def test_layers_with_different_experts_have_one_number_of_ranks() -> None:
    found = pack([8, 24, 8], [1, 2, 4, 8], lambda ranks: 8.0 / ranks, lambda ranks: 2.0)
    assert (found.num_experts, found.ep_size) == ((8, 24), 4)
    assert found.experts_per_rank(4) == (2, 6)
    lines = str(found.table()).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["1", "or", "3", "8", "1.000", "2.000"],
        ["2", "or", "6", "4", "2.000", "2.000"],
    ]
    assert lines[0].split("  ")[0].strip() == "experts per rank"
