# SPDX-License-Identifier: Apache-2.0
"""Runs an untouched training script with the ``"fsmoe"`` block honoured.

``deepspeed --module ds_fsmoe.run train.py --its --own arguments``
"""

from __future__ import annotations

import os
import runpy
import sys

USAGE = "usage: deepspeed --module ds_fsmoe.run SCRIPT.py [ARGUMENTS OF THE SCRIPT]"


def split_arguments(arguments: list[str]) -> tuple[str, list[str]]:
    """The script and what it is to find in ``sys.argv[1:]``.

    DeepSpeed's launcher puts ``--local_rank=N`` first; the script gets it as it would without us.

    Raises:
        SystemExit: no script, or one that is not there, with the reason.
    """
    position = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), None)
    if position is None:
        raise SystemExit(f"ds_fsmoe.run: no script given\n{USAGE}")
    script = arguments[position]
    if not os.path.isfile(script):
        raise SystemExit(f"ds_fsmoe.run: {script}: no such file\n{USAGE}")
    return script, arguments[:position] + arguments[position + 1 :]


def main() -> None:
    """Install, then run the script as ``__main__`` the way ``python SCRIPT.py`` would."""
    script, rest = split_arguments(sys.argv[1:])
    from ds_fsmoe.door import install

    install()
    sys.argv = [script, *rest]
    # `python -m` put the current folder first; a script finds its neighbours by its own folder there.
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
