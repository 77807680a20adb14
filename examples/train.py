# SPDX-License-Identifier: Apache-2.0
"""The main job: a byte-level language model with MoE layers, trained by DeepSpeed, with stock's layers or ours.

deepspeed --num_accelerators 2 examples/train.py --deepspeed_config ds_configs/gpt_moe_small.json --moe fsmoe
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from gpt_moe import GPTMoE, Sizes
from text_data import Text, TextError, draw_batch, load_text, rank_generator

import ds_fsmoe
from ds_fsmoe.terminal.progress import Progress
from ds_fsmoe.terminal.screen import is_terminal
from ds_fsmoe.terminal.tables import print_table

AUX_LOSS_WEIGHT = 0.01


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line, checked: what is wrong ends the program with one sentence, before ranks have met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moe", choices=("fsmoe", "deepspeed"), help="whose MoE layers; default: as the config says")
    parser.add_argument("--text", metavar="FILE", help="text to train on; default: the Python language reference")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps (%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="width of the model, M (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="blocks, each with an MoE layer (%(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="attention heads (%(default)s)")
    parser.add_argument("--seq-len", type=int, default=128, help="bytes per sequence, L (%(default)s)")
    parser.add_argument("--num-experts", type=int, default=8, help="experts per layer, E (%(default)s)")
    parser.add_argument("--ep-size", type=int, help="ranks that share the experts; default: all")
    parser.add_argument("--k", type=int, default=2, help="experts per token (%(default)s)")
    parser.add_argument("--capacity-factor", type=float, default=1.25, help="slots per expert over the mean")
    parser.add_argument("--eval-batches", type=int, default=8, help="batches of a validation (%(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of weights and batches (%(default)s)")
    parser.add_argument("--save-dir", default="runs/checkpoints", help="where the checkpoint goes (%(default)s)")
    parser.add_argument("--metrics", metavar="FILE", help="JSON file for everything that was measured")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args(arguments)

    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    args.ep_size = world_size if args.ep_size is None else args.ep_size
    if args.deepspeed_config is None:
        parser.error("--deepspeed_config FILE is needed, for example ds_configs/gpt_moe_small.json")
    if not os.path.isfile(args.deepspeed_config):
        parser.error(f"--deepspeed_config {args.deepspeed_config}: no such file")
    for name in ("steps", "width", "layers", "heads", "seq_len", "num_experts", "ep_size", "k", "eval_batches"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if args.width % args.heads:
        parser.error(f"--width {args.width} is not divisible by --heads {args.heads}")
    if world_size % args.ep_size:
        parser.error(f"--ep-size {args.ep_size} does not divide the {world_size} ranks")
    if args.num_experts % args.ep_size:
        parser.error(f"--num-experts {args.num_experts} is not divisible by --ep-size {args.ep_size}")
    if args.k > args.num_experts:
        parser.error(f"--k {args.k}: there are only {args.num_experts} experts (--num-experts)")
    try:
        args.loaded_text = load_text(args.text, args.seq_len)
    except TextError as error:
        parser.error(str(error))
    return args


def read_config(args: argparse.Namespace) -> dict[str, Any]:
    """The DeepSpeed config, with ``--moe`` put into its fsmoe block.

    Raises:
        SystemExit: the file cannot be read or is no JSON object; one sentence says so.
    """
    # Comments are allowed, as DeepSpeed allows them.
    import hjson

    at_fault = f"train.py: error: --deepspeed_config {args.deepspeed_config}"
    try:
        config = json.loads(json.dumps(hjson.loads(Path(args.deepspeed_config).read_text())))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{at_fault}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise SystemExit(f"{at_fault}: must hold a JSON object")
    block = config.get("fsmoe", {})
    # A block that is no object is left for ds_fsmoe to name.
    if args.moe is not None and isinstance(block, dict):
        config["fsmoe"] = block | {"enabled": args.moe == "fsmoe"}
    # Handed over as a dict below; DeepSpeed wants to see only one of the two.
    args.deepspeed_config = None
    return config


def mean_over_ranks(value: torch.Tensor) -> float:
    """A scalar averaged over all ranks."""
    total = value.detach().clone().float()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


@torch.no_grad()
def validate(engine: Any, text: Text, args: argparse.Namespace, batch_size: int) -> float:
    """Mean loss in nats per byte over fixed batches of the validation part, different ones on every rank."""
    engine.eval()
    generator = rank_generator(args.seed + 1, dist.get_rank())
    losses = []
    for _ in range(args.eval_batches):
        tokens_BL, targets_BL = draw_batch(text.validation_L, batch_size, args.seq_len, generator)
        losses.append(engine(tokens_BL.to(engine.device), targets_BL.to(engine.device))[0])
    engine.train()
    return mean_over_ranks(torch.stack(losses).mean())


def train(engine: Any, text: Text, args: argparse.Namespace, batch_size: int) -> tuple[list[float], list[float]]:
    """Loss and milliseconds of every step."""
    generator = rank_generator(args.seed, dist.get_rank())
    losses: list[float] = []
    times_ms: list[float] = []
    first_rank = dist.get_rank() == 0
    on_terminal = is_terminal(sys.stderr)
    with Progress("training", args.steps, is_shown=first_rank and on_terminal) as progress:
        for step in range(1, args.steps + 1):
            start = time.perf_counter()
            step_losses = []
            for _ in range(engine.gradient_accumulation_steps()):
                tokens_BL, targets_BL = draw_batch(text.train_L, batch_size, args.seq_len, generator)
                loss, aux_loss = engine(tokens_BL.to(engine.device), targets_BL.to(engine.device))
                engine.backward(loss + AUX_LOSS_WEIGHT * aux_loss)
                engine.step()
                step_losses.append(loss.detach())
            losses.append(mean_over_ranks(torch.stack(step_losses).mean()))
            times_ms.append((time.perf_counter() - start) * 1e3)
            tokens_per_s = tokens_per_step(engine, args, batch_size) / times_ms[-1] * 1e3
            said = f"loss {losses[-1]:.4f}, {tokens_per_s:.0f} tokens/s"
            progress.reached(step, said)
            if first_rank and not on_terminal and (step % 10 == 0 or step == 1):
                print(f"step {step}/{args.steps}: {said}", flush=True)
    return losses, times_ms


def tokens_per_step(engine: Any, args: argparse.Namespace, batch_size: int) -> int:
    """Bytes that all ranks together train on in one step."""
    return batch_size * args.seq_len * engine.gradient_accumulation_steps() * dist.get_world_size()


def report(result: dict[str, Any], args: argparse.Namespace) -> None:
    """What came out, for people and, with ``--metrics``, for programs."""
    first, last = result["validation_first"], result["validation_last"]
    rows = [
        ("MoE layers", result["moe"]),
        ("text", result["text"]),
        ("loss, first and last step", f"{result['losses'][0]:.4f}  {result['losses'][-1]:.4f}"),
        ("validation, before and after", f"{first:.4f}  {last:.4f}  ({'lower' if last < first else 'NOT lower'})"),
        ("step, median", f"{result['step_ms']:.1f} ms"),
        ("tokens per second, median", f"{result['tokens_per_s']:.0f}"),
        ("checkpoint", result["checkpoint"]),
        *((f"runs: {name}", value) for name, value in result["chosen"].items()),
    ]
    print_table((), rows)
    if args.metrics is not None:
        Path(args.metrics).parent.mkdir(parents=True, exist_ok=True)
        Path(args.metrics).write_text(json.dumps(result, indent=1))


def main() -> None:
    """Train, validate, save, report."""
    args = parse_arguments()
    config = read_config(args)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if get_accelerator().device_name() == "cpu":
        # DeepSpeed compiles this op when its first process group is made on a CPU, which takes a minute or two;
        # it serves a collective of inference and is not used in training.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

    torch.manual_seed(args.seed)
    sizes = Sizes(
        args.width,
        args.layers,
        args.heads,
        args.seq_len,
        args.num_experts,
        args.ep_size,
        args.k,
        args.capacity_factor,
    )
    model = GPTMoE(sizes)
    engine, *_ = ds_fsmoe.initialize(args=args, model=model, model_parameters=list(model.parameters()), config=config)
    # From here on the ranks draw different random numbers: the gates' noise is theirs alone.
    torch.manual_seed(args.seed + 1000 * dist.get_rank())
    batch_size = engine.train_micro_batch_size_per_gpu()

    validation_first = validate(engine, args.loaded_text, args, batch_size)
    losses, times_ms = train(engine, args.loaded_text, args, batch_size)
    validation_last = validate(engine, args.loaded_text, args, batch_size)
    engine.save_checkpoint(args.save_dir)

    if dist.get_rank() == 0:
        state = getattr(engine, "fsmoe", None)
        step_ms = statistics.median(times_ms[1:] or times_ms)  # the first step allocates
        result = {
            "moe": "stock DeepSpeed" if state is None else f"ds_fsmoe, {state.num_layers} layers",
            "text": args.loaded_text.source,
            "losses": losses,
            "validation_first": validation_first,
            "validation_last": validation_last,
            "step_ms": step_ms,
            "step_times_ms": times_ms,
            "tokens_per_s": tokens_per_step(engine, args, batch_size) / step_ms * 1e3,
            "checkpoint": args.save_dir,
            "chosen": {} if state is None else state.chosen(),
            "hints": [] if state is None or state.autotune is None else state.autotune.result.hints,
            "is_tuned": state is not None and state.autotune is not None and state.autotune.result.measured is not None,
        }
        report(result, args)
    dist.barrier()
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
