# SPDX-License-Identifier: Apache-2.0
"""What rows are on the wire: as they are, or bytes of 8-bit floating-point numbers with a scale for each row.

A row travels as M bytes and the four of its scale, in one message with the others, so the order of collectives and the
number of rows stay what they are. The scale is the row's largest magnitude over the largest number of the format, so a
row means the same in every chunk. Nothing is added up in the narrow format: sums over ranks take rows as they are.

Letters: R rows, M width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Wire = Literal["model", "fp8"]
"""``"model"``: rows travel in the layer's own type."""
FP8 = torch.float8_e4m3fn
"""Three bits of mantissa: with a scale for each row its range is enough for gradients, too."""
_LARGEST = torch.finfo(FP8).max
_LEAST_SCALE = torch.finfo(torch.float32).tiny
SCALE_BYTES = 4

Send = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Wires:
    """The wires of a layer. The backward's gradients take the wire of their hop the other way."""

    dispatch: Wire = "model"
    """From tokens to experts, and of gradients back from there."""
    combine: Wire = "model"
    """From experts to tokens, and of gradients to the experts."""

    def of(self, direction: Literal["forward", "backward"]) -> tuple[Wire, Wire]:
        """Return the wires of a phase's way in and of its way out."""
        return (self.dispatch, self.combine) if direction == "forward" else (self.combine, self.dispatch)

    def shares(self, width: int, element_bytes: int) -> tuple[float, float]:
        """Return how many bytes a row of this width has on each wire, as shares of what it has in the layer's type."""
        return _share(self.dispatch, width, element_bytes), _share(self.combine, width, element_bytes)


FULL = Wires()
"""Rows travel in the layer's own type, both ways."""


def _share(wire: Wire, width: int, element_bytes: int) -> float:
    return 1.0 if wire == "model" or not width else (width + SCALE_BYTES) / (width * element_bytes)


def carry(wire: Wire, x_RM: torch.Tensor, send: Send) -> torch.Tensor:
    """Send rows over a wire: return what ``send`` makes of them, in their own type."""
    return send(x_RM) if wire == "model" else widened(send(narrowed(x_RM)), x_RM)


def narrowed(x_RM: torch.Tensor) -> torch.Tensor:
    """Return rows as bytes, [R, M + 4] uint8. A row with a number that is not finite has none that is."""
    rows_RM = x_RM.flatten(1).float()
    # Below that a scale has too few bits of its own; a row of zeros has any.
    scale_R1 = torch.linalg.vector_norm(rows_RM, torch.inf, dim=1, keepdim=True).div_(_LARGEST).clamp_(min=_LEAST_SCALE)
    bytes_RB = torch.empty(len(rows_RM), rows_RM.shape[1] + SCALE_BYTES, dtype=torch.uint8, device=x_RM.device)
    # A quotient may be larger than the largest number by its last bit, and is rounded to that.
    bytes_RB[:, :-SCALE_BYTES] = (rows_RM / scale_R1).to(FP8).view(torch.uint8)
    bytes_RB[:, -SCALE_BYTES:] = scale_R1.view(torch.uint8)
    return bytes_RB


def widened(bytes_RB: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return rows from :func:`narrowed` in the type and with the further dimensions of ``like``."""
    # Copied, for a scale to begin where a float may.
    scale_R1 = bytes_RB[:, -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.float32)
    rows_RM = bytes_RB[:, :-SCALE_BYTES].contiguous().view(FP8).float().mul_(scale_R1)
    return rows_RM.to(like.dtype).view(len(bytes_RB), *like.shape[1:])
