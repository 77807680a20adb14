# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that survive: DeepSpeed's files, published whole or not at all, described, checked, and gone on from."""
