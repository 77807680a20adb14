# SPDX-License-Identifier: Apache-2.0
"""Runs an untouched training script with the ``"fsmoe"`` block honoured.

``deepspeed --module ds_fsmoe.run [--fsmoe FILE|JSON] train.py --its --own arguments``

Where the script's DeepSpeed config is out of reach, ``--fsmoe`` gives the block from outside.
"""

from __future__ import annotations

import os
import runpy
import sys

from ds_fsmoe.engine.command_line import OPTION, read_given, take_option

USAGE = f"usage: deepspeed --module ds_fsmoe.run [{OPTION} FILE|JSON] SCRIPT.py [ARGUMENTS OF THE SCRIPT]"


def split_arguments(arguments: list[str]) -> tuple[str, list[str], str | None]:
    """The script, what it is to find in ``sys.argv[1:]``, and the value of ``--fsmoe``, if that was given.

    DeepSpeed's launcher puts ``--local_rank=N`` first; the script gets it as it would without us.

    Raises:
        SystemExit: no script, or one that is not there, with the reason.
    """
    try:
        given, options, rest = take_option(arguments)
    except ValueError as error:
        raise SystemExit(f"ds_fsmoe.run: {error}\n{USAGE}") from None
    if not rest:
        raise SystemExit(f"ds_fsmoe.run: no script given\n{USAGE}")
    script = rest[0]
    if not os.path.isfile(script):
        raise SystemExit(f"ds_fsmoe.run: {script}: no such file\n{USAGE}")
    return script, options + rest[1:], given


def main() -> None:
    """Install, then run the script as ``__main__`` the way ``python SCRIPT.py`` would."""
    script, rest, given = split_arguments(sys.argv[1:])
    try:
        block = None if given is None else read_given(given)
    except ValueError as error:
        raise SystemExit(f"ds_fsmoe.run: {error}") from None
    from ds_fsmoe.engine import entry_points

    entry_points.install()
    sys.argv = [script, *rest]
    # `python -m` put the current folder first; a script finds its neighbours by its own folder there.
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    if block is not None:
        try:
            entry_points.install(block)  # only now, as plugins that it names may lie beside the script
        except ValueError as error:
            raise SystemExit(f"ds_fsmoe.run: {OPTION} {given}: {error}") from None
    runpy.run_path(script, run_name="__main__")
    if block is not None:
        entry_points.warn_if_unused()


if __name__ == "__main__":
    main()
