# SPDX-License-Identifier: Apache-2.0
"""Saves, checks and loads DeepSpeed's checkpoints on all ranks together."""
