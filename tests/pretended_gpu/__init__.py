# SPDX-License-Identifier: Apache-2.0
"""A GPU that is pretended on the CPU, and knows which operation is ordered after which.

Tensors hold real numbers in the CPU's memory, and are taken for tensors of a GPU all the same: their ``device`` says
so, and each of their operations is noted on the stream that was current. A program that is wrong only for the order in
which a GPU might do its work computes the right numbers here, and is found by the rules.
"""

from tests.pretended_gpu.gpu import Breach, Gpu
from tests.pretended_gpu.modes import pretending

__all__ = ["Breach", "Gpu", "pretending"]
