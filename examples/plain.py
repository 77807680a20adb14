# SPDX-License-Identifier: Apache-2.0
"""A script that knows DeepSpeed and nothing of ds_fsmoe. The first line trains with DeepSpeed's layers, the second with
ours, as the "fsmoe" block of the config says; the script is the same.

deepspeed --num_accelerators 2 examples/plain.py --deepspeed_config ds_configs/cpu.json
deepspeed --num_accelerators 2 --module ds_fsmoe.run examples/plain.py --deepspeed_config ds_configs/cpu.json
"""

import argparse

import deepspeed
import torch
from deepspeed.moe.layer import MoE


class Model(torch.nn.Module):
    def __init__(self, ep_size: int) -> None:
        super().__init__()
        expert = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
        self.moe = MoE(32, expert, num_experts=4, ep_size=ep_size, k=2, capacity_factor=1.5)

    def forward(self, x_SM: torch.Tensor) -> torch.Tensor:
        y_SM, aux_loss, _ = self.moe(x_SM)
        return (x_SM + y_SM - torch.sin(3 * x_SM)).square().mean() + 0.01 * aux_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--local_rank", type=int)
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # a minute of compiling on a CPU, for inference only
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Model(ep_size=torch.distributed.get_world_size())
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=list(model.parameters()))
    torch.manual_seed(torch.distributed.get_rank())
    for step in range(args.steps):
        loss = engine(torch.randn(128, 32, device=engine.device))
        engine.backward(loss)
        engine.step()
        if torch.distributed.get_rank() == 0 and step in (0, args.steps - 1):
            print(f"step {step + 1}: loss {loss.item():.4f}, by {type(model.moe.deepspeed_moe).__name__}", flush=True)
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
