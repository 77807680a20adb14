# SPDX-License-Identifier: Apache-2.0
"""Splits the parameter groups of an optimizer into experts and other parameters, which DeepSpeed reduces separately.

The engine calls it when it makes the optimizer. Scripts for Hugging Face models make groups without regard to experts:
Trainer makes two, with and without weight decay. A group of experts that is split off has the options of its original
group and follows it: schedulers and scripts change the options of the groups that they know. DeepSpeed splits the
groups of the optimizers that it makes itself; following works in the same way for these.
"""

from __future__ import annotations

import functools
import gc
import inspect
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from ds_fsmoe.checkpoint.ranks import replaced
from ds_fsmoe.checkpoint_files.expert_parts import part_of, parts_in
from ds_fsmoe.engine.shard_experts import adapters_of
from ds_fsmoe.layer.experts_layer import FSMoEExperts
from ds_fsmoe.log import log_on_rank_0

# ---- Knows whether DeepSpeed's optimizer has groups of experts, which it insists on once a model has MoE
# layers


def groups_of_trained(engine: Any, layers: Sequence[FSMoEExperts]) -> AbstractContextManager[None]:
    """Make an engine build its optimizer as for a dense model, inside the block.

    It applies where all layers are Hugging Face's and none of their experts or adapters is trained: a group of experts
    would be empty then.

    Args:
        engine: the engine; afterwards it has MoE layers again, which saving needs.
        layers: the converted layers.
    """
    trains = any(each.requires_grad for layer in layers for each in (*layer.parameters(), *adapters_of(layer)))
    if trains or len(layers) < len(engine.fsmoe.layers):
        return nullcontext()
    return replaced(engine, "has_moe_layers", False)


# ---- Splits the groups of an optimizer into those of experts and of all else, which DeepSpeed reduces apart


_OWN = ("params", "name", "moe")
"""What a group of experts does not take over from the one that it came off."""


_known: weakref.WeakKeyDictionary[torch.optim.Optimizer, ScriptGroups] = weakref.WeakKeyDictionary()
"""Optimizers whose groups are others than those of their scripts."""


def with_expert_groups(client: Any) -> Any:
    """Return a script's optimizer, or its factory, with groups of experts split off in place.

    Args:
        client: an optimizer, a function that makes one of parameters, or ``None``.
    """
    if client is None or isinstance(client, torch.optim.Optimizer):
        return _split(client)
    return lambda parameters: _split(client(parameters))


def with_names(parameters: Any) -> Any:
    """Return parameter groups with one name each, since DeepSpeed's own optimizer tells groups apart by names."""
    groups = list(parameters or ())
    if not groups or not isinstance(groups[0], dict) or any("moe" in each for each in groups):
        return parameters
    return [{"name": f"group {number}"} | each for number, each in enumerate(groups)]


def without_frozen_experts(parameters: Any) -> Any:
    """Return parameters, or groups of them, without frozen experts, for DeepSpeed's own optimizer.

    It makes groups of experts by their size. Below stage 3, ZeRO refuses a group whose parameters are all frozen, as
    experts under adapters are.
    """
    if parameters is None or isinstance(parameters, torch.Tensor):
        return parameters
    groups = list(parameters)
    if not groups or not isinstance(groups[0], dict):
        return [each for each in groups if part_of(each) is None or each.requires_grad]
    kept = [each | {"params": without_frozen_experts(each["params"])} for each in groups]
    return [each for each in kept if isinstance(each["params"], torch.Tensor) or each["params"]]


def numbers_of(parameters: Any) -> dict[int, int]:
    """Return id of a parameter -> number of its group, for the parameters or groups that DeepSpeed receives."""
    given = [parameters] if isinstance(parameters, dict) else list(parameters or ())
    groups = [each["params"] for each in given] if given and isinstance(given[0], dict) else [given]
    held = [[each] if isinstance(each, torch.Tensor) else each for each in groups]
    return {id(each): number for number, group in enumerate(held) for each in group}


def follow_groups(optimizer: Any, numbers: Mapping[int, int]) -> None:
    """Make the groups of experts that DeepSpeed has split off follow the script's groups.

    Args:
        optimizer: the optimizer that DeepSpeed has made.
        numbers: the result of :func:`numbers_of` for the groups that the optimizer was made from.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    groups = optimizer.param_groups
    groups[:] = [each for each in groups if each["params"]]  # as DeepSpeed does next
    of_script: dict[Any, list[int]] = {}
    for at, group in enumerate(groups):
        # Of a script's group DeepSpeed makes two for Muon: of matrices, which come first, and of all else.
        key = numbers.get(id(group["params"][0]), len(numbers)), not group.get("use_muon", True)
        of_script.setdefault(key, []).append(at)
    # A group of experts alone has nothing to follow; in several pieces, the first leads.
    made = [sorted(of_script[key], key=lambda at: groups[at].get("moe", False)) for key in sorted(of_script)]
    came_off = {other: leader for leader, *others in made for other in others}
    _remember(optimizer, [leader for leader, *_ in made], came_off)


def _split(optimizer: Any) -> Any:
    """Split the experts off groups that have other parameters too, and return the optimizer.

    A group of experts alone is marked. An object that is no optimizer of torch is returned unchanged.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    groups = optimizer.param_groups
    known: list[int | dict[str, Any]] = []
    for group in groups:
        # DeepSpeed leaves out empty groups; schedulers still count them.
        known.append(sum(isinstance(each, int) for each in known) if group["params"] else group)
    groups[:] = [each for each in groups if each["params"]]
    came_off: dict[int, int] = {}
    for number, group in enumerate(list(groups)):
        if group.get("moe"):
            continue
        # Below stage 3 ZeRO cannot have a group of frozen ones alone.
        experts = [each for each in group["params"] if part_of(each) is not None and each.requires_grad]
        if not experts:
            continue
        marks = {"moe": True, "name": experts[0].group_name}
        if len(experts) == len(group["params"]):
            group.update(marks)
            continue
        chosen = set(map(id, experts))
        group["params"] = [each for each in group["params"] if id(each) not in chosen]
        came_off[len(groups)] = number
        groups.append(group | marks | {"params": experts})
    if came_off:
        of_script = _remember(optimizer, [each for each in known if isinstance(each, int)], came_off)
        for scheduler in list(_schedulers_of(optimizer)):
            scheduler.optimizer = _Known(optimizer, of_script, known)
    return optimizer


def _remember(optimizer: torch.optim.Optimizer, known: list[int], came_off: dict[int, int]) -> ScriptGroups | None:
    """Record which groups a script knows, and make the others follow; return ``None`` if it knows all, in their
    order."""
    if known == list(range(len(optimizer.param_groups))):
        return None
    _known[optimizer] = ScriptGroups(optimizer, known, came_off)
    return _known[optimizer]


@contextmanager
def as_script_knows(optimizer: Any) -> Iterator[None]:
    """Show an optimizer's original parameter groups inside the block, and no others.

    Args:
        optimizer: torch's or one of DeepSpeed's; one whose groups have not been split is unchanged.
    """
    base = optimizer if isinstance(optimizer, torch.optim.Optimizer) else getattr(optimizer, "optimizer", None)
    found = _known.get(base) if isinstance(base, torch.optim.Optimizer) else None
    if found is None:
        yield
        return
    everything = base.param_groups
    base.param_groups = found.known()
    try:
        yield
    finally:
        base.param_groups = everything


def show_scripts_groups(scheduler: Any) -> None:
    """Show a scheduler the original groups of its script.

    Args:
        scheduler: one that was made within :func:`as_script_knows`; any other object is unchanged.
    """
    optimizer = getattr(scheduler, "__dict__", {}).get("optimizer")
    found = _known.get(optimizer) if isinstance(optimizer, torch.optim.Optimizer) else None
    if found is not None:
        scheduler.optimizer = _Known(optimizer, found, found.numbers)


class ScriptGroups:
    """Knows all groups of an optimizer, and which of them are its script's.

    Loading makes new groups, and DeepSpeed steps with one group at a time. Before every step, groups of experts follow
    the groups that they were split off.

    Args:
        optimizer: the optimizer.
        numbers: the numbers of the groups that the script knows, in its order.
        came_off: number of a group of experts -> number of the original group.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, numbers: list[int], came_off: Mapping[int, int]) -> None:
        self.now, self.numbers, self._came_off = list(optimizer.param_groups), numbers, came_off
        optimizer.register_load_state_dict_post_hook(self._read_groups)
        if came_off:
            optimizer.register_step_pre_hook(self._follow)

    def known(self) -> list[dict[str, Any]]:
        """Return the script's groups as they are now."""
        return [self.now[each] for each in self.numbers]

    def _read_groups(self, optimizer: torch.optim.Optimizer) -> None:
        self.now = list(optimizer.param_groups)

    def _follow(self, *_: Any) -> None:
        for own, other in self._came_off.items():
            options = self.now[other].items()
            self.now[own].update({name: value for name, value in options if name not in _OWN})


class _Known:
    """Shows a scheduler the groups that an optimizer had when the scheduler was made: it has a rate for each of them.

    Args:
        optimizer: the optimizer.
        groups: all its groups.
        known: the numbers of these groups; for one that was empty, the group itself.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, groups: ScriptGroups, known: Sequence[int | dict[str, Any]]
    ) -> None:
        self._optimizer, self._groups, self._known = optimizer, groups, known

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Return the groups as they are now."""
        return [self._groups.now[each] if isinstance(each, int) else each for each in self._known]

    def __eq__(self, other: object) -> bool:
        # SequentialLR compares the optimizers of its schedulers.
        return other is self._optimizer or (isinstance(other, _Known) and other._optimizer is self._optimizer)

    def __hash__(self) -> int:
        return hash(self._optimizer)

    def __getattr__(self, name: str) -> Any:
        if name == "_optimizer":  # while it is copied
            raise AttributeError(name)
        return getattr(self._optimizer, name)


def _schedulers_of(optimizer: torch.optim.Optimizer) -> Iterator[LRScheduler]:
    """Return the schedulers of an optimizer, which has no list of them itself."""
    if not getattr(optimizer.step, "_wrapped_by_lr_sched", False):
        return
    gc.collect()
    for each in gc.get_objects():
        # By its type: some objects answer isinstance() for the class that they wrap.
        if issubclass(type(each), LRScheduler) and vars(each).get("optimizer") is optimizer:
            yield each


# ---- Has schedulers count the groups of a script's optimizer, whoever makes them, and the engine report those
#
# Experts lie in groups of their own, which follow the script's. A scheduler with a value or a function for each group
# has as many as the script has made.


class GroupsEngine(DeepSpeedEngine):
    """Extends DeepSpeed's engine with an optimizer whose groups of experts are hidden from its script."""

    _number_of_given: dict[int, int]

    def _configure_optimizer(self, client_optimizer: Any, model_parameters: Any) -> None:
        """Make DeepSpeed's optimizer, with groups of experts; without trained experts there are no such groups."""
        if self._hf_layers:
            client_optimizer, model_parameters = with_expert_groups(client_optimizer), with_names(model_parameters)
            _count_scripts_groups()
        if self._hf_layers and self.zero_optimization():
            model_parameters = without_frozen_experts(model_parameters)
        self._number_of_given = numbers_of(model_parameters)
        with groups_of_trained(self, self._hf_layers):
            super()._configure_optimizer(client_optimizer, model_parameters)
        if self._hf_layers:
            warn_of_whole_tensors(self)

    def _configure_basic_optimizer(self, model_parameters: Any) -> Any:
        made = super()._configure_basic_optimizer(model_parameters)
        if self._hf_layers:
            follow_groups(made, self._number_of_given)
        return made

    def _configure_lr_scheduler(self) -> None:
        with as_script_knows(self.basic_optimizer):
            super()._configure_lr_scheduler()
        show_scripts_groups(self.lr_scheduler)

    def _get_optimizer_param(self, param_name: str) -> list[Any]:
        with as_script_knows(self.basic_optimizer):
            return super()._get_optimizer_param(param_name)


def _count_scripts_groups() -> None:
    """Make schedulers of torch and DeepSpeed count the original groups of scripts, from now on."""
    kinds = [each for module in (lr_scheduler, lr_schedules) for each in vars(module).values()]
    for kind in kinds:
        is_scheduler = isinstance(kind, type) and (
            issubclass(kind, lr_scheduler.LRScheduler) or kind.__module__ == lr_schedules.__name__
        )
        if is_scheduler and "__init__" in vars(kind) and not hasattr(kind.__init__, "counts_scripts_groups"):
            kind.__init__ = _counting(kind.__init__)


def _counting(make: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(make)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with as_script_knows(args[0] if args else kwargs.get("optimizer")):
            make(self, *args, **kwargs)
        show_scripts_groups(self)

    __init__.counts_scripts_groups = True  # type: ignore[attr-defined]
    return __init__


# ---- Tries whether an optimizer treats every element of a weight by itself, as ranks with their own experts
# need
#
# LAMB scales an update by norms of the whole weight, Adafactor keeps means over it: for such the update of an expert
# depends on the others in its tensor. No list of names says which they are. A few steps of the same class with the
# same options are taken, on a small tensor, and on each half of it by itself.


_SHAPE = (2, 4, 6)
"""Two experts of small weights."""
_STEPS = 4
"""Some estimate scales in the first steps, which tell in later ones."""
_LEAST = 1e-3
"""From this share of the largest update on a difference is more than rounding."""


def warn_of_whole_tensors(engine: Any) -> None:
    """Warn once where the optimizer of an engine computes updates of experts from whole tensors.

    Args:
        engine: our engine, with its optimizer.
    """
    optimizer, is_zero = engine.basic_optimizer, engine.zero_optimization()
    if not isinstance(optimizer, torch.optim.Optimizer):
        return
    if not any(part.num_parts > 1 and each.requires_grad for _, each, part in parts_in(engine.module)):
        return
    device = torch.device("cpu") if engine.zero_use_cpu_optimizer() else torch.device(engine.device)
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    try:
        depends = any(
            # ZeRO shows it flat partitions, but for what Muon makes of a gradient before that.
            depends_on_others(optimizer, group, is_zero and not group.get("use_muon"), device)
            for group in optimizer.param_groups
            if group.get("moe")
        )
    except Exception as error:  # whatever its own code raises: training is to show it, and not a trial
        log_on_rank_0(f"could not test whether {name} updates each element of a weight independently: {error!r}")
        return
    if depends:
        flat = "ZeRO passes it flat partitions, which differ if experts have groups of their own"
        why = flat if is_zero else "a rank has its own experts only"
        remedy = "" if is_zero else ', or spread no experts ("ep_size": 1)'
        log_on_rank_0(
            f"{name} trains experts differently than stock DeepSpeed: use AdamW, SGD or Lion",
            logging.WARNING,
            "It updates a weight by other elements of the same tensor (tested on a small one, as a whole and in two "
            f"parts), and {why}. Experts are trained differently for each number of ranks. Use an optimizer that "
            f"updates each element independently{remedy}",
        )


def depends_on_others(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], is_flat: bool, device: torch.device
) -> bool:
    """Return True if an optimizer updates a whole tensor differently from its two parts.

    The optimizer itself makes no step. The options are those of one of its groups, with a rate that changes values.

    Args:
        optimizer: the optimizer.
        group: the group.
        is_flat: True if it receives tensors of one dimension.
        device: the device of its tensors.
    """
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([1.0, 3.0]).view(2, 1, 1)  # halves that are alike would hide what is taken over both
    start, *gradients = (torch.randn(_SHAPE, generator=generator).to(device) for _ in range(_STEPS + 1))
    start, gradients = start * scales.to(device), [each / scales.to(device) ** 2 for each in gradients]
    if is_flat:
        start, gradients = start.flatten(), [each.flatten() for each in gradients]
    cut = [each.chunk(2) for each in (start, *gradients)]
    # The result of compiled code is found without the seconds of compiling it.
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.compiler.set_stance("force_eager"):
        whole = _updated(optimizer, group, start, gradients)
        halves = torch.cat([_updated(optimizer, group, first, others) for first, *others in zip(*cut, strict=True)])
        differs = _is_apart(halves, whole, start)
        # One that rounds at random comes out otherwise every time.
        return differs and not _is_apart(_updated(optimizer, group, start, gradients), whole, start)


def _is_apart(one: torch.Tensor, other: torch.Tensor, start: torch.Tensor) -> bool:
    return bool((one - other).abs().max() > _LEAST * (other - start).abs().max())


def _updated(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], start: torch.Tensor, gradients: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return the update of a tensor by a new optimizer of the same class."""
    parameter = torch.nn.Parameter(start.clone())
    taken = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in group.items() if name != "params"}
    if options.get("lr") is not None:
        options["lr"] = 0.1
    defaults = {name: value for name, value in optimizer.defaults.items() if name in taken and name != "params"}
    twin = type(optimizer)([options | {"params": [parameter]}], **defaults)
    for each in gradients:
        parameter.grad = each.clone()
        twin.step()
    return parameter.detach()
