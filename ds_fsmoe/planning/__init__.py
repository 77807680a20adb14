# SPDX-License-Identifier: Apache-2.0
"""Predicts the cost of tasks, decides their order and simulates schedules. It needs no torch."""
