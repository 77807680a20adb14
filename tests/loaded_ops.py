# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled ops as it is imported, if they are built: the fork server does that once, and all ranks have them.

By themselves they would take half a second for it, the first of them before the others.
"""

from __future__ import annotations

from contextlib import suppress

from ds_fsmoe.ops import loading
from tests.built_ops import ops_are_built

with suppress(Exception):  # what goes wrong is for the ranks to say
    if ops_are_built():
        loading._load_on_every_rank("cpu")
