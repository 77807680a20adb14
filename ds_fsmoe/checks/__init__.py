# SPDX-License-Identifier: Apache-2.0
"""Checks models and configs before training and at the first forwards, and logs problems.

The engine and the entry points call it. ``ds_fsmoe/config`` checks a block without a model.
"""
