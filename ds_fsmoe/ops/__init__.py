# SPDX-License-Identifier: Apache-2.0
"""Custom ops, each with a plain reference in torch. Importing this package builds and loads nothing."""

from ds_fsmoe.ops.loading import Ops, RowOps, load_ops, load_row_ops

__all__ = ["Ops", "RowOps", "load_ops", "load_row_ops"]
