# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the files of runs and checkpoints: written completely or not at all, and read as untrusted.

It needs no torch. ``ds_fsmoe/offline`` reads with it what training writes.
"""
