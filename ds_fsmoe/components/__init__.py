# SPDX-License-Identifier: Apache-2.0
"""The six parts of a layer, each exchangeable: gate, order, dispatch, expert, combine, i-order.

The modules here define the base classes; each folder holds one kind of part, one part per file. ``ds_fsmoe.registry``
looks parts up by name, and ``ds_fsmoe.layer`` calls them.
"""
