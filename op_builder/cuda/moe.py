# SPDX-License-Identifier: Apache-2.0
"""All ops of an MoE layer for CUDA devices, in one library."""

from ..builder import CUDABuilder


class MoEBuilder(CUDABuilder):
    NAME = "fsmoe_cuda"

    def sources(self) -> list[str]:
        return [
            "csrc/python_module.cpp",
            "csrc/cuda/bindings.cpp",
            "csrc/cuda/gated.cu",
            "csrc/cuda/rows.cu",
            "csrc/cuda/slots.cu",
        ]

    def include_paths(self) -> list[str]:
        return ["csrc/includes", "csrc/cuda"]


BUILDER = MoEBuilder
