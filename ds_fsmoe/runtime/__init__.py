# SPDX-License-Identifier: Apache-2.0
"""Does: runs schedules on lanes, and measures them. Needs torch; knows the planner's data, not the layer's parts."""
