# SPDX-License-Identifier: Apache-2.0
"""The scale rule of gradients: over which ranks a gradient is summed, and by what it is divided. Nobody else decides.

The gradient wanted is that of ``L = 1/dp * sum over d of L_d``, where L_d is the loss that one of the dp model replicas
computes from its tokens. Write r for a rank, with its loss L_r. Every rank starts its backward with dL_r/dL_r = 1, and
gradients cross ranks where tokens did, so what a rank finds for a parameter of its own is the sum of dL_r/dw over all
ranks r whose tokens it worked on. The rest is counting them. A pipeline stage has mp * dp = ep * esp * edp ranks.

*Without tensor parallelism* (mp = 1; d and r are the same).

- dense and gate: own tokens only. Sum over DP, divide by dp.
- expert shard: the all-to-all over EP brings the tokens of ep ranks, the all-gather over ESP those of all esp ranks of
  each, so a shard works on the tokens of its whole block of ep * esp ranks. The reduce-scatter forward adds the shards'
  partial outputs, y_r = sum over s of y_rs, hence dL_r/dy_rs = dL_r/dy_r for every shard s: its backward is an
  all-gather without any factor, and the shard has its dL_r/dw_s for each r of the block, complete and once. EDP has one
  rank in every block. Sum over EDP, divide by dp: not by edp, which would leave a factor that depends on ep and esp.
- expert (a parameter that every rank of the ESP group holds whole, as a bias of the output): y_r takes it up once, as a
  share of 1/esp from each shard or from one shard alone, so a rank's gradient is a part and the parts add up over ESP.
  Sum over ESP and EDP, divide by dp. With esp = 1 there is one part, and it is the rule of the shard. (DeepSpeed takes
  such copies for different parameters: it never makes them equal, and counts each in the gradient norm. Shards are
  simpler, and a bias of the output can be one: each rank adds another part of its columns.)

*With tensor parallelism* mp ranks compute the same L_d.

- tokens "dropped" (all mp ranks have the same tokens, each sends its 1/mp of the slots, outputs are gathered): the
  gather's backward takes the rank's own slice of dL_d/dy, so every slot comes to an expert once, with its full
  gradient. Over all ranks of the stage an expert has seen each L_d once: as above, and dp is now ranks / mp.
  The gate works on all tokens on each of the mp ranks and has the full gradient there: no sum over MP.
- tokens "distinct" (sequence parallelism, each rank has other tokens of the sequence): for experts the same. The gate,
  and whatever else the layer replicates over MP, sees the rank's own tokens: sum over MP and DP, divide by dp. An
  auxiliary loss computed on every rank counts mp times then: the layer has to divide it by mp.
- tokens "duplicate" (the same on all mp ranks, none dropped): experts see each L_d mp times. Divide by dp * mp.

*What DeepSpeed 0.19.8 does* with a parameter whose ``group_name`` is ``ep_size_{ep*esp}``: sums over EDP, divides by
dp; with a dense one: sums over DP, divides by dp. The same at every ZeRO stage it has for MoE:

- stage 0: ``_reduce_expert_gradients`` (runtime/engine.py:3898) takes dp from ``_get_data_parallel_group()``, the mpu's
  where there is one; ``_reduce_non_expert_gradients`` (3877) likewise.
- stages 1 and 2: ``average_tensor`` (runtime/zero/stage_1_and_2.py:1688) divides the bucket by the size of
  ``dp_process_group``, then (1640-1642, 1690-) sums experts over ``expert_dp_process_group[group_name]``.

So shards and gates need nothing on top, nor do they with dropped duplicates: ``correction`` is 1, ``sum_first`` empty.
What DeepSpeed leaves out is ``expert`` with esp > 1, and ``gate`` with distinct tokens: sum those over ``sum_first``
before its hooks see them (a ``Tensor.register_hook`` of the parameter comes before).

Not covered: sequence parallelism of DeepSpeed's own (Ulysses, ``sp`` ranks per sequence). Stages 1 and 2 divide by
dp there; stage 0 divides experts, but not the dense part, by dp * sp if the mpu makes those groups (engine.py:3901 asks
``_get_data_parallel_group()``, which is then ``None`` and means the world).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from ds_fsmoe.runtime.topology import is_count


class Kind(StrEnum):
    """What a parameter is."""

    DENSE = "dense"
    """Outside the MoE layers, the same on all ranks of a DP group."""
    GATE = "gate"
    """Inside an MoE layer and the same on all ranks: gates, and the dense half of a residual layer."""
    EXPERT = "expert"
    """Of an expert, held whole by every rank of an ESP group."""
    EXPERT_SHARD = "expert shard"
    """Of an expert, and each rank of an ESP group holds another part."""


class Tokens(StrEnum):
    """What tokens the ranks of an MP group give to an MoE layer. Without tensor parallelism it makes no difference."""

    DROPPED = "dropped"
    """All the same; each rank sends a part and gathers the outputs, as stock's layer does."""
    DISTINCT = "distinct"
    """Each rank others: sequence parallelism."""
    DUPLICATE = "duplicate"
    """All the same, and every rank sends all of them."""


@dataclass(frozen=True, slots=True)
class ScaleRule:
    """How gradients of a kind of parameter become the gradient of the mean loss over data-parallel ranks."""

    sum_over: tuple[str, ...]
    """Kinds of groups (as in :class:`~ds_fsmoe.runtime.topology.Layout`): the sum over one after the other."""
    divisor: int
    """What the sum is divided by."""
    sum_first: tuple[str, ...]
    """Of ``sum_over``, what DeepSpeed's own reduction leaves out: to be summed over before it."""
    correction: float
    """What a gradient has to be multiplied by before DeepSpeed's own reduction, which divides by ``dp_size``."""


def scale_rule(
    kind: Kind,
    *,
    dp_size: int,
    edp_size: int,
    ep_size: int = 1,
    esp_size: int = 1,
    mp_size: int = 1,
    tokens: Tokens = Tokens.DROPPED,
) -> ScaleRule:
    """The rule for one kind of parameter; the derivation is the text of this module.

    Args:
        kind: of parameter.
        dp_size, edp_size, ep_size, esp_size, mp_size: ranks of a group of each kind, in one pipeline stage.
        tokens: what the ranks of an MP group give to the layer.

    Raises:
        ValueError: sizes with ``mp * dp != ep * esp * edp``, or a word that is none.
    """
    kind, tokens = Kind(kind), Tokens(tokens)
    sizes = {"mp": mp_size, "dp": dp_size, "ep": ep_size, "esp": esp_size, "edp": edp_size}
    for name, size in sizes.items():
        if not is_count(size):
            raise ValueError(f"{name}_size = {size!r}: must be a whole number of at least 1")
    if mp_size * dp_size != ep_size * esp_size * edp_size:
        raise ValueError(
            f"mp x dp = {mp_size} x {dp_size} and ep x esp x edp = {ep_size} x {esp_size} x {edp_size}: both must be "
            "the ranks of one pipeline stage"
        )
    of_expert = kind in (Kind.EXPERT, Kind.EXPERT_SHARD)
    in_parts = {
        "esp": kind is Kind.EXPERT and esp_size > 1,
        "mp": kind is Kind.GATE and tokens is Tokens.DISTINCT and mp_size > 1,
    }
    sum_first = tuple(name for name, parts in in_parts.items() if parts)
    divisor = dp_size * (mp_size if of_expert and tokens is Tokens.DUPLICATE else 1)
    return ScaleRule((*sum_first, "edp" if of_expert else "dp"), divisor, sum_first, dp_size / divisor)
