# SPDX-License-Identifier: Apache-2.0
"""The six parts of a layer: gate, order, dispatch, expert, combine, i-order. One part per file."""
