# SPDX-License-Identifier: Apache-2.0
"""Custom ops, each with a plain reference in torch. Importing this package builds and loads nothing."""

from ds_fsmoe.ops.loading import REFERENCE, Ops, load_ops

__all__ = ["REFERENCE", "Ops", "load_ops"]
