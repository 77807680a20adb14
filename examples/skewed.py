# SPDX-License-Identifier: Apache-2.0
"""Experts move to where the tokens are: a small OLMoE trains under skewed routing, and says what moved and why.

deepspeed --num_accelerators 2 examples/skewed.py

Half of the tokens are sent to experts of one rank (``--routing`` has other ways), so that the other ranks wait for it.
``"placement": "balanced"`` in the config is all that is said about where experts are; ``--policy off`` leaves them
where they were, with the same losses.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
import torch.distributed as dist
from hf_finetune import LENGTH, small_olmoe
from text_data import draw_batch, load_text, rank_generator

import ds_fsmoe
from ds_fsmoe.placement.watch import Event
from ds_fsmoe.routes.made import NAMES, choices

SAMPLES, EXPERTS, TOP_K, LAYERS = 4, 16, 4, 2


def skewed(routing: str, step: int) -> np.ndarray:
    """The experts of each token of this rank: [tokens, layers, k]."""
    sizes = {"num_tokens": SAMPLES * LENGTH, "num_experts": EXPERTS, "k": TOP_K, "ep_size": dist.get_world_size()}
    of_layers = [choices(routing, **sizes, step=step, rank=dist.get_rank(), layer=each) for each in range(LAYERS)]
    return np.stack(of_layers, axis=1)


def tell(events: Sequence[Event]) -> None:
    """Print what was decided about each layer, once."""
    for each in events if dist.get_rank() == 0 else ():
        print(f"after step {each.step}: {each.why}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--routing", default="hot_rank", choices=NAMES, help="how tokens choose (%(default)s)")
    parser.add_argument("--policy", default="balanced", help="who decides where experts are (%(default)s)")
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps (%(default)s)")
    parser.add_argument("--local_rank", type=int, default=0, help="given by the launcher")
    args = parser.parse_args()

    moves = args.policy != "off"
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 2},
        "steps_per_print": args.steps + 1,
        "fsmoe": {
            "enabled": True,
            "ep_size": "auto",
            # Experts stay until plans are settled, which takes more steps than this.
            "autotune": False,
            "placement": {"policy": args.policy} | ({"every": 3, "moves_per_step": 4} if moves else {}),
        },
    }
    model = small_olmoe(seed=1)
    engine, *_ = ds_fsmoe.initialize(model=model, model_parameters=model.parameters(), config=config)
    told: list[Event] = []
    if engine.fsmoe.placement_watch is not None:
        engine.fsmoe.placement_watch.on_event += [tell, told.extend]

    text, generator = load_text(None, LENGTH), rank_generator(1, dist.get_rank())
    for step in range(1, args.steps + 1):
        inputs, _ = draw_batch(text.train_L, SAMPLES, LENGTH, generator)
        inputs = inputs.to(engine.device)
        engine.fsmoe.replay(skewed(args.routing, step))
        loss = engine(input_ids=inputs, labels=inputs).loss
        engine.backward(loss)
        engine.step()
        if step % 8 == 0 or step == 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step:3}: loss {mean.item() / dist.get_world_size():.4f}", flush=True)
    if told and dist.get_rank() == 0:
        first, last = (max(each.balance for each in told if each.step == told[at].step) for at in (0, -1))
        print(f"the fullest rank had {first:.2f} times the mean at first, and {last:.2f} at last", flush=True)
    engine.destroy()


if __name__ == "__main__":
    main()
