# SPDX-License-Identifier: Apache-2.0
"""LoRA on experts: a step with PEFT under stock DeepSpeed, by two implementations of transformers, and with ours.

``python benchmarks/cases/bench_lora.py`` is one rank, and ``--ranks 2`` starts two on this machine, over gloo. Each
rank has one thread. The model has the blocks of Qwen3-MoE with 64 experts, 8 for a token, in fp32. All weights are
frozen; adapters are on the queries and values of attention, and on both weights of the experts, by PEFT's
``target_parameters``. ``stock`` is ``deepspeed.initialize`` with ``grouped_mm``, at the stage of ZeRO that it is
fastest with, of 0, 1 and 2; ``eager`` is the same with transformers' loop over experts, where that does not take
minutes; ``ours`` has ``"enabled": true`` at the same stage. On two ranks that spreads the experts over both, and
``ours, ep_size 1`` keeps all of them on each rank, as stock does. Steps are whole: forward, backward, optimizer.

Rows go to ``benchmarks/results/lora.csv``. The memory of each variant's tensors, in one step that is not timed, and how
far its losses are from stock's goes to ``lora_memory.csv``.
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.harness.harness import RESULTS, Case, Effort, Grid, Variant, run_grid
from benchmarks.harness.join import join
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import append_rows, made_with
from benchmarks.harness.routing import parsed
from benchmarks.models.hugging_face import made
from benchmarks.models.step_costs import StepMemory, storages_now
from benchmarks.models.sweeps import OFF, OURS, STOCK, counted
from benchmarks.models.whole_models import Setting, Training, Whole

EAGER, WHOLE = "eager", "ours, ep_size 1"
IMPLEMENTATION = {STOCK: "grouped_mm", EAGER: "eager"}
"""Of transformers, for the variants that have one."""
OPTIMIZER = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
NUM_COMPARED = 5
"""First steps of which losses are compared."""
TARGETS = {
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


@dataclass(frozen=True)
class Adapted(Whole):
    """A model with adapters of rank ``r``."""

    r: int = 8
    has_eager: bool = False
    """Whether the loop over experts is measured too, on one rank."""
    stages: tuple[int, ...] = (0, 1, 2)


_NARROW = Adapted("qwen3", 4, B=1, L=64, M=256, H=192, E=64, k=8)
_WIDE = Adapted("qwen3", 2, B=1, L=64, M=768, H=288, E=64, k=8)
CASES = {
    "narrow-few": Case("M 256, 64 tokens, r 8", replace(_NARROW, has_eager=True)),
    "narrow-many": Case("M 256, 512 tokens, r 8", replace(_NARROW, B=2, L=256)),
    "narrow-r32": Case("M 256, 512 tokens, r 32", replace(_NARROW, B=2, L=256, r=32)),
    "wide-few": Case("M 768, 64 tokens, r 8", _WIDE),
    "wide-many": Case("M 768, 512 tokens, r 8", replace(_WIDE, B=2, L=256)),
    "wide-r32": Case("M 768, 512 tokens, r 32", replace(_WIDE, B=2, L=256, r=32)),
}


def tiny(case: Case) -> Case:
    """Return a case as small as it can be, to see that all runs."""
    sizes = {"layers": 1, "B": 1, "L": 16, "M": 32, "H": 16, "E": 8, "k": 2, "has_eager": True}
    return Case("tiny", replace(case.settings, **sizes))


class Tuned(Training):
    """An engine over a model with adapters, and a step of it.

    Attributes:
        losses: of the first steps, on this rank.
    """

    def __init__(self, model: Adapted, setting: Setting, more: dict[str, Any], name: str) -> None:
        self.losses: list[float] = []
        self._name = name
        super().__init__(model, setting, OPTIMIZER | more, name)

    def _module(self) -> torch.nn.Module:
        from peft import LoraConfig, get_peft_model

        module = made(self._model)
        if self._name in IMPLEMENTATION:
            module.set_experts_implementation(IMPLEMENTATION[self._name])
        # Adapters are drawn alike by every variant.
        torch.manual_seed(1)
        return get_peft_model(module, LoraConfig(r=self._model.r, lora_alpha=2 * self._model.r, **TARGETS))

    def _loss(self) -> torch.Tensor:
        loss = super()._loss()
        if len(self.losses) < NUM_COMPARED:
            self.losses.append(float(loss.detach()))
        return loss


@dataclass
class Facts:
    """What is known of a variant besides its times."""

    memory: StepMemory
    losses: list[float]
    num_trained: int
    """Elements of adapters on this rank."""


def main() -> None:
    """Measure the cases that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1, help="started here, unless a launcher has started some")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--tiny", action="store_true", help="to see that all runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    if "RANK" not in os.environ:
        if args.ranks > 1:
            _start(args.ranks)
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ["MASTER_PORT"] = str(_free_port())
    torch.set_num_threads(1)
    join()
    for key in args.only:
        case = tiny(CASES[key]) if args.tiny else CASES[key]
        ranks = dist.get_world_size()
        case = Case(f"{case.name}, {ranks} rank{'s' * (ranks > 1)}", case.settings)
        setting = Setting(_best_stage(case))
        found: dict[str, Facts] = {}
        ways = _ways(case.settings)
        variants = [Variant(name, partial(_made, setting, more, name, found)) for name, more in ways.items()]
        # The stage is a setting of the case: rows say it.
        case = Case(case.name, replace(case.settings, stages=(setting.stage,)))
        run_grid(Grid("lora", (case,)), variants, STOCK, Effort(args.blocks, 1, warmup=1), results=args.results)
        _write(case, found, args.results / "lora_memory.csv")
    dist.destroy_process_group()


def _ways(model: Adapted) -> dict[str, dict[str, Any]]:
    """Variant -> what its config has besides."""
    ours = {OURS: {"fsmoe": {"enabled": True}}}
    if dist.get_world_size() > 1:
        return {STOCK: OFF, **ours, WHOLE: {"fsmoe": {"enabled": True, "ep_size": 1}}}
    return {STOCK: OFF, **({EAGER: OFF} if model.has_eager else {}), **ours}


def _best_stage(case: Case, turns: int = 3) -> int:
    """The stage of ZeRO that stock is fastest with. Collective."""
    times_s: dict[int, float] = {}
    for stage in case.settings.stages:
        training = Tuned(case.settings, Setting(stage), OFF, STOCK)
        found = []
        for _ in range(turns):
            dist.barrier()
            start_s = time.perf_counter()
            training()
            found.append(time.perf_counter() - start_s)
        training.close()
        # All ranks have to choose the same.
        slowest = torch.tensor(median(found), dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        times_s[stage] = float(slowest)
    if dist.get_rank() == 0:
        shown = ", ".join(f"ZeRO {stage} {1e3 * each:.0f} ms" for stage, each in times_s.items())
        print(f"{case.name}: stock at {shown}", flush=True)
    return min(times_s, key=times_s.__getitem__)


def _made(setting: Setting, more: dict[str, Any], name: str, found: dict[str, Facts], model: Adapted) -> Tuned:
    """Return a variant that has made its first steps, the memory of one of them counted."""
    before = storages_now()
    training = Tuned(model, setting, more, name)
    # Baselines are made twice.
    if name not in found:
        trained = sum(each.numel() for each in training.engine.module.parameters() if each.requires_grad)
        memory = counted(training, before)
        while len(training.losses) < NUM_COMPARED:
            training()
        found[name] = Facts(memory, training.losses, trained)
    return training


def _write(case: Case, found: dict[str, Facts], file: Path) -> None:
    """Append memory and losses of each variant, of the rank that has the most, and print them. Collective."""
    stock = found[STOCK].losses
    off = [max(abs(a - b) / abs(b) for a, b in zip(each.losses, stock, strict=True)) for each in found.values()]
    numbers = [
        [each.memory.held, each.memory.peak, each.num_trained, of_losses]
        for each, of_losses in zip(found.values(), off, strict=True)
    ]
    most = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if dist.get_rank():
        return
    made_now = made_with(PACKAGES) | {"ranks": dist.get_world_size(), "case": case.name}
    rows = [
        made_now
        | {"variant": name, "unit": "MB", "held": f"{held / 1e6:.6g}", "above": f"{(peak - held) / 1e6:.6g}"}
        | {"trained": f"{trained:.0f}", "loss": f"{stock[-1]:.6f}", "loss_off": f"{of_losses:.2g}"}
        for name, (held, peak, trained, of_losses) in zip(found, most.tolist(), strict=True)
    ]
    append_rows(file, tuple(rows[0]), rows)
    for row in rows:
        print(
            f"{case.name}: {row['variant']}: tensors {row['held']} MB between steps, {row['above']} MB more at the "
            f"peak of one; {row['trained']} elements trained; losses within {row['loss_off']} of stock's",
            flush=True,
        )
    assert all(map(math.isfinite, stock))


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _start(ranks: int) -> None:
    """Become the launcher of this script on so many ranks."""
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(_free_port())]
    os.environ["OMP_NUM_THREADS"] = "1"
    os.execv(sys.executable, [sys.executable, *launcher, *sys.argv])


if __name__ == "__main__":
    main()
