# SPDX-License-Identifier: Apache-2.0
"""What one word in the config gains: whole models as users write them, ``"enabled"`` false and true.

``cluster.py up --inter 100mbit --intra 400mbit``, then ``cluster.py run -- benchmarks/cases/bench_one_word.py --only
gpt``, a job for each case. The GPT has DeepSpeed's own MoE layers, the others are Hugging Face's. ``stock`` is the
config with ``"enabled": false``, which for a Hugging Face model means that every rank has all experts; ``ours`` is
``true`` and nothing else, measured once the autotuner, which nobody has asked for, has settled; then ``true`` with a
schedule by name. Steps are whole: forward, backward, optimizer, the gather of parameters. A turn is two steps of one
engine: ours gathers parameters under the next forward, so the first step's are hidden, and the second's are waited for
before the clock stops, where in training all are hidden. AutoEP has a row where the
installed transformers is one that it knows (5.22.2 or older), over the ranks of a node and over all.

Rows go to ``benchmarks/results/one_word.csv``, what stock's step spends its time on to ``one_word_operations.csv``,
what each variant's tensors take, in one step that is not timed, to ``one_word_memory.csv``, and what tuning took, with
after how many steps it has paid, to ``one_word_tuning.csv``.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from packaging.version import Version

# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import deepspeed
from gpt_moe import GPTMoE, Sizes

import ds_fsmoe
from benchmarks.harness.harness import RESULTS, Case, Effort, Goal, Grid, Variant, run_grid
from benchmarks.harness.intervals import MIN_BLOCKS_TO_JUDGE
from benchmarks.harness.join import join
from benchmarks.harness.outcome import PACKAGES
from benchmarks.harness.result_files import append_rows, made_with
from benchmarks.harness.routing import parsed
from benchmarks.models.hugging_face import Model, made
from benchmarks.models.layer_steps import wait_for_parameters
from benchmarks.models.layers import StockGroups, ranks_per_node
from benchmarks.models.operations import COMMUNICATION, OTHER, Operations
from benchmarks.models.step_costs import StepMemory, step_memory, storages_now, write_memory, write_tuning

NEWEST_FOR_AUTOEP = Version("5.22.2")
PRESETS = ("deepspeed", "tutel", "pipemoe_lina", "fsmoe")
AUTOEP_NAMES = {"qwen3": "qwen3_moe", "mixtral": "mixtral"}
OPERATIONS = (*COMMUNICATION, "experts", "attention", "routing", OTHER)
IN_A_ROW = 2
MOST_STEPS = 200
"""Until plans have to be settled."""


@dataclass(frozen=True)
class Whole(Model):
    """A whole model at a stage of ZeRO. ``family`` may be ``"gpt"``: DeepSpeed's own layers, over all ranks."""

    stage: int = 1
    micro_batches: int = 1
    """Of a step, whose gradients are added up before they are sent."""
    capacity_factor: float = 1.25
    """Of the GPT; the others drop nothing."""


CASES = {
    "gpt": Case("GPT, k 2, H 4 M", Whole("gpt", 3, B=2, L=128, M=256, H=1024, E=8, k=2, vocabulary=256, stage=1)),
    "mixtral": Case(
        "Mixtral, k 2, H 7/2 M", Whole("mixtral", 2, B=4, L=128, M=128, H=448, E=8, k=2, stage=1, micro_batches=2)
    ),
    "olmoe": Case(
        "OLMoE, k 8, H 1/2 M", Whole("olmoe", 2, B=4, L=128, M=128, H=64, E=64, k=8, stage=2, micro_batches=2)
    ),
    "qwen3": Case(
        "Qwen3, k 8, H 3/4 M", Whole("qwen3", 2, B=4, L=128, M=128, H=96, E=32, k=8, stage=3, micro_batches=2)
    ),
}


@functools.cache
def _groups(kind: str) -> StockGroups:
    """Return what DeepSpeed keeps of the groups of one kind of engines: ours make a group once for all of theirs."""
    return StockGroups()


class Training:
    """An engine over a model as a user has it, and a step of it.

    Args:
        model: the sizes.
        more: what the config has besides.
        named: kept here by the name of its variant, once its plans are settled.
    """

    def __init__(self, model: Whole, more: dict[str, Any], name: str, named: dict[str, Training]) -> None:
        is_ours = more.get("fsmoe", {}).get("enabled", False)
        self.groups = _groups("ours" if is_ours else name)
        self.groups.put()
        self._model = model
        module = self._module()
        base = {
            "train_micro_batch_size_per_gpu": model.B,
            "gradient_accumulation_steps": model.micro_batches,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": model.stage},
            "steps_per_print": 1_000_000,
        }
        parameters = list(module.parameters())
        initialize: Any = ds_fsmoe.initialize if "fsmoe" in more else deepspeed.initialize
        self.engine = initialize(model=module, model_parameters=parameters, config=base | more)[0]
        self.groups.take()
        generator = torch.Generator().manual_seed(1 + dist.get_rank())
        self._ids = torch.randint(model.vocabulary, (model.B, model.L), generator=generator)
        for _ in range(MOST_STEPS):
            self()
            if self._is_settled():
                break
        else:
            raise RuntimeError(f"{name}: no plan was settled in {MOST_STEPS} steps")
        named[name] = self

    def _module(self) -> torch.nn.Module:
        model = self._model
        if model.family != "gpt":
            return made(model)
        torch.manual_seed(0)
        of_gpt = model.M, model.layers, model.heads, model.L, model.E, dist.get_world_size(), model.k
        return GPTMoE(Sizes(*of_gpt, model.capacity_factor))

    def _is_settled(self) -> bool:
        tuner = getattr(getattr(self.engine, "fsmoe", None), "autotune", None)
        return tuner is None or tuner.is_settled

    def __call__(self) -> None:
        self.groups.put()
        for _ in range(self._model.micro_batches):
            self.engine.backward(self._loss())
            self.engine.step()

    def finish(self) -> None:
        """Wait for what the last step has left under way."""
        wait_for_parameters(self.engine)

    def _loss(self) -> torch.Tensor:
        if self._model.family == "gpt":
            loss, aux_loss = self.engine(self._ids, self._ids)
            return loss + 0.01 * aux_loss
        return self.engine(input_ids=self._ids, labels=self._ids).loss

    def operations_ms(self, num_steps: int = 3) -> dict[str, float]:
        """Return what a step spends its time on, the mean over ranks of the median over steps. Collective."""
        of_classes = {"Experts": "experts", "Attention": "attention", "Gate": "routing", "Router": "routing"}
        operation_of = {
            module: next(word for end, word in of_classes.items() if type(module).__name__.endswith(end))
            for module in self.engine.module.modules()
            if type(module).__name__.endswith(tuple(of_classes))
        }
        found = []
        self.groups.put()
        for _ in range(num_steps):
            operations = Operations()
            dist.barrier()
            with operations.watched(operation_of):
                for _ in range(self._model.micro_batches):
                    with operations.phase("forward"):
                        loss = self._loss()
                    with operations.phase("backward"):
                        self.engine.backward(loss)
                    with operations.phase("step"):
                        self.engine.step()
            found.append([operations.of(name) for name in OPERATIONS])
        times_s = torch.tensor(found, dtype=torch.float64)
        dist.all_reduce(times_s)
        median_ms = (times_s / dist.get_world_size()).median(dim=0).values * 1e3
        return dict(zip(OPERATIONS, median_ms.tolist(), strict=True))

    def close(self) -> None:
        """End the engine."""
        self.engine.destroy()


def configs(model: Whole) -> dict[str, dict[str, Any]]:
    """Return what the config of each variant has besides, the baseline first."""
    found: dict[str, dict[str, Any]] = {"stock": {"fsmoe": {"enabled": False}}, "ours": {"fsmoe": {"enabled": True}}}
    if model.family == "gpt":
        # Slots are what stock sends where tokens are dropped.
        found["ours, rows"] = {"fsmoe": {"enabled": True, "dispatch": "rows"}}
    else:
        found["ours, over all ranks"] = {"fsmoe": {"enabled": True, "ep_size": dist.get_world_size()}}
    for name in PRESETS:
        of_tuner = {"autotune": True} if name == "fsmoe" else {"autotune": False, "num_chunks": 2}
        found[name] = {"fsmoe": {"enabled": True, "schedule": name} | (of_tuner if name != "deepspeed" else {})}
    if model.family in AUTOEP_NAMES and Version(version("transformers")) <= NEWEST_FOR_AUTOEP:
        for size in sorted({ranks_per_node(), dist.get_world_size()}):
            asked = {"enabled": True, "autoep_size": size, "preset_model": AUTOEP_NAMES[model.family]}
            found[f"AutoEP over {size}"] = {"expert_parallel": asked}
    return found


def write_operations(case: Case, file: Path) -> None:
    """Append what stock's step spends its time on, and print it. Collective."""
    stock = Training(case.settings, {"fsmoe": {"enabled": False}}, "stock", {})
    of_step = stock.operations_ms()
    stock.close()
    if dist.get_rank():
        return
    step_ms = sum(of_step.values())
    made_now = made_with(PACKAGES) | {"ranks": dist.get_world_size(), "case": case.name}
    rows = [
        made_now | {"operation": name, "ms": f"{ms:.1f}", "share": f"{ms / step_ms:.3f}"}
        for name, ms in of_step.items()
        if ms > 0
    ]
    append_rows(file, tuple(rows[0]), rows)
    print(f"stock's step of {case.name}: " + ", ".join(f"{row['operation']} {float(row['share']):.0%}" for row in rows))


def main() -> None:
    """Measure the models that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--steps", type=int, default=1, help="turns of each variant in a block")
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--variants", nargs="*", help="besides stock (all)")
    parser.add_argument("--tiny", action="store_true", help="to see that all runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--local_rank", type=int, help="given by the launcher")
    args = parsed(parser)
    join()
    for key in args.only:
        case = CASES[key]
        if args.tiny:
            case = Case("tiny", replace(case.settings, L=16, M=32, H=32, layers=1))
        named: dict[str, Training] = {}
        memories: dict[str, StepMemory] = {}
        wanted = {
            name: more
            for name, more in configs(case.settings).items()
            if name == "stock" or args.variants is None or name in args.variants
        }
        variants = [Variant(name, _made(more, name, named, memories)) for name, more in wanted.items()]
        goals = [Goal("ours", at_least=0.98)] if args.blocks >= MIN_BLOCKS_TO_JUDGE and "ours" in wanted else []
        effort = Effort(args.blocks, args.steps, warmup=1, in_a_row=IN_A_ROW)
        write_operations(case, args.results / "one_word_operations.csv")
        (result,) = run_grid(Grid("one_word", (case,)), variants, "stock", effort, goals, args.results)
        write_memory(case, memories, args.results / "one_word_memory.csv")
        if dist.get_rank() == 0:
            engines = {name: training.engine for name, training in named.items()}
            write_tuning(case, engines, result, args.results / "one_word_tuning.csv")
    dist.destroy_process_group()


def _made(
    more: dict[str, Any], name: str, named: dict[str, Training], memories: dict[str, StepMemory]
) -> Callable[[Whole], Training]:
    """Return what makes a variant, and runs one step of it, before any is timed, whose memory is counted."""

    def make(model: Whole) -> Training:
        before = storages_now()
        training = Training(model, more, name, named)
        # The baseline is made twice.
        if name not in memories:
            state = getattr(training.engine, "fsmoe", None)
            layers = [] if state is None else list(state.inner_layers.values())
            # In the first step with it, a plan that was settled on moves what is there.
            training()
            memories[name] = step_memory(training, layers, before, training.engine.zero_reduce_bucket_size())
            training.finish()
        return training

    return make


if __name__ == "__main__":
    main()
