# SPDX-License-Identifier: Apache-2.0
"""Measurements kept between runs: one JSON file for each cluster that they hold for.

A file that cannot be read, or holds something else, is not trusted: a warning names it, and it is rewritten.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_fsmoe.files.whole_files import write_whole
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.measuring.measurements import Measurements
from ds_fsmoe.planning.cluster import Cluster, cluster_as_json
from ds_fsmoe.planning.measured import Timing
from ds_fsmoe.untrusted import read_json

_FORMAT = 2
"""The version of ``measured`` in a cluster file; a file with another number is from another version."""
Fingerprint = Mapping[str, Any]
"""The description of what the measurements hold for, in JSON's types."""


class MeasurementCache:
    """The files of one folder, one per cluster; only rank 0 uses them.

    Each is a cluster file, as ``ds_fsmoe plan --cluster`` takes it, that holds what it was made from. Two jobs that
    write the same file at the same time leave that of one of them, whole.

    Args:
        folder: made when the first file is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._said_of_folder = False

    def file_of(self, fingerprint: Fingerprint) -> Path:
        """Return the path where measurements of this cluster are kept."""
        text = json.dumps(fingerprint, sort_keys=True)
        return self._folder / f"cluster-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def read(self, fingerprint: Fingerprint) -> Measurements | None:
        """Return what is kept, or ``None``; a warning names a file that is not usable."""
        path = self.file_of(fingerprint)
        try:
            return read_measurements(path, fingerprint)
        except (FileNotFoundError, NotADirectoryError):  # the latter is said when it is written
            return None
        except UselessFileError as error:
            log_on_rank_0(f"fsmoe.autotune.cache_dir: {path} {error}; it is measured again", logging.WARNING)
            return None

    def write(self, fingerprint: Fingerprint, measurements: Measurements, cluster: Cluster) -> None:
        """Keep measurements beside those already kept, whole or not at all; warn if that cannot be done.

        Args:
            fingerprint: of the cluster.
            measurements: of this run; of two by one name these are kept.
            cluster: what they make.
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
            if not self._said_of_folder:
                log_on_rank_0(
                    f"fsmoe.autotune.cache_dir: measurements cannot be kept in {self._folder}, so the next run "
                    f"measures again: {error}",
                    logging.WARNING,
                )
            self._said_of_folder = True


class UselessFileError(Exception):
    """A file that is not to be trusted. The message says why, after the file's name."""


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
    """Return what was measured on this cluster.

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
        raise UselessFileError(f"is not a file of measurements: {type(error).__name__}: {error}") from error


def _measurements(data: Any, fingerprint: Fingerprint) -> Measurements:
    if data["format"] != _FORMAT:
        raise UselessFileError(f"has format {data['format']!r}, and this version reads {_FORMAT}")
    expected, found = json.loads(json.dumps(fingerprint)), data["fingerprint"]
    if found != expected:
        differing = sorted(key for key in expected.keys() | found.keys() if found.get(key) != expected.get(key))
        raise UselessFileError(f"is of another cluster: it differs in {', '.join(differing)}")
    timings = {name: _timing(name, at) for name, at in data["timings"].items()}
    return Measurements(timings, {name: _number(value, name) for name, value in data["numbers"].items()})


def _timing(name: str, at: Any) -> Timing:
    sizes, times_ms = (tuple(_number(each, name) for each in at[key]) for key in ("sizes", "times_ms"))
    if not isinstance(at["unit"], str):
        raise UselessFileError(f"has {at['unit']!r} for the unit of {name}")
    if any(a >= b for a, b in itertools.pairwise(sizes)):
        raise UselessFileError(f"has sizes of {name} that do not grow: {list(sizes)}")
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
