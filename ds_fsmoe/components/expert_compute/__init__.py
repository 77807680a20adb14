# SPDX-License-Identifier: Apache-2.0
"""Computes a rank's experts: by hand-written gradients or by autograd, one by one or grouped. ``calls`` and
``stacked_experts`` are the entry points for layers."""
