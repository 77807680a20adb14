# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's checkpoints saved, checked and loaded by all ranks together."""
