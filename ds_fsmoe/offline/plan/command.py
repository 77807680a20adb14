# SPDX-License-Identifier: Apache-2.0
"""Predicts the step time and the memory of a model on a cluster, without a GPU, and prints the config that runs it.

ds_fsmoe plan --cluster h100_400 --model qwen3-30b-a3b
ds_fsmoe plan --cluster a100_200 --nodes 4 --hf-config my-model/config.json --zero 3 --samples 2
ds_fsmoe plan --cluster cluster.json --layers 24 --length 2048 --width 2048 --hidden 8192
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ds_fsmoe.offline.models.training import BYTES, LORA_TARGETS, OPTIMIZERS

HELP = "predict step time and memory of a model on a cluster"
LENGTH = 4096
"""The positions of a sample of a model that is made for as many, where none are given."""
MICRO_BATCHES_PER_STAGE = 4
"""The micro-batches of a batch for each stage, where no number is given."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of this command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.usage = "%(prog)s --cluster CLUSTER (--model NAME | --hf-config PATH | the model in numbers) [options]"
    where = parser.add_argument_group("the cluster")
    where.add_argument("--cluster", help="cluster: testbed_a, testbed_b, ..., or a JSON file")
    where.add_argument("--nodes", type=int, help="number of nodes (as measured)")
    where.add_argument(
        "--from-trace",
        type=Path,
        metavar="DIR",
        help="folder of a recorded run: predict other plans for that job",
    )
    where.add_argument("--ranks-per-node", type=int, metavar="N", help="with --from-trace: ranks per node")
    _add_model(parser)
    _add_groups(parser)
    _add_how(parser.add_argument_group("how"))
    _add_memory(parser)
    out = parser.add_argument_group("results")
    out.add_argument("--gantt", action="store_true", help="draw one layer of the plan as text")
    out.add_argument(
        "--two-batch-overlap",
        "--halves",
        dest="two_batch",
        action="store_true",
        help="predict two-batch overlap, relative to best (with --gantt: two layers of both)",
    )
    out.add_argument("--trace", type=Path, metavar="FILE", help="write the step for Perfetto and chrome://tracing")
    out.add_argument("--png", type=Path, metavar="FILE", help="draw a step of up to three layers by every preset")
    out.add_argument("--json", type=Path, metavar="FILE", help="write all results as JSON")


def _add_how(how: Any) -> None:
    how.add_argument("--preset", default="best", help="preset whose plan is printed (best)")
    how.add_argument(
        "--micro-batches",
        type=int,
        metavar="M",
        help=f"micro-batches per batch ({MICRO_BATCHES_PER_STAGE} per stage; without stages, one)",
    )
    how.add_argument(
        "--alltoall", default="flat", help="flat, 2dh, node_deduplicated, or auto: the fastest by the shown preset"
    )
    how.add_argument(
        "--expert-groups",
        type=int,
        metavar="G",
        help="number of expert groups; a token chooses from some of them (1)",
    )
    how.add_argument("--groups-per-token", type=int, metavar="N", help="groups that a token chooses from (all)")
    how.add_argument(
        "--routing", type=Path, metavar="FILE", help="a recorded routing, to count the nodes that a token is sent to"
    )
    how.add_argument(
        "--loads", type=Path, metavar="FILE", help="a recorded routing, or JSON, of loads for expert placement"
    )
    how.add_argument("--spare-experts", action=_RemovedOption, help=argparse.SUPPRESS)
    how.add_argument("--recompute", action="store_true", help="layers run their forward again in the backward")
    how.add_argument("--solver", default="exact", help="algorithm for numbers of chunks: exact, or the paper's slsqp")
    how.add_argument("--gradient-solver", default="dp", help="algorithm for gradients: dp, or the paper's de")
    how.add_argument(
        "--max-chunks",
        "--max-degree",
        dest="max_degree",
        type=int,
        default=16,
        metavar="N",
        help="largest number of chunks (16)",
    )
    how.add_argument("--chunk-bytes", type=int, help="slices of fixed_chunk (31457280), micro-ops of lina (30000000)")
    how.add_argument(
        "--contention", default="measured", help="measured (the cluster's), ideal, or kappa of the two links"
    )
    how.add_argument(
        "--host-us", type=float, help="cost of launching one task in microseconds (default: the cluster's)"
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about the model."""
    model = parser.add_argument_group("the model (a known one, your own, or all of it in numbers)")
    model.add_argument(
        "--model", metavar="NAME", help="mixtral-8x7b, deepseek-v3, ...; or the paper's, like mixtral-7b"
    )
    model.add_argument(
        "--hf-config", metavar="PATH", help="a config.json, a folder that has one, or a name of the Hugging Face Hub"
    )
    model.add_argument("--layers", type=int, help="number of layers; of a named model, only the first ones")
    model.add_argument("--samples", type=int, metavar="B", help="samples per model-parallel group (1)")
    model.add_argument(
        "--length", type=int, metavar="L", help=f"positions of a sample (a real model's, up to {LENGTH})"
    )
    model.add_argument("--width", type=int, metavar="M", help="width of the model")
    model.add_argument("--hidden", type=int, metavar="H", help="width inside an expert")
    model.add_argument("--experts", type=int, metavar="E", help="number of experts (the model's, or 8)")
    model.add_argument("--top-k", type=int, metavar="K", help="experts per token")
    model.add_argument("--capacity-factor", metavar="F", help="a number, or none (no dropping)")
    model.add_argument(
        "--imbalance",
        type=float,
        metavar="X",
        help="rows of the fullest rank over the mean, without dropping (default: 1)",
    )
    model.add_argument("--ffn", help="gpt (two products) or mixtral (three)")
    model.add_argument("--heads", type=int, help="attention heads")
    model.add_argument("--kv-heads", type=int, help="heads of keys and values (the same as --heads)")
    model.add_argument(
        "--dtype",
        choices=BYTES,
        help="number type of communication (default: the model's own, else fp32)",
    )


def _add_groups(parser: argparse.ArgumentParser) -> None:
    """Add the arguments about the sizes of groups."""
    groups = parser.add_argument_group(
        "group sizes (of real models mp = expert_tensor_parallel_size = 1, and ep_size as many ranks of a node as "
        "divide the experts; else those of the paper, as far as they fit: mp = expert_tensor_parallel_size = GPUs of a "
        "node, ep_size = nodes; on one node 1, 1 and its GPUs)"
    )
    for names, what in (
        (("--mp",), "model parallel"),
        (("--expert-tensor-parallel-size", "--esp"), "ranks that each expert is split over"),
        (("--ep-size", "--ep"), "ranks that experts are distributed over"),
        (("--dp",), "data parallel (the remaining ranks)"),
        (("--pp",), "pipeline stages (1)"),
    ):
        groups.add_argument(*names, dest=names[-1].strip("-"), type=int, metavar="N", help=what)


def _add_memory(parser: argparse.ArgumentParser) -> None:
    memory = parser.add_argument_group(
        "the memory of a rank (of real models; the micro-batch is --samples of --length)"
    )
    memory.add_argument("--zero", type=int, choices=(0, 1, 2, 3), help="ZeRO stage (the lowest that fits)")
    memory.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adam",
        help="adam: DeepSpeed's fused; adam8bit: bitsandbytes'",
    )
    memory.add_argument("--offload-optimizer", choices=("cpu",), help="optimizer states are on the host")
    memory.add_argument("--lora", type=int, default=0, metavar="RANK", help="train adapters only")
    memory.add_argument(
        "--lora-targets",
        choices=LORA_TARGETS,
        default="attention",
        help="modules with adapters: attention's projections, or experts as well (attention)",
    )
    memory.add_argument("--grad-accum-fp32", action="store_true", help="data_types.grad_accum_dtype is fp32")
    memory.add_argument("--activation-checkpointing", action="store_true", help="checkpoint every block")
    memory.add_argument(
        "--memory-gb", type=float, metavar="GB", help="memory of a GPU in 10^9 bytes (default: the cluster's)"
    )
    memory.add_argument("--reduce-bucket-size", type=float, metavar="N", help="DeepSpeed's, in elements (5e8)")


class _RemovedOption(argparse.Action):
    """Refuses an option of version 0.2.0 that was removed."""

    def __call__(self, parser: argparse.ArgumentParser, args: Any, value: Any, option: str | None = None) -> None:
        why = "is ignored, as experts have no replicas since version 0.2.0: remove it"
        print(f"{parser.prog}: {option} {value}: {why}", file=sys.stderr)


def run(args: argparse.Namespace) -> int:
    """Plan a model or a recorded run, and print the result. The planner is imported here, so that ``ds_fsmoe
    --help`` stays fast.
    """
    if args.from_trace is not None:
        from ds_fsmoe.offline.plan.from_trace import run_from_trace

        return run_from_trace(args)
    from ds_fsmoe.offline.plan.whole_plan import print_plan

    return print_plan(args)
