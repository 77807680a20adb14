# SPDX-License-Identifier: Apache-2.0
"""Describes models for the planner: their architecture, the work of their layers, and their memory."""
