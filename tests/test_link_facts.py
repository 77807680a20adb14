# SPDX-License-Identifier: Apache-2.0
"""What a host tells of its links is read without privileges, and what it does not know is not made up."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ds_fsmoe.distributed.topology import find_topology, topology_of_size
from ds_fsmoe.measuring import cache as fingerprint
from ds_fsmoe.measuring import hardware as module
from ds_fsmoe.measuring.cache import cluster_fingerprint
from ds_fsmoe.measuring.hardware import link_lines, read_nvlink_status
from tests.ranks import run_on_ranks
from tests.waiting import LIMIT_S

STATUS = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-5a)
\t Link 0: 26.562 GB/s
\t Link 1: 26.562 GB/s
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-7b)
\t Link 0: 26.562 GB/s
\t Link 1: <inactive>
"""


def interface(root: Path, name: str, driver: str = "", **files: str) -> None:
    folder = root / "sys/class/net" / name
    folder.mkdir(parents=True)
    for key, text in ({"mtu": "1500", "type": "1", "operstate": "up"} | files).items():
        (folder / key).write_text(f"{text}\n")
    if driver:
        (root / "drivers" / driver).mkdir(parents=True, exist_ok=True)
        (folder / "device").mkdir()
        (folder / "device/driver").symlink_to(root / "drivers" / driver)


def port(root: Path, adapter: str, number: int, **files: str) -> None:
    folder = root / "sys/class/infiniband" / adapter / "ports" / str(number)
    folder.mkdir(parents=True)
    for key, text in files.items():
        (folder / key).write_text(f"{text}\n")


@pytest.fixture
def host(tmp_path: Path) -> Path:
    interface(tmp_path, "lo", mtu="65536", type="772", operstate="unknown")
    interface(tmp_path, "eth0", "mlx5_core", speed="100000", mtu="9000")
    interface(tmp_path, "eth1", "virtio_net", speed="-1")
    interface(tmp_path, "eth2", "e1000", speed="4294967295", operstate="down")
    interface(tmp_path, "eth3", "x", speed="fast", operstate="unknown")
    interface(tmp_path, "bond0", speed="200000", uevent="DEVTYPE=bond\nINTERFACE=bond0")
    interface(tmp_path, "veth3f", speed="10000")
    interface(tmp_path, "docker0", uevent="DEVTYPE=bridge")
    (tmp_path / "sys/class/net/bonding_masters").write_text("bond0\n")
    port(tmp_path, "mlx5_0", 1, rate="400 Gb/sec (4X NDR)", state="4: ACTIVE", link_layer="InfiniBand")
    port(tmp_path, "mlx5_1", 1, rate="100 Gb/sec (4X EDR)", state="1: DOWN", link_layer="Ethernet")
    return tmp_path


def test_lines_name_what_stays_from_one_start_to_the_next_and_what_is_not_told_is_no_error(host: Path) -> None:
    assert link_lines(host) == [
        "bond0: virtual, is up, 200 Gbit/s, mtu 1500, bond",
        "eth0: physical, is up, 100 Gbit/s, mtu 9000, mlx5_core",
        "eth1: physical, is up, speed unknown, mtu 1500, virtio_net",
        "eth2: physical, is down, speed unknown, mtu 1500, e1000",
        "eth3: physical, speed unknown, mtu 1500, x",
        "mlx5_0/1: InfiniBand, 400 Gb/sec (4X NDR), active",
        "mlx5_1/1: Ethernet, 100 Gb/sec (4X EDR), down",
    ]
    assert link_lines(host / "drivers") == []


# ---- GPUs


def pretend(patch: pytest.MonkeyPatch, names: list[str], reach: Callable[[int, int], bool]) -> None:
    """GPUs of these names, of which those reach each other."""
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "device_count", lambda: len(names))
    patch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    patch.setattr(torch.cuda, "can_device_access_peer", reach)


def test_gpus_are_said_to_reach_each_other_if_all_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pretend(monkeypatch, ["A", "A"], lambda a, b: True)
    reaching = ["GPUs: 2 x A", "GPUs: all reach each other's memory"]
    for nvlink, lines in (((), []), ((450.0, 450.0), ["NVLink: 450 GB/s per GPU"])):
        monkeypatch.setattr(module, "_nvlink_gb_s", lambda nvlink=nvlink: nvlink)
        assert link_lines(tmp_path, ask_nvidia_smi=True) == [*reaching, *lines]
    pretend(monkeypatch, ["A", "A", "B"], lambda a, b: (a, b) != (0, 2))
    assert link_lines(tmp_path) == ["GPUs: 2 x A, 1 x B", "GPUs: 0 cannot access the memory of all others"]
    pretend(monkeypatch, ["A"], lambda a, b: False)
    assert link_lines(tmp_path) == ["GPUs: 1 x A"]
    assert link_lines(tmp_path, cuda=False) == []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: (_ for _ in ()).throw(RuntimeError("no driver")))
    assert link_lines(tmp_path) == []
    monkeypatch.setitem(sys.modules, "torch", None)
    assert link_lines(tmp_path) == []


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (f"cat <<'END'\n{STATUS}END", (53.124, 26.562)),
        (f"cat <<'END'\n{STATUS}END\nexit 3", ()),
        ("exec sleep 6000", ()),
        (None, ()),
    ],
)
def test_nvidia_smi_is_asked_but_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | None, expected: tuple
) -> None:
    if script is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin" if script is not None else str(tmp_path))
    # Who answers has all the time it needs.
    monkeypatch.setattr(module, "NVIDIA_SMI_LIMIT_S", 0.2 if "sleep" in str(script) else LIMIT_S)
    assert module._nvlink_gb_s() == expected
    for nothing in ("", "GPU 0: NVIDIA T4 (UUID: GPU-1)\n", "Unable to retrieve NVLink information\n"):
        assert read_nvlink_status(nothing) == ()


# ---- what measurements hold for


def fingerprints(rank: int, world_size: int, root: str) -> list[dict[str, Any]]:
    socket.gethostname = lambda: f"node{rank // 2}"
    torch.set_num_threads(1 + rank // 2)
    of = [find_topology(), topology_of_size(3, 3)]
    found = [cluster_fingerprint(torch.device("cpu"), each, Path(root)) for each in of]
    fingerprint.link_lines = lambda *_, **__: [f"eth{rank // 2}: physical"]
    return [*found, cluster_fingerprint(torch.device("cpu"), of[0], Path(root))]


def test_a_fingerprint_is_the_same_on_every_rank_and_tells_clusters_apart(host: Path, tmp_path: Path) -> None:
    (host / "proc").mkdir()
    (host / "proc/cpuinfo").write_text("processor\t: 0\nmodel name\t: Abacus 7\nmodel name\t: Abacus 7\n")
    seen = run_on_ranks(fingerprints, 3, tmp_path / "ranks", str(host))
    assert seen[0] == seen[1] == seen[2]
    found, overridden, other_links = seen[0]
    assert json.loads(json.dumps(found)) == found
    expected = {
        "hosts": {"0-1": "node0", "2": "node1"},
        "nodes": {"0-1": "0", "2": "1"},
        "ranks_per_node": [2, 1],
        "devices": {"0-2": "Abacus 7"},
        "threads": {"0-1": "1", "2": "2"},
        "backend": "gloo",
        "links": dict.fromkeys(("node0", "node1"), link_lines(host)),
    }
    assert {name: found[name] for name in expected} == expected
    assert found["versions"]["torch"] == torch.__version__
    assert {key for key in found if found[key] != overridden[key]} == {"nodes", "ranks_per_node"}
    assert {key for key in found if found[key] != other_links[key]} == {"links"}
    assert other_links["links"]["node1"] == ["eth1: physical"]
