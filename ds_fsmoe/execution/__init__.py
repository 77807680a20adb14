# SPDX-License-Identifier: Apache-2.0
"""Runs schedules: lanes, the pipeline of a layer's chunks, the collectives of its tasks."""
