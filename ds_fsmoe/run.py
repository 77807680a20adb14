# SPDX-License-Identifier: Apache-2.0
"""Runs an unchanged training script with the ``"fsmoe"`` block active.

``deepspeed --module ds_fsmoe.run [--fsmoe FILE|JSON] train.py --its --own arguments``; ``--module NAME`` in place of
the script runs a module, as ``python -m NAME`` does.

If the script's DeepSpeed config cannot be edited, ``--fsmoe`` passes the block from outside.
"""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys

from ds_fsmoe.engine.command_line import OPTION, read_given, take_option

MODULE = "--module"
USAGE = (
    f"usage: deepspeed --module ds_fsmoe.run [{OPTION} FILE|JSON] SCRIPT.py [ARGUMENTS OF THE SCRIPT]\n"
    f"       deepspeed --module ds_fsmoe.run [{OPTION} FILE|JSON] {MODULE} NAME [ARGUMENTS OF THE MODULE]"
)


def split_arguments(arguments: list[str]) -> tuple[str, bool, list[str], str | None]:
    """Return the script or module, True for a module, its ``sys.argv[1:]``, and the value of ``--fsmoe`` if there is
    one.

    DeepSpeed's launcher puts ``--local_rank=N`` in front of all arguments, so in front of the script's name. The script
    receives it in front of its own arguments, as it would without us.

    Raises:
        SystemExit: there is no script or module, or it does not exist, with the reason.
    """
    try:
        given, options, rest = take_option(arguments)
    except ValueError as error:
        raise SystemExit(f"ds_fsmoe.run: {error}\n{USAGE}") from None
    is_module = MODULE in options[-1:]
    if not rest:
        raise SystemExit(f"ds_fsmoe.run: no {'module' if is_module else 'script'} given\n{USAGE}")
    name = rest[0]
    if not (_is_there(name) if is_module else os.path.isfile(name)):
        raise SystemExit(f"ds_fsmoe.run: {name}: no such {'module' if is_module else 'file'}\n{USAGE}")
    return name, is_module, (options[:-1] if is_module else options) + rest[1:], given


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package above it
        return False


def main() -> None:
    """Call ``install``, then run the script as ``__main__`` like ``python SCRIPT.py`` would, or the module."""
    script, is_module, rest, given = split_arguments(sys.argv[1:])
    try:
        block = None if given is None else read_given(given)
    except ValueError as error:
        raise SystemExit(f"ds_fsmoe.run: {error}") from None
    from ds_fsmoe.engine import entry_points

    entry_points.install()
    sys.argv = [script, *rest]
    # `python -m` put the current folder first; a script finds its neighbours by its own folder there.
    if not is_module:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
    if block is not None:
        try:
            entry_points.install(block)  # only now, as plugins that it names may lie beside the script
        except ValueError as error:
            raise SystemExit(f"ds_fsmoe.run: {OPTION} {given}: {error}") from None
    if is_module:
        runpy.run_module(script, run_name="__main__", alter_sys=True)  # puts the module's file into sys.argv[0]
    else:
        runpy.run_path(script, run_name="__main__")
    if block is not None:
        entry_points.warn_if_unused()


if __name__ == "__main__":
    main()
