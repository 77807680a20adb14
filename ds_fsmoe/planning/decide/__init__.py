# SPDX-License-Identifier: Apache-2.0
"""Chooses degrees, orders, all-to-alls and gradient slices by the costs of tasks."""
