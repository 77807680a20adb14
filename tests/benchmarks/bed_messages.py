# SPDX-License-Identifier: Apache-2.0
"""Messages between places of a bed, and what its token buckets say of them: rates that are set, bytes that passed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.bed.bed import Bed

_RECEIVE = """
import socket, sys
server = socket.create_server(("0.0.0.0", 5000))
print("up", flush=True)
peer, _ = server.accept()
count = 0
for line in sys.stdin:
    wanted = int(line)
    peer.setblocking(wanted > 0)
    try:
        while count < wanted or not wanted:
            count += len(peer.recv(65536))
    except BlockingIOError:
        pass
    print(count, flush=True)
"""
_SEND = """
import socket, sys
peer = socket.create_connection((sys.argv[1], 5000))
print("up", flush=True)
for line in sys.stdin:
    peer.sendall(b"x" * int(line))
    print("sent", flush=True)
"""


class Connection:
    """A connection between two places: a process at each end does what it is told."""

    def __init__(self, sender: subprocess.Popen[str], receiver: subprocess.Popen[str]) -> None:
        self._sender, self._receiver = sender, receiver
        self._sent = 0

    def send(self, num_bytes: int) -> None:
        """Hand it over to the kernel; more than its buffers hold has to arrive for that."""
        self._sent += num_bytes
        assert _ask(self._sender, num_bytes) == "sent"

    def arrived(self) -> int:
        """Bytes that have come up to now."""
        return int(_ask(self._receiver, 0))

    def receive(self) -> int:
        """Wait until all that was sent has come."""
        return int(_ask(self._receiver, self._sent))


def _ask(process: subprocess.Popen[str], number: int) -> str:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{number}\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


@contextmanager
def connected(bed: Bed, sender: int, receiver: int) -> Iterator[Connection]:
    """Two places of a bed, by number."""
    places, ends = bed.places(), []
    try:
        for place, code, arguments in (
            (places[receiver], _RECEIVE, []),
            (places[sender], _SEND, [places[receiver].address]),
        ):
            command = ["ip", "netns", "exec", place.namespace, sys.executable, "-c", code, *arguments]
            ends.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            assert ends[-1].stdout.readline() == "up\n"
        yield Connection(ends[1], ends[0])
    finally:
        for each in ends:
            each.kill()
            each.communicate()


@dataclass(frozen=True)
class Bucket:
    """What the kernel says of a token bucket."""

    rate_mbit: float
    burst_bytes: int
    passed_bytes: int
    held_back: int
    """How often a packet had to wait for the rate."""


def bucket(namespace: str, port: str) -> Bucket:
    """The bucket of a port, now."""
    command = ["tc", "-json", "-statistics", "-netns", namespace, "qdisc", "show", "dev", port]
    (found,) = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    options = found["options"]
    return Bucket(options["rate"] * 8 / 1e6, options["burst"], found["bytes"], found["overlimits"])


def passes(bed: Bed, sender: int, receiver: int, num_bytes: int, ports: list[tuple[str, str]]) -> list[bool]:
    """Send a message, and say of each port whether it passed there; where it did, it was held back to the rate."""
    before = [bucket(*port) for port in ports]
    with connected(bed, sender, receiver) as connection:
        connection.send(num_bytes)
        assert connection.receive() == num_bytes
    passed = []
    for port, old in zip(ports, before, strict=True):
        new = bucket(*port)
        # Besides there are packets by which the places find each other.
        passed.append(new.passed_bytes - old.passed_bytes >= num_bytes)
        assert passed[-1] or new.passed_bytes - old.passed_bytes < num_bytes / 4
        assert not passed[-1] or new.held_back > old.held_back, f"{port} has let a message through at once"
    return passed
