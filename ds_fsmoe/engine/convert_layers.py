# SPDX-License-Identifier: Apache-2.0
"""Converts DeepSpeed's MoE layers to ours and back, and defines ``ds_fsmoe.MoE`` for models written for us.

The engine calls it where it replaces layers, and when it is disabled. ``convert_experts`` does the same for Hugging
Face models.
"""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

import torch
from torch import nn

from ds_fsmoe import registry
from ds_fsmoe.components.expert_compute.shards import check_shardable, shard_expert
from ds_fsmoe.components.gate import GateBase, GateCallOptions, OptionError
from ds_fsmoe.config.blocks import FSMoEBlock, GateBlock
from ds_fsmoe.config.reading import ConfigError, shown
from ds_fsmoe.distributed.groups import has_neighbours, sizes_of_mpu, stock_names
from ds_fsmoe.execution.tensor_parallel import TensorParallelUse, sum_gradients
from ds_fsmoe.layer.opaque import Handle
from ds_fsmoe.layer.parts import LayerError, Parts, choose_parts
from ds_fsmoe.layer.runtime import LayerRuntime
from ds_fsmoe.layer.state import LayerState
from ds_fsmoe.layer.stock_layer import FSMoEGate, FSMoELayer, StockMoE, StockMOELayer, StockTopKGate
from ds_fsmoe.log import log_on_rank_0

_OF_BLOCK = "fsmoe_of_block"
"""The attribute of a gate with the block that it was made by."""


def find_layers(model: nn.Module, has_others: bool = False) -> dict[str, StockMoE]:
    """Return name -> ``deepspeed.moe.layer.MoE`` of a model (or of this rank's stage), in module order.

    Args:
        model: the model.
        has_others: True if the model has other experts that are converted.

    Raises:
        LayerError: the model has none; a stage of a pipeline may have none.
    """
    named = ((name or type(model).__name__, module) for name, module in model.named_modules())
    layers = {name: module for name, module in named if isinstance(module, StockMoE)}
    if not layers and not has_others and getattr(model, "num_stages", 1) == 1:
        raise LayerError(
            f"No MoE layers found in {type(model).__name__}: ds_fsmoe needs deepspeed.moe.layer.MoE, ds_fsmoe.MoE "
            "or experts of transformers 5. Set fsmoe.enabled to false for this model"
        )
    return layers


def check_layers(layers: dict[str, StockMoE], gate: GateBlock | None) -> None:
    """Refuse layers with changes by a user that the conversion would lose.

    Raises:
        LayerError: a change would be lost; names the layer.
    """
    for name, layer in layers.items():
        inner = layer.deepspeed_moe
        if type(inner) not in (StockMOELayer, FSMoELayer):
            raise LayerError(
                f"{name}.deepspeed_moe is a {type(inner).__module__}.{type(inner).__name__}; ds_fsmoe replaces the "
                "forward of deepspeed.moe.sharded_moe.MOELayer, so the behaviour of this class would be lost"
            )
        if inner.use_tutel:
            raise LayerError(f"{name}: use_tutel = True runs Tutel's kernels, which ds_fsmoe replaces; remove it")
        if gate is not None and not _has_gate(layer, gate) and type(inner.gate) not in (StockTopKGate, FSMoEGate):
            raise LayerError(
                f"{name} has its own gate, a {type(inner.gate).__name__}, which fsmoe.gate would not change: remove "
                "fsmoe.gate, or use DeepSpeed's gate in the layer"
            )


def facts_of_tensor_parallel(layers: dict[str, StockMoE], mpu: Any) -> dict[str, str]:
    """Return the settings of tensor parallelism around the layers that all ranks must agree on, as short texts by
    name."""
    facts = {
        "mpu: tensor-parallel ranks, pipeline stages": str(sizes_of_mpu(mpu)),
        "mpu: tensor-parallel ranks of a group are consecutive": str(has_neighbours(mpu)),
    }
    return facts | {
        f"{name}: {field}": str(value)
        for name, each in layers.items()
        for field, value in vars(tensor_parallel_use(each)).items()
    }


def check_mpu(mpu: Any) -> None:
    """Refuse tensor-parallel ranks whose layout differs from the one that DeepSpeed expects.

    It raises on all ranks or on none, if :func:`facts_of_tensor_parallel` are equal on all ranks.

    Raises:
        LayerError: the layout differs; names the setting to change.
    """
    if not has_neighbours(mpu):
        raise LayerError(
            f"mpu: the {sizes_of_mpu(mpu)[0]} tensor-parallel ranks of a group are not consecutive, as they are in "
            "Megatron and DeepSpeed; number them so, or set fsmoe.enabled to false"
        )


def check_shards(layers: dict[str, StockMoE], esp_size: int) -> None:
    """Refuse experts that cannot be split into as many shards as a block asks for.

    Raises:
        LayerError: names the layer, the expert and the sizes that fit.
    """
    if esp_size == 1:
        return
    for name, layer in layers.items():
        for expert in layer.deepspeed_moe.experts.deepspeed_experts:
            try:
                check_shardable(expert, esp_size)
            except ValueError as error:
                raise LayerError(f"fsmoe.expert_tensor_parallel_size = {esp_size}: {name}: {error}") from error


def check_left(layers: dict[str, StockMoE], is_enabled: bool = True) -> None:
    """Refuse layers in a state, left by an ended engine of ours, that the next engine cannot use.

    Args:
        layers: the layers, by name.
        is_enabled: True if our layers run.

    Raises:
        LayerError: names the layer and the reason.
    """
    for name, layer in layers.items():
        state = layer.deepspeed_moe.fsmoe
        why = ""
        if state.running.block.esp_size > 1:
            why = "a shard of each of its experts (fsmoe.expert_tensor_parallel_size)"
        elif state.placed is not None and not state.placed.placement.is_at_start:
            why = "its experts where fsmoe.placement had moved them; engine.fsmoe.placement.go_home() moves them back"
        elif not is_enabled and not isinstance(layer.deepspeed_moe.gate, StockTopKGate):
            why = "a gate of fsmoe.gate, which DeepSpeed's own layer does not run"
        if why:
            raise LayerError(
                f"{name}: an earlier engine of ds_fsmoe left it {why}: build a new model and load a checkpoint"
            )


def convert(
    layer: StockMoE,
    parts: Parts,
    gate: GateBlock | None = None,
    running: LayerRuntime | None = None,
    label: str = "moe",
    path: str = "",
) -> dict[nn.Parameter, nn.Parameter]:
    """Convert a stock layer to ours, in place.

    Args:
        layer: a layer checked by :func:`check_layers`.
        parts: its order, all-to-all, ops, hooks.
        gate: the gate that the block asks for; ``None`` keeps the layer's own gate.
        running: the runtime of the engine; ``None`` for a layer outside of one.
        label: the label of the layer, in traces.
        path: the path of the layer in its model, for messages.

    Returns:
        New parameter -> the one it replaces. Empty unless the block names another kind of gate, or shards experts.
    """
    inner = layer.deepspeed_moe
    replaced = _take_over_gate(layer, gate)
    if isinstance(inner.gate, GateCallOptions):
        inner.gate.ops = parts.ops
    parts.check_dispatch(inner.gate)
    inner.__class__ = FSMoELayer
    inner.fsmoe = LayerState(parts, parts.order_for(inner.gate), running, label, path, tensor_parallel_use(layer))
    inner.fsmoe.opaque = Handle(inner, path)
    if running is not None:
        replaced |= _shard_experts(layer, running)
        if getattr(inner.gate, "causal", False):
            _warn_of_later_tokens(type(inner.gate).__name__)
    return replaced


@functools.cache
def _warn_of_later_tokens(gate: str) -> None:
    """Warn once per class of gates, for any number of layers, that later tokens influence earlier ones."""
    log_on_rank_0(
        f'{gate}: a causal model sees the future of its sequence (not causal? set "causal": false in fsmoe.gate)',
        logging.WARNING,
        "The gate routes a token by later ones of its sequence. A causal language model would be trained with "
        "information that it does not have in generation, and its training loss looks better than it is",
    )


def tensor_parallel_use(layer: StockMoE) -> TensorParallelUse:
    """Return the settings of tensor parallelism around a layer."""
    same_tokens = not getattr(layer, "sequence_parallel", False)
    return TensorParallelUse(same_tokens, layer.enable_expert_tensor_parallelism)


def _shard_experts(layer: StockMoE, running: LayerRuntime) -> dict[nn.Parameter, nn.Parameter]:
    """Replace this rank's experts by its shard of each, if experts are sharded; return new parameter -> old one."""
    ep_size, esp_size = layer.deepspeed_moe.ep_size, running.block.esp_size
    if esp_size == 1:
        return {}
    experts = layer.deepspeed_moe.experts.deepspeed_experts
    # Until there are groups, shards are taken from this rank's experts; afterwards from the right ones.
    layer.deepspeed_moe.fsmoe.unsharded = list(experts)
    index = running.index_in("esp", ep_size)
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    for i, expert in enumerate(experts):
        experts[i], new_to_old = shard_expert(expert, index, esp_size)
        replaced |= new_to_old
    stock_names(ep_size, esp_size).put_on(layer)
    return replaced


def _has_gate(layer: StockMoE, gate: GateBlock) -> bool:
    """Return True if a layer has this gate from an earlier engine."""
    return getattr(layer.deepspeed_moe.gate, _OF_BLOCK, None) == gate


def _take_over_gate(layer: StockMoE, gate: GateBlock | None) -> dict[nn.Parameter, nn.Parameter]:
    inner = layer.deepspeed_moe
    if gate is not None and _has_gate(layer, gate):
        return {}
    if gate is not None and gate.type != "topk":
        return _replace_gate(layer, gate)
    if type(inner.gate) is StockTopKGate:
        inner.gate.__class__ = FSMoEGate
    if gate is not None:
        for name, value in gate.options().items():
            setattr(inner.gate, name, value)
    return {}


def _replace_gate(layer: StockMoE, gate: GateBlock) -> dict[nn.Parameter, nn.Parameter]:
    stock = layer.deepspeed_moe.gate
    ours = _make_gate(layer, gate).to(device=stock.wg.weight.device, dtype=stock.wg.weight.dtype)
    own = getattr(ours, "wg", None)
    if isinstance(own, nn.Linear) and own.weight.shape == stock.wg.weight.shape:
        # The same matrix in another formula: it begins as the model has it.
        with torch.no_grad():
            own.weight.copy_(stock.wg.weight)
    layer.deepspeed_moe.gate = ours
    setattr(ours, _OF_BLOCK, gate)
    return dict.fromkeys(ours.parameters(), stock.wg.weight)


def _make_gate(layer: StockMoE, gate: GateBlock, path: str = "this layer") -> GateBase:
    stock = layer.deepspeed_moe.gate
    gate_class: type[GateBase] = registry.lookup("gate", gate.type)
    options = gate.options(inspect.signature(gate_class).parameters)
    try:
        try:
            ours = gate_class(**_inherited_options(gate_class, stock) | options)
        except TypeError as error:
            raise LayerError(f"fsmoe.gate: the gate {gate.type!r} does not take {options}: {error}") from error
        if not isinstance(ours, GateBase):
            raise LayerError(f"fsmoe.gate: {gate.type!r} is a {gate_class.__name__}: it must be a subclass of GateBase")
        ours.build_once(stock.wg.in_features, stock.wg.out_features)
    except LayerError:
        raise
    except OptionError as error:
        # What the block does not say comes from the layer, or is the gate's own default.
        where = f"fsmoe.gate.{error.name}" if error.name in options else f"fsmoe.gate: {path}: {error.name}"
        raise ConfigError(f"{where} = {shown(error.value)}: {error.problem}") from error
    except ValueError as error:
        raise LayerError(f"fsmoe.gate: {path}: {error}") from error
    for name in ours.state_dict():
        if "expert" in name:
            raise LayerError(
                f"fsmoe.gate: the gate {gate.type!r} has a parameter or buffer {name!r}; DeepSpeed saves every name "
                "that contains 'expert' as an expert's: rename it"
            )
    return ours


def _inherited_options(gate_class: type[GateBase], stock: StockTopKGate) -> dict[str, Any]:
    """Return the layer's own options that a block leaves out, if the new gate accepts them."""
    parameters = inspect.signature(gate_class).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    names = ("k", "capacity_factor", "eval_capacity_factor", "min_capacity", "drop_tokens")
    return {name: getattr(stock, name) for name in names if takes_all or name in parameters}


def restore_stock(layer: StockMoE) -> None:
    """Turn a layer back into stock's, in place; this undoes :func:`convert`, with the layer's own gate and experts."""
    inner = layer.deepspeed_moe
    if type(inner) is FSMoELayer:
        inner.__class__ = StockMOELayer
        del inner.fsmoe
    if type(inner.gate) is FSMoEGate:
        inner.gate.__class__ = StockTopKGate
        for name in (*GateCallOptions.__annotations__, *FSMoEGate.__annotations__):
            vars(inner.gate).pop(name, None)


def check_parts(block: FSMoEBlock, layers: dict[str, StockMoE]) -> None:
    """Check that the parts of a block can be made, without building ops and without memory for parameters.

    Raises:
        LayerError: a part cannot be made.
        ConfigError: the gate refuses an option, or an order conflicts with a gate.
    """
    parts = choose_parts(block.model_copy(update={"ops": "reference"}), "cpu")
    for name, layer in layers.items():
        gate = layer.deepspeed_moe.gate
        if block.gate is not None and block.gate.type != "topk" and not _has_gate(layer, block.gate):
            with torch.device("meta"):
                gate = _make_gate(layer, block.gate, name)
        parts.order_for(gate)
        parts.check_dispatch(gate)


class MoE(StockMoE):
    """Extends ``deepspeed.moe.layer.MoE`` with our layer inside from the start, for models written for ds_fsmoe.

    It accepts stock's arguments and one more, and returns stock's ``(output, l_aux, exp_counts)``. With
    ``"fsmoe": {"enabled": false}`` our ``initialize`` turns it into the stock layer, so one flag compares the two.

    Args:
        hidden_size: M, the width of a token.
        expert: the module that each expert is a copy of.
        num_experts: E, over all ranks.
        ep_size: the ranks over which they are spread.
        k: experts per token.
        args: see stock's layer.
        kwargs: see stock's layer.
        sequence_parallel: ``True``: the tensor-parallel ranks of an ``mpu`` enter this layer with different tokens,
            each with its part of the sequence. Tokens are then neither dropped nor gathered. Gradients of the gate and
            of the dense part of a residual layer are summed over these ranks. Parameters with a true attribute
            ``tensor_model_parallel`` or ``model_parallel`` are exceptions: they are split over the ranks. Each rank
            returns its part of the auxiliary loss: that of its own tokens, divided by the number of ranks. Without
            tensor parallelism it changes nothing. Stock's layer lacks this argument.

    Raises:
        LayerError: ``num_experts``, ``ep_size`` or ``k`` do not fit together.

    Examples:
        >>> import torch, ds_fsmoe
        >>> layer = ds_fsmoe.MoE(8, ds_fsmoe.GPTFeedForward(8, 32), num_experts=4, k=2)
        >>> output, l_aux, exp_counts = layer(torch.randn(2, 3, 8))  # [..., M], a scalar, [E]
        >>> output.shape, exp_counts.shape
        (torch.Size([2, 3, 8]), torch.Size([4]))
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        *args: Any,
        sequence_parallel: bool = False,
        **kwargs: Any,
    ) -> None:
        if ep_size < 1 or num_experts % ep_size:
            sizes = [size for size in range(1, num_experts + 1) if num_experts % size == 0]
            raise LayerError(
                f"MoE: num_experts = {num_experts} is not divisible by ep_size = {ep_size}; with {num_experts} "
                f"experts ep_size can be {', '.join(map(str, sizes))}"
            )
        if not 1 <= k <= num_experts:
            raise LayerError(f"MoE: k = {k}: must be between 1 and num_experts ({num_experts})")
        super().__init__(hidden_size, expert, num_experts, ep_size, k, *args, **kwargs)
        self.sequence_parallel, self._sums_gradients = sequence_parallel, False
        convert(self, choose_parts(FSMoEBlock(ops="reference"), "cpu"))

    def set_deepspeed_parallelism(self, *args: Any, **kwargs: Any) -> None:
        """Make the process groups of the layer; DeepSpeed's engine calls this."""
        super().set_deepspeed_parallelism(*args, **kwargs)
        mp_group = self.deepspeed_moe.fsmoe.mp_group if isinstance(self.deepspeed_moe, FSMoELayer) else None
        if self.sequence_parallel and mp_group is not None and not self._sums_gradients:
            self._sums_gradients = True
            experts = {id(each) for each in self.deepspeed_moe.experts.parameters()}
            alike = (each for each in self.parameters() if id(each) not in experts and not _is_split(each))
            sum_gradients(alike, mp_group)


def _is_split(parameter: nn.Parameter) -> bool:
    """Return True if each tensor-parallel rank has another part of a parameter, by the marks of Megatron and
    DeepSpeed."""
    return any(getattr(parameter, mark, False) for mark in ("tensor_model_parallel", "model_parallel"))
