# SPDX-License-Identifier: Apache-2.0
"""Runs a model's blocks by halves of the batch that take turns: while the tokens of one travel, the other computes."""
