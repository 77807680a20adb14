# SPDX-License-Identifier: Apache-2.0
"""Studies that measure nothing: the paper's evaluation, and models on clusters of thousands of GPUs, simulated."""
