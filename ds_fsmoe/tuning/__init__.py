# SPDX-License-Identifier: Apache-2.0
"""Measures an engine's layers, has them planned, applies the plan, and watches whether it holds."""
