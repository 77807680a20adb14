# SPDX-License-Identifier: Apache-2.0
"""CUDA ops are built for whatever torch itself understands in TORCH_CUDA_ARCH_LIST. No GPU is needed."""

from __future__ import annotations

import pytest
import torch

from ds_fsmoe.ops import loading
from tests.test_ops_loading import gencode, toolkit_of

CARDS = {"A100": (8, 0), "H100": (9, 0), "B200": (10, 0), "RTX 5090": (12, 0)}


@pytest.fixture
def builder(tmp_path, monkeypatch):
    """A builder for CUDA on a machine whose cards ``put`` names. Its toolkit is of torch's release."""
    toolkit_of("13.0", tmp_path, monkeypatch)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("DS_BUILD_FSMOE", raising=False)
    found = loading.import_op_builder().builders("cuda")["fsmoe_cuda"]
    found.jit_mode = True

    def put(architectures: str | None, *cards: str):
        if architectures is None:
            monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
        else:
            monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", architectures)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=0: CARDS[cards[index]])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: cards[index])
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90", "sm_100", "compute_100"])
        return found

    return put


@pytest.mark.parametrize(
    ("architectures", "card", "made"),
    [
        ("9.0", "H100", ["sm_90"]),
        ("9.0a", "H100", ["sm_90a"]),
        ("9.0a+PTX", "H100", ["compute_90a", "sm_90a"]),
        ("10.0a", "B200", ["sm_100a"]),
        ("12.0a", "RTX 5090", ["sm_120a"]),
        ("Hopper", "H100", ["compute_90", "sm_90"]),
        ("Blackwell", "B200", ["compute_121", "sm_100", "sm_103", "sm_120", "sm_121"]),
        ("8.0;9.0+PTX", "H100", ["compute_90", "sm_80", "sm_90"]),
        ("8.0 9.0a", "H100", ["sm_80", "sm_90a"]),
        (" 8.0;  9.0 ; ", "H100", ["sm_80", "sm_90"]),
        ("native", "H100", ["compute_90", "sm_90"]),
        ("native", "RTX 5090", ["compute_100", "sm_100"]),
        ("", "A100", ["compute_80", "sm_80"]),
        (None, "A100", ["compute_80", "sm_80"]),
    ],
)
def test_ops_are_built_for_what_torch_understands(builder, architectures, card, made) -> None:
    found = builder(architectures, card)
    assert [each for each in found.obstacles() if "ARCH" in each] == []
    assert gencode(found.nvcc_args()) == made


def test_torch_adds_no_flags_of_its_own(builder) -> None:
    from torch.utils import cpp_extension

    assert cpp_extension._get_cuda_arch_flags(builder("9.0a", "H100").nvcc_args()) == []


@pytest.mark.parametrize(
    ("architectures", "said"),
    [
        ("12.0f", "Unknown CUDA arch (12.0f) or GPU not supported; in place of 12.0f write 12.0 or 12.0a or 12.0+PTX"),
        ("9.0;10.0f", "Unknown CUDA arch (10.0f)"),
        ("hopper", "in place of 'hopper' write a number such as 9.0 or 9.0+PTX, or a generation such as Hopper"),
        ("99.9", "in place of '99.9' write a number"),
    ],
)
def test_what_torch_refuses_is_refused_with_its_words_and_a_spelling_that_it_takes(
    builder, architectures, said
) -> None:
    (reason,) = builder(architectures, "H100").obstacles()
    assert reason.startswith(f"TORCH_CUDA_ARCH_LIST = {architectures!r}: ")
    assert said in reason


@pytest.mark.parametrize(
    ("architectures", "cards", "number"),
    [
        ("8.0", ["H100"], "9.0"),
        ("9.0a", ["B200"], "10.0"),
        ("9.0a+PTX", ["B200"], "10.0"),
        ("9.0", ["A100"], "8.0"),
        ("10.0+PTX", ["H100"], "9.0"),
        ("9.0", ["H100", "A100"], "8.0"),
    ],
)
def test_a_list_that_names_nothing_for_a_card_is_named(builder, architectures, cards, number) -> None:
    (reason,) = builder(architectures, *cards).obstacles()
    assert reason.endswith(f"({cards[-1]}, {number}) can run: add {number}")


@pytest.mark.parametrize(
    ("architectures", "cards"), [("8.0+PTX", ["H100", "B200"]), ("8.0;9.0", ["A100", "H100"]), ("9.0", ["H100"])]
)
def test_a_list_with_something_for_every_card_is_taken(builder, architectures, cards) -> None:
    assert builder(architectures, *cards).obstacles() == []


def test_a_wheel_may_be_for_cards_that_are_not_here(builder, monkeypatch) -> None:
    found = builder("8.0", "H100")
    monkeypatch.setenv("DS_BUILD_FSMOE", "1")
    assert found.obstacles() == []


def test_with_no_card_and_no_list_it_is_said_what_to_write(builder) -> None:
    assert builder("native").obstacles() == [
        "no GPU is visible to compile for: name some in TORCH_CUDA_ARCH_LIST, such as 9.0"
    ]
