# SPDX-License-Identifier: Apache-2.0
"""Implements the command ``ds_fsmoe plan``: its arguments, its output, and what it reads of a recorded run."""
