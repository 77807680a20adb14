# SPDX-License-Identifier: Apache-2.0
"""A user's script that mypy is run on, by tests/test_public_names.py; it is not run itself.

A line that ends in ``# wrong: CODE`` has a mistake that mypy has to report under that code; all others have none.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

import ds_fsmoe
from ds_fsmoe.components.gate import option, takes_options_of
from ds_fsmoe.components.token_choice import ChoiceSettings, Scores, TokenChoiceGate


@dataclass(frozen=True)
class MySettings(ChoiceSettings):
    sharpness: float = option(1.0, above=0)


@ds_fsmoe.register_gate("mine")
class MyGate(TokenChoiceGate):
    Settings = MySettings
    settings: MySettings

    @takes_options_of(MySettings)
    def __init__(self) -> None: ...

    def score(self, x_SM: torch.Tensor) -> Scores:
        return Scores(x_SM * self.settings.sharpness, x_SM)


@ds_fsmoe.register_order("my order")
class MyOrder(ds_fsmoe.OrderBase):
    def arrange(self, x_SM: torch.Tensor, routing: ds_fsmoe.RoutingBase) -> torch.Tensor:
        return x_SM

    def restore(self, y_ECM: torch.Tensor, routing: str) -> torch.Tensor:  # wrong: override
        return y_ECM


class MyHook(ds_fsmoe.CallbackBase):
    def before_dispatch_hook(self, args: ds_fsmoe.CallbackArgs) -> torch.Tensor | None:
        reveal: int = args.chunk
        phase: int = args.direction  # wrong: assignment
        return args.tensor if reveal + phase else None


def train(model: nn.Module, batches: list[torch.Tensor]) -> None:
    engine, _, _, _ = ds_fsmoe.initialize(model=model, config={"fsmoe": {"enabled": True, "gate": "mixtral"}})
    for batch in batches:
        engine.backward(engine(batch).mean())
        engine.step()
    layers: int = engine.fsmoe.num_layers
    schedule: str = engine.fsmoe.chosen()["schedule"]
    name: str = engine.fsmoe.num_layers  # wrong: assignment
    print(layers, schedule, name, engine.fsmoe.num_layer)  # wrong: attr-defined
    ds_fsmoe.initialize(modell=model)  # wrong: call-arg
    ds_fsmoe.initialize(model=model, distributed_port="29500")  # wrong: arg-type


def by_hand() -> nn.Module:
    MyGate(sharpness=2.0, k=2, capacity_factor=None)
    MyGate(sharpnes=2.0)  # wrong: call-arg
    ds_fsmoe.LinearGate(k=2, noisy_gate_policy="Jitter", use_rts=False)
    ds_fsmoe.LinearGate(k="2")  # wrong: arg-type
    ds_fsmoe.LinearGate(2)  # wrong: call-arg
    ds_fsmoe.SwitchGate(jitter=0.1, drop_tokens=False)
    ds_fsmoe.MixtralGate(jitter=0.1)  # wrong: call-arg
    ds_fsmoe.DeepSeekGate(k=8, num_groups=4, kept_groups=2)
    ds_fsmoe.DeepSeekGate(k=8, num_groups=4.5)  # wrong: arg-type
    ds_fsmoe.SoftMoEGate(slots_per_expert="4")  # wrong: arg-type
    ds_fsmoe.MOELayer(MyGate(), MyOrder(), model_dim=8, num_expert=4)  # wrong: call-arg
    ds_fsmoe.MOELayer(MyGate(), "sparse", model_dim=8, num_experts=4)  # wrong: arg-type
    return ds_fsmoe.MOELayer(
        MyGate(k=2), ds_fsmoe.SimpleOrder(), model_dim=8, num_experts=4, expert_dim=16, callbacks=[MyHook()]
    )


def outputs(output: ds_fsmoe.MoEOutput) -> torch.Tensor:
    loss: torch.Tensor = output.aux_loss
    print(output.aux_los)  # wrong: attr-defined
    return loss


def blocks() -> None:
    ds_fsmoe.install({"enabled": True, "num_chunks": 4})
    block = ds_fsmoe.Config(num_chunks=4, gate=ds_fsmoe.Config.Gate(type="deepseek", top_k=2, num_groups=2))
    ds_fsmoe.install(block)
    ds_fsmoe.initialize(config={"fsmoe": ds_fsmoe.Config(gate="mixtral", autotune={"enabled": False}, ops=None)})
    written: dict[str, object] = ds_fsmoe.Config(autotune=ds_fsmoe.Config.Autotune(trials=5)).as_dict()
    print(written)
    ds_fsmoe.Config(num_chunk=4)  # wrong: call-arg
    ds_fsmoe.Config(schedule="fsmoo")  # wrong: arg-type
    ds_fsmoe.Config(debug=True)  # wrong: arg-type
    ds_fsmoe.Config.NumChunks(forward="x")  # wrong: arg-type
    ds_fsmoe.install("fsmoe.json")  # wrong: arg-type
    ds_fsmoe.instal()  # wrong: attr-defined
