# SPDX-License-Identifier: Apache-2.0
"""Keeps measurements between runs: one JSON file for each cluster that they hold for.

The autotuner and ``ds_fsmoe profile`` read it ahead of measuring, and write it after.

A file that cannot be read, or holds something else, is not trusted: a warning names it, and it is rewritten.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import platform
import re
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ds_fsmoe.distributed import nccl
from ds_fsmoe.distributed.agreement import version_of
from ds_fsmoe.distributed.fail_together import NCCL_BACKENDS, on_every_rank
from ds_fsmoe.distributed.topology import Topology, world_size_now
from ds_fsmoe.files.whole_files import write_whole
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.measuring.hardware import link_lines
from ds_fsmoe.measuring.stopwatch import Prepare, Stopwatch
from ds_fsmoe.planning.cluster import Cluster, cluster_as_json
from ds_fsmoe.planning.job.measured import Timing
from ds_fsmoe.planning.workload import ALLTOALLS_OF_BEFORE
from ds_fsmoe.untrusted import read_json
from ds_fsmoe.versions import VERSION

# ---- The measurements by name: what is known already is not measured again
#
# Every rank knows the same, because what was kept from before is read by one rank and sent to all; so all of them
# measure the same things in the same order.


@dataclass
class Measurements:
    """Holds the values, the same on every rank. A name contains the operation and its settings besides the cluster."""

    timings: dict[str, Timing] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    """The values: milliseconds, factors, and 0 or 1 for yes or no."""


class Timeable(NamedTuple):
    """Holds an operation that is to be timed at several sizes."""

    name: str
    """The key of its measurements."""
    unit: str
    """The unit of the sizes in the result, such as "byte"."""
    sizes: Sequence[int]
    """The sizes, each given to ``prepare``."""
    size_of_one: float
    """The units in a size of 1."""
    prepare: Prepare
    group: dist.ProcessGroup | None = None
    """The group of a collective."""
    within: Callable[[], AbstractContextManager[None]] = nullcontext
    """The context in which it is prepared and timed."""


class Measuring:
    """Measures missing values. Every method is collective.

    Args:
        watch: the stopwatch of this job.
        known: the values that are known; measured ones are added.
        on_progress: a function that is called with the name of each value ahead of its measurement, on every rank.
    """

    def __init__(
        self, watch: Stopwatch, known: Measurements, on_progress: Callable[[str], None] = lambda what: None
    ) -> None:
        self.watch = watch
        self.known = known
        self._on_progress = on_progress

    def timings(self, work: Mapping[str, Timeable]) -> dict[str, Timing]:
        """Measure several operations, one after another; see :meth:`timing`."""
        return {operation: self.timing(each) for operation, each in work.items()}

    def timing(self, work: Timeable) -> Timing:
        """Measure an operation at several sizes, unless its times are known.

        Raises:
            MeasuringError: on every rank, if one has failed.
        """
        name = work.name
        if name not in self.known.timings:
            self._on_progress(name)
            with work.within():
                found = self.watch.times(name, work.sizes, work.prepare, work.group)
            in_units = tuple(each * work.size_of_one for each in work.sizes)
            self.known.timings[name] = Timing(
                work.unit, in_units, tuple(found.times_ms), tuple(found.issued_ms), tuple(found.least_ms)
            )
        return self.known.timings[name]

    def number(self, name: str, measure: Callable[[], float]) -> float:
        """Return a number; ``measure`` is collective and returns the same on every rank."""
        if name not in self.known.numbers:
            self._on_progress(name)
            self.known.numbers[name] = measure()
        return self.known.numbers[name]


# ---- The conditions that measurements hold for: hosts, rank placement, processors, links and versions, in
# JSON's types


Fingerprint = dict[str, Any]


def cluster_fingerprint(
    device: torch.device,
    topology: Topology,
    root: Path = Path("/"),
    *,
    max_ctas: int | None = None,
    one_link: bool = False,
) -> Fingerprint:
    """Return the cluster this job runs on, the same on every rank. Collective over all ranks of the job.

    The names of measurements have what they depend on besides: sizes, types, layers.

    Args:
        device: the device of this rank; on a GPU it has to be set by now, because NCCL sends the texts.
        topology: the nodes of the job, as they were found or are asked for.
        root: the root of the files that describe this host; for tests.
        max_ctas: the limit of the communicators that are measured, where they are NCCL's.
        one_link: whether one link is used after the other there.
    """
    own = {
        "host": socket.gethostname(),
        "device": device_name(device, root),
        "threads": torch.get_num_threads() if device.type == "cpu" else 0,
        "links": link_lines(root, cuda=device.type == "cuda"),
    }
    of_ranks = on_every_rank(own)
    links = {each["host"]: each["links"] for each in reversed(of_ranks)}
    found: Fingerprint = {
        "hosts": by_ranks([each["host"] for each in of_ranks]),
        "nodes": by_ranks([str(node) for node in topology.node_of_rank]),
        "ranks_per_node": list(topology.node_sizes),
        "devices": by_ranks([each["device"] for each in of_ranks]),
        "links": {host: links[host] for host in sorted(links)},
        "versions": {"torch": str(torch.__version__), "deepspeed": version_of("deepspeed"), "ds_fsmoe": VERSION},
        "backend": _backend(),
    }
    if device.type == "cuda":
        # Times that an earlier version took by the host's clock are of another kind.
        found["clock"] = "of the device"
        found["nccl"] = {"max_ctas": max_ctas, "one_link": one_link}
    if device.type == "cpu":
        found["threads"] = by_ranks([str(each["threads"]) for each in of_ranks])
    return found


def source_of(fingerprint: Fingerprint, dtype: str) -> str:
    """Return a sentence about the source of numbers that were measured under these conditions.

    Args:
        fingerprint: the conditions.
        dtype: the type in which products were measured, by name.
    """
    devices = ", ".join(dict.fromkeys(fingerprint["devices"].values()))
    threads = "/".join(dict.fromkeys(fingerprint.get("threads", {}).values()))
    hosts = list(dict.fromkeys(fingerprint["hosts"].values()))
    links = fingerprint["links"][hosts[0]]
    parts = (
        f"measured by ds_fsmoe {VERSION} on {datetime.now(UTC):%Y-%m-%d}",
        f"{world_size_now()} ranks of {devices}{threads and f' ({threads} threads)'}, {dtype}",
        f"hosts {', '.join(hosts[:8])}{' and more' if len(hosts) > 8 else ''}",
        f"torch {fingerprint['versions']['torch']}, {fingerprint['backend']}",
        *([f"links of {hosts[0]}: {' | '.join(links)}"] if links else []),
    )
    return "; ".join(parts)


def by_ranks(values: Sequence[str]) -> dict[str, str]:
    """Return runs of ranks with the same value, such as ``{"0-1": "node0", "2": "node1"}``."""
    found: dict[str, str] = {}
    first = 0
    for rank, value in enumerate(values):
        if rank + 1 == len(values) or values[rank + 1] != value:
            found[str(rank) if rank == first else f"{first}-{rank}"] = value
            first = rank + 1
    return found


def device_name(device: torch.device, root: Path = Path("/")) -> str:
    """Return the model of a GPU or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _backend() -> str:
    if world_size_now() == 1:
        return "none"
    name = str(dist.get_backend())
    return f"{name} {'.'.join(map(str, nccl.version()))}" if name in NCCL_BACKENDS else name


# ---- Measurements kept between runs: one JSON file for each cluster that they hold for


_FORMAT = 2
"""The version of ``measured`` in a cluster file; a file with another number is from another version."""


class MeasurementCache:
    """Reads and writes the files of one folder, one per cluster; only rank 0 uses them.

    Each is a cluster file, as ``ds_fsmoe plan --cluster`` takes it, that holds what it was made from. Two jobs that
    write the same file at the same time leave that of one of them, whole.

    Args:
        folder: made when the first file is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._has_warned_of_folder = False

    def file_of(self, fingerprint: Fingerprint) -> Path:
        """Return the path where measurements of this cluster are kept."""
        text = json.dumps(fingerprint, sort_keys=True)
        return self._folder / f"cluster-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def read(self, fingerprint: Fingerprint) -> Measurements | None:
        """Return the kept measurements, or ``None``; a warning names an unusable file."""
        path = self.file_of(fingerprint)
        try:
            return read_measurements(path, fingerprint)
        except (FileNotFoundError, NotADirectoryError):  # the latter is said when it is written
            return None
        except UselessFileError as error:
            log_on_rank_0(f"fsmoe.autotune.cache_dir: {path} {error}; measuring again", logging.WARNING)
            return None

    def write(self, fingerprint: Fingerprint, measurements: Measurements, cluster: Cluster) -> None:
        """Keep measurements beside those already kept, whole or not at all; warn if that cannot be done.

        Args:
            fingerprint: the fingerprint of the cluster.
            measurements: those of this run; of two by one name these are kept.
            cluster: the cluster that follows from them.
        """
        path = self.file_of(fingerprint)
        try:
            kept = read_measurements(path, fingerprint)
        except (OSError, UselessFileError):  # nothing there that is worth keeping
            kept = Measurements()
        both = Measurements(kept.timings | measurements.timings, kept.numbers | measurements.numbers)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_measurements(path, fingerprint, both, cluster)
        except OSError as error:
            if not self._has_warned_of_folder:
                log_on_rank_0(
                    f"fsmoe.autotune.cache_dir: cannot write to {self._folder}, so the next run measures again: "
                    f"{error}",
                    logging.WARNING,
                )
            self._has_warned_of_folder = True


class UselessFileError(Exception):
    """Reports a file that is not to be trusted. The message has the reason, after the file's name."""


def write_measurements(path: Path, fingerprint: Fingerprint, measurements: Measurements, cluster: Cluster) -> None:
    """Write a cluster file with what it was made from, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    measured = {
        "format": _FORMAT,
        "fingerprint": fingerprint,
        "timings": {
            name: {"unit": each.unit, "sizes": list(each.sizes), "times_ms": list(each.times_ms)}
            | {key: list(found) for key in ("issued_ms", "least_ms") if (found := getattr(each, key))}
            for name, each in sorted(measurements.timings.items())
        },
        "numbers": dict(sorted(measurements.numbers.items())),
    }
    text = json.dumps(cluster_as_json(cluster) | {"measured": measured}, indent=1)
    write_whole(path, _LIST.sub(_on_one_line, text) + "\n")


_LIST = re.compile(r"\[\n[^\[\]{}]*\]")
"""Return a list without nested lists over several lines. No JSON text has a line break, so none looks like it."""


def _on_one_line(found: re.Match[str]) -> str:
    return "[" + re.sub(r"\n\s*", " ", found[0][1:-1]).strip() + "]"


def read_measurements(path: Path, fingerprint: Fingerprint) -> Measurements:
    """Return the measurements of this cluster.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        UselessFileError: there is, and it is not to be trusted.
    """
    try:
        data = read_json(path, follow_links=False)
        return _measurements(data["measured"], fingerprint)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UselessFileError(f"cannot be read: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UselessFileError(f"is not a measurements file: {type(error).__name__}: {error}") from error


def _measurements(data: Any, fingerprint: Fingerprint) -> Measurements:
    if data["format"] != _FORMAT:
        raise UselessFileError(f"has format {data['format']!r}, and this version reads {_FORMAT}")
    expected, found = json.loads(json.dumps(fingerprint)), data["fingerprint"]
    if found != expected:
        differing = sorted(key for key in expected.keys() | found.keys() if found.get(key) != expected.get(key))
        raise UselessFileError(f"is from another cluster: it differs in {', '.join(differing)}")
    timings = {_name_today(name): _timing(name, at) for name, at in data["timings"].items()}
    return Measurements(timings, {_name_today(name): _number(value, name) for name, value in data["numbers"].items()})


def _name_today(name: str) -> str:
    """Return the name of a measurement; those of version 0.2.0 contain other names of all-to-alls."""
    return re.sub(r"\w+", lambda word: ALLTOALLS_OF_BEFORE.get(word[0], word[0]), name)


def _timing(name: str, at: Any) -> Timing:
    sizes, times_ms = (tuple(_number(each, name) for each in at[key]) for key in ("sizes", "times_ms"))
    if not isinstance(at["unit"], str):
        raise UselessFileError(f"has the unknown unit {at['unit']!r} for {name}")
    if any(a >= b for a, b in itertools.pairwise(sizes)):
        raise UselessFileError(f"has sizes of {name} that do not increase: {list(sizes)}")
    issued_ms, least_ms = (tuple(_number(each, name) for each in at.get(key, ())) for key in ("issued_ms", "least_ms"))
    for which, found in (("times of the host", issued_ms), ("least times", least_ms)):
        if len(found) not in (0, len(sizes)):
            raise UselessFileError(f"has {len(found)} {which} for {len(sizes)} sizes of {name}")
    timing = Timing(at["unit"], sizes, times_ms, issued_ms, least_ms)
    timing.fit  # noqa: B018 - what cannot be fitted is of no use, and says why
    return timing


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise UselessFileError(f"has {value!r} in {name}: must be a finite number of at least 0")
    return float(value)
