# SPDX-License-Identifier: Apache-2.0
"""Ops for CUDA devices. Each file of this folder defines one builder class and calls it ``BUILDER``."""
