# SPDX-License-Identifier: Apache-2.0
"""Checks models and configs before training and at the first forwards, and logs problems."""
