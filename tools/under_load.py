# SPDX-License-Identifier: Apache-2.0
"""Run a command beside processes that keep the machine busy: tests that judge by a clock fail here first.

python tools/under_load.py --busy 8 --times 20 -- python -m pytest -q tests/test_lanes.py
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys


def main() -> int:
    """Run the command as often as asked; return how many runs failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--busy", type=int, default=8, help="processes that do nothing but compute (default: 8)")
    parser.add_argument("--times", type=int, default=1, help="how often the command is run (default: 1)")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="after --")
    options = parser.parse_args()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        parser.error("no command: write it after --")
    # Ended from outside, it must not leave the busy processes behind.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(options.busy)]
    failed = 0
    try:
        for number in range(1, options.times + 1):
            status = subprocess.run(command).returncode
            failed += status != 0
            print(f"under_load: run {number} of {options.times}: status {status}; failed so far: {failed}", flush=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return min(failed, 125)


if __name__ == "__main__":
    sys.exit(main())
