# SPDX-License-Identifier: Apache-2.0
"""The layer in Hugging Face models: replaces the forward of the module of experts, and nothing around it.

The model's own router decides, and calls ``experts(hidden_states, top_k_index, top_k_weights)``. The module keeps its
parameters' names and its own class as a base, and has the experts of this rank; see ``engine/convert_experts.py``.
``stock_layer`` is the counterpart for DeepSpeed's layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_fsmoe.checkpoint_files.expert_parts import ExpertPart, part_of
from ds_fsmoe.components.expert_compute.adapters import Adapter
from ds_fsmoe.components.expert_compute.contract import shape_of
from ds_fsmoe.components.expert_compute.stacked_experts import StackedExperts
from ds_fsmoe.components.routing import BareRouting, Routing
from ds_fsmoe.layer.expert_shard import TRUSTED, asking, tensors_in
from ds_fsmoe.layer.experts_state import ExpertsState, ExternalRouter, FastPath, adapters_now
from ds_fsmoe.layer.opaque import Handle, OpaqueModule
from ds_fsmoe.layer.parts import LayerError
from ds_fsmoe.layer.replay import as_first
from ds_fsmoe.layer.state import ConvertedLayer, LayerRun


class FSMoEExperts(ConvertedLayer):
    """Replaces the forward of a module of experts, as a base in front of its class. Made by conversion, never
    constructed."""

    fsmoe: ExpertsState
    num_experts: int

    def train(self, mode: bool = True) -> FSMoEExperts:
        """Change the mode, after a check of the choices made in the other mode.

        Raises:
            RoutingError: a forward on a device had choices out of range.
        """
        running = self.fsmoe.running
        if running is not None and not running.is_over:
            running.late_faults.check()
        return super().train(mode)

    @property
    def gate(self) -> ExternalRouter:
        """Return the placeholder of the model's router."""
        return self.fsmoe.gate

    @property
    def ep_size(self) -> int:
        """Return the number of ranks over which the experts are spread."""
        return self.fsmoe.ep_size

    @property
    def ep_group_name(self) -> str:
        """Return DeepSpeed's name of these ranks."""
        return self.fsmoe.group_name

    @property
    def num_local_experts(self) -> int:
        """Return the number of experts of this rank."""
        return self.fsmoe.total_experts // self.fsmoe.ep_size

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return for each token the sum of its experts' results times their weights.

        Args:
            hidden_states: [S, M].
            top_k_index: [S, k] integers: experts of all ranks, or E for a choice that is not made.
            top_k_weights: [S, k].

        Raises:
            LayerError: weights of another shape.
            RoutingError: an index is out of range, on any rank; raised on every rank that shares the experts.
        """
        state = self.fsmoe
        choice = state.end_choice()
        if state.gate.k != top_k_index.shape[-1]:
            state.gate.k = top_k_index.shape[-1]
        shape = hidden_states.shape
        x_SM = hidden_states.reshape(-1, shape[-1])
        num_tokens = x_SM.shape[0]
        # Without tokens torch cannot infer the number of choices.
        sizes = [num_tokens, -1] if num_tokens else [0, top_k_index.shape[-1]]
        index_SK, weights_SK = top_k_index.reshape(sizes), top_k_weights.reshape(sizes)
        if weights_SK.shape != index_SK.shape:
            # Some model families of the first releases return a weight for each expert, and some the first k of those.
            raise LayerError(
                f"{state.path}: the router returned weights {list(weights_SK.shape)} for choices "
                f"{list(index_SK.shape)}: must be one per choice; a later version of transformers does so"
            )
        chosen_KS = state.settle_choice(choice, index_SK)
        route = partial(_route_as_chosen, index_SK, weights_SK, state.total_experts, chosen_KS)
        run = state.begin_call(self, x_SM, route=route)
        way = self._fast_path(run) if run.gate is route else None
        is_short = way is not None and way.takes(x_SM, weights_SK)
        # Instruments may observe a forward, but not its recomputation, which must save the same tensors.
        if as_first(state.gate, is_short) and is_short:
            y_SM, fault = way.run(x_SM, index_SK, weights_SK)
            state.settle_fault(fault, self.training)
        else:
            y_SM = run.token_path(x_SM)
        output = y_SM.view(shape).to(hidden_states.dtype)
        is_over = state.running is not None and state.running.is_over
        if is_over and output.requires_grad and state.ep_size * state.esp_size > 1:
            output.register_hook(state.refuse_gradient)
        return output

    def _fast_path(self, run: LayerRun) -> FastPath | None:
        """Return the fast path of the layer, unless an instrument observes or changes this call."""
        state, local = self.fsmoe, run.local_experts
        is_as_ever = run.pipeline is state.pipeline and run.experts is local
        if not is_as_ever or state.known_experts is None or local is not state.known_experts[1]:
            return None
        way = state.fast_path
        if way is None or way.pipeline is not state.pipeline or way.experts is not local:
            way = state.fast_path = FastPath.of(state, state.pipeline, local)
        return way

    def local_experts(self) -> StackedExperts:
        """Return the experts of this rank."""
        state = self.fsmoe
        adapters = state.adapters
        is_nested = state.own_forward is not None or state.contract.has_post_expert_norm
        present = [*self.parameters()] if is_nested else [*self._parameters.values()]
        known = state.known_experts
        if not adapters and known is not None and [*map(id, present)] == [*map(id, known[0])]:
            return known[1]
        of_layer = self, state.contract, state.own_forward, state.path, adapters
        experts = StackedExperts(*of_layer, ops=state.order.ops)
        if not adapters and (known is None or state.had_before(present)):
            state.known_experts = present, experts
        return experts

    @contextmanager
    def adapted(self, adapters: Sequence[Adapter]) -> Iterator[None]:
        """Add adapters to weights inside the block, besides those that are active.

        Args:
            adapters: with A and B of this rank's experts.
        """
        state = self.fsmoe
        # For this call alone: while it pauses, another sub-batch may call the module.
        token = adapters_now.set({**adapters_now.get(), id(state): (*state.adapters, *adapters)})
        try:
            yield
        finally:
            adapters_now.reset(token)

    def route_without_hooks(
        self, x_SM: torch.Tensor, used_token_S: torch.Tensor | None, group: dist.ProcessGroup | None
    ) -> Routing:
        """Return a decision about artificial tokens, with a row for each choice."""
        num_choices = self.fsmoe.gate.k or 1
        rows_KS = torch.arange(num_choices * len(x_SM), device=x_SM.device).view(num_choices, len(x_SM))
        counts_E = rows_KS.new_full((1,), rows_KS.numel())
        weights_KS = x_SM.new_ones(rows_KS.shape)
        return Routing(rows_KS, weights_KS, x_SM.new_zeros(()), counts_E, rows_KS.numel(), 1)

    def run_without_tokens(self, shape: torch.Size, like: torch.Tensor) -> torch.Tensor:
        """Take part in a forward of the other ranks, with tokens that make no choice.

        Args:
            shape: the shape of the tokens, [S, M].
            like: a tensor that the result depends on.

        Returns:
            A scalar, 0.
        """
        weight = next(self.parameters())
        x_SM = torch.zeros(shape, dtype=weight.dtype, device=weight.device) + like.to(weight)
        # As many choices as on other ranks, the only number on which ranks' common decisions depend.
        index_SK = torch.full((len(x_SM), self.fsmoe.gate.k or 1), self.fsmoe.total_experts, device=weight.device)
        called = self.fsmoe.outermost[0] if self.fsmoe.outermost else self
        return 0.0 * called(x_SM, index_SK, torch.zeros_like(index_SK, dtype=weight.dtype)).float().sum()

    def why_called(self) -> str | None:
        """Return the reason against chunks: ``None``, since hooks on the module see its own call."""
        return None

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Create the process groups. DeepSpeed calls this layer by layer on every rank."""
        if self.fsmoe.running is not None:
            self.fsmoe.connect(self.fsmoe.ep_size, self.gate)


def own_class_of(module: FSMoEExperts) -> type[nn.Module]:
    """Return the class of a converted module before its conversion."""
    return type(module).__bases__[1]


def _route_as_chosen(
    index_SK: torch.Tensor,
    weights_SK: torch.Tensor,
    num_experts: int,
    chosen_KS: torch.Tensor | None,
    x_SM: torch.Tensor,
    used_token_S: torch.Tensor | None,
    group: dist.ProcessGroup | None,
) -> Routing:
    """Return the router's decision; the last three arguments, which every gate gets, have no effect.

    Args:
        index_SK: [S, K] integers: experts, or E for a choice that is not made.
        weights_SK: [S, K] float.
        num_experts: E.
        chosen_KS: [k, S] integers: the experts that the router chose, see :attr:`Routing.experts_KS`.
        x_SM, used_token_S, group: the arguments of every gate.
    """
    return BareRouting.of(index_SK.t().long(), weights_SK.t(), num_experts, experts_KS=chosen_KS)


# ---- Adapters of PEFT on parameters of experts: each rank has the adapters of its own experts
#
# PEFT adds the adapters' change to a weight in each call. Here the wrapped experts receive the adapters instead, and
# add their part to rows: see ``components/expert_compute/adapters.py``.


class FSMoEParamWrapper(OpaqueModule):
    """Replaces the forward of PEFT's wrapper, as a base in front of its class. Made by conversion, never
    constructed."""

    opaque: Handle | None = None

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the output of the wrapped experts with the active adapters; arguments are those of the experts.

        Raises:
            ValueError: arguments that PEFT's own wrapper refuses, such as other adapters for each sample.
            LayerError: an adapter was added after ``initialize``.
        """
        self._check_forward_args(x, *args, **kwargs)
        kwargs.pop("adapter_names", None)
        if self.disable_adapters and self.merged:
            self.unmerge()
        if self.disable_adapters or self.merged:
            return self.base_layer(x, *args, **kwargs)
        active = [self.adapter(name) for name in self.active_adapters if name in self.lora_A]
        with self.wrapped_experts.adapted(active):
            return self.base_layer(x, *args, **kwargs)

    @property
    def wrapped_experts(self) -> FSMoEExperts:
        """Return the wrapped module of experts."""
        return self.get_base_layer()

    def adapter(self, name: str) -> Adapter:
        """Return an adapter, with the A and B of this rank's experts.

        Args:
            name: PEFT's name of it.

        Raises:
            LayerError: it was added after ``initialize``.
        """
        experts = self.wrapped_experts
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        if part_of(a) is None or part_of(b) is None:
            raise LayerError(
                f"{experts.fsmoe.path}: adapter {name!r} of {self.parameter_name} was added after initialize(), so "
                "its parameters are not in the optimizer; add it before"
            )
        # Within GatheredParameters A and B have all experts.
        num_experts = (shape_of(a) or (0,))[0] // self.r[name]
        return Adapter(self.parameter_name, a, b, self.scaling[name], num_experts)

    def get_delta_weight(self, adapter_name: str, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return an adapter's change of this rank's part of the weight.

        Within ``deepspeed.zero.GatheredParameters``, which ZeRO 3 needs, return its change of the whole weight.
        """
        weight, contract = self.get_param(), self.wrapped_experts.fsmoe.contract
        return self.adapter(adapter_name).delta(contract.is_transposed).to(weight.device, weight.dtype)


# ---- Modules with this rank's experts only and no engine: loaded by parts, or left by an engine


_LEFT = "fsmoe_left"
"""The attribute of such a module: (the hook that refuses its calls, the part that it was loaded with or ``None``,
the position of each of its experts if an engine has moved them)."""


def leave_alone(module: nn.Module, loaded: ExpertPart | None = None, places: Sequence[int] | None = None) -> None:
    """Mark a module of experts so that it refuses to run until it has an engine.

    Args:
        module: the module, whose parameters describe their parts.
        loaded: the part that it was loaded with; ``None``: an engine has left it.
        places: the position of each of its experts among those of all ranks, if they have moved.
    """
    setattr(module, _LEFT, (module.register_forward_pre_hook(_refuse), loaded, places))


def let_run(module: nn.Module) -> Sequence[int] | None:
    """Remove the mark of a module, as it has an engine or all experts, and return the positions of moved experts."""
    handle, _, places = vars(module).pop(_LEFT)
    handle.remove()
    return places


def loaded_part(module: nn.Module) -> ExpertPart | None:
    """Return the part that a module was loaded with; ``None`` for one that has all experts or has had an engine."""
    return getattr(module, _LEFT, (None, None))[1]


def loaded_in(model: nn.Module) -> Iterator[tuple[str, nn.Module, ExpertPart]]:
    """Yield (name, module, part) for every module of a model that was loaded by parts."""
    for name, module in model.named_modules():
        if (part := loaded_part(module)) is not None:
            yield name, module, part


def is_left(module: nn.Module) -> bool:
    """Return True if an engine has left a module and no other engine has it."""
    return hasattr(module, _LEFT) and loaded_part(module) is None


def _refuse(module: nn.Module, inputs: Any) -> None:
    kind, part = type(module).__name__, loaded_part(module)
    if part is None:
        raise LayerError(
            f"{kind} has this rank's experts only, and its engine has ended: give the model to ds_fsmoe.initialize, "
            "or call ds_fsmoe.make_whole(model) on every rank"
        )
    raise LayerError(
        f"{kind} has {part.num_local} of {part.num_experts} experts, those of rank {part.ep_rank} of {part.ep_size}, "
        "and no engine: give the model to ds_fsmoe.initialize before a forward, or load all experts within "
        'ds_fsmoe.own_experts({"fsmoe": {"enabled": False}})'
    )


# ---- Errors on the use of parameters that were replaced when experts were spread, or made whole again


class ReplacedParameter(nn.Parameter):
    """Represents a parameter that a model had before; any use of it raises an error."""

    fsmoe_name: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if asking() in TRUSTED or func.__name__ in ("__hash__", "__repr__"):
                return func(*args, **(kwargs or {}))
        found = next(each for each in tensors_in((*args, kwargs or {})) if isinstance(each, ReplacedParameter))
        raise LayerError(
            f"{found.fsmoe_name}: this parameter is from before ds_fsmoe.initialize() or ds_fsmoe.make_whole(), "
            "which replaced it; get it from the model again"
        )


def replace_all(replaced: Mapping[nn.Parameter, nn.Parameter], path: str, module: nn.Module) -> None:
    """Turn the replaced parameters of a model into ones that raise on use, and free their memory.

    Args:
        replaced: new parameter -> the one that it replaces.
        path: the path of a module that has the new ones.
        module: that module.
    """
    for name, new in module.named_parameters():
        if (old := replaced.get(new)) is not None:
            old.data, old.grad = old.data.new_empty(0), None
            old.fsmoe_name, old.__class__ = f"{path}.{name}", ReplacedParameter
