# SPDX-License-Identifier: Apache-2.0
"""Where slots lie chunk by chunk is worked out once for sizes that stay, and kept in bounds where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from ds_fsmoe.execution import slot_chunks as chunking
from ds_fsmoe.execution.device_tables import DeviceTables
from ds_fsmoe.execution.slot_chunks import CapacityChunks


class Noting(TorchDispatchMode):
    """Notes the names of all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> DeviceTables:
    """New ones, empty."""
    made = DeviceTables(limit_bytes=1000)
    monkeypatch.setattr(chunking, "TABLES", made)
    return made


def copies(capacity: int) -> bool:
    """Whether a table is made for a call."""
    with Noting() as noting:
        CapacityChunks((0, 1, capacity)).chunked_slots(torch.zeros(3, dtype=torch.long), 2)
    return "aten.cat.default" in noting.names


def test_a_second_call_copies_nothing_and_capacities_that_never_come_again_do_not_fill_memory(
    tables: DeviceTables,
) -> None:
    assert copies(2)
    for capacity in range(3, 60):
        assert copies(capacity)
        assert not copies(2)  # used between all the others
    kept = list(tables._tables.values())
    assert 0 < sum(each.nbytes for each in kept) == tables._num_bytes <= 1000
    # One that is larger than all that may be kept is made every time.
    assert copies(500)
    assert [*tables._tables.values()] == kept


def test_no_table_is_kept_that_only_a_tracer_could_read(tables: DeviceTables) -> None:
    with FakeTensorMode() as mode:
        slots = mode.from_tensor(torch.zeros(3, dtype=torch.long))
        assert CapacityChunks((0, 1, 2)).chunked_slots(slots, 2).shape == (3,)
    assert not tables._tables
    with torch.inference_mode():
        copies(2)
    (table,) = tables._tables.values()
    assert not table.is_inference()
