# SPDX-License-Identifier: Apache-2.0
"""Reads and writes the files of runs and checkpoints: written whole, read with distrust. Needs no torch."""
