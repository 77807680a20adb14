# SPDX-License-Identifier: Apache-2.0
"""Runs a model's blocks with two-batch overlap: while the tokens of one sub-batch are sent, the other computes.

An engine creates a :class:`~ds_fsmoe.two_batch.splitter.Splitter` if its block asks for it.
"""
