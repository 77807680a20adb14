# SPDX-License-Identifier: Apache-2.0
"""A small training job that saves, resumes, and has one thing go wrong where it is told to. See ``bench_faults.py``.

Every rank appends the loss of each of its steps to ``losses/rank<N>.txt``; a rank that something is about to happen to
writes the time into ``fault.txt`` first. A job that is started again goes on from the last checkpoint, and nothing goes
wrong a second time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import ds_fsmoe
from ds_fsmoe.tuning.autotune import Autotune

WIDTH, LENGTH, NUM_EXPERTS = 19, 11, 4


@dataclass(frozen=True)
class Fault:
    """What goes wrong, on which rank, in which step.

    Attributes:
        what: one of :data:`FAULTS`.
        rank: to which.
        step: in which, from 0.
        seconds: for those that last.
    """

    what: str = "none"
    rank: int = 1
    step: int = 3
    seconds: float = 3.0


class Network(nn.Module):
    """Two MoE layers with dropout between them, which draws from the generator of random numbers."""

    def __init__(self, ep_size: int, num_layers: int = 2) -> None:
        super().__init__()
        experts = (ds_fsmoe.GPTFeedForward(WIDTH, 2 * WIDTH) for _ in range(num_layers))
        self.layers = nn.ModuleList(
            ds_fsmoe.MoE(WIDTH, expert, num_experts=NUM_EXPERTS, ep_size=ep_size, k=2) for expert in experts
        )
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x_BLM: torch.Tensor) -> torch.Tensor:
        """The loss."""
        y_BLM, aux_losses = self.first(x_BLM), torch.zeros(())
        for layer in self.layers:
            out_BLM, aux_loss, _ = layer(y_BLM)
            y_BLM, aux_losses = nn.functional.dropout(y_BLM + out_BLM, 0.1), aux_losses + aux_loss
        return (y_BLM - x_BLM.roll(1, 1)).square().mean() + 0.01 * aux_losses


class Wrong:
    """Lets it happen.

    Args:
        fault: what.
        folder: of the job.
    """

    def __init__(self, fault: Fault, folder: Path) -> None:
        self.fault, self.folder = fault, folder
        self.step = -1
        self._happened = (folder / "fault.txt").exists()

    @property
    def is_due(self) -> bool:
        """On this rank, in this step, for the first time."""
        return not self._happened and self.step == self.fault.step and dist.get_rank() == self.fault.rank

    def stamp(self) -> None:
        """The time, for who measures how long it takes the job to end."""
        self._happened = True
        (self.folder / "fault.txt").write_text(repr(time.time()))

    def die(self, *_: Any) -> None:
        """At once, without a word."""
        if self.is_due:
            self.stamp()
            os.kill(os.getpid(), signal.SIGKILL)

    def die_later(self, after_s: float) -> None:
        """While this thread goes on."""

        def die() -> None:
            self.stamp()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Timer(after_s, die).start()

    def prepare(self, engine: Any) -> None:
        """Put it in place."""
        what, layer = self.fault.what, engine.module.layers[-1]
        if what == "kill in forward":
            layer.deepspeed_moe.gate.register_forward_pre_hook(lambda *_: self.die())
        elif what == "kill in backward":
            layer.register_forward_hook(lambda _, __, out: out[0].register_hook(lambda gradient: self.die()) and None)
        elif what == "kill in a collective":
            self._in_a_collective(layer)
        elif what == "kill in a save":
            self._in_a_save()
        elif what == "kill while measuring":
            measure = Autotune._measure

            def measured(tuner: Autotune, *args: Any) -> Any:
                if not self._happened and dist.get_rank() == self.fault.rank:
                    self.die_later(0.3)
                return measure(tuner, *args)

            Autotune._measure = measured

    def _in_a_collective(self, layer: nn.Module) -> None:
        """This rank enters the all-to-all and dies in it; the others come later."""

        def wait(*_: Any) -> None:
            if self.step != self.fault.step or self._happened or (self.folder / "fault.txt").exists():
                return
            if dist.get_rank() == self.fault.rank:
                self.die_later(0.5)
            else:
                time.sleep(1.0)

        layer.deepspeed_moe.gate.register_forward_hook(wait)

    def _in_a_save(self) -> None:
        save = torch.save

        def die_in_the_middle(state: Any, file: Any, *args: Any, **options: Any) -> None:
            if self.is_due:
                Path(file).write_bytes(b"half of it")
                self.die()
            save(state, file, *args, **options)

        torch.save = die_in_the_middle


FAULTS = (
    *("kill in forward", "kill in backward", "kill in a collective", "kill in a save", "kill while measuring"),
    *("error", "late", "other config", "other plan", "other layers", "none"),
)


def block_for(fault: Fault, rank: int) -> dict[str, Any]:
    """The ``fsmoe`` block."""
    is_other = rank == fault.rank
    block: dict[str, Any] = {"enabled": True, "debug": {"hang_timeout_s": 20.0}, "deterministic": True}
    degrees = {"forward": 2, "backward": 3 if fault.what == "other plan" and is_other else 2}
    if fault.what == "kill while measuring":
        return block | {"autotune": {"enabled": True, "trials": 0}, "deterministic": False}
    if fault.what == "other config" and is_other:
        block["order"] = "dense"
    return block | {"pipeline_degree": degrees}


def train(
    folder: Path, num_steps: int, fault: Fault, stage: int, ep_size: int, save_every: int, pause_s: float
) -> None:
    """The job, on one rank."""
    rank = dist.get_rank()
    wrong = Wrong(fault, folder)
    was = (folder / "fault.txt").exists()
    block = block_for(Fault() if was and fault.what.startswith("other") else fault, rank)
    torch.manual_seed(rank)
    model = Network(ep_size, 3 if fault.what == "other layers" and rank == fault.rank and not was else 2)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 4096},
        "steps_per_print": 1_000_000,
        "fsmoe": block,
    }
    if fault.what.startswith("other") and rank == fault.rank and not was:
        wrong.stamp()
    engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    # All ranks have met in initialize, and none has saved since.
    if (folder / "checkpoints" / "latest").is_file():
        engine.load_checkpoint(str(folder / "checkpoints"))
    wrong.prepare(engine)
    losses = folder / "losses" / f"rank{rank}.txt"
    losses.parent.mkdir(exist_ok=True)
    for step in range(engine.global_steps, num_steps):
        wrong.step = step
        if wrong.is_due and fault.what == "late":
            wrong.stamp()
            time.sleep(fault.seconds)
        if wrong.is_due and fault.what == "error":
            wrong.stamp()
            raise RuntimeError("something in a user's script")
        generator = torch.Generator().manual_seed(1000 * step + rank)
        loss = engine(torch.randn(2, LENGTH, WIDTH, generator=generator))
        engine.backward(loss)
        engine.step()
        with losses.open("a") as opened:
            opened.write(f"{step} {loss.item()!r}\n")
        time.sleep(pause_s)
        if (step + 1) % save_every == 0:
            engine.save_checkpoint(str(folder / "checkpoints"))
    engine.destroy()


def main(start: Callable[[], None] = lambda: deepspeed.init_distributed("gloo")) -> None:
    """From the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--fault", type=json.loads, default={}, help="as JSON; see Fault")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--ep-size", type=int, default=2)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--pause-s", type=float, default=0.0, help="after each step")
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parser.parse_args()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.chdir(args.folder)  # where reports are left
    start()
    folder, fault = args.folder.resolve(), Fault(**args.fault)
    train(folder, args.steps, fault, args.stage, args.ep_size, args.save_every, args.pause_s)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
