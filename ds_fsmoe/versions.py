# SPDX-License-Identifier: Apache-2.0
"""Defines the version of this package and the supported versions of others, in one place.

``setup.py`` builds the package's requirements from this table and ``ds_fsmoe.engine.compat`` checks it when training
starts. The file imports nothing, so that both can read it.
"""

VERSION = "0.2.0"
"""The version of this package."""

# Outside these ranges training refuses to start, with the reason below; a torch above its range is a warning.
SUPPORTED: dict[str, str] = {
    "python": ">=3.11,<3.15",
    "torch": ">=2.11,<2.16",
    "deepspeed": "==0.19.8",
}

# What an installation asks for: it never puts an older torch in the place of a newer one.
REQUIRED: dict[str, str] = SUPPORTED | {"torch": SUPPORTED["torch"].partition(",")[0]}

# The versions of Python and torch that all tests have run with; others in the ranges say at start that they were not.
RUN: tuple[tuple[str, str], ...] = (("3.11", "2.11"), ("3.11", "2.13"), ("3.13", "2.15"))

# Why another version is refused, after "works with deepspeed ==0.19.8: ".
REASONS: dict[str, str] = {
    "python": "it is written in the Python of these versions",
    "torch": "older ones lack what it uses of it",
    "deepspeed": "it stands in for parts of DeepSpeed that have no interface, and that other versions may have moved",
}
