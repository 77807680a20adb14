# SPDX-License-Identifier: Apache-2.0
"""Moves experts to where the tokens are, between two steps of training."""
