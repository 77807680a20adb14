# SPDX-License-Identifier: Apache-2.0
"""A model whose gradients are awkward to reduce, ways to train it, and what a run has computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.runtime.zero import stage_1_and_2
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.small_model import BATCH, EXPERTS, LENGTH, NUM_EXPERTS, WIDTH, Case

# Odd and prime as the other sizes, so that slices and partitions end in the middle of everything.
VOCABULARY = 19
STEPS = 5


@dataclass(frozen=True)
class Run:
    """One training run; everything but ``mode`` and ``block`` is the same for stock."""

    stage: int = 0
    dtype: str = "fp32"
    mode: str = "adaptive"
    ep_size: int = 2
    accumulation: int = 1
    loop: str = "plain"
    """How the script trains, see ``LOOPS``."""
    checkpointing: str = ""
    """Of the middle block: "", "reentrant" or "saved"."""
    config: tuple[tuple[str, Any], ...] = ()
    """Of DeepSpeed: dotted path, value."""
    block: tuple[tuple[str, Any], ...] = ()
    """Of ours: dotted path, value."""
    features: frozenset[str] = frozenset()
    """Of the model: "sometimes", "wanders", "skips", "twice", "shared", "sparse", "gpt", "tail", see
    :class:`AwkwardModel`."""
    steps: int = STEPS

    @property
    def name(self) -> str:
        """What is not as usual, for messages."""
        usual = Run()
        fields = ("stage", "dtype", "mode", "ep_size", "accumulation", "loop", "checkpointing", "config", "block")
        parts = [f"{each}={getattr(self, each)}" for each in fields if getattr(self, each) != getattr(usual, each)]
        return ", ".join([f"stage={self.stage}", *parts[self.stage > 0 :], *sorted(self.features)])

    def ds_config(self) -> dict[str, Any]:
        """Without a block of ours."""
        case = Case(stage=self.stage, dtype=self.dtype, accumulation=self.accumulation)
        others = (("optimizer.params.lr", 0.3), ("zero_optimization.reduce_bucket_size", 1009))
        return _with(case.ds_config(zero_force_ds_cpu_optimizer=False), (*others, *self.config))

    def fsmoe_block(self) -> dict[str, Any]:
        """Of ours."""
        of_mode: dict[str, Any] = {"mode": self.mode} if self.mode != "unsaid" else {}
        if self.mode in ("fixed_chunk", "micro_ops"):
            of_mode["chunk_bytes"] = 700
        return _with({"enabled": True, "gradient_partition": of_mode}, self.block)


def _with(config: dict[str, Any], values: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    for path, value in values:
        *blocks, key = path.split(".")
        at = config
        for each in blocks:
            at = at.setdefault(each, {})
        at[key] = list(value) if isinstance(value, tuple) else value
    return config


class MiddleBlock(nn.Module):
    """What may be run under activation checkpointing: dense layers and an MoE layer."""

    def __init__(self, moe: MoE) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.moe = moe

    def forward(self, h_BLM: torch.Tensor, shared: nn.Module | None) -> tuple[torch.Tensor, torch.Tensor]:
        y_BLM = torch.tanh(self.inner(self.norm(h_BLM)))
        if shared is not None:
            y_BLM = y_BLM + shared(y_BLM)
        y_BLM, aux, _ = self.moe(y_BLM)
        return h_BLM + y_BLM, aux


class AwkwardModel(nn.Module):
    """Three MoE layers, the last with all experts on every rank, so that expert gradients travel too.

    The embedding is the head as well; ``frozen`` has no gradient, ``unused`` never gets one. By request: ``sometimes``
    gets one on some ranks in some steps; "wanders" uses ``wanderer`` in front or behind, in turns; "skips" leaves the
    last MoE layer out on one rank; "shared" uses a layer twice, once in the block that may be checkpointed; "twice"
    uses an MoE layer twice; "tail" has a large last layer that rank 0 alone reads; "sparse" and "sparse function" make
    the embedding's gradient sparse. The same parameters on every rank and for every ep_size, by global expert id.
    """

    def __init__(self, run: Run, rank: int) -> None:
        super().__init__()
        self.run, self.rank = run, rank
        self.embed = nn.Embedding(VOCABULARY, WIDTH, sparse="sparse" in run.features)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, 3)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.wanderer = nn.Linear(WIDTH, WIDTH)
        moes = [self._moe(run, ep_size, k) for ep_size, k in ((run.ep_size, 1), (run.ep_size, 2), (1, 1))]
        self.before = moes[0]
        self.block = MiddleBlock(moes[1])
        self.behind = moes[2]
        self.last = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if "tail" in run.features:
            self.tail = nn.Linear(WIDTH, 2048)
        if not {"sparse", "sparse function"} & run.features:
            self.head.weight = self.embed.weight
        self._initialise(rank)

    @staticmethod
    def _moe(run: Run, ep_size: int, k: int) -> MoE:
        expert = EXPERTS["gpt" if "gpt" in run.features else "smooth"]()
        return MoE(WIDTH, expert, num_experts=NUM_EXPERTS, ep_size=ep_size, k=k, capacity_factor=1.25, min_capacity=2)

    def _initialise(self, rank: int) -> None:
        layers = {name: module for name, module in self.named_modules() if isinstance(module, MoE)}
        for name, parameter in sorted(self.named_parameters()):
            parts = name.split(".")
            if "deepspeed_experts" in parts:
                layer = layers[name.partition(".deepspeed_moe")[0]]
                at = parts.index("deepspeed_experts") + 1
                parts[at] = str(rank % layer.ep_size * layer.num_local_experts + int(parts[at]))
            generator = torch.Generator().manual_seed(sum(i * ord(c) for i, c in enumerate(".".join(parts), 1)))
            with torch.no_grad():
                spread = 0.6 / parameter.shape[-1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * spread)

    def forward(
        self, tokens_BL: torch.Tensor, target_BL: torch.Tensor, use_sometimes: float | None = None, turn: int = 0
    ) -> torch.Tensor:
        """The loss. ``use_sometimes``: how much ``sometimes`` counts, ``None``: not touched; ``turn``: even or odd."""
        run = self.run
        if "sparse function" in run.features:
            x_BLM = F.embedding(tokens_BL, self.embed.weight, sparse=True)
        else:
            x_BLM = self.embed(tokens_BL)
        h_BLM = torch.tanh(self.frozen(self.first(x_BLM)))
        if "wanders" in run.features and turn % 2:
            h_BLM = h_BLM + self.wanderer(h_BLM)
        if "shared" in run.features:
            h_BLM = h_BLM + self.shared(h_BLM)
        y_BLM, aux_first, _ = self.before(h_BLM)
        h_BLM = h_BLM + y_BLM
        if use_sometimes is not None:
            h_BLM = h_BLM + use_sometimes * self.sometimes(h_BLM)
        shared = self.shared if "shared" in run.features else None
        if run.checkpointing:
            h_BLM, aux_second = checkpoint(self.block, h_BLM, shared, use_reentrant=run.checkpointing == "reentrant")
        else:
            h_BLM, aux_second = self.block(h_BLM, shared)
        if "skips" in run.features and turn % 2:
            y_BLM, aux_third = torch.zeros_like(h_BLM), torch.zeros(())
        else:
            y_BLM, aux_third, _ = self.behind(h_BLM)
        if "twice" in run.features:
            y_BLM, aux_again, _ = self.behind(torch.tanh(h_BLM + y_BLM))
            aux_third = aux_third + aux_again
        if "wanders" in run.features and not turn % 2:
            y_BLM = y_BLM + self.wanderer(h_BLM)
        if "tail" in run.features and self.rank == 0:
            y_BLM = y_BLM + self.tail(y_BLM).mean(-1, keepdim=True)
        logits_BLV = self.head(self.last(h_BLM + y_BLM))
        loss = F.cross_entropy(logits_BLV.float().flatten(0, 1), target_BL.flatten())
        return loss + 0.01 * (aux_first + aux_second + aux_third).float()


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of one micro step on one rank: [B, L] each."""
    generator = torch.Generator().manual_seed(1009 * step + rank)
    tokens_BL, target_BL = (torch.randint(VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(2))
    return tokens_BL, target_BL


@dataclass
class Seen:
    """What a run has computed, and what its reducer says of itself."""

    numbers: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    rounds: int = 0
    sent_again: int = 0
    num_gradients: int = 0
    """Those of one round."""
    hidden: int = 0
    """Elements that the last plan sends in windows."""
    numel: int = 0
    """Elements of all buffers."""
    mode: str = ""
    ways: list[str] = field(default_factory=list)
    """How each buffer is added up at the end."""

    def add(self, name: str, value: torch.Tensor) -> None:
        self.numbers.setdefault(name, []).append(value.detach().clone())


class Script:
    """A training script: the engine, the batches, and what it writes down."""

    def __init__(self, run: Run, rank: int, engine: Any, model: AwkwardModel, is_stock: bool, seen: Seen) -> None:
        self.run, self.rank, self.engine, self.model, self.seen = run, rank, engine, model, seen
        self._is_stock = is_stock
        self._micro_step = 0
        self.num_steps = 0

    def forward(self, engine: Callable[..., torch.Tensor] | None = None) -> torch.Tensor:
        """The loss of the next batch."""
        step, self._micro_step = self._micro_step, self._micro_step + 1
        torch.manual_seed(100 * step + self.rank)  # the same draws, if they are drawn in the same order
        tokens_BL, target_BL = batch(step, self.rank)
        # Both ranks in front, both behind, one of each.
        turn = (step >> 1) + (self.rank if step >= 4 else 0)
        loss = (engine or self.engine)(tokens_BL, target_BL, self._use_of_sometimes(step), turn)
        self.seen.add("losses", loss)
        return loss

    def _use_of_sometimes(self, step: int) -> float | None:
        if "sometimes" not in self.run.features:
            return None
        if step % 3 == 2 or (step + self.rank) % 2:
            # Stock cannot do without at stages 1 and 2: where another rank has a gradient, it needs a zero.
            return 0.0 if self._is_stock and self.run.stage else None
        return 0.5

    def step(self) -> None:
        self.engine.step()
        self.num_steps += 1
        norm = self.engine.get_global_grad_norm()
        self.seen.add("norms", torch.tensor(float(norm or 0.0)))


def _plain(script: Script) -> None:
    for _ in range(script.run.accumulation):
        script.engine.backward(script.forward())
        script.step()


def _torch_style(script: Script) -> None:
    for _ in range(script.run.accumulation):
        script.forward().backward()
        script.step()


def _no_sync(script: Script) -> None:
    with script.engine.no_sync():
        script.engine.backward(script.forward())
    script.engine.backward(script.forward())
    script.step()


def _coalesced(script: Script) -> None:
    with script.engine.coalesce_grad_reduction():
        for _ in range(2):
            script.engine.backward(script.forward())
    script.step()


def _unmanaged(script: Script) -> None:
    for _ in range(2):
        script.engine.backward(script.forward())
    script.step()


def _by_hand(script: Script) -> None:
    for is_last in (False, False, True):
        script.engine.set_gradient_accumulation_boundary(is_last)
        script.engine.backward(script.forward())
    script.step()


def _forwards_first(script: Script) -> None:
    losses = [script.forward() for _ in range(2)]
    script.engine.backward(losses[0] + losses[1])
    script.step()


def _retained(script: Script) -> None:
    loss = script.forward()
    script.engine.backward(loss, retain_graph=True)
    script.step()
    script.engine.backward(0.5 * loss)
    script.step()


def _evaluating(script: Script) -> None:
    loss = script.forward()
    script.engine.eval()
    with torch.no_grad():
        script.forward()
    script.engine.train()
    script.engine.backward(loss)
    script.step()


def _peeking(script: Script) -> None:
    """Gradients that are no training, before the backward and behind it; past the engine, which would refuse them."""
    weights = script.model.first.weight, script.model.block.inner.weight
    loss = script.forward()
    script.seen.add("peeks", torch.autograd.grad(script.forward(script.model), weights)[0])
    script.engine.backward(loss)
    script.seen.add("peeks", torch.autograd.grad(script.forward(script.model), weights)[1])
    script.step()


def _by_hand_reduced(script: Script) -> None:
    """As scripts do that call the reduction themselves."""
    script.engine.enable_backward_allreduce = False
    script.engine.backward(script.forward())
    script.engine.allreduce_gradients()
    script.step()


def _without_a_batch(script: Script) -> None:
    """In every third step the last rank has none; stock has no word for that."""
    if script.num_steps % 3 == 2 and script.rank == script.engine.world_size - 1:
        loss = script.engine.fsmoe_dummy_forward()
    else:
        loss = script.forward()
    script.engine.backward(loss)
    script.step()


LOOPS: dict[str, Callable[[Script], None]] = {
    "plain": _plain,
    "torch style": _torch_style,
    "no_sync": _no_sync,
    "coalesced": _coalesced,
    "unmanaged": _unmanaged,
    "by hand": _by_hand,
    "forwards first": _forwards_first,
    "retained": _retained,
    "evaluating": _evaluating,
    "peeking": _peeking,
    "reduced by hand": _by_hand_reduced,
    "without a batch": _without_a_batch,
}


def let_deepspeed_read_nothing(patch: pytest.MonkeyPatch) -> None:
    """DeepSpeed 0.19.8 looks at every parameter in the first hook of a backward, and so waits for all updated ones."""
    count = stage_1_and_2.count_used_parameters_in_backward

    def counted(parameters: Any) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            return count(parameters)

    patch.setattr(stage_1_and_2, "count_used_parameters_in_backward", counted)


@contextmanager
def training(run: Run, rank: int, stock: bool = False) -> Iterator[Script]:
    """An engine with a script that has not begun; ``script.seen`` is complete behind the block."""
    import deepspeed

    import ds_fsmoe

    torch.manual_seed(0)
    model = AwkwardModel(run, rank)
    initialize = deepspeed.initialize if stock else ds_fsmoe.initialize
    config = run.ds_config() | ({} if stock else {"fsmoe": run.fsmoe_block()})
    engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=config)
    seen = Seen()
    yield Script(run, rank, engine, model, stock, seen)
    for name, parameter in model.named_parameters():
        if "experts" not in name or not any(path == "esp_size" for path, _ in run.block):
            seen.add(f"parameter {name}", parameter)
    if not stock:
        seen.mode = engine.fsmoe.gradients
        reduction = engine.fsmoe.reduction
        if reduction is not None:
            reducer = reduction.reducer
            seen.rounds, seen.sent_again = reducer.rounds, reducer.sent_again
            seen.num_gradients = len(list(reducer.parameters))
            seen.hidden = reducer.plan.hidden() if reducer.plan else 0
            seen.ways = [str(each.algorithm) for each in reducer.flats]
            seen.numel = sum(each.numel for each in reducer.flats)
    engine.destroy()


def train(run: Run, rank: int, stock: bool = False) -> Seen:
    """What ``run.steps`` steps compute."""
    with training(run, rank, stock) as script:
        for _ in range(run.steps):
            LOOPS[run.loop](script)
    return script.seen


def compare(ours: Seen, theirs: Seen, tolerance: float = 0.0) -> list[str]:
    """What differs by more than ``tolerance`` of the largest number of its kind; 0 is bit for bit."""
    assert ours.numbers.keys() == theirs.numbers.keys(), (ours.numbers.keys(), theirs.numbers.keys())
    found = []
    for name, numbers in ours.numbers.items():
        a, b = (torch.stack([each.float() for each in run]) for run in (numbers, theirs.numbers[name]))
        if name != "norms" and not b.isfinite().all():  # that of a step that overflows is not
            found.append(f"{name} is not finite")
        if tolerance == 0.0:
            is_same = torch.equal(a, b)
        else:
            is_same = a.shape == b.shape and (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-3)
        if not is_same:
            found.append(f"{name}: {(a - b).abs().max().item():.2g} of {b.abs().max().item():.2g}")
    return found
