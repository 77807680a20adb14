# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's engines with our layers: how they are made, what they know, what they tell."""
