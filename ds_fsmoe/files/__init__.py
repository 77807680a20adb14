# SPDX-License-Identifier: Apache-2.0
"""The files that runs and checkpoints leave: written whole, read with distrust. Needs no torch."""
