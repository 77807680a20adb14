# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels under ThreadSanitizer, a thread of the host per CUDA thread: no barrier and no atomic is missing.

And none is there in vain: with any of them left out, the race is reported with its lines of the ``.cu`` file.
"""

from __future__ import annotations

import dataclasses
import itertools
import re

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
from tests.ops_cases import assert_same_bits, random_rows, random_slots  # noqa: E402
from tests.samples import sampled  # noqa: E402

KERNEL_FILES = sorted(path.name for path in FOLDER.glob("*.cu"))
# More than one warp in each: of packs of 16 bytes, and of single values.
WIDTHS = {"packs": 328, "values": 37}


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
        lines = (FOLDER / file).read_text().splitlines()
        name, begin = "", 0
        for number, line in enumerate(lines, 1):
            if re.match(r"\S.*\b(\w+)\(", line):  # a function begins in the first column, and ends there
                name, begin = re.match(r"\S.*?\b(\w+)\(", line)[1], number
            if kind := re.search(r"__syncthreads\(\)|\batomic\w+(?=\()", line):
                end = next(after for after in range(number, len(lines) + 1) if lines[after - 1] == "}")
                found.append(Site(file, number, kind[0], name, range(begin, end + 1)))
    return found


SITES = sites()
ONE_BARRIER = next(i for i, site in enumerate(SITES) if site.file == "slots.cu" and site.text == "__syncthreads()")
ONE_ATOMIC = next(i for i, site in enumerate(SITES) if site.file == "slots.cu" and site.text == "atomicAdd")


def take_slots(kernels: Kernels, priority: str, num_tokens: int, num_experts: int = 2, **how) -> None:
    capacity, generator = max(1, num_tokens // 2), torch.Generator().manual_seed(0)
    scores_SE = torch.randn(num_tokens, num_experts, generator=generator).round()
    used_S = torch.rand(num_tokens, generator=generator) < 0.95
    expected = reference.top_k_slots(scores_SE, 2, capacity, used_S, priority)
    case = (expected.experts_KS, num_experts, capacity, used_S, priority, scores_SE, (0, num_experts, 1))
    slots_KS, counts_E = kernels.take_slots(*case, **how)
    assert torch.equal(slots_KS, expected.slots_KS)
    assert torch.equal(counts_E, expected.counts_E)


# A tile of 256 tokens is a block. By choice, few tokens are two tiles.
TAKEN = [("choice", 20), ("choice", 261), ("token", 261), ("score", 261), ("score", 520)]


@pytest.mark.slow
@sampled(("priority", "num_tokens"), TAKEN, kept=[0])
def test_slots_are_taken_without_a_race(priority: str, num_tokens: int) -> None:
    take_slots(build("slots.cu", RACING), priority, num_tokens)


@pytest.mark.slow
@pytest.mark.parametrize("num_experts", [3, 33])
def test_experts_are_chosen_without_a_race(num_experts: int) -> None:
    scores_SE = random_rows(19, num_experts, torch.float32)
    experts_KS = build("slots.cu", RACING).choose(scores_SE, 3)
    assert torch.equal(experts_KS, scores_SE.topk(3).indices.t())


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "wire"), list(itertools.product(DTYPES, DTYPES)), ids=str)
@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_rows_are_moved_without_a_race(dtype: torch.dtype, wire: torch.dtype, width: int) -> None:
    kernels, (num_tokens, num_choices, num_slots) = build("rows.cu", RACING), (3, 2, 5)
    slots_KS = random_slots(num_tokens, num_choices, num_slots)
    x_SM, y_NM = random_rows(num_tokens, width, dtype), random_rows(num_slots, width, dtype)
    weights_KS = random_rows(num_choices, num_tokens, torch.float32, 2)
    arranged_NM = kernels.arrange(x_SM, slots_KS, num_slots, wire)
    assert_same_bits(arranged_NM, reference.arrange(x_SM, slots_KS, num_slots, wire))
    restored_SM = kernels.restore(y_NM, slots_KS, weights_KS, wire)
    assert_same_bits(restored_SM, reference.restore(y_NM, slots_KS, weights_KS, wire))
    kernels.restore_backward(random_rows(num_tokens, width, wire, 3), y_NM, slots_KS, weights_KS)


def call_without(site: Site) -> Ended:
    """How the smallest call ends that comes by there, if what is there is left out."""
    kernels = build(site.file, RACING)
    if site.file == "rows.cu":
        slots_KS = torch.arange(6).view(2, 3)
        y_NM, d_out_SM = (random_rows(rows, WIDTHS["packs"], torch.float32) for rows in (6, 3))
        call = kernels.restore_backward
        inputs = (d_out_SM, y_NM, slots_KS, torch.ones(2, 3))
    else:
        priority, num_tokens = {"count_kernel": ("choice", 20), "place_kernel": ("token", 40)}.get(
            site.function, ("score", 300)
        )
        # Of those 40, every other one chooses an expert twice.
        first_S, each = torch.arange(num_tokens), 2 if priority == "token" else 1
        experts_KS = torch.stack((first_S % 2, (first_S + 1) // each % 2))
        scores_KS = random_rows(2, num_tokens, torch.float32)
        call = kernels.take_slots
        inputs = (experts_KS, 2, 100, None, priority, scores_KS, (num_tokens, 1, 0))
    with pytest.MonkeyPatch.context() as patch:
        ended: list[Ended] = []
        run = Kernels.end
        patch.setattr(Kernels, "end", lambda *given, **how: ended.append(run(*given, **how)) or ended[-1])
        with pytest.raises(AssertionError):
            call(*inputs, leave_out=site.line)
    return ended[-1]


@sampled("site", SITES, kept=[ONE_BARRIER, ONE_ATOMIC], ids=str)
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
    assert {site.function for site in SITES} >= {"count_kernel", "place_kernel", "select_kernel"}
    known = re.findall(
        r"__syncthreads\(\)|\batomic\w+\(|__syncwarp|__threadfence|\bcuda::\w+",
        "".join(re.sub(r"//.*", "", (FOLDER / file).read_text()) for file in KERNEL_FILES),
    )
    assert len(known) == len(SITES), "one per line, of a kind that the emulation knows"
    assert (REPOSITORY / "tests/emulated_cuda/threads.h").is_file()
