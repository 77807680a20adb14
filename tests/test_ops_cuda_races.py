# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels under ThreadSanitizer, a thread of the host per CUDA thread: no barrier and no atomic is missing.

And none is there in vain: with any of them left out, the race is reported with its lines of the ``.cu`` file.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from ds_fsmoe.ops import reference  # noqa: E402
from tests.emulated_kernels import (  # noqa: E402
    DTYPES,
    FOLDER,
    RACING,
    REPOSITORY,
    SANITIZED_STATUS,
    Ended,
    Kernels,
    build,
)
from tests.ops_cases import assert_same_bits, random_rows, random_slots, segments_of  # noqa: E402
from tests.samples import sampled  # noqa: E402

pytestmark = pytest.mark.long

KERNEL_FILES = sorted(path.name for path in FOLDER.glob("*.cu"))
# More than one warp in each: of packs of 16 bytes, and of single values.
WIDTHS = {"packs": 328, "values": 37}


# A function begins in the first column, and ends there.
FUNCTION = re.compile(r"^(?=\S)[^;{}/#]*?\b(?!__launch_bounds__)(\w+)\([^;{}]*\) \{$", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Site:
    """A barrier or an atomic in a file of kernels."""

    file: str
    line: int
    text: str
    function: str
    body: range  # the lines of the function

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.text}"


def sites() -> list[Site]:
    found = []
    for file in KERNEL_FILES:
        text = (FOLDER / file).read_text()
        lines = text.splitlines()
        for head in FUNCTION.finditer(text):
            begin = text.count("\n", 0, head.start(1)) + 1
            body = range(begin, lines.index("}", begin) + 2)
            for number in body:
                if kind := re.search(r"__syncthreads\(\)|\batomic\w+(?=\()", lines[number - 1]):
                    found.append(Site(file, number, kind[0], head[1], body))
    return found


SITES = sites()


def build_slots() -> Kernels:
    """Rounds of two experts: few threads come by what lies between two rounds."""
    return build("slots.cu", RACING, ("kExpertsAtOnce = 1024;", "kExpertsAtOnce = 2;"))


def take_slots(priority: str, num_tokens: int) -> None:
    num_experts = 3
    capacity, generator = max(1, num_tokens // 2), torch.Generator().manual_seed(0)
    scores_SE = torch.randn(num_tokens, num_experts, generator=generator).round()
    used_S = torch.rand(num_tokens, generator=generator) < 0.95
    expected = reference.top_k_slots(scores_SE, 2, capacity, used_S, priority)
    case = (expected.experts_KS, num_experts, capacity, used_S, priority, scores_SE, (0, num_experts, 1))
    slots_KS, counts_E = build_slots().take_slots(*case)
    assert torch.equal(slots_KS, expected.slots_KS)
    assert torch.equal(counts_E, expected.counts_E)


def number_rows(num_segments: int | None, capacity: int) -> None:
    num_tokens, num_experts = 261, 3
    choices_KS = torch.randint(-2, 3 * capacity + 3, (2, num_tokens), generator=torch.Generator().manual_seed(0))
    segments_3T = None if num_segments is None else segments_of(num_tokens, num_segments)
    decision = choices_KS, num_experts, capacity, segments_3T, torch.ones(num_experts, dtype=torch.int64)
    found, expected = build_slots().number_rows(*decision), reference.number_rows(*decision)
    assert all(map(torch.equal, found, expected))
    assert int(expected.fault) == (3 if capacity else 1)


def choose(num_experts: int) -> None:
    scores_SE = random_rows(19, num_experts, torch.float32)
    assert torch.equal(build_slots().choose(scores_SE, 3), scores_SE.topk(3).indices.t())


def move_rows(dtype: torch.dtype, wire: torch.dtype, width: int) -> None:
    kernels, (num_tokens, num_choices, num_slots) = build("rows.cu", RACING), (3, 2, 5)
    slots_KS = random_slots(num_tokens, num_choices, num_slots)
    x_SM, y_NM = random_rows(num_tokens, width, dtype), random_rows(num_slots, width, dtype)
    weights_KS = random_rows(num_choices, num_tokens, torch.float32, 2)
    arranged_NM = kernels.arrange(x_SM, slots_KS, num_slots, wire)
    assert_same_bits(arranged_NM, reference.arrange(x_SM, slots_KS, num_slots, wire))
    for by_slot in (False, True):
        restored_SM = kernels.restore(y_NM, slots_KS, weights_KS, wire, by_slot=by_slot)
        assert_same_bits(restored_SM, reference.restore(y_NM, slots_KS, weights_KS, wire, by_slot))
    kernels.restore_backward(random_rows(num_tokens, width, wire, 3), y_NM, slots_KS, weights_KS)


def multiply() -> None:
    x_RF, dh_RH = (random_rows(3, width, torch.bfloat16) for width in (2 * WIDTHS["packs"], WIDTHS["packs"]))
    dx_RF, h_RH = build("gated.cu", RACING).gated(x_RF, dh_RH, "silu", True, 0.0, 0.0)
    torch.testing.assert_close((dx_RF, h_RH), reference.gated_backward(x_RF, dh_RH, "silu", True))


# A tile of 256 tokens is a block. By choice, few tokens are two tiles.
TAKEN = [("choice", 20), ("choice", 261), ("token", 261), ("score", 261), ("score", 520)]
CALLS = [partial(take_slots, *each) for each in TAKEN]
CALLS += [partial(number_rows, *each) for each in itertools.product((None, 3), (0, 2))]
CALLS += [partial(choose, each) for each in (3, 33)] + [multiply]
CALLS += [partial(move_rows, *each) for each in itertools.product(DTYPES, DTYPES, WIDTHS.values())]


@pytest.mark.daily("kernels without a race", 3)
@pytest.mark.parametrize("call", CALLS, ids=lambda each: str(getattr(each, "func", each).__name__))
def test_kernels_compute_without_a_race(call: Callable[[], None]) -> None:
    call()


def call_without(site: Site) -> Ended:
    """How the smallest call ends that comes by there, if what is there is left out."""
    how = {"leave_out": site.line}
    if site.file == "rows.cu":
        kernels, weights_KS = build("rows.cu", RACING), torch.ones(2, 3)
        # The second choice of each token has the earlier slot.
        slots_KS = torch.arange(6).view(2, 3).flip(0)
        y_NM, d_out_SM = (random_rows(rows, WIDTHS["packs"], torch.float32) for rows in (6, 3))
        call, inputs = kernels.restore, (y_NM, slots_KS, weights_KS, torch.float32)
        if site.function == "restore_backward_kernel":
            call, inputs = kernels.restore_backward, (d_out_SM, y_NM, slots_KS, weights_KS)
        else:
            how["by_slot"] = True
    elif site.function in ("count_kernel", "ends_kernel"):
        # Two tiles; many choices of each are out of range, and more than one expert has too many.
        tokens_S = torch.arange(40)
        choices_KS = torch.stack((tokens_S % 3, -(tokens_S % 2)))
        call = build_slots().number_rows
        inputs = (choices_KS, 3, 1, segments_of(len(tokens_S), 2), torch.ones(3, dtype=torch.int64))
    else:
        priority, num_tokens = ("token", 40) if site.function == "place_kernel" else ("score", 300)
        # Of those 40, every other one chooses an expert twice.
        first_S, each = torch.arange(num_tokens), 2 if priority == "token" else 1
        experts_KS = torch.stack((first_S % 2, (first_S + 1) // each % 2))
        scores_KS = random_rows(2, num_tokens, torch.float32)
        call = build_slots().take_slots
        inputs = (experts_KS, 3, 100, None, priority, scores_KS, (num_tokens, 1, 0))
    with pytest.MonkeyPatch.context() as patch:
        ended: list[Ended] = []
        run = Kernels.end
        patch.setattr(Kernels, "end", lambda *given, **how: ended.append(run(*given, **how)) or ended[-1])
        # Some races need the right turns of threads; each call has others.
        for _ in range(40):
            with suppress(AssertionError):
                call(*inputs, **how)
            if ended[-1].status == SANITIZED_STATUS:
                break
    return ended[-1]


@sampled("site", SITES, drawn=2, ids=str)
def test_without_any_barrier_or_atomic_a_race_is_reported_with_its_lines(site: Site) -> None:
    ended = call_without(site)
    assert ended.status == SANITIZED_STATUS, f"no race without {site}: is it needed? {ended.stderr}"
    report = ended.stderr.split("WARNING: ThreadSanitizer: data race")[1].split("Location is")[0]
    accesses = re.split(r"\n\s*\n", report)[:2]
    for access in accesses:
        named = {int(line) for line in re.findall(rf"{re.escape(site.file)}:(\d+)", access)}
        assert named & set(site.body), f"no line of {site.function} in {access}"
    if site.text != "__syncthreads()":
        assert f"{site.file}:{site.line}" in report


def test_there_are_barriers_and_atomics_to_leave_out() -> None:
    assert {"__syncthreads()", "atomicAdd", "atomicOr"} <= {site.text for site in SITES}
    functions = {"count_kernel", "place_kernel", "select_kernel", "ends_kernel", "restore_kernel", "order_by_slot"}
    assert {site.function for site in SITES} >= functions
    known = re.findall(
        r"__syncthreads\(\)|\batomic\w+\(|__syncwarp|__threadfence|\bcuda::\w+",
        "".join(re.sub(r"//.*", "", (FOLDER / file).read_text()) for file in KERNEL_FILES),
    )
    assert len(known) == len(SITES), "one per line, of a kind that the emulation knows"
    assert (REPOSITORY / "tests/emulated_cuda/threads.h").is_file()
