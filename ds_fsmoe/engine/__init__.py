# SPDX-License-Identifier: Apache-2.0
"""Defines DeepSpeed engines with ds_fsmoe layers: how they are made, their state and their reports.

Code of scripts calls this folder through ``ds_fsmoe``; the other folders of the package run below an engine.
"""
