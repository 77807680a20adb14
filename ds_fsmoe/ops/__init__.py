# SPDX-License-Identifier: Apache-2.0
"""Custom ops, each with a plain reference in torch. Importing this package builds and loads nothing."""

from ds_fsmoe.ops.loading import RowOps, load_row_ops

__all__ = ["RowOps", "load_row_ops"]
