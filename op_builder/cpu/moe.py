# SPDX-License-Identifier: Apache-2.0
"""All ops of an MoE layer for the CPU, in one library: one build to wait for."""

from ..builder import CPUBuilder


class MoEBuilder(CPUBuilder):
    NAME = "fsmoe_cpu"

    def sources(self) -> list[str]:
        return [
            "csrc/python_module.cpp",
            "csrc/cpu/arrange.cpp",
            "csrc/cpu/gated.cpp",
            "csrc/cpu/number_rows.cpp",
            "csrc/cpu/rows.cpp",
            "csrc/cpu/slots.cpp",
        ]


BUILDER = MoEBuilder
