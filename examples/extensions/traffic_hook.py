# SPDX-License-Identifier: Apache-2.0
"""A hook of one's own: counts the bytes that this rank sends to experts, in both directions.

{"fsmoe": {"enabled": true, "hooks": ["extensions.traffic_hook.TRAFFIC"]}}
"""

from collections import Counter

import torch

from ds_fsmoe import CallbackArgs, CallbackBase


class Traffic(CallbackBase):
    """Called for each chunk on its lane: with tokens in the forward, with gradients in the backward."""

    def __init__(self) -> None:
        self.sent_bytes: Counter[str] = Counter()

    def before_dispatch_hook(self, args: CallbackArgs) -> torch.Tensor | None:
        """Before the first all-to-all. ``None`` is returned: the tensor travels as it is."""
        self.sent_bytes[args.direction] += args.tensor.nbytes
        return None


TRAFFIC = Traffic()
