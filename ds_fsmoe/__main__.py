# SPDX-License-Identifier: Apache-2.0
"""``python -m ds_fsmoe``: the console script, for where none is installed."""

from ds_fsmoe.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
