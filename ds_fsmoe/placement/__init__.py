# SPDX-License-Identifier: Apache-2.0
"""Moves experts to the ranks of their tokens, between two steps of training."""
