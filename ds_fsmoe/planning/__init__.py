# SPDX-License-Identifier: Apache-2.0
"""This package decides what tasks cost, their order and how long that takes. It needs no torch."""
