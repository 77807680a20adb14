# SPDX-License-Identifier: Apache-2.0
"""What the CUDA kernels compute, checked where there is no GPU: the same sources, on emulated CUDA, on the CPU.

AddressSanitizer and UndefinedBehaviorSanitizer watch: wrong indices, reads and writes outside of tensors and of shared
memory, misaligned vectors and overflows are reported with their lines. Under ThreadSanitizer, with a thread of the host
for each of CUDA's, no barrier and no atomic is missing, and none is there in vain. Speed only a GPU can show.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from ds_fsmoe.ops import reference  # noqa: E402
from tests.covering import covering  # noqa: E402
from tests.emulated_kernels import (  # noqa: E402
    CHECKED,
    DTYPES,
    FOLDER,
    PRIORITIES,
    RACING,
    SANITIZED_STATUS,
    Behind,
    Ended,
    Kernels,
    build,
)
from tests.ops_cases import assert_same_bits, random_rows, random_slots, segments_of  # noqa: E402
from tests.samples import sampled  # noqa: E402

pytestmark = pytest.mark.long

# (S, M, K, N); widths that go in vectors of 16 bytes and others, and more than one round of the block's threads.
SHAPES_SMKN = [(1, 1, 1, 1), (7, 16, 2, 29), (11, 67, 5, 17), (3, 1064, 3, 7), (3, 2113, 1, 5), (5, 8, 3, 3)]
# Nothing at all of one kind.
SHAPES_SMKN += [(0, 5, 2, 7), (5, 7, 3, 0), (5, 0, 1, 3), (5, 8, 0, 3)]
# (S, E, k, C); more than one tile of 256 tokens, more experts than a warp has lanes, k = E.
SHAPES_SEkC = [(1, 1, 1, 1), (13, 3, 2, 3), (300, 7, 2, 37), (263, 67, 3, 5), (17, 37, 37, 7), (523, 3, 3, 523)]


CASES = covering(SHAPES_SMKN, DTYPES, DTYPES)
# Of each shape one, and of each pair of types about every other one.
ONE_OF_EACH_SHAPE = [next(at for at, case in enumerate(CASES) if case[0] == shape) for shape in SHAPES_SMKN]
SLOT_CASES = list(itertools.product(SHAPES_SEkC, PRIORITIES))


@sampled(("shape_SMKN", "dtype", "out_dtype"), CASES, kept=ONE_OF_EACH_SHAPE, drawn=2, ids=str)
def test_rows_are_arranged_and_restored_as_by_the_reference(shape_SMKN, dtype, out_dtype) -> None:
    kernels, (num_tokens, width, num_choices, num_slots) = build("rows.cu", CHECKED), shape_SMKN
    slots_KS, x_SM = random_slots(num_tokens, num_choices, num_slots), random_rows(num_tokens, width, dtype)
    # Rows that do not begin at 16 bytes are moved value by value.
    in_offset_bytes, out_offset_bytes = {7: (4, 0), 5: (0, 4)}.get(num_tokens, (0, 0))
    offset = {"out_offset_bytes": out_offset_bytes}
    arranged_NM = kernels.arrange(Behind(x_SM, in_offset_bytes), slots_KS, num_slots, out_dtype, **offset)
    assert_same_bits(arranged_NM, reference.arrange(x_SM, slots_KS, num_slots, out_dtype))
    y_NM = random_rows(num_slots, width, dtype).requires_grad_()
    # Weights are read where they lie, here token by token, and their gradients lie there too.
    weights_KS = random_rows(num_tokens, num_choices, torch.float32, 2).t().requires_grad_()
    y, d_out_SM = Behind(y_NM, in_offset_bytes), random_rows(num_tokens, width, out_dtype, 3)
    for weights, by_slot in itertools.product((None, weights_KS), (True, False)):
        expected_SM = reference.restore(y_NM, slots_KS, weights, out_dtype, by_slot)
        found_SM = kernels.restore(y, slots_KS, weights, out_dtype, by_slot=by_slot, **offset)
        assert_same_bits(found_SM, expected_SM.detach())
    if 0 in shape_SMKN and num_slots:  # then the bindings return zeros
        return
    expected_SM.backward(d_out_SM)
    for given in ((Behind(d_out_SM, in_offset_bytes), y_NM), (d_out_SM, y)):
        dy_NM, d_weights_KS = kernels.restore_backward(*given, slots_KS, weights_KS, **offset)
        assert_same_bits(dy_NM, y_NM.grad)
        largest = float(d_out_SM.double().abs().sum(1).max() * y_NM.detach().double().abs().max()) if num_slots else 0.0
        torch.testing.assert_close(d_weights_KS, weights_KS.grad, rtol=0, atol=1e-6 * largest)


def assert_takes_slots(case: tuple, scores, strides: tuple[int, int, int], expected, kernels: Kernels) -> None:
    slots_KS, counts_E = kernels.take_slots(*case, scores, strides)
    assert torch.equal(slots_KS, expected.slots_KS)
    assert torch.equal(counts_E, expected.counts_E)


@sampled(("shape_SEkC", "priority"), SLOT_CASES, kept=[8, 10], ids=str)
def test_slots_equal_reference(shape_SEkC: tuple[int, int, int, int], priority: str) -> None:
    num_tokens, num_experts, k, capacity = shape_SEkC
    kernels = build("slots.cu", CHECKED)
    for seed in range(2):
        generator = torch.Generator().manual_seed(seed)
        scores_SE = torch.randn(num_tokens, num_experts, generator=generator)
        scores_SE[::2] = scores_SE[::2].round()  # equal ones
        scores_SE[1::5, 0] = float("nan")
        scores_SE[2::5, -1] = -0.0
        used_S = torch.rand(num_tokens, generator=generator) < 0.8 if seed else None
        expected = reference.top_k_slots(scores_SE, k, capacity, used_S, priority)
        assert torch.equal(kernels.choose(scores_SE, k, seed=seed), expected.experts_KS)
        case = (expected.experts_KS, num_experts, capacity, used_S, priority)
        assert_takes_slots(case, scores_SE, (0, num_experts, 1), expected, kernels)


@pytest.mark.parametrize("priority", PRIORITIES)
def test_choices_made_elsewhere_get_the_same_slots_even_one_expert_twice(priority: str) -> None:
    generator = torch.Generator().manual_seed(0)
    for num_tokens, num_experts, capacity in ((300, 5, 29), (0, 5, 3), (3, 5, 0), (300, 2, 150)):
        experts_KS = torch.randint(-1, num_experts, (3, num_tokens), generator=generator)
        scores_KS = torch.randn(3, num_tokens, generator=generator).round()
        case = (experts_KS, num_experts, capacity, None, priority)
        expected = reference.take_slots(*case, scores_KS)
        assert_takes_slots(case, scores_KS, (num_tokens, 1, 0), expected, build("slots.cu", CHECKED))


# ---- what the sanitizers are for


@pytest.mark.daily("planted faults of kernels", 1)
def test_a_write_beyond_shared_memory_is_reported_with_its_line() -> None:
    planted = ("FSMOE_SHARED(uint32_t[kWarps], warp_counts);", "FSMOE_SHARED(uint32_t[kWarps - 1], warp_counts);")
    experts_KS, scores_KS = torch.zeros(1, 9, dtype=torch.int64), torch.rand(1, 9)
    with pytest.raises(AssertionError, match=r"heap-buffer-overflow[\s\S]*WRITE of size 4[\s\S]*slots\.cu:\d+"):
        build("slots.cu", CHECKED, planted).take_slots(experts_KS, 1, 3, None, "score", scores_KS, (9, 1, 0))


@pytest.mark.daily("planted faults of kernels", 1)
@pytest.mark.parametrize("which", ["load", "store"])
def test_16_bytes_at_a_misaligned_address_are_reported_with_their_line(which: str) -> None:
    pointer, (before, behind) = ("x", (4, 0)) if which == "load" else ("out", (0, 4))
    aligned = "is_aligned(x) && is_aligned(out) ? arrange_with<In, Out, kSize>"
    planted = (aligned, aligned.replace(f"is_aligned({pointer})", "true"))
    x_SM = Behind(random_rows(3, 8, torch.float32), before)
    with pytest.raises(AssertionError, match=r"rows\.cu:\d+:\d+: runtime error: .*misaligned address"):
        build("rows.cu", CHECKED, planted).arrange(
            x_SM, random_slots(3, 1, 5), 5, torch.float32, out_offset_bytes=behind
        )


# (S, E, K, C); several tiles, more experts than have their share of shared memory at once, places within an expert,
# nothing to number.
DECISIONS_SEKC = [(1, 1, 1, 1), (13, 3, 2, 1), (541, 7, 2, 1), (270, 384, 4, 1), (260, 1050, 2, 2), (64, 5, 2, 3)]
DECISIONS_SEKC += [(0, 3, 2, 1), (5, 3, 0, 2), (5, 3, 2, 0)]
DECISIONS = list(itertools.product(DECISIONS_SEKC, (None, 1, 4, 30)))


# Of each shape one, with each number of segments in turn; of 384 experts with as many as degrees 16 and 15 need.
@sampled(("shape_SEKC", "count"), DECISIONS, kept=[0, 6, 9, 15, 16, 22, 24, 30, 34])
def test_rows_are_numbered_counted_and_checked_as_by_the_reference(shape_SEKC, count: int | None) -> None:
    num_tokens, num_experts, num_choices, capacity = shape_SEKC
    generator, none = torch.Generator().manual_seed(1), num_experts * capacity
    # Of one shape some choices are out of range.
    lowest, highest = (-1, none + 2) if num_tokens == 64 else (0, none + 1)
    choices_KS = torch.randint(lowest, highest, (num_tokens, num_choices), generator=generator).t()
    if num_tokens % 2 == 0:  # the others are read where they lie
        choices_KS = choices_KS.contiguous()
    segments_3T = None if count is None else segments_of(num_tokens, count)
    limits_E = torch.full((num_experts,), 3) if num_tokens == 541 else None
    decision = choices_KS, num_experts, capacity, segments_3T, limits_E
    expected = reference.number_rows(*decision)
    for found, each in zip(build("slots.cu", CHECKED).number_rows(*decision), expected, strict=True):
        assert torch.equal(found, each)
    assert int(expected.fault) == {64: 1, 541: 2}.get(num_tokens, 0)


def terms(x_RF: torch.Tensor, dh_RH: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """How large is what a gated product's gradient, [R, 2H], and the product, [R, H], are added up of."""
    x_RF, dh_RH = x_RF.double().abs(), dh_RH.double().abs()
    gate_RH, up_RH = (x_RF[:, ::2], x_RF[:, 1::2]) if interleaved else x_RF.chunk(2, dim=1)
    of_x = torch.stack([dh_RH * (up_RH + 1), dh_RH * gate_RH], dim=2 if interleaved else 1)
    return of_x.reshape(x_RF.shape), gate_RH * (up_RH + 1)


def assert_near(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...], sizes, last_bits: int) -> None:
    """1 + erf(x) and 1 + tanh(x) cancel: the last bit of their terms is more than that of their sum."""
    for each, its, size in zip(found, expected, sizes, strict=True):
        ends = torch.finfo(each.dtype)
        assert torch.all((each.double() - its.double()).abs() <= last_bits * ends.eps * (size + ends.tiny))


# (R, H, bytes behind a multiple of 16).
GATED_SHAPES = [(1, 1, 0), (7, 24, 0), (3, 2056, 0), (5, 13, 0), (2, 16, 8), (0, 8, 0), (3, 0, 0)]
GATED = covering(reference.FORMS, (False, True), DTYPES)
ONE_OF_EACH_FORM = [next(at for at, case in enumerate(GATED) if case[0] == form) for form in reference.FORMS]


@sampled(("form", "interleaved", "dtype"), GATED, kept=ONE_OF_EACH_FORM, ids=str)
def test_gated_products_and_their_gradients_equal_the_reference(form, interleaved, dtype) -> None:
    kernels = build("gated.cu", CHECKED)
    for num_rows, width, offset_bytes in GATED_SHAPES:
        x_RF, dh_RH = random_rows(num_rows, 2 * width, dtype), random_rows(num_rows, width, dtype, 1)
        x_RF[:1, ::3] *= 40
        arguments = form, interleaved, 1.25, 1.702
        x, dh = Behind(x_RF, offset_bytes), Behind(dh_RH, offset_bytes)
        _, h_RH = kernels.gated(x, None, *arguments, out_offset_bytes=offset_bytes)
        dx_RF, again_RH = kernels.gated(x, dh, *arguments, out_offset_bytes=offset_bytes)
        assert_same_bits(again_RH, h_RH)
        expected, sizes = reference.gated_backward(x_RF, dh_RH, *arguments), terms(x_RF, dh_RH, interleaved)
        # Two libraries' functions differ in their last bit, and a step that is rounded may differ by one more.
        assert_near((dx_RF, h_RH), expected, sizes, last_bits=4)
        if dtype == torch.float32:  # narrower steps may fall on the other side of a limit
            exact = reference.gated_backward(x_RF.double(), dh_RH.double(), *arguments)
            assert_near((dx_RF, h_RH), exact, sizes, last_bits=8)


def test_a_gated_product_hands_on_what_is_no_number_and_clamps_what_has_no_end() -> None:
    ends = torch.tensor([math.inf, -math.inf, math.nan, 0.0])
    gate, up = (each.reshape(-1) for each in torch.meshgrid(ends, ends, indexing="ij"))
    x_RF, dh_RH = torch.stack([gate, up], dim=1), torch.ones(len(gate), 1)
    for form in reference.FORMS:
        arguments = form, False, 7.0, 1.702
        dx_RF, h_RH = build("gated.cu", CHECKED).gated(x_RF, dh_RH, *arguments)
        expected_dx, expected_h = reference.gated_backward(x_RF, dh_RH, *arguments)
        torch.testing.assert_close(h_RH, expected_h, equal_nan=True)
        torch.testing.assert_close(dx_RF, expected_dx, equal_nan=True)


# ---- races


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
