# SPDX-License-Identifier: Apache-2.0
"""Defines DeepSpeed's engines with our layers: how they are made, what they know, what they report."""
