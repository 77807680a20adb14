# SPDX-License-Identifier: Apache-2.0
"""Defines DeepSpeed engines with ds_fsmoe layers: construction, state and reports."""
