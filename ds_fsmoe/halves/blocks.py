# SPDX-License-Identifier: Apache-2.0
"""Finds the blocks of a model that may be run by halves of the batch, and puts itself before their forwards."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn


@dataclass(eq=False)
class Block:
    """A block of a chain: what it returns is what the next one is called with."""

    path: str
    """Its path in the model."""
    module: nn.Module
    layers: tuple[nn.Module, ...]
    """The layers with experts in it: one, or none in a block between two that have one."""
    forward: Callable[..., Any]
    """Its own forward."""
    has_next: bool = False
    """True if what it returns was seen to be handed on to the block after it, as it is, on all ranks."""
    num_returned: int | None = None
    """The length of the tuple that it returns; ``None``: it returns a tensor."""
    hands_on: bool = False
    """True if it returns one tensor, or a tuple with nothing else in it."""
    name_of_first: str = "hidden_states"
    """The name of its first argument."""

    def take(self, call: Callable[..., Any]) -> None:
        """Let ``call(block, *args, **kwargs)`` run in the place of its forward."""
        self.module.forward = Before(self, call)

    def give_back(self) -> None:
        """Undo :meth:`take`, unless somebody has put another forward around it since."""
        if isinstance(vars(self.module).get("forward"), Before):
            own = self.forward
            if getattr(own, "__func__", None) is type(self.module).forward:
                del self.module.forward
            else:
                self.module.forward = own

    @property
    def runs_again(self) -> bool:
        """Return whether the model keeps no activations of the block, which runs again in the backward."""
        return bool(getattr(self.module, "gradient_checkpointing", False))

    def forward_alone(self) -> Callable[..., Any] | None:
        """Return its forward without the checkpointing that transformers wraps it in; ``None``: it is not wrapped so,
        and what checkpoints it is not known."""
        wrapper = getattr(self.forward, "__func__", None)
        inside = getattr(wrapper, "__wrapped__", None)
        if inside is None or wrapper.__globals__.get("__name__") != "transformers.modeling_layers":
            return None
        return types.MethodType(inside, self.module)

    def why_alone(self) -> str:
        """Return the version of transformers that a checkpointed block is alone because of, in words; empty if not."""
        if not any(each.__module__ == "transformers.modeling_layers" for each in type(self.module).mro()):
            return ""
        return f", as blocks of transformers before 5.23 do ({version('transformers')} is installed)"

    def is_looked_at(self) -> bool:
        """Return whether others than DeepSpeed see what the block returns, or is called with: it has to be there."""
        if not isinstance(vars(self.module).get("forward"), Before):
            return True
        of_all = torch.nn.modules.module
        if of_all._global_forward_hooks or of_all._global_forward_pre_hooks:
            return True
        hooks = (*self.module._forward_hooks.values(), *self.module._forward_pre_hooks.values())
        return not all(_acts_on_tensors_alone(each) for each in hooks)


class Before:
    """Is called in the place of a block's forward. Copies of the block have its own forward again."""

    def __init__(self, block: Block, call: Callable[..., Any]) -> None:
        self._block = block
        self._call = call
        self.__signature__ = inspect.signature(block.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._block, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._block.module)]
        return types.MethodType(type(copied).forward, copied)

    def __reduce__(self) -> tuple:
        module = self._block.module
        return types.MethodType, (type(module).forward, module)


def _acts_on_tensors_alone(hook: Any) -> bool:
    """Return whether a hook leaves alone what is no tensor. DeepSpeed's do; whether those of transformers collect what
    blocks return is asked in each forward."""
    if isinstance(hook, types.MethodType):
        hook = hook.__func__
    name = getattr(hook, "__module__", "") or ""
    return name.startswith(("deepspeed.", "transformers.utils.output_capturing"))


def find_chains(
    model: nn.Module, layers: Mapping[str, nn.Module], named: Sequence[str] = ()
) -> tuple[list[list[Block]], str]:
    """Return the chains of blocks of a model in which layers with experts are, and why there is none.

    A block is the innermost element of a list of modules around a layer, or the nearest module around it whose class is
    among those named. Elements of the list that lie between two such belong to the chain, too.

    Args:
        model: the model.
        layers: path -> the layer with experts.
        named: names of classes; empty: lists of modules are looked for.

    Returns:
        (chains, the reason why there are none).
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    chains: dict[str, dict[str, list[nn.Module]]] = {}
    for path, layer in layers.items():
        found = _block_around(path, modules, named)
        if found is None:
            around = f"no module around it is a {' or a '.join(named)}" if named else "it is in no list of modules"
            return [], f"{path}: {around}"
        of_list, block = found
        chains.setdefault(of_list, {}).setdefault(block, []).append(layer)
    return [_chain(of_list, blocks, modules) for of_list, blocks in chains.items()], ""


def _block_around(path: str, modules: Mapping[str, nn.Module], named: Sequence[str]) -> tuple[str, str] | None:
    """Return the paths (of what holds the block, of the block)."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        at, above = ".".join(parts[:length]), ".".join(parts[: length - 1])
        if named:
            # Its class may have been derived from, as ours are.
            if any(each.__name__ in named for each in type(modules[at]).__mro__):
                return above, at
        elif isinstance(modules[above], (nn.ModuleList, nn.Sequential)):
            return above, at
    return None


def _chain(of_list: str, blocks: Mapping[str, Sequence[nn.Module]], modules: Mapping[str, nn.Module]) -> list[Block]:
    holder = modules[of_list]
    paths = list(blocks)
    if isinstance(holder, (nn.ModuleList, nn.Sequential)):
        all_paths = [f"{of_list}.{name}" if of_list else name for name, _ in holder.named_children()]
        places = [all_paths.index(each) for each in paths]
        paths = all_paths[min(places) : max(places) + 1]
    return [_block(path, modules[path], blocks.get(path, ())) for path in paths]


def _block(path: str, module: nn.Module, layers: Sequence[nn.Module]) -> Block:
    parameters = list(inspect.signature(module.forward).parameters)
    return Block(path, module, tuple(layers), module.forward, name_of_first=parameters[0] if parameters else "")
