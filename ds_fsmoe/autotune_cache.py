# SPDX-License-Identifier: Apache-2.0
"""Measurements kept between runs: one JSON file for each cluster and model that they hold for.

A file that cannot be read, or is of something else, is never trusted: it is named in a warning, and written anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.runtime.profiler import LayerProfile
from ds_fsmoe.runtime.stopwatch import Timing

_FORMAT = 1
"""Of the file: with another number it is of another version."""
Fingerprint = Mapping[str, Any]
"""What the measurements hold for, in JSON's types."""


class ProfileCache:
    """The files of one folder; for rank 0 alone.

    Args:
        folder: made when the first file is written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def file_of(self, fingerprint: Fingerprint) -> Path:
        """Where measurements of this are kept."""
        text = json.dumps(fingerprint, sort_keys=True)
        return self._folder / f"profile-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"

    def read(self, fingerprint: Fingerprint, wanted: Sequence[tuple[str, ...]]) -> list[LayerProfile] | None:
        """What is kept, or ``None``; a file that is of no use is named in a warning.

        Args:
            fingerprint: of this run.
            wanted: the operations of each kind of layer.
        """
        path = self.file_of(fingerprint)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):  # the latter is said when it is written
            return None
        except (OSError, ValueError) as error:
            self._warn(path, f"cannot be read: {error}")
            return None
        try:
            return _profiles(data, fingerprint, wanted)
        except _UselessError as error:
            self._warn(path, str(error))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            self._warn(path, f"is not a file of measurements: {type(error).__name__}: {error}")
        return None

    def write(self, fingerprint: Fingerprint, profiles: Sequence[LayerProfile]) -> None:
        """Keep measurements, whole or not at all; where that cannot be done, a warning says so."""
        path = self.file_of(fingerprint)
        data = {"format": _FORMAT, "fingerprint": fingerprint, "layers": [_as_json(each) for each in profiles]}
        temporary = None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(
                "w", encoding="utf-8", dir=self._folder, prefix=path.stem, suffix=".part", delete=False
            ) as file:
                temporary = Path(file.name)
                file.write(json.dumps(data, indent=1) + "\n")
            os.replace(temporary, path)
        except OSError as error:
            if temporary is not None:
                temporary.unlink(missing_ok=True)
            log_on_rank_0(
                f"fsmoe.autotune.cache_dir: measurements cannot be kept in {self._folder}, so the next run measures "
                f"again: {error}",
                logging.WARNING,
            )

    def _warn(self, path: Path, why: str) -> None:
        log_on_rank_0(f"fsmoe.autotune.cache_dir: {path} {why}; it is measured again", logging.WARNING)


class _UselessError(Exception):
    """A file that was read and is not to be trusted."""


def _as_json(profile: LayerProfile) -> dict[str, Any]:
    operations = {
        name: {"unit": each.unit, "sizes": list(each.sizes), "times_ms": list(each.times_ms)}
        for name, each in profile.operations.items()
    }
    return {"operations": operations, "task_ms": profile.task_ms, "draws": profile.draws}


def _profiles(data: Any, fingerprint: Fingerprint, wanted: Sequence[tuple[str, ...]]) -> list[LayerProfile]:
    if data["format"] != _FORMAT:
        raise _UselessError(f"has format {data['format']}, and this version reads {_FORMAT}")
    if data["fingerprint"] != json.loads(json.dumps(fingerprint)):
        differing = [key for key, value in fingerprint.items() if data["fingerprint"].get(key) != value]
        raise _UselessError(f"is of something else: it differs in {', '.join(differing) or 'what it was made for'}")
    if len(data["layers"]) != len(wanted):
        raise _UselessError(f"has {len(data['layers'])} kinds of layers where {len(wanted)} are needed")
    return [_profile(each, names) for each, names in zip(data["layers"], wanted, strict=True)]


def _profile(data: Any, names: tuple[str, ...]) -> LayerProfile:
    if set(data["operations"]) != set(names):
        raise _UselessError(f"has {', '.join(data['operations'])} where {', '.join(names)} are needed")
    operations = {}
    for name in names:
        at = data["operations"][name]
        timing = Timing(str(at["unit"]), _numbers(at["sizes"], name), _numbers(at["times_ms"], name))
        timing.fit  # noqa: B018 - what cannot be fitted is of no use, and says why
        operations[name] = timing
    if not isinstance(data["draws"], bool):
        raise _UselessError(f"has draws = {data['draws']!r}, which is neither true nor false")
    return LayerProfile(operations, _numbers([data["task_ms"]], "task_ms")[0], data["draws"])


def _numbers(values: Any, name: str) -> tuple[float, ...]:
    for each in values:
        if isinstance(each, bool) or not isinstance(each, int | float) or not (math.isfinite(each) and each >= 0):
            raise _UselessError(f"has {each!r} in {name}: must be a finite number of at least 0")
    return tuple(float(each) for each in values)
