# SPDX-License-Identifier: Apache-2.0
"""Models as the planner knows them: their architecture, the work of their layers, the memory that they need."""
