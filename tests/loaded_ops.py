# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled ops as it is imported, if they are built: the fork server does that once, and all ranks have them.

By themselves they would take half a second for it, the first of them before the others. DeepSpeed runs
compilers to see which of its own ops they can build; that is done once here, too.
"""

from __future__ import annotations

from contextlib import suppress

import deepspeed
import torch

from ds_fsmoe.ops import loading
from tests.built_ops import ops_are_built

with suppress(Exception):  # what goes wrong is for the ranks to say
    if ops_are_built():
        loading._load_on_every_rank("cpu")

if torch.version.cuda is None:  # it would begin CUDA, which no rank could do again
    _ = deepspeed.ops.__compatible_ops__
