# SPDX-License-Identifier: Apache-2.0
"""How everything is measured: variants side by side, intervals, rows of results."""
