# SPDX-License-Identifier: Apache-2.0
"""Implements the console script ``ds_fsmoe``. Each command imports its modules when it runs."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from ds_fsmoe.terminal.screen import RED, print_coloured
from ds_fsmoe.untrusted import suggested
from ds_fsmoe.versions import VERSION

COMMANDS = {
    "clusters": "ds_fsmoe.offline.commands.clusters",
    "compare": "ds_fsmoe.offline.commands.compare",
    "convert": "ds_fsmoe.offline.commands.convert",
    "env": "ds_fsmoe.offline.commands.env",
    "plan": "ds_fsmoe.offline.plan.command",
    "profile": "ds_fsmoe.offline.commands.profile",
    "remembered": "ds_fsmoe.offline.commands.remembered",
    "report": "ds_fsmoe.offline.commands.report",
    "tune": "ds_fsmoe.offline.commands.tune",
}
MOVED = {"scale": "benchmarks.simulations.scale", "simulate-paper": "benchmarks.simulations.paper"}
"""Commands of before -> the module of a checkout that does it now."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit status: 0 if all is well, 1 if the command found a problem, 2 for a wrong argument.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] not in COMMANDS and not arguments[0].startswith("-"):
        moved = MOVED.get(arguments[0])
        remedy = (
            f"it is a benchmark now: in a checkout of the repository, run python -m {moved}"
            if moved
            else f"unknown command; {suggested(arguments[0], COMMANDS)}"
        )
        print_coloured(f"ds_fsmoe {arguments[0]}: error: {remedy}", RED)
        return 2
    parser = argparse.ArgumentParser(prog="ds_fsmoe", description="Training of Mixture-of-Experts models, scheduled.")
    parser.add_argument("--version", action="version", version=f"ds_fsmoe {VERSION}")
    # DeepSpeed's launcher puts it before what it was given; ranks find it in their environment.
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module_name in COMMANDS.items():
        module = importlib.import_module(module_name)
        command = commands.add_parser(name, help=module.HELP, description=module.__doc__)
        module.add_arguments(command)
        command.set_defaults(run=module.run, parser=command)
    args, unknown = parser.parse_known_args(arguments)
    try:
        if unknown:
            options = [
                name for each in args.parser._actions if each.help != argparse.SUPPRESS for name in each.option_strings
            ]
            remedy = suggested(unknown[0].partition("=")[0], options, f"run {args.parser.prog} --help for all options")
            raise ValueError(f"{unknown[0]}: unknown argument; {remedy}")
        return args.run(args)
    except (ValueError, ModuleNotFoundError) as error:
        # What a user can cause is one sentence, not a traceback.
        remedy = "; pip install 'ds_fsmoe[train]'" if getattr(error, "name", None) in ("torch", "deepspeed") else ""
        print_coloured(f"{args.parser.prog}: error: {error}{remedy}", RED)
        return 2
