# SPDX-License-Identifier: Apache-2.0
"""Runs the console script as ``python -m ds_fsmoe``, for environments where it is not installed."""

from ds_fsmoe.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
