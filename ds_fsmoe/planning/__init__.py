# SPDX-License-Identifier: Apache-2.0
"""Decides: what tasks cost, in which order they run, and how long that takes. Needs numpy and scipy, never torch."""
