# SPDX-License-Identifier: Apache-2.0
"""Row gather and its gradient: ``torch.ops.fsmoe.gather_rows``."""

from ..builder import CPUBuilder


class RowsBuilder(CPUBuilder):
    NAME = "fsmoe_rows"

    def sources(self) -> list[str]:
        return ["csrc/cpu/rows.cpp"]


BUILDER = RowsBuilder
