# SPDX-License-Identifier: Apache-2.0
"""The orders that the package has, one per file: each permutes tokens into expert slots and results back.

``fsmoe.order = "auto"`` chooses one by the gate's kind of routing.
"""
