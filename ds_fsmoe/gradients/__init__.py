# SPDX-License-Identifier: Apache-2.0
"""Decides when gradients travel: takes DeepSpeed's reduction over, in slices beside the backward."""
