# SPDX-License-Identifier: Apache-2.0
"""This module reads what the host reports about its links: network, InfiniBand, and between its GPUs.

It is what is written there, not what was measured: a virtual interface tells a speed that it does not have, and a limit
set by ``tc`` is seen nowhere. Torch is imported only where GPUs are asked for.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
NVIDIA_SMI_LIMIT_S = 10.0
# A speed nobody knows: -1, also as an unsigned number.
_NO_SPEED = (-1, 2**32 - 1)
# Interfaces that stay from one start to the next, though no device belongs to them: bonds, and eth0 in a container.
_STEADY_NAMES = ("eth", "en", "ib", "bond", "team")


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    name: str
    kind: str
    """``physical``, ``virtual`` or ``loopback``."""
    state: str
    """``up``, ``down``, ...; "" where it is not known."""
    speed_mbits: int | None
    """The speed that the interface itself reports; ``None``: not known."""
    mtu_bytes: int | None
    driver: str

    def line(self) -> str:
        """Return a readable description."""
        speed = "speed unknown" if self.speed_mbits is None else f"{self.speed_mbits / 1e3:g} Gbit/s"
        parts = (self.kind, self.state and f"is {self.state}", speed, self.mtu_bytes and f"mtu {self.mtu_bytes}")
        return f"{self.name}: {', '.join([*filter(None, parts), *([self.driver] if self.driver else [])])}"


@dataclass(frozen=True)
class Port:
    """A port of an InfiniBand or RoCE adapter."""

    name: str
    """Adapter and number, such as ``mlx5_0/1``."""
    link: str
    """``InfiniBand``, or ``Ethernet`` for RoCE."""
    state: str
    rate: str
    """The speed, such as ``400 Gb/sec (4X NDR)``."""

    def line(self) -> str:
        """Return a readable description."""
        return f"{self.name}: {', '.join(filter(None, (self.link, self.rate, self.state)))}"


@dataclass(frozen=True)
class Gpus:
    """The GPUs that this process sees."""

    names: tuple[str, ...]
    peers: tuple[tuple[int, ...], ...]
    """For each GPU, the GPUs whose memory it can access directly."""
    nvlink_gb_s: tuple[float, ...] = ()
    """The bandwidth of all NVLinks of each GPU together, one way; empty if not asked for or without NVLinks."""

    def lines(self) -> list[str]:
        """Return a readable description."""
        counts = {name: self.names.count(name) for name in self.names}
        found = [f"GPUs: {', '.join(f'{count} x {name}' for name, count in counts.items())}"]
        if len(self.names) > 1:
            alone = [str(i) for i, peers in enumerate(self.peers) if len(peers) < len(self.names) - 1]
            reach = (
                f"{', '.join(alone)} cannot reach the memory of all others"
                if alone
                else "all reach each other's memory"
            )
            found.append(f"GPUs: {reach}")
        if self.nvlink_gb_s:
            found.append(f"NVLink: {', '.join(f'{each:g}' for each in dict.fromkeys(self.nvlink_gb_s))} GB/s per GPU")
        return found


@dataclass(frozen=True)
class LinkFacts:
    """The links of one host."""

    interfaces: tuple[Interface, ...]
    ports: tuple[Port, ...]
    gpus: Gpus | None = None

    def lines(self) -> list[str]:
        """Short, to be read; loopback and what is virtual and comes and goes is left out."""
        network = [each.line() for each in self.interfaces if _is_steady(each)]
        return [*network, *(each.line() for each in self.ports), *(self.gpus.lines() if self.gpus else ())]


def link_facts(root: Path = ROOT, cuda: bool = True, ask_nvidia_smi: bool = False) -> LinkFacts:
    """Read them. Never raises: what cannot be read is not known.

    Args:
        root: under which ``sys/class`` is; for tests.
        cuda: whether to ask torch for GPUs; that begins to use them.
        ask_nvidia_smi: whether to ask it for NVLinks, which takes a second.
    """
    gpus = _gpus(_nvlink_gb_s() if ask_nvidia_smi else ()) if cuda else None
    return LinkFacts(tuple(_interfaces(root / "sys/class/net")), tuple(_ports(root / "sys/class/infiniband")), gpus)


# ---- network


def _is_steady(interface: Interface) -> bool:
    return interface.kind == "physical" or (interface.kind == "virtual" and interface.name.startswith(_STEADY_NAMES))


def _interfaces(folder: Path) -> list[Interface]:
    return [_interface(each) for each in _entries(folder) if _text(each / "mtu")]


def _interface(at: Path) -> Interface:
    # A device of its own, or the kernel's making. ARPHRD_LOOPBACK is 772.
    kind = "loopback" if _text(at / "type") == "772" else "physical" if (at / "device").exists() else "virtual"
    kinds = re.search(r"^DEVTYPE=(\w+)$", _text(at / "uevent"), re.MULTILINE)
    speed = _number(at / "speed")
    return Interface(
        at.name,
        kind,
        _text(at / "operstate").replace("unknown", ""),
        None if speed in (*_NO_SPEED, 0) else speed,
        _number(at / "mtu"),
        _link_name(at / "device" / "driver") or (kinds[1] if kinds else ""),
    )


def _ports(folder: Path) -> list[Port]:
    return [
        Port(
            f"{adapter.name}/{port.name}",
            _text(port / "link_layer"),
            # Such as "4: ACTIVE".
            _text(port / "state").partition(":")[2].strip().lower(),
            _text(port / "rate"),
        )
        for adapter in _entries(folder)
        for port in _entries(adapter / "ports")
    ]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # a link that is down has no speed to read
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if re.fullmatch(r"-?\d+", text) else None


def _link_name(path: Path) -> str:
    return path.resolve().name if path.exists() else ""


# ---- GPUs


def _gpus(nvlink_gb_s: Sequence[float]) -> Gpus | None:
    try:
        import torch

        if not torch.cuda.is_available():
            return None
        numbers = range(torch.cuda.device_count())
        reach = torch.cuda.can_device_access_peer
        peers = tuple(tuple(b for b in numbers if a != b and reach(a, b)) for a in numbers)
        return Gpus(tuple(torch.cuda.get_device_name(each) for each in numbers), peers, tuple(nvlink_gb_s))
    except (ImportError, RuntimeError, AssertionError):  # no torch, or a driver that does not answer
        return None


def _nvlink_gb_s() -> tuple[float, ...]:
    try:
        done = subprocess.run(
            ["nvidia-smi", "nvlink", "--status"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_LIMIT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):  # not there, too slow, or without links
        return ()
    return read_nvlink_status(done.stdout)


def read_nvlink_status(text: str) -> tuple[float, ...]:
    """Parse the output of ``nvidia-smi nvlink --status``: GB/s of all active links of each GPU; empty without links."""
    found: list[float] = []
    for line in text.splitlines():
        if re.match(r"GPU \d+:", line):
            found.append(0.0)
        elif found and (rate := re.match(r"\s*Link \d+: ([\d.]+) GB/s", line)):
            found[-1] += float(rate[1])
    return tuple(round(each, 3) for each in found) if any(found) else ()
