# SPDX-License-Identifier: Apache-2.0
"""The version of this package and the versions of others it works with, stated once.

``setup.py`` builds the package's requirements from this table and ``ds_fsmoe.engine.compat`` checks it when training
starts. The file imports nothing, so that both can read it.
"""

VERSION = "0.2.0"
"""The version of this package."""

# Outside these ranges training refuses to start, with the reason below.
SUPPORTED: dict[str, str] = {
    "python": ">=3.11,<3.13",
    "torch": ">=2.11,<2.14",
    "deepspeed": "==0.19.8",
}

# What the test suite has run with, as "major.minor"; anything else in the supported range is untested and says so.
TESTED: dict[str, tuple[str, ...]] = {
    "python": ("3.11", "3.12"),
    "torch": ("2.11", "2.13"),
}

# Why another version is refused, after "works with deepspeed ==0.19.8: ".
REASONS: dict[str, str] = {
    "python": "it is written in the Python of these versions",
    "torch": "it relies on how these order collectives and streams, and nothing has been tried with others",
    "deepspeed": "it stands in for parts of DeepSpeed that have no interface, and that other versions may have moved",
}
