# SPDX-License-Identifier: Apache-2.0
"""Runs schedules: lanes, the pipeline of a layer's chunks, and the collectives of its tasks.

``ds_fsmoe.layer`` calls the pipeline in each forward, and ``ds_fsmoe.planning`` makes the schedules.
"""
