# SPDX-License-Identifier: Apache-2.0
"""Predicts a measured job under other conditions: from recorded costs, on other ranks."""
