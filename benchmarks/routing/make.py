# SPDX-License-Identifier: Apache-2.0
"""Makes the recorded routing in this folder: trains the examples' two kinds of models on real text, packs some steps.

deepspeed --num_accelerators 4 benchmarks/routing/make.py

``gpt.npz`` is of a GPT with DeepSpeed's MoE layers, 8 experts and k = 2, nothing dropped; ``olmoe.npz`` of an OLMoE
with 64 narrow experts and k = 8. The text is the Python language reference that comes with every Python. It takes
minutes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
# Run as a file, Python looks for modules beside it only.
sys.path.insert(0, str(ROOT))

import ds_fsmoe  # noqa: E402
from ds_fsmoe.routes.recorded import read_routing, write_packed  # noqa: E402
from examples.gpt_moe import GPTMoE, Sizes  # noqa: E402
from examples.text_data import draw_batch, load_text, rank_generator  # noqa: E402

LENGTH, BATCH = 64, 4


def olmoe() -> torch.nn.Module:
    """An OLMoE with many narrow experts."""
    from transformers import AutoModelForCausalLM, OlmoeConfig

    sizes = {"hidden_size": 96, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4}
    of_experts = {"num_experts": 64, "num_experts_per_tok": 8, "output_router_logits": True}
    words = {"vocab_size": 256, "pad_token_id": 0, "eos_token_id": 0, "max_position_embeddings": LENGTH}
    return AutoModelForCausalLM.from_config(OlmoeConfig(**sizes, **of_experts, **words))


def gpt() -> torch.nn.Module:
    """A GPT with DeepSpeed's own MoE layers."""
    made = GPTMoE(Sizes(96, 4, 4, LENGTH, num_experts=8, ep_size=dist.get_world_size(), k=2, capacity_factor=1.0))
    for module in made.modules():
        if hasattr(module, "drop_tokens"):
            module.drop_tokens = False
    return made


def loss_of_olmoe(engine: Any, tokens_BL: torch.Tensor, targets_BL: torch.Tensor) -> torch.Tensor:
    """The loss of a batch, with the balance loss that the family has."""
    return engine(input_ids=tokens_BL, labels=tokens_BL).loss


def loss_of_gpt(engine: Any, tokens_BL: torch.Tensor, targets_BL: torch.Tensor) -> torch.Tensor:
    """The loss of a batch, with a hundredth of the balance losses."""
    loss, balance_loss = engine(tokens_BL, targets_BL)
    return loss + 0.01 * balance_loss


def record(name: str, make: Callable[[], Any], loss_of: Callable[..., Any], steps: int, every: int, out: Path) -> None:
    """Train a model, and pack the routing of every so many of its steps."""
    held = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(held)
    torch.manual_seed(1)
    model = make()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 2e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "steps_per_print": steps + 1,
        "fsmoe": {"enabled": True, "metrics": "off", "autotune": False, "routing": {"record": held[0], "every": every}},
    }
    engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    text, generator = load_text(None, LENGTH), rank_generator(1, dist.get_rank())
    for step in range(steps):
        loss = loss_of(engine, *draw_batch(text.train_L, BATCH, LENGTH, generator))
        engine.backward(loss)
        engine.step()
        if dist.get_rank() == 0 and step % every == 0:
            print(f"{name}: step {step}, loss {loss.item():.3f}", flush=True)
    engine.destroy()
    dist.barrier()
    if dist.get_rank() == 0:
        recording = read_routing(held[0])
        write_packed(out / f"{name}.npz", recording)
        for layer in recording.layers:
            load_E = recording.counts(layer.path, recording.steps[-1]).sum(axis=0)
            print(f"{name}: {layer.path}: fullest expert {load_E.max() / load_E.mean():.2f} times the mean", flush=True)
    dist.barrier()


def main() -> None:
    """Make both files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=561, help="optimizer steps (%(default)s)")
    parser.add_argument("--every", type=int, default=80, help="steps from one that is kept to the next (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder of the files (%(default)s)")
    parser.add_argument("--only", nargs="*", choices=("gpt", "olmoe"), default=["gpt", "olmoe"])
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    args = parser.parse_args()
    deepspeed.init_distributed()
    if "gpt" in args.only:
        record("gpt", gpt, loss_of_gpt, args.steps, args.every, args.out)
    if "olmoe" in args.only:
        record("olmoe", olmoe, loss_of_olmoe, args.steps, args.every, args.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
