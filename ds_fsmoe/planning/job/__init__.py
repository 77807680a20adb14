# SPDX-License-Identifier: Apache-2.0
"""This package plans what a measured job would take otherwise: from recorded costs, on other ranks."""
