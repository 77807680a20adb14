# SPDX-License-Identifier: Apache-2.0
"""Schedules on one GPU, links emulated, and the checks for a first GPU."""
