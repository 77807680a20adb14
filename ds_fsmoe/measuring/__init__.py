# SPDX-License-Identifier: Apache-2.0
"""Measures the costs of tasks and links on this machine, and keeps the results. It returns data only."""
