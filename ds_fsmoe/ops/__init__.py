# SPDX-License-Identifier: Apache-2.0
"""Custom operators, each with a reference in plain torch.

Layers get them from :func:`load_ops`. Importing this package builds and loads nothing.
"""

from ds_fsmoe.ops.loading import REFERENCE, Ops, load_ops

__all__ = ["REFERENCE", "Ops", "load_ops"]
