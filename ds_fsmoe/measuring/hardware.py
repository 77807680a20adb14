# SPDX-License-Identifier: Apache-2.0
"""Reads the host's reports about its links: network, InfiniBand, and between its GPUs.

Called when measurements are kept or printed. These are reports, not measurements: a virtual interface reports a speed
that it does not have, and no report has a limit that was set by ``tc``. Torch is imported where GPUs are asked for.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path("/")
NVIDIA_SMI_LIMIT_S = 10.0
# An unknown speed: -1, also as an unsigned number.
_NO_SPEED = (None, 0, -1, 2**32 - 1)
# Interfaces that stay from one start to the next, though no device belongs to them: bonds, and eth0 in a container.
_STEADY_NAMES = ("eth", "en", "ib", "bond", "team")


def link_lines(root: Path = ROOT, cuda: bool = True, ask_nvidia_smi: bool = False) -> list[str]:
    """Return a line for each network interface, each InfiniBand port, and for the GPUs that this process sees.

    Loopback is left out, and what is virtual and comes and goes. Never raises: what cannot be read is not known.

    Args:
        root: under which ``sys/class`` is; for tests.
        cuda: whether to ask torch for GPUs; that begins to use them.
        ask_nvidia_smi: whether to ask it for NVLinks, which takes a second.
    """
    network = filter(None, map(_interface, _entries(root / "sys/class/net")))
    gpus = _gpus(_nvlink_gb_s() if ask_nvidia_smi else ()) if cuda else []
    return [*network, *_ports(root / "sys/class/infiniband"), *gpus]


# ---- network


def _interface(at: Path) -> str | None:
    """Return the line of an interface; ``None`` where there is none, or one that does not stay.

    Args:
        at: its folder.
    """
    mtu_bytes, name, is_device = _number(at / "mtu"), at.name, (at / "device").exists()
    # ARPHRD_LOOPBACK is 772.
    if mtu_bytes is None or _text(at / "type") == "772" or not (is_device or name.startswith(_STEADY_NAMES)):
        return None
    state, speed_mbits = _text(at / "operstate").replace("unknown", ""), _number(at / "speed")
    speed = "speed unknown" if speed_mbits in _NO_SPEED else f"{speed_mbits / 1e3:g} Gbit/s"
    kinds = re.search(r"^DEVTYPE=(\w+)$", _text(at / "uevent"), re.MULTILINE)
    driver = _link_name(at / "device" / "driver") or (kinds[1] if kinds else "")
    parts = ("physical" if is_device else "virtual", state and f"is {state}", speed, f"mtu {mtu_bytes}", driver)
    return f"{name}: {', '.join(filter(None, parts))}"


def _ports(folder: Path) -> list[str]:
    """Return a line for each port of an InfiniBand or RoCE adapter."""
    found = []
    for adapter in _entries(folder):
        for port in _entries(adapter / "ports"):
            state = _text(port / "state").partition(":")[2].strip().lower()  # such as "4: ACTIVE"
            parts = (_text(port / "link_layer"), _text(port / "rate"), state)
            found.append(f"{adapter.name}/{port.name}: {', '.join(filter(None, parts))}")
    return found


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


def _gpus(nvlink_gb_s: Sequence[float]) -> list[str]:
    """Return lines about the GPUs, and about the bandwidth of all NVLinks of each together, one way."""
    try:
        import torch

        if not torch.cuda.is_available():
            return []
        numbers = range(torch.cuda.device_count())
        reach = torch.cuda.can_device_access_peer
        alone = [str(a) for a in numbers if not all(reach(a, b) for b in numbers if b != a)]
        counts = Counter(torch.cuda.get_device_name(each) for each in numbers)
    except (ImportError, RuntimeError, AssertionError):  # no torch, or a driver that does not answer
        return []
    found = [f"GPUs: {', '.join(f'{count} x {name}' for name, count in counts.items())}"]
    if len(numbers) > 1:
        cannot = f"{', '.join(alone)} cannot access the memory of all others"
        found.append(f"GPUs: {cannot}" if alone else "GPUs: all reach each other's memory")
    if nvlink_gb_s:
        found.append(f"NVLink: {', '.join(f'{each:g}' for each in dict.fromkeys(nvlink_gb_s))} GB/s per GPU")
    return found


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
