# SPDX-License-Identifier: Apache-2.0
"""Decides when gradients are sent: it replaces DeepSpeed's reduction by one in slices, concurrent with the backward.

The engine makes it, and layers open its windows. ``ds_fsmoe/execution`` runs the slices in a layer's schedule.
"""
