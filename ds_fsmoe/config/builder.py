# SPDX-License-Identifier: Apache-2.0
"""Builds the ``"fsmoe"`` block in Python; values are checked at once, and the result is a dict.

Scripts call it as ``ds_fsmoe.Config``. The keys are those of ``blocks.py``; the file ``builder.pyi`` describes them for
type checkers and editors.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any, ClassVar

from pydantic import BaseModel

from ds_fsmoe.config.blocks import FSMoEBlock
from ds_fsmoe.config.hints import class_name, hints_of
from ds_fsmoe.config.reading import read_block
from ds_fsmoe.config.words import BLOCK
from ds_fsmoe.shapes import shape_in, words_for


class Written(dict[str, Any]):
    """Holds the values of a block, as a dict: DeepSpeed, JSON and other libraries accept it as one."""

    _word: ClassVar[str | None] = None
    """The word for a block inside the whole one; ``None``: it is the whole one."""

    def __init__(self, **values: Any) -> None:
        super().__init__(values)
        # Not enabled, so that only this part is asked what it is; how it goes with the others is asked of the whole.
        read_block({BLOCK: self if self._word is None else {"enabled": False, self._word: self}})

    def as_dict(self) -> dict[str, Any]:
        """Return a copy in plain dicts, with the given values only."""
        return {
            key: value.as_dict() if isinstance(value, Written) else copy.deepcopy(value) for key, value in self.items()
        }

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{key}={value!r}' for key, value in self.items())})"


class Config(Written):
    """Builds the ``"fsmoe"`` block of a DeepSpeed config in Python, with completion, type hints and its checks at once.

    It is a dict with the keys that were given, and ``enabled``, so it is accepted wherever the block is: in the config
    for :func:`initialize`, in :func:`install`, in a JSON file. Blocks inside it are dicts too, or are built by the
    classes that this one has: ``Config.Gate``, ``Config.NumChunks``, ``Config.Autotune`` and so on, one for each.

    Args:
        values: the keys of the block, all optional, see docs/config.md. ``enabled`` is ``True`` unless it is given. The
            names of parts and modules in ``plugins`` are looked up at once, as :func:`initialize` does.

    Raises:
        ConfigError: as :func:`initialize` raises it for the same block, one line for each mistake. Only ``initialize``
            checks against the model, the ranks and DeepSpeed's own blocks.

    Examples:
        >>> import ds_fsmoe
        >>> block = ds_fsmoe.Config(num_chunks=ds_fsmoe.Config.NumChunks(forward=2, backward=4), metrics="off")
        >>> block.as_dict()
        {'enabled': True, 'num_chunks': {'forward': 2, 'backward': 4}, 'metrics': 'off'}
        >>> ds_config = {"train_batch_size": 8, "fsmoe": block}
        >>> ds_fsmoe.Config(num_chunk=4, metrics=True)
        Traceback (most recent call last):
        ds_fsmoe.config.reading.ConfigError: 2 problems:
        fsmoe.metrics = true: must be 'off', 'brief' or 'detailed'
        fsmoe.num_chunk: unknown key; did you mean 'num_chunks'?
    """

    def __init__(self, **values: Any) -> None:
        super().__init__(**{"enabled": True} | values)


def _signature(block: type[BaseModel]) -> inspect.Signature:
    """Return the signature that shells without a type checker show and complete."""
    kind = inspect.Parameter.KEYWORD_ONLY
    found = [inspect.Parameter(word, kind, default=..., annotation=hint) for word, hint in hints_of(block).items()]
    if block.model_config["extra"] == "allow":
        found.append(inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD, annotation="Any"))
    return inspect.Signature(found)


def _add_part(word: str, block: type[BaseModel]) -> None:
    name = class_name(word)
    made = {"_word": word, "__doc__": block.__doc__, "__signature__": _signature(block), "__module__": __name__}
    setattr(Config, name, type(name, (Written,), made | {"__qualname__": f"Config.{name}"}))


for _name, _field in FSMoEBlock.model_fields.items():
    if _inner := shape_in(_field):
        _add_part(words_for(_name, _field)[0], _inner)
Config.__signature__ = _signature(FSMoEBlock)  # type: ignore[attr-defined]
Config.Wires = Config.CommDtype  # type: ignore[attr-defined]  # its name in version 0.2.0
