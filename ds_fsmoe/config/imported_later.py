# SPDX-License-Identifier: Apache-2.0
"""Changes a module of another library as soon as it is imported, without importing it.

Modules for Accelerate, transformers, PEFT and DeepSpeed call it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType


class Finder:
    """Finds modules like the other finders, and changes one of them as soon as it has run.

    Args:
        name: the full name of the module.
        change: the function that changes the module, its argument.
    """

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name, self._change = name, change
        self._is_asking = False

    def begin(self) -> None:
        """Change the module from now on, whether it is imported already or later."""
        if self._name in sys.modules:
            self._change(sys.modules[self._name])
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Stop changing the module; a later import leaves it as it is."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the other finders for the module, which is changed after it has run."""
        if fullname != self._name or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_asking = False
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            self._change(module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec
