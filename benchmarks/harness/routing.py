# SPDX-License-Identifier: Apache-2.0
"""``--routing FILE|NAME`` of every benchmark: layers route by what was recorded, or is made up, not by themselves.

A NAME is one of ``ds_fsmoe.routes.made``; a FILE is recorded routing, a folder or a packed file, or the name of one in
``benchmarks/routing``. All systems that are compared get the same choices for the same tokens. Ours take them as given;
in stock's gates and AutoEP's router a large number is added to the logits of the chosen experts, so that they are its
own choice, and the weights come from the live logits in all of them. Which of a token's choices comes first may differ,
and with it who is dropped where an expert is full.

Recorded choices are taken as they are where E and k are those of the file, repeated or cut to the number of tokens.
With another E or k each token draws k experts by the load that the file has in this layer and step, its experts sorted
by load and stretched over E.

Letters: S tokens, E experts, k choices of a token.
"""

from __future__ import annotations

import argparse
import functools
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import allocator
from ds_fsmoe.routes import made
from ds_fsmoe.routes.recorded import Recording, RoutingFileError, read_routing

FOLDER = Path(__file__).resolve().parents[1] / "routing"
_FORCE = 1e4
"""What is added to the logits of chosen experts."""


class Routing:
    """Says which experts tokens go to.

    Args:
        text: FILE or NAME.

    Raises:
        ValueError: it is neither; names the choices.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.recording: Recording | None = None
        if text not in made.NAMES:
            beside = FOLDER / f"{text}.npz"
            files = ", ".join(sorted(each.stem for each in FOLDER.glob("*.npz")))
            try:
                self.recording = read_routing(beside if beside.is_file() else text)
            except RoutingFileError as error:
                names = ", ".join(made.NAMES)
                raise ValueError(
                    f"{text!r}: the choices are {names}, the recorded {files}, or a path: {error}"
                ) from error

    @property
    def name(self) -> str:
        """A word for folders and cases."""
        return self.text if self.recording is None else Path(self.text).stem

    def choices(
        self,
        num_tokens: int,
        num_experts: int,
        k: int,
        *,
        ep_size: int = 1,
        step: int = 0,
        rank: int = 0,
        layer: int = 0,
    ) -> np.ndarray:
        """Return [S, k] int64: different experts for each token."""
        if self.recording is None:
            sizes = {"num_tokens": num_tokens, "num_experts": num_experts, "k": k, "ep_size": ep_size}
            return made.choices(self.text, **sizes, step=step, rank=rank, layer=layer)
        ranks, steps = tuple(self.recording.ranks), self.recording.steps
        of_rank, of_step = ranks[rank % len(ranks)], steps[step % len(steps)]
        layers = self.recording.ranks[of_rank].layers
        number = layer % len(layers)
        micro_batches = self.recording.micro_batches(of_step, of_rank)
        found = [self.recording.choices(of_rank, of_step, each, number).indices_SK for each in range(micro_batches)]
        index_SK = np.concatenate(found).astype(np.int64)
        if (layers[number].num_experts, index_SK.shape[1]) == (num_experts, k) and len(index_SK):
            return index_SK[np.arange(num_tokens) % len(index_SK)]
        load_E = self.recording.counts(layers[number].path, of_step).sum(axis=0)
        return drawn(load_E, num_tokens, num_experts, k, [layer, step, rank])


def drawn(load_E: np.ndarray, num_tokens: int, num_experts: int, k: int, seed: Sequence[int]) -> np.ndarray:
    """Return [S, k]: drawn by a load whose experts are sorted by it, and stretched over another number of them."""
    sorted_E = np.sort(load_E)[::-1].astype(float)
    places = np.linspace(0, len(sorted_E) - 1, num_experts)
    popularity_E = np.interp(places, np.arange(len(sorted_E)), sorted_E) + 1e-9
    order = np.random.default_rng([seed[0], 0]).permutation(num_experts)
    noise_SE = np.random.default_rng([*seed, 1]).gumbel(size=(num_tokens, num_experts))
    scores_SE = noise_SE
    scores_SE[:, order] += np.log(popularity_E)
    return np.argsort(-scores_SE, axis=1, kind="stable")[:, :k].astype(np.int64)


def add_routing(parser: argparse.ArgumentParser) -> None:
    """Add the option."""
    files = ", ".join(sorted(each.stem for each in FOLDER.glob("*.npz")))
    about = (
        f"routing of the layers: recorded ({files}, or a path), or made up: {', '.join(made.NAMES)} (the gates' own)"
    )
    parser.add_argument("--routing", metavar="FILE|NAME", help=about)


def parsed(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None, *, no_routers: str = ""
) -> argparse.Namespace:
    """Return a benchmark's options, and do what they ask for about routing and memory.

    Rows of forced routing go to a folder of their own in that of the results, so that no file mixes routings.

    Args:
        parser: the parser, with all other options.
        arguments: those of the command line unless given.
        no_routers: why routing changes nothing in this benchmark; printed where it is asked for.
    """
    add_routing(parser)
    allocator.add_allocator(parser)
    args = parser.parse_args(arguments)
    if args.allocator == allocator.KEPT:
        try:
            allocator.keep_memory()
        except ValueError as error:
            parser.error(str(error))
    if args.routing is None:
        return args
    try:
        routing = Routing(args.routing)
    except ValueError as error:
        parser.error(str(error))
    if no_routers:
        print(f"--routing {args.routing} changes nothing here: {no_routers}", flush=True)
        return args
    if hasattr(args, "results"):
        args.results = args.results / f"routing_{routing.name}"
        args.results.mkdir(parents=True, exist_ok=True)
    force(routing)
    return args


class Forced:
    """Knows what each router of this process is to choose next."""

    def __init__(self, routing: Routing) -> None:
        self.routing = routing
        self.step: int | None = None
        """The step of the benchmark, the same for all that are compared; ``None``: each router counts its calls."""
        self.tokens_of_node: int | None = None
        """The tokens that the ranks of a node have together, where these work on the same ones or on parts."""
        self._calls: dict[int, int] = {}
        self._layers: dict[int, int] = {}
        self._held: dict[tuple[int, ...], Any] = {}

    def choices(self, router: Any, weight: Any, num_tokens: int, k: int) -> Any:
        """Return [S, k], what a router is to choose in its next call.

        Args:
            router: the module.
            weight: its matrix [E, M]; with what it begins, it says which layer this is, alike in all systems.
            num_tokens: S.
            k: its choices.
        """
        import torch
        import torch.distributed as dist

        number = self._calls.get(id(router), 0)
        self._calls[id(router)] = number + 1
        number = number if self.step is None else self.step
        if id(router) not in self._layers:
            first = weight.detach().float().reshape(-1)[:8].cpu().numpy()
            self._layers[id(router)] = zlib.crc32(np.round(first, 3).tobytes()) % 2**16
        world = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        num_experts = weight.shape[0]
        ep_size = next(each for each in range(world, 0, -1) if num_experts % each == 0)
        total, part = num_tokens, 0
        if self.tokens_of_node is not None and self.tokens_of_node % max(1, num_tokens) == 0:
            total, parts = self.tokens_of_node, self.tokens_of_node // max(1, num_tokens)
            from benchmarks.models.layers import ranks_per_node

            rank, inside = divmod(rank, ranks_per_node())
            part = inside if parts > 1 else 0
        key = (self._layers[id(router)], number, rank, total, num_experts, k)
        if key not in self._held:
            if len(self._held) > 256:
                self._held.clear()
            sizes = {"ep_size": ep_size, "step": number, "rank": rank, "layer": key[0]}
            self._held[key] = torch.from_numpy(self.routing.choices(total, num_experts, k, **sizes))
        index_SK = self._held[key][part * num_tokens : (part + 1) * num_tokens]
        return index_SK.to(weight.device)


forced: Forced | None = None
"""What is forced in this process."""


def at_step(step: int) -> None:
    """Take note of the step of a benchmark: all that are compared have the same routing in it."""
    if forced is not None:
        forced.step = step


def force(routing: Routing) -> None:
    """Force a routing on all routers that run in this process from now on, stock's, AutoEP's and ours."""
    global forced
    forced = Forced(routing)
    _force_ours(forced)
    _force_stock(forced)
    _force_auto_ep(forced)


def _force_ours(to: Forced) -> None:
    from ds_fsmoe.components.gates.topk import LinearGate
    from ds_fsmoe.components.routing import ReplayedRouting
    from ds_fsmoe.components.token_choice import TokenChoiceGate
    from ds_fsmoe.layer.experts_layer import ExpertsState
    from ds_fsmoe.layer.stock_layer import FSMoEGate

    def given_to(method: Any, k_of: Any) -> Any:
        @functools.wraps(method)
        def decides(self: Any, x_SM: Any, *args: Any, **kwargs: Any) -> Any:
            weight = getattr(self.wg, "weight", self.wg)
            if self.given is None and self.training:
                self.given = ReplayedRouting(to.choices(self, weight, len(x_SM), k_of(self)).t())
                try:
                    return method(self, x_SM, *args, **kwargs)
                finally:
                    self.given = None
            return method(self, x_SM, *args, **kwargs)

        return decides

    FSMoEGate.decide = given_to(FSMoEGate.decide, lambda gate: gate.k)
    LinearGate.forward = given_to(LinearGate.forward, lambda gate: gate.settings.k)
    TokenChoiceGate.forward = given_to(TokenChoiceGate.forward, lambda gate: gate.settings.k)
    begin = ExpertsState.next_replayed

    def next_replayed(state: ExpertsState) -> ReplayedRouting | None:
        found = begin(state)
        shape, k = state.last_shape, state.gate.k
        if found is not None or shape is None or k is None:
            return found  # in the first forward its sizes are not known yet
        weights = (each for each in state.watch.block.parameters() if each.dim() == 2)
        weight = next(each for each in weights if each.shape[0] == state.total_experts)
        return ReplayedRouting(to.choices(state, weight, shape[0], k).t())

    ExpertsState.next_replayed = next_replayed


def _with_choice(logits: Any, index_SK: Any) -> Any:
    import torch

    return logits + torch.zeros_like(logits).scatter_(1, index_SK, _FORCE)


def _force_stock(to: Forced) -> None:
    from deepspeed.moe import sharded_moe

    waiting: list[tuple[Any, int]] = []
    whole = sharded_moe.TopKGate.forward

    @functools.wraps(whole)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        waiting.append((self, self.k))
        try:
            return whole(self, *args, **kwargs)
        finally:
            waiting.pop()

    sharded_moe.TopKGate.forward = forward

    def of(function: Any) -> Any:
        @functools.wraps(function)
        def gating(logits: Any, *args: Any, **kwargs: Any) -> Any:
            if waiting and waiting[-1][0].training:
                gate, k = waiting[-1]
                logits = _with_choice(logits, to.choices(gate, gate.wg.weight, len(logits), k))
            return function(logits, *args, **kwargs)

        return gating

    for name in ("top1gating", "top2gating", "topkgating"):
        setattr(sharded_moe, name, of(getattr(sharded_moe, name)))


def _force_auto_ep(to: Forced) -> None:
    from deepspeed.moe.ep_router import TokenChoiceTopKRouter

    whole = TokenChoiceTopKRouter.forward

    @functools.wraps(whole)
    def forward(self: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return whole(self, x, *args, **kwargs)
        index_SK = to.choices(self, self.gate.weight, len(x), self.top_k)
        handle = self.gate.register_forward_hook(lambda _, inputs, logits: _with_choice(logits, index_SK))
        try:
            return whole(self, x, *args, **kwargs)
        finally:
            handle.remove()

    TokenChoiceTopKRouter.forward = forward
