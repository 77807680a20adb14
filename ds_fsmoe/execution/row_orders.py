# SPDX-License-Identifier: Apache-2.0
"""The orders in which rows lie on their way, and how to get from one to another.

Rows come in blocks: those that one source sends to one expert in one segment of its tokens. Only the sizes of blocks
depend on the tokens; the order of blocks at each place follows from the plan, so it is worked out once.

Letters: E experts of all ranks, e experts on this rank, N ranks that rows come from, T segments, X blocks.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal

import numpy as np
import torch

from ds_fsmoe.execution.device_tables import TABLES
from ds_fsmoe.execution.token_cuts import TokenCuts

Order = Literal["by_source", "by_expert"]
"""How the rows of a chunk lie at the experts: as they arrive, source by source, and for each expert by expert; or
expert by expert, and for each segment by segment, so that any run of segments is one run of rows of an expert."""


@lru_cache(maxsize=256)
def block_order(shape: tuple[int, int, int], cuts: TokenCuts, degree: int, order: Order) -> np.ndarray:
    """Return the blocks in the order in which they lie, chunk by chunk, as indices into an array [N, e, T].

    Args:
        shape: (N, e, T).
        cuts: the cuts of the tokens.
        degree: the number of chunks.
        order: the order within a chunk.
    """
    source, expert, segment = (each.reshape(-1) for each in np.indices(shape))
    chunk = cuts.chunk_of_segment(degree)[segment]
    # The last key counts first.
    keys = {"by_source": (segment, expert, source, chunk), "by_expert": (source, segment, expert, chunk)}
    return np.lexsort(keys[order])


@lru_cache(maxsize=256)
def _table(
    shape: tuple[int, int, int], cuts: TokenCuts, before: tuple[int, Order], after: tuple[int, Order], of_chunk: bool
) -> np.ndarray:
    """Return [4, X]: the blocks in the order before, those in the order after, for each of the latter its position in
    the former, and the position of the first block of its chunk."""
    blocks_before, blocks_after = (block_order(shape, cuts, *each) for each in (before, after))
    position = np.empty_like(blocks_before)
    position[blocks_before] = np.arange(len(blocks_before))
    chunk = cuts.chunk_of_segment(after[0])[blocks_after % shape[2]]
    first = np.searchsorted(chunk, chunk) if of_chunk else np.zeros_like(chunk)
    return np.stack([blocks_before, blocks_after, position[blocks_after], first])


def moves(
    sizes_NeT: torch.Tensor,
    cuts: TokenCuts,
    before: tuple[int, Order],
    after: tuple[int, Order],
    num_rows: int,
    *,
    of_chunk: bool = False,
) -> torch.Tensor:
    """Return for each row of the order after where it lies in the order before, [rows] int64.

    Nothing here waits for the device.

    Args:
        sizes_NeT: [N, e, T] int64, the rows of each block.
        cuts: the cuts of the tokens.
        before, after: (number of chunks, order within them).
        num_rows: their number.
        of_chunk: whether places count from the first row of the chunk; then both orders have the same chunks.
    """
    shape = tuple(sizes_NeT.shape)
    made_of = shape, cuts, before, after, of_chunk

    def table(device: torch.device) -> torch.Tensor:
        return torch.from_numpy(_table(*made_of)).to(device)

    blocks_before, blocks_after, position, first = TABLES.get(made_of, sizes_NeT, table).unbind()
    sizes_X = sizes_NeT.reshape(-1)
    ends_before, ends_after = sizes_X[blocks_before].cumsum(0), sizes_X[blocks_after].cumsum(0)
    sizes_after = sizes_X[blocks_after]
    starts_after = ends_after - sizes_after
    offsets = (ends_before[position] - sizes_after) - starts_after
    if of_chunk:
        offsets = offsets - starts_after[first]
    places = torch.repeat_interleave(offsets, sizes_after, output_size=num_rows)
    return places.add_(torch.arange(num_rows, device=places.device))
