# SPDX-License-Identifier: Apache-2.0
"""AutoEP, the other MoE layer of the DeepSpeed package, in the layout ``"ranks"`` of ``layers.py``, on a CPU.

AutoEP puts a layer of its own where a model has an MoE block. It needs no package of models for that: it finds a block
by the name of its module, and takes its weights from ``gate.weight``, ``experts.gate_up_proj`` and
``experts.down_proj``.

Of the cases of ``bench_layer.py`` it can run those with Mixtral's FFN in which nothing is dropped: numbers 2, 11, 14
and 23. The others it cannot: its experts are gated, three matrices without a bias, and not GPT's; and it has no
capacity, every token goes to each expert that it has chosen. Nor can it run the layout ``"node"``: it refuses experts
cut by their hidden width (``expert_tensor_parallel_size``) and an ``mpu`` with tensor parallelism.

Its gate has no auxiliary loss, which stock's and ours compute: the only thing that it leaves out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.models.layer_steps import Found, Steps, tokens
from benchmarks.models.layers import Attention, Layer, StockGroups


def can_run(layer: Layer) -> str | None:
    """Why AutoEP cannot run a layer; ``None`` if it can."""
    if layer.ffn != "mixtral":
        return f"AutoEP's experts are gated, of three matrices without a bias: it has no {layer.ffn} FFN"
    if layer.f is not None:
        return f"AutoEP has no capacity and drops nothing: capacity factor {layer.f:g} means nothing to it"
    return None


class Experts(nn.Module):
    """All experts of a block, as linear layers would begin: ``gate_up_proj`` [E, 2H, M], ``down_proj`` [E, M, H]."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        E, M, H = layer.E, layer.M, layer.ratio * layer.M
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * H, M).uniform_(-(M**-0.5), M**-0.5))
        self.down_proj = nn.Parameter(torch.empty(E, M, H).uniform_(-(H**-0.5), H**-0.5))


class Block(nn.Module):
    """What AutoEP puts its layer in the place of, before it is ever called."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.gate = nn.Linear(layer.M, layer.E, bias=False)
        self.experts = Experts(layer)
        if layer.skew:
            self.gate.weight.data.copy_(layer.directions())


class AutoEPModel(nn.Module):
    """``layers.Model`` with AutoEP's layers in it, once an engine has it."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.attention = nn.ModuleList(Attention(layer, None, scattered=False) for _ in range(layer.layers))
        self.moes = nn.ModuleList(Block(layer) for _ in range(layer.layers))

    def forward(self, x_SM: torch.Tensor) -> torch.Tensor:
        """This rank's part of the loss."""
        for attention, moe in zip(self.attention, self.moes, strict=True):
            x_SM = attention(x_SM)
            x_SM = x_SM + moe(x_SM[None])[0]
        return x_SM.square().mean()


class AutoEPSteps:
    """An engine over such a model, and a step of it, on the tokens that ``layer_steps.Steps`` has in ``"ranks"``.

    Args:
        layer: sizes; experts are spread over all ranks.
        found: settings.
        prepare: called with the model before an engine has it.

    Attributes:
        losses: of this rank, one for each step.

    Raises:
        ValueError: a layer that AutoEP cannot run.
    """

    def __init__(self, layer: Layer, found: Found, prepare: Callable[[AutoEPModel], None] = lambda _: None) -> None:
        if reason := can_run(layer):
            raise ValueError(reason)
        torch.manual_seed(0)
        self.groups = StockGroups()
        self.groups.put()
        module = AutoEPModel(layer)
        prepare(module)
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "SGD", "params": {"lr": 1e-4}},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": found.stage, "reduce_bucket_size": found.bucket},
            "gradient_clipping": 0.0,  # as in Steps
            "steps_per_print": 1_000_000,
            "expert_parallel": {
                "enabled": True,
                "autoep_size": dist.get_world_size(),
                "moe_layer_pattern": r"moes\.\d+",
                "top_k": layer.k,
                # On a CPU torch's grouped matrix product is a loop, too, and as fast, but not every torch has it there.
                "use_grouped_mm": False,
            },
        }
        self.engine = deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=config)[0]
        self.groups.take()
        self.losses: list[torch.Tensor] = []
        self.batches = tokens(layer, all_of_node=False)
        self()

    def __call__(self) -> None:
        self.groups.put()
        loss = self.engine(*next(self.batches))
        self.losses.append(loss.detach())
        self.engine.backward(loss)
        self.engine.step()

    timed_s = Steps.timed_s

    def close(self) -> None:
        self.engine.destroy()
