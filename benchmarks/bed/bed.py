# SPDX-License-Identifier: Apache-2.0
"""A cluster on one machine: network namespaces for nodes, rate-limited links between them and inside them.

Two modes. ``independent``: a namespace per node; its ranks talk over ``lo``, nodes over ``eth0``, and the two links do
not know of each other. ``shared``: a namespace per rank behind its node's bridge; a rank's port carries both kinds of
traffic and the node's uplink is its NIC, so the links contend, as those of real machines do.

The rates are kept by token buckets. A bucket passes its whole size free of charge after a pause, and links have many
pauses, so a bucket holds one packet and no more. Packets are as large as a link sends in a millisecond, jumbo frames at
the most: each costs the processors time that the ranks then do not have.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from pydantic import create_model

from ds_fsmoe.files.whole_files import write_whole
from ds_fsmoe.shapes import StrictShape, Whole, fits
from ds_fsmoe.untrusted import read_json

STATE = Path("/run/ds_fsmoe_bed")
PACKET_S = 1e-3
"""What a link's largest packet takes, and with that the largest bucket it can have for free."""
SMALLEST_MTU, LARGEST_MTU = 1500, 9000
_HEADER_BYTES = 100
MODES = ("independent", "shared")
MAX_NODES, MAX_RANKS_PER_NODE = 16, 16
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_NAME = re.compile(r"[a-z0-9]{1,12}")


class BedError(Exception):
    """What a user can cause or has to mend; one sentence."""


def rate_mbit(text: str) -> float:
    """A rate such as ``100mbit`` in Mbit/s.

    Raises:
        BedError: not a rate, or one that a token bucket cannot keep.
    """
    found = _RATE.fullmatch(text)
    value = float(found[1]) * _BITS[found[2]] / 1e6 if found else 0.0
    if not 0.1 <= value <= 100_000:
        raise BedError(f"rate {text!r}: must be a number with kbit, mbit or gbit, from 100kbit to 100gbit")
    return value


@dataclass(frozen=True)
class Bed:
    """A bed's shape. What is up on this machine is in ``STATE``.

    Raises:
        BedError: a size, rate, mode or name that cannot be.
    """

    name: str = "bed"
    nodes: int = 2
    ranks_per_node: int = 2
    inter: str = "100mbit"
    intra: str = "400mbit"
    mode: Literal["independent", "shared"] = "independent"

    def __post_init__(self) -> None:
        check_name(self.name)
        if not 1 <= self.nodes <= MAX_NODES or not 1 <= self.ranks_per_node <= MAX_RANKS_PER_NODE:
            raise BedError(
                f"{self.nodes} nodes of {self.ranks_per_node} ranks: "
                f"must be 1 to {MAX_NODES} of 1 to {MAX_RANKS_PER_NODE}"
            )
        if self.mode not in MODES:
            raise BedError(f"mode {self.mode!r}: the choices are {', '.join(MODES)}")
        for rate in (self.inter, self.intra):
            rate_mbit(rate)

    # ---- names

    @property
    def switch(self) -> str:
        """Namespace of the switch between nodes."""
        return f"fsmoe-{self.name}-sw"

    def node_switch(self, node: int) -> str:
        """Namespace of a node's own bridge, where there is one."""
        return f"fsmoe-{self.name}-n{node}sw"

    def places(self) -> list[Place]:
        """Where processes run: a place per node, or per rank."""
        prefix = f"fsmoe-{self.name}-n"
        if self.mode == "independent":
            return [
                Place(f"{prefix}{node}", node, f"10.88.0.{node + 1}", self.ranks_per_node) for node in range(self.nodes)
            ]
        return [
            Place(f"{prefix}{node}r{rank}", node, f"10.88.{node}.{rank + 1}", 1)
            for node in range(self.nodes)
            for rank in range(self.ranks_per_node)
        ]

    def mtu(self, which: str) -> int:
        """The largest packet of the links "inter" or "intra" nodes, in bytes; where they share ports, of both."""
        rates = (self.inter, self.intra) if self.mode == "shared" else (getattr(self, which),)
        size_bytes = min(map(rate_mbit, rates)) * 1e6 / 8 * PACKET_S
        return int(min(LARGEST_MTU, max(SMALLEST_MTU, size_bytes)))

    @property
    def state_file(self) -> Path:
        """Says that it is up, and how."""
        return _state_file(self.name)

    # ---- up and down

    def up(self) -> None:
        """Build it. If that fails, or is interrupted, nothing is left behind.

        Raises:
            BedError: no rights, no tools, up already or about to be, or a command of the system that failed.
        """
        check_machine()
        with _being_built(self.name):
            if os.path.lexists(self.state_file) or namespaces(self.name):
                known = f" ({found_bed(self.name)})" if os.path.lexists(self.state_file) else ""
                raise BedError(
                    f"bed {self.name!r} is already up{known}: `benchmarks/cluster.py --name {self.name} down` first"
                )
            # Only who is to build it clears it away again.
            with cleared_if_killed(self.name) as keep:
                write_whole(self.state_file, json.dumps(asdict(self)))
                self._build()
                keep()

    def _build(self) -> None:
        _new_bridge(self.switch)
        places = self.places()
        if self.mode == "shared":
            for node in range(self.nodes):
                inside = self.node_switch(node)
                _new_bridge(inside)
                # The node's uplink: what leaves the node, and what comes to it, at the rate between nodes.
                _ip(
                    "link",
                    "add",
                    "uplink",
                    "netns",
                    inside,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    f"n{node}",
                    "netns",
                    self.switch,
                )
                for namespace, port in ((inside, "uplink"), (self.switch, f"n{node}")):
                    _ip("-n", namespace, "link", "set", port, "mtu", str(self.mtu("inter")), "master", "br0", "up")
                    _limit(namespace, port, self.inter, self.mtu("inter"))
        for index, place in enumerate(places):
            shared = self.mode == "shared"
            to, port = (self.node_switch(place.node), f"r{index}") if shared else (self.switch, f"n{place.node}")
            _ip("netns", "add", place.namespace)
            _ip("link", "add", "eth0", "netns", place.namespace, "type", "veth", "peer", "name", port, "netns", to)
            _ip("-n", to, "link", "set", port, "mtu", str(self.mtu("inter")), "master", "br0", "up")
            _ip("-n", place.namespace, "addr", "add", f"{place.address}/16", "dev", "eth0")
            _ip("-n", place.namespace, "link", "set", "eth0", "mtu", str(self.mtu("inter")), "up")
            _ip("-n", place.namespace, "link", "set", "lo", "mtu", str(self.mtu("intra")), "up")
            _limit(place.namespace, "eth0", self.intra if shared else self.inter, self.mtu("inter"))
            if shared:
                _limit(to, port, self.intra, self.mtu("intra"))
            else:
                _limit(place.namespace, "lo", self.intra, self.mtu("intra"))
            # `ip netns exec` shows this file as /etc/hosts there: nodes know one another by name.
            hosts = Path("/etc/netns") / place.namespace / "hosts"
            hosts.parent.mkdir(parents=True, exist_ok=True)
            lines = {f"{each.address} node{each.node}": None for each in places}
            hosts.write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")

    def link(self, node: int, action: str, rate: str | None = None, which: str = "inter") -> None:
        """Cut, restore or re-rate a node's link while jobs run.

        Args:
            node: which node.
            action: "down", "up" or "rate"; a link inside a node can be re-rated only.
            rate: for "rate".
            which: "inter" or "intra".

        Raises:
            BedError: no such node or action, a rate that cannot be, or a command that failed.
        """
        if not 0 <= node < self.nodes:
            raise BedError(f"node {node}: there are nodes 0 to {self.nodes - 1}")
        if action in ("down", "up") and which == "inter":
            _ip("-n", self.switch, "link", "set", f"n{node}", action)
        elif action == "rate" and rate is not None:
            rate_mbit(rate)
            mine = [place for place in self.places() if place.node == node]
            if self.mode == "independent":
                ends = [(place.namespace, "eth0" if which == "inter" else "lo") for place in mine]
            elif which == "inter":
                ends = [(self.node_switch(node), "uplink"), (self.switch, f"n{node}")]
            else:
                numbered = [(i, place) for i, place in enumerate(self.places()) if place.node == node]
                ends = [(place.namespace, "eth0") for place in mine]
                ends += [(self.node_switch(node), f"r{index}") for index, _ in numbered]
            for namespace, port in ends:
                _limit(namespace, port, rate, self.mtu(which), change=True)
        else:
            raise BedError(f"link {action}: the choices are down, up (between nodes), or rate with a rate")

    def status(self) -> list[tuple[str, str, str, int]]:
        """Per namespace: its name, node and address, what its ports are limited to, processes in it."""
        rows = []
        for place in self.places():
            limits = _run("tc", "-n", place.namespace, "qdisc", "show").stdout
            rates = ", ".join(f"{dev} {rate}" for dev, rate in re.findall(r"tbf \S+ dev (\S+) .*?rate (\S+)", limits))
            pids = _run("ip", "netns", "pids", place.namespace).stdout.split()
            rows.append((place.namespace, f"node{place.node} {place.address}", rates, len(pids)))
        return rows

    def __str__(self) -> str:
        return (
            f"{self.nodes} nodes x {self.ranks_per_node} ranks, {self.inter} between, {self.intra} inside, "
            f"buckets of a packet, {self.mode}"
        )


@dataclass(frozen=True)
class Place:
    """A namespace in which processes run."""

    namespace: str
    node: int
    address: str
    ranks: int


def found_bed(name: str) -> Bed:
    """The bed that is up under this name.

    Raises:
        BedError: none is, or what is kept about it is damaged.
    """
    file = _state_file(name)
    try:
        found = read_json(file, follow_links=False)
        if not fits(found, _SHAPE):
            raise ValueError("it is not what is kept about a bed")
        return Bed(**found)
    except (OSError, ValueError, TypeError, RecursionError, BedError) as error:
        if not isinstance(error, FileNotFoundError):
            raise BedError(
                f"{file} is damaged: {error}; `benchmarks/cluster.py --name {name} down` removes it and the bed"
            ) from error

        others = sorted(path.stem for path in STATE.glob("*.json")) if STATE.is_dir() else []
        known = f"there are {', '.join(others)}" if others else "none is up"
        raise BedError(f"no bed is up under the name {name!r}: {known}") from error


_SHAPE = create_model(
    "_SHAPE",
    __base__=StrictShape,
    **dict.fromkeys(("name", "inter", "intra", "mode"), (str, ...)),
    **dict.fromkeys(("nodes", "ranks_per_node"), (Whole, ...)),
)


def check_name(name: str) -> None:
    """It becomes part of the names of files and namespaces.

    Raises:
        BedError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise BedError(f"name {name!r}: must be 1 to 12 small letters and digits")


def _state_file(name: str) -> Path:
    check_name(name)
    return STATE / f"{name}.json"


@contextmanager
def _being_built(name: str) -> Iterator[None]:
    """One process at a time builds a bed of a name; that is given back however it ends.

    Raises:
        BedError: another one is about to.
    """
    STATE.mkdir(parents=True, exist_ok=True)
    lock = os.open(_state_file(name).with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise BedError(f"bed {name!r} is being built by another process") from error
    finally:
        os.close(lock)


def namespaces(name: str) -> list[str]:
    """Those of a bed, whole or not.

    Raises:
        BedError: no bed can have this name.
    """
    check_name(name)
    listed = _run("ip", "netns", "list").stdout.splitlines()
    return [line.split()[0] for line in listed if line.startswith(f"fsmoe-{name}-")]


def down(name: str) -> int:
    """Remove a bed and end what runs in it; the remains of one as well.

    Returns:
        How many namespaces there were.

    Raises:
        BedError: no rights, no tools, or a name that no bed can have.
    """
    check_name(name)
    check_machine()
    found = namespaces(name)
    for signal in ("-TERM", "-KILL"):
        pids = [pid for namespace in found for pid in _run("ip", "netns", "pids", namespace).stdout.split()]
        if pids:
            _run("kill", signal, *pids)
            time.sleep(0.5 if signal == "-TERM" else 0.1)
    for namespace in found:
        _run("ip", "netns", "del", namespace)
        shutil.rmtree(Path("/etc/netns") / namespace, ignore_errors=True)
    _state_file(name).unlink(missing_ok=True)
    return len(found)


@contextmanager
def cleared_if_killed(name: str) -> Iterator[object]:
    """Whatever ends this process inside the block, a SIGKILL too, the bed is removed, unless ``keep()`` was called."""
    # A process of its own waits for this one to end: its standard input closes then.
    watcher = subprocess.Popen(
        [sys.executable, str(Path(__file__).parents[1] / "cluster.py"), "--name", name, "watch"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    kept = False

    def keep() -> None:
        nonlocal kept
        kept = True

    try:
        yield keep
    finally:
        if not kept:
            down(name)
        watcher.stdin.write(b"done")
        watcher.stdin.close()
        watcher.wait()


def check_machine() -> None:
    """Can this machine have a bed?

    Raises:
        BedError: no, and what is missing.
    """
    if sys.platform != "linux":
        raise BedError("network namespaces need Linux")
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        raise BedError(f"not installed: {', '.join(missing)}. On Debian and Ubuntu: apt install iproute2 util-linux")
    if os.geteuid() != 0:
        raise BedError(
            "network namespaces need root: run it with sudo, or in a container that has NET_ADMIN and SYS_ADMIN"
        )
    tried = f"fsmoe-try-{os.getpid()}"
    made = _run("ip", "netns", "add", tried)
    try:
        limited = _run("tc", "-n", tried, "qdisc", "add", "dev", "lo", "root", "tbf", *_bucket("10mbit", SMALLEST_MTU))
    finally:
        _run("ip", "netns", "del", tried)
    for done, what in ((made, "network namespaces"), (limited, "token buckets (tbf)")):
        if done.returncode:
            raise BedError(f"this machine does not allow {what}: {done.stderr.strip()}")


def _new_bridge(namespace: str) -> None:
    _ip("netns", "add", namespace)
    _ip("-n", namespace, "link", "add", "br0", "type", "bridge")
    _ip("-n", namespace, "link", "set", "br0", "up")


def _bucket(rate: str, mtu: int) -> tuple[str, ...]:
    return "rate", rate, "burst", str(mtu + _HEADER_BYTES), "latency", "400ms"


def _limit(namespace: str, port: str, rate: str, mtu: int, change: bool = False) -> None:
    verb = "change" if change else "add"
    _check(["tc", "-n", namespace, "qdisc", verb, "dev", port, "root", "tbf", *_bucket(rate, mtu)])


def _ip(*arguments: str) -> None:
    _check(["ip", *arguments])


def _check(command: Sequence[str]) -> None:
    done = _run(*command)
    if done.returncode:
        raise BedError(f"`{' '.join(command)}` failed: {done.stderr.strip() or done.stdout.strip()}")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
