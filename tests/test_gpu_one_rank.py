# SPDX-License-Identifier: Apache-2.0
"""A layer of one rank and its operators, on a GPU: a step waits for nothing, no wrong argument ends the process, and
numbers are those of the reference. The same bodies run here on the CPU; on a GPU nothing of this has run yet."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_fsmoe.components.expert_compute import grouped_products
from ds_fsmoe.ops import Ops, reference
from tests.gpu_cases import ON_DEVICE
from tests.python_path import python_path
from tests.ranks import run_on_ranks
from tests.scripts import ROOT, free_port
from tests.test_gpu_ops import REFERENCE, ops_of
from tests.waiting import LIMIT_S

FIXTURES = (ops_of,)  # which pytest finds by their names here

TOO_MANY = 2**31
"""Rows, choices or slots: more than a launch has blocks."""
MOST_ORDERED = 8192
"""The choices of a token that the kernel for sums in the order of slots puts in order."""


# ---- no wrong argument ends the process


def good_calls(device: torch.device) -> dict[str, list[Any]]:
    """For each operator arguments that it takes: 7 tokens of width 6, 2 choices, 5 experts, 11 slots."""
    x_SM, y_NM, dh_RH = (torch.ones(rows, width, device=device) for rows, width in ((7, 6), (11, 6), (7, 3)))
    slots_KS = torch.arange(14, device=device).view(2, 7) % 5
    own_KS = torch.arange(14, device=device).view(2, 7)  # no slot twice
    weights_KS, scores_SE = torch.ones(2, 7, device=device), torch.rand(7, 5, device=device)
    segments_3T = torch.tensor([[3, 7], [0, 1], [2, 2]], device=device)
    return {
        "arrange": [x_SM, own_KS, 14, None],
        "restore": [y_NM, own_KS, weights_KS, None, False],
        "restore_backward": [x_SM, y_NM, own_KS, weights_KS],
        "gated": [x_SM, "silu", False, 0.0, 0.0],
        "gated_backward": [x_SM, dh_RH, "silu", False, 0.0, 0.0],
        "top_k_slots": [scores_SE, 2, 4, None, "choice"],
        "take_slots": [slots_KS, 5, 4, None, "score", weights_KS],
        "number_rows": [slots_KS, 5, 1, segments_3T, torch.full((5,), 9, device=device)],
    }


def refusals(device: torch.device) -> Iterator[tuple[str, int, Any, str]]:
    """(operator, which argument, what is wrong there, words of the error), one for each check in the bindings."""
    good = good_calls(device)
    names = {"arrange": ["x", "slots"], "restore": ["y", "slots", "weights"], "top_k_slots": ["scores"]}
    names |= {"restore_backward": ["d_out", "y", "slots", "weights"], "gated": ["x"], "gated_backward": ["x"]}
    names |= {"take_slots": ["experts"], "number_rows": ["choices"]}
    for op, its_names in names.items():
        for index, name in enumerate(its_names):
            tensor = good[op][index]
            if name != "weights":  # wants the shape of the slots
                yield op, index, tensor[0], rf"{name} must be (2-dimensional|\[[KSR], )"
            wrong = tensor.int() if tensor.dtype == torch.int64 else tensor.long()
            yield op, index, wrong, rf"{name} must be (float|int64)"
    x_SM, slots_KS, weights_KS = good["arrange"][0], good["restore"][1], good["restore"][2]
    yield "arrange", 0, x_SM[:5], "x has 5 rows but slots is for 7 tokens"
    yield "arrange", 2, -1, "num_slots must not be negative"
    yield "arrange", 3, torch.int64, "dtype must be float32"
    yield "restore", 2, weights_KS[:1], "weights must have the shape of slots"
    yield "restore", 3, torch.int64, "dtype must be float32"
    yield "restore_backward", 0, x_SM[:5], r"d_out must be \[7, 6\]"
    yield "restore_backward", 3, weights_KS[:1], "weights must have the shape of slots"
    for op, index in (("gated", 1), ("gated_backward", 2)):
        yield op, 0, x_SM[:, 1:], r"x must be \[R, 2 \* H\]"
        yield op, index, "relu", "no form is named 'relu'"
    yield "gated_backward", 1, good["gated_backward"][1][:, 1:], r"dh must be \[7, 3\]"
    yield "gated_backward", 1, good["gated_backward"][1].bfloat16(), "dh must be Float"
    for k in (0, 6):
        yield "top_k_slots", 1, k, f"k = {k}: must be between 1 and the number of experts"
    for op in ("top_k_slots", "take_slots"):
        yield op, 2, -1, "capacity must not be negative"
        yield op, 3, torch.ones(7, device=device), "used must be bool"
        yield op, 3, torch.ones(6, device=device, dtype=torch.bool), r"used must be bool and \[7\]"
        yield op, 4, "last", "priority = 'last'"
    yield "take_slots", 1, 0, "num_experts must be at least 1"
    yield "take_slots", 5, None, "priority 'score' needs scores"
    yield "take_slots", 5, weights_KS.half(), "scores must be float32"
    yield "take_slots", 5, weights_KS[:1], "scores must have the shape of experts"
    yield "number_rows", 1, 0, "num_experts must be at least 1"
    yield "number_rows", 2, -1, "capacity must not be negative"
    yield "number_rows", 3, slots_KS, r"segments must be (int64 and )?\[3, T\]"
    yield "number_rows", 3, good["number_rows"][3].int(), "segments must be int64"
    yield "number_rows", 4, weights_KS[0], r"limits must be int64 and \[5\]"
    if device.type == "cuda":
        yield from _of_cuda_alone(good)


def _of_cuda_alone(good: dict[str, list[Any]]) -> Iterator[tuple[str, int, Any, str]]:
    """No float64, no more than a launch can count (of memory that nothing takes), and one device for all."""
    for op in ("arrange", "restore", "gated", "gated_backward", "top_k_slots"):
        yield op, 0, good[op][0].double(), "must be float32"
    x_SM, slots_KS, scores_SE = good["arrange"][0], good["arrange"][1], good["top_k_slots"][0]
    yield "arrange", 0, x_SM[:1].expand(TOO_MANY, 6), "rows; "
    yield "arrange", 2, TOO_MANY, "nor above"
    yield "restore", 1, slots_KS[:, :1].expand(2, TOO_MANY), "tokens; "
    yield "top_k_slots", 0, scores_SE[:1].expand(TOO_MANY, 5), "are more than"
    yield "take_slots", 0, slots_KS[:, :1].expand(2, TOO_MANY), "are more than"
    yield "number_rows", 0, slots_KS[:, :1].expand(2, TOO_MANY), "are more than"
    elsewhere = (("arrange", 1), ("restore", 1), ("restore", 2), ("restore_backward", 2), ("restore_backward", 3))
    elsewhere += (("gated_backward", 1), ("take_slots", 5), ("number_rows", 3), ("number_rows", 4))
    for op, index in elsewhere:
        yield op, index, good[op][index].cpu(), "on cpu"
    for op in ("top_k_slots", "take_slots"):
        yield op, 3, torch.ones(7, dtype=torch.bool), "used is on cpu"


def refuse_once(device: torch.device) -> int:
    """Have each operator refuse whatever it can, and return how often; it goes on working behind each refusal."""
    number = 0
    for op, index, wrong, words in refusals(device):
        call, arguments = getattr(torch.ops.fsmoe, op).default, good_calls(device)[op]
        call(*arguments)
        arguments[index] = wrong
        with pytest.raises(RuntimeError, match=words):
            call(*arguments)
        call(*good_calls(device)[op])
        number += 1
    if device.type == "cuda":
        y_NM, slots_KS = good_calls(device)["restore"][:2]
        many_KS = slots_KS[:1].expand(MOST_ORDERED + 1, 7)
        with pytest.raises(RuntimeError, match="by_slot takes at most"):
            torch.ops.fsmoe.restore.default(y_NM, many_KS, None, None, True)
        torch.cuda.synchronize()
    return number


@ON_DEVICE
def test_an_operator_that_refuses_leaves_the_process_as_it_was(
    ops_of: Callable[[torch.device], Ops], device: torch.device
) -> None:
    assert ops_of(device).name == "compiled"
    assert refuse_once(device) >= 45


# ---- numbers


def compare_gated(ops: Ops, device: torch.device) -> dict[str, str]:
    """Compare gated products with the reference on the same device; return those with other bits, and how far."""
    differ = {}
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x_RF = (torch.randn(257, 2 * 96, generator=generator) * 5).to(device, dtype)
        dh_RH = torch.randn(257, 96, generator=generator).to(device, dtype)
        for form, interleaved in itertools.product(reference.FORMS, (False, True)):
            settings = form, interleaved, 7.0, 1.702
            found = ops.gated(x_RF, *settings), *ops.gated_backward(x_RF, dh_RH, *settings)
            wanted = REFERENCE.gated(x_RF, *settings), *REFERENCE.gated_backward(x_RF, dh_RH, *settings)
            for name, one, other in zip(("h", "dx", "h again"), found, wanted, strict=True):
                # A gradient is a sum of terms that may cancel: each is off by its own rounding.
                off, most = (one.double() - other.double()), 4 * torch.finfo(dtype).eps
                assert off.norm() <= most * other.double().norm(), (dtype, settings, name)
                assert off.abs().max() <= most * other.abs().max(), (dtype, settings, name)
                if not torch.equal(one, other):
                    differ[f"{dtype} {form} {interleaved} {name}"] = f"{float((one - other).abs().max()):.1e}"
    return differ


@ON_DEVICE
def test_gated_products_are_those_of_the_reference(ops_of: Callable[[torch.device], Ops], device: torch.device) -> None:
    differ = compare_gated(ops_of(device), device)
    # On a GPU compilers fuse as they like: a module whose own product has other bits keeps torch's operators.
    assert device.type == "cuda" or not differ


def compare_numbers(ops: Ops, device: torch.device, num_experts: int = 384, degrees: tuple[int, int] = (16, 15)) -> int:
    """Compare the numbers of rows with the reference's, in the segments of both phases; return the queues."""
    for num_tokens, num_choices, is_wrong in ((1, 1, False), (613, 8, False), (5003, 8, True)):
        ends = sorted({round(i * num_tokens / each) for each in degrees for i in range(1, each + 1)})
        segments_3T = torch.tensor([ends, range(len(ends)), [len(ends)] * len(ends)])
        generator = torch.Generator().manual_seed(num_tokens)
        lowest, highest = (-2, num_experts + 3) if is_wrong else (0, num_experts + 1)
        choices_SK = torch.randint(lowest, highest, (num_tokens, num_choices), generator=generator)
        limits_E = torch.full((num_experts,), 90 if is_wrong else num_tokens * num_choices)
        for choices_KS in (choices_SK.t(), choices_SK.t().contiguous()):
            wanted = REFERENCE.number_rows(choices_KS, num_experts, 1, segments_3T, limits_E)
            moved = choices_KS.to(device), num_experts, 1, segments_3T.to(device), limits_E.to(device)
            for name, one, other in zip(wanted._fields, ops.number_rows(*moved), wanted, strict=True):
                assert one.device.type == device.type
                assert torch.equal(one.cpu(), other), f"{name} of {num_tokens} tokens"
        assert int(wanted.fault) == 3 * is_wrong
    return len(wanted.counts_V)


@ON_DEVICE
def test_rows_of_384_experts_in_30_segments_are_numbered(
    ops_of: Callable[[torch.device], Ops], device: torch.device
) -> None:
    assert compare_numbers(ops_of(device), device) == 384 * 30


# ---- a block of a model


def block_on(device: torch.device, ops: str = "required") -> Any:
    """Return the MoE block of a Qwen3 of one layer, in bf16, in an engine of one rank, which this process is."""
    from tests.test_one_rank import engine_of, qwen3

    engine = engine_of(qwen3(), ops)
    assert engine.device.type == device.type
    return engine.module.model.layers[0].mlp


def wait_for_nothing(device: torch.device, ops: str = "required") -> str:
    """Run three steps of a block, the third where a wait for the device is an error; return why the way is general."""
    block = block_on(device, ops)
    x = torch.randn(1, 24, 64, dtype=torch.bfloat16, device=device).requires_grad_()
    dy = torch.randn_like(x)

    def step() -> None:
        y = block(x)
        (y if isinstance(y, Tensor) else y[0]).backward(dy)

    step()
    step()
    with errors_at_waits(device):
        step()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())
    return block.experts.fsmoe.fast_path.why_general


@contextlib.contextmanager
def errors_at_waits(device: torch.device) -> Iterator[None]:
    """Have torch raise where the host waits for the device."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def leave_no_trace_of_none(device: torch.device) -> int:
    """Compute choices of no expert with two kinds of memory behind the last expert's rows: all results and gradients
    are the same, and finite. Return how many."""
    experts, original = block_on(device).experts, torch.nn.functional.grouped_mm
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 29, 64, generator=generator).to(device, torch.bfloat16)
    index = torch.randint(0, 17, (29, 4), generator=generator)
    index[3] = 16
    weights = torch.rand(29, 4, generator=generator).to(device, torch.bfloat16)
    found: list[list[Tensor]] = []
    for poison in (0.0, float("nan")):

        def filled(left: Tensor, right: Tensor, *, offs: Tensor, poison: float = poison) -> Tensor:
            product = original(left, right, offs=offs)
            if left.dim() == 2 and right.dim() == 3:
                product[int(offs[-1]) :] = poison
            return product

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grouped_products.F, "grouped_mm", filled)
            experts.zero_grad()
            leaf, leaf_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
            for _ in range(2):
                y = experts(leaf, index.to(device), leaf_weights)
                y.sum().backward()
            found.append(
                [y.detach(), leaf.grad, leaf_weights.grad, *(each.grad.clone() for each in experts.parameters())]
            )
    names = ("y", "x", "weights", *(name for name, _ in experts.named_parameters()))
    differ = [name for name, one, other in zip(names, *found, strict=True) if not torch.equal(one, other)]
    assert differ == []
    assert all(bool(each.isfinite().all()) for each in found[1])
    return len(names)


def in_a_process(function: Callable[..., Any], device: torch.device, folder: Path, *arguments: Any) -> Any:
    """Call a function of this file in a process that is one rank, and return what it returns."""
    if device.type == "cpu":
        return run_on_ranks(called, 1, folder, function, device, arguments)[0]
    code = f"import json, torch; from tests.test_gpu_one_rank import {function.__name__} as f; "
    code += f"print(json.dumps(['RETURNED', f(torch.device({device.type!r}), *{arguments!r})]))"
    environment = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": device.type}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PYTHONPATH": python_path()}
    command = [sys.executable, "-c", code]
    options = {"capture_output": True, "text": True, "timeout": 3 * LIMIT_S, "check": False}
    done = subprocess.run(command, env=environment, cwd=ROOT, **options)
    last = next((each for each in done.stdout.splitlines() if each.startswith('["RETURNED"')), None)
    if done.returncode or last is None:
        pytest.fail(f"exit status {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return json.loads(last)[1]


def called(rank: int, world_size: int, function: Callable[..., Any], device: torch.device, arguments: Any) -> Any:
    return function(device, *arguments)


def needs_one_kernel(device: torch.device) -> None:
    """Skip a test where grouped products of bf16 are a loop over experts, whose sizes the host has to know."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        pytest.skip("grouped products of bf16 are one kernel on sm_90 and later")


@ON_DEVICE
@pytest.mark.parametrize("ops", ["required", "plain"])
def test_a_step_of_a_block_of_one_rank_waits_for_nothing(
    ops_of: Callable[[torch.device], Ops], device: torch.device, ops: str, tmp_path: Path
) -> None:
    needs_one_kernel(device)
    ops_of(device)  # compiled by now
    assert in_a_process(wait_for_nothing, device, tmp_path, ops) == ""


@ON_DEVICE
def test_choices_of_no_expert_leave_no_trace_in_poisoned_memory(
    ops_of: Callable[[torch.device], Ops], device: torch.device, tmp_path: Path
) -> None:
    needs_one_kernel(device)
    ops_of(device)
    assert in_a_process(leave_no_trace_of_none, device, tmp_path) == 5


@pytest.mark.gpu
def test_a_wait_for_the_device_would_be_seen() -> None:
    x = torch.ones(3, device="cuda")
    with errors_at_waits(x.device), pytest.raises(RuntimeError, match="synchroniz"):
        x.sum().item()
