# SPDX-License-Identifier: Apache-2.0
"""A cluster on one machine (see ``bed/bed.py``).

cluster.py up --nodes 2 --ranks-per-node 2 --inter 100mbit --intra 400mbit
cluster.py run -- examples/train.py --deepspeed_config ds_configs/gpt_moe_small.json
cluster.py link 1 down | up | rate 50mbit      while a job runs
cluster.py self-test                           what the links and collectives really do
cluster.py status
cluster.py down
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.bed.bed import MODES, Bed, BedError, check_name, down, found_bed, namespaces


def main(arguments: list[str] | None = None) -> int:
    """Run one command.

    Returns:
        0; the worst status of the ranks for ``run``; 1 for a self-test that found the bed wanting; 2 for what the user
        has to mend, said in one sentence.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="bed", help="two beds need two names (bed)")
    commands = parser.add_subparsers(dest="command", required=True)
    up = commands.add_parser("up", help="build it")
    up.add_argument("--nodes", type=int, default=2)
    up.add_argument("--ranks-per-node", type=int, default=2)
    up.add_argument("--inter", default="100mbit", help="rate between nodes (100mbit)")
    up.add_argument("--intra", default="400mbit", help="rate inside a node (400mbit)")
    up.add_argument(
        "--mode", default="independent", help=f"{' or '.join(MODES)}: do the two kinds of traffic share a port"
    )
    run = commands.add_parser("run", help="run a script on every rank")
    run.add_argument("--timeout", type=float, metavar="SECONDS", help="end it after that")
    run.add_argument("script", nargs=argparse.REMAINDER, help="-- SCRIPT ARGUMENTS")
    link = commands.add_parser("link", help="cut, restore or re-rate a node's link")
    link.add_argument("node", type=int)
    link.add_argument("action", help="down, up or rate")
    link.add_argument("rate", nargs="?")
    link.add_argument("--which", choices=("inter", "intra"), default="inter")
    test = commands.add_parser("self-test", help="measure links, collectives and overlap")
    test.add_argument("--json", type=Path, metavar="FILE")
    commands.add_parser("status", help="what is up")
    commands.add_parser("down", help="remove it, and what runs in it")
    commands.add_parser("watch")  # see bed.cleared_if_killed
    args = parser.parse_args(arguments)
    # An end by request runs the same cleaning as an error does.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        check_name(args.name)
        return _command(args)
    except BedError as error:
        print(f"cluster.py: error: {error}", file=sys.stderr)
        return 2
    finally:
        signal.signal(signal.SIGTERM, before)


def _command(args: argparse.Namespace) -> int:
    if args.command == "up":
        bed = Bed(args.name, args.nodes, args.ranks_per_node, args.inter, args.intra, args.mode)
        bed.up()
        print(f"up: {bed}")
    elif args.command == "run":
        from benchmarks.bed.job import run_job

        script = args.script[1:] if args.script[:1] == ["--"] else args.script
        return run_job(found_bed(args.name), script, args.timeout, lambda line: print(line, flush=True))
    elif args.command == "link":
        found_bed(args.name).link(args.node, args.action, args.rate, args.which)
    elif args.command == "self-test":
        from benchmarks.bed.self_test import self_test

        return self_test(found_bed(args.name), args.json)
    elif args.command == "status":
        bed = found_bed(args.name)
        print(bed)
        for row in bed.status():
            print("  ".join(map(str, row)), "processes")
    elif args.command == "down":
        count = down(args.name)
        print(f"down: {count} namespaces removed" if count else f"no bed {args.name!r} was up")
    elif sys.stdin.buffer.read() != b"done" and namespaces(args.name):
        down(args.name)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
