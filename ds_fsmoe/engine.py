# SPDX-License-Identifier: Apache-2.0
"""The door: ``initialize`` in place of ``deepspeed.initialize``, and ``install`` for scripts that call the latter.

Every way in ends in the same mechanism. The block is read and checked; if it is enabled, DeepSpeed's own
``initialize`` runs with our engine class in place of its own, and our engine makes the layers ours at the point where
DeepSpeed itself replaces layers: the config and the process group are there, the optimizer is not.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import nn

from ds_fsmoe import compat
from ds_fsmoe.config import ConfigError, FSMoEBlock, read_block
from ds_fsmoe.layer import FSMoEGate, StockMoE
from ds_fsmoe.log import log_on_rank_0
from ds_fsmoe.parts import LayerError, Parts, choose_parts
from ds_fsmoe.preflight import check_deepspeed_blocks, check_experts
from ds_fsmoe.running import Running
from ds_fsmoe.runtime.agreement import (
    check_agreement,
    facts_of_config,
    facts_of_layers,
    facts_of_plan,
    facts_of_versions,
)
from ds_fsmoe.runtime.groups import stock_names
from ds_fsmoe.takeover import (
    check_layers,
    check_parts,
    check_shards,
    check_unused,
    find_layers,
    give_back,
    take_over,
)
from ds_fsmoe.versions import VERSION

# Whoever imports this module first imports stock's function: install() replaces the attribute later, if asked to.
_stock_initialize = deepspeed.initialize


class FSMoEState:
    """What is on, for one engine: ``engine.fsmoe``."""

    def __init__(self, block: FSMoEBlock, layers: dict[str, StockMoE], parts: Parts, running: Running) -> None:
        self.block = block
        self.layers = layers
        self.parts = parts
        self.running = running

        self._facts: dict[str, str] = {}
        self._compared_at = 0

    def facts(self) -> dict[str, str]:
        """What all ranks have to have alike, as short texts by name."""
        if not self._facts:
            for layer in self.layers.values():
                pipeline = layer.deepspeed_moe.pipeline
                for plan in (pipeline.forward, pipeline.backward):
                    self._facts |= facts_of_plan(pipeline.label, plan)
        return self._facts | facts_of_config(_alike(self.block)) | facts_of_layers(self.layers)

    def at_step(self, number: int) -> None:
        """Optimizer step ``number`` is about to begin, or goes on.

        Raises:
            DisagreementError: every ``debug.check_every`` steps, if ranks have come to differ.
        """
        self.running.at_step(number)
        every = self.block.debug.check_every
        if every and number >= self._compared_at + every:
            self._compared_at = number
            check_agreement(self.facts(), what=f"how MoE layers are run, at step {number}")

    @property
    def num_layers(self) -> int:
        """How many MoE layers are ours."""
        return len(self.layers)

    def chosen(self) -> dict[str, str]:
        """What runs, a word or two per choice, in the order a token meets them."""
        gates = sorted({_describe_gate(layer) for layer in self.layers.values()})
        return {
            "schedule": self.block.schedule,
            "pipeline_degree": "forward {}, backward {}".format(*self.running.degrees),
            "esp_size": str(self.block.esp_size),
            "gate": "; ".join(gates),
            "order": self.parts.order_name,
            "alltoall": self.parts.alltoall_name,
            "ops": self.parts.ops_name,
            "gradients": "DeepSpeed's own reduction",
        }


def _alike(block: FSMoEBlock) -> dict[str, Any]:
    """What of a block has to be the same on every rank."""
    return block.model_dump(exclude={"trace": {"path"}, "autotune": {"cache_dir"}})


def _describe_gate(layer: StockMoE) -> str:
    gate = layer.deepspeed_moe.gate
    if not isinstance(gate, FSMoEGate):
        return type(gate).__name__
    return f"topk, k = {gate.k}, {f'capacity factor {gate.capacity_factor}' if gate.drop_tokens else 'nothing dropped'}"


class FSMoEEngine(DeepSpeedEngine):
    """DeepSpeed's engine with our layers; ``engine.fsmoe`` says what is on."""

    fsmoe: FSMoEState

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_agreement(self.fsmoe.facts(), what="how MoE layers are run")

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """DeepSpeed's, with the trace and the comparison of ranks at the start of a step."""
        self.fsmoe.at_step(self.global_steps)
        return super().forward(*inputs, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """DeepSpeed's; the trace ends with the step, and not with what comes after it."""
        result = super().step(*args, **kwargs)
        self.fsmoe.running.at_step(self.global_steps)
        return result

    def destroy(self) -> None:
        """End the lanes, then what DeepSpeed ends."""
        if "fsmoe" in vars(self):
            self.fsmoe.running.close()
        super().destroy()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """DeepSpeed's, with our layers left out of what is compiled: lanes are no matter for a compiler."""
        for layer in self.fsmoe.layers.values():
            inner = layer.deepspeed_moe
            inner.forward = torch.compiler.disable(inner.forward)
        super().compile(*args, **kwargs)

    def fsmoe_dummy_forward(self) -> torch.Tensor:
        """Take part in a forward of the other ranks without a batch: the MoE layers alone, without tokens.

        For a rank that has fewer batches than the others; they would wait for it in the all-to-alls.

        Returns:
            Zero, to be given to :meth:`backward` as the others give their losses.

        Raises:
            RuntimeError: no forward was run before, so the size of a batch is not known.
        """
        total = torch.zeros(())
        for name, layer in self.fsmoe.layers.items():
            inner = layer.deepspeed_moe
            if inner.last_shape is None:
                raise RuntimeError(f"fsmoe_dummy_forward: {name} has not run yet, so its input's size is not known")
            weight = next(inner.experts.parameters())
            # Each layer hangs on the one before, so that the backward meets them in the order of the other ranks.
            x = torch.zeros(inner.last_shape, dtype=weight.dtype, device=weight.device) + total.to(weight)
            y = inner(x, torch.zeros(inner.last_shape[:-1].numel(), device=weight.device))
            total = 0.0 * (y.float().sum() + inner.l_aux.float())
        return total

    def _configure_expert_parallel(self, model: nn.Module, collect_sources: bool | None = None) -> Any:
        sources = super()._configure_expert_parallel(model, collect_sources)
        for sentence in compat.check_versions():
            log_on_rank_0(sentence, logging.WARNING)
        block = read_block(self.config)
        layers = find_layers(model)
        check_experts(layers, dist.get_world_size(), block.gate, block.esp_size)
        # Before any group is made: DeepSpeed would hang over models that differ.
        facts = facts_of_layers(layers) | facts_of_config(_alike(block)) | facts_of_versions(("torch", "deepspeed"))
        check_agreement(facts | {"version of ds_fsmoe": VERSION}, what="model, config or versions")
        parts = choose_parts(block, get_accelerator().device_name())
        device = torch.device(get_accelerator().device_name())
        running = Running(block, device, not self.config.get("use_data_before_expert_parallelism", False))
        for index, layer in enumerate(layers.values()):
            replaced = take_over(layer, parts, block.gate, running, f"L{index:02d}")
            # DeepSpeed puts each new parameter into the optimizer group of the one it stands in for.
            sources.sources.update({id(new): [old] for new, old in replaced.items()})
            sources.discarded.update(id(old) for old in replaced.values())
        self.fsmoe = FSMoEState(block, layers, parts, running)
        chosen = ", ".join(f"{name}: {value}" for name, value in self.fsmoe.chosen().items())
        log_on_rank_0(f"ds_fsmoe {VERSION} is on for {len(layers)} MoE layer(s) ({chosen})")
        return sources


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize`` that honours the ``"fsmoe"`` block: same arguments, same 4-tuple.

    Without a block, or with ``"enabled": false``, DeepSpeed's own function runs and nothing else. Otherwise everything
    that can be wrong is checked first, on every rank, before any process group is made.

    Raises:
        ConfigError: the block, or DeepSpeed blocks that do not go with it.
        LayerError: the model.
        IncompatibleError: the installed versions.
    """
    arguments = dict(locals())
    written = next((each for each in (config, config_params, getattr(args, "deepspeed_config", None)) if each), None)
    ds_config = {} if written is None else compat.load_ds_config(written)
    block = read_block(ds_config)
    if model is None:
        return _stock_initialize(**arguments)
    if block is None or not block.enabled:
        _make_stock(model, block is not None)
        return _stock_initialize(**arguments)
    _check_before_any_group(block, ds_config, model, mpu)
    if block.esp_size > 1:
        _rename_expert_groups((optimizer, model_parameters), block.esp_size)
    with _our_engine():
        return _stock_initialize(**arguments)


def _rename_expert_groups(holders: Iterable[Any], esp_size: int) -> None:
    """Parameter groups of experts that a script has split carry DeepSpeed's name for their ranks: with shards, the new
    one, by which ZeRO looks them up."""
    for holder in holders:
        groups = getattr(holder, "param_groups", holder)
        for group in groups if isinstance(groups, list) else ():
            name = group.get("name", "") if isinstance(group, dict) and group.get("moe") else ""
            if found := re.fullmatch(r"ep_size_(\d+)", name):
                group["name"] = stock_names(int(found[1]), esp_size).expert_group_name


def _make_stock(model: nn.Module, has_block: bool) -> None:
    """Not enabled means stock, for layers written as ``ds_fsmoe.MoE`` too."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, StockMoE)}
    if has_block:
        check_unused(layers)
    for layer in layers.values():
        give_back(layer)


def _check_before_any_group(block: FSMoEBlock, ds_config: Mapping[str, Any], model: nn.Module, mpu: Any) -> None:
    compat.check_versions()
    compat.check_private_names()
    check_deepspeed_blocks(ds_config)
    device_type = get_accelerator().device_name()
    if block.ops == "required" and device_type != "cpu":
        raise ConfigError(
            f"fsmoe.ops = 'required': compiled ops exist for the CPU only in this version, and this is {device_type}; "
            "use 'auto' or 'reference'"
        )
    if isinstance(model, PipelineModule):
        raise LayerError("a PipelineModule is not supported in this version: set fsmoe.enabled to false")
    if mpu is not None and bwc_tensor_model_parallel_world_size(mpu) > 1:
        raise LayerError(
            f"mpu has {bwc_tensor_model_parallel_world_size(mpu)} tensor-parallel ranks: duplicate tokens are not "
            "dropped and gathered in this version; set fsmoe.enabled to false, or do without tensor parallelism"
        )
    layers = find_layers(model)
    check_layers(layers, block.gate)
    check_unused(layers)
    # Under a launcher that sets no WORLD_SIZE the engine checks again, as soon as the ranks have found each other.
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 0))
    check_experts(layers, world_size or None, block.gate, block.esp_size)
    check_parts(block, layers)
    check_shards(layers, block.esp_size)


@contextmanager
def _our_engine() -> Iterator[None]:
    """DeepSpeed looks its engine class up in its own module when ``initialize`` runs; ours is there meanwhile."""
    stock_engine = deepspeed.DeepSpeedEngine
    deepspeed.DeepSpeedEngine = FSMoEEngine
    try:
        yield
    finally:
        deepspeed.DeepSpeedEngine = stock_engine


def install() -> None:
    """From now on ``deepspeed.initialize`` is :func:`initialize`, for every library that calls it too.

    Raises:
        RuntimeError: a module holds stock's function under a name of its own already, and would go past us.
    """
    for name, module in list(sys.modules.items()):
        if module in (deepspeed, sys.modules[__name__]) or not hasattr(module, "__dict__"):
            continue
        held = next((alias for alias, value in list(vars(module).items()) if value is _stock_initialize), None)
        if held is not None:
            raise RuntimeError(
                f"{name} took deepspeed.initialize in before ds_fsmoe.install(), as {held}, and would go past it: call "
                "install() first, or use ds_fsmoe.initialize"
            )
    deepspeed.initialize = initialize


def uninstall() -> None:
    """Undo :func:`install`."""
    deepspeed.initialize = _stock_initialize
