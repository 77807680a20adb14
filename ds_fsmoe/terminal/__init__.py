# SPDX-License-Identifier: Apache-2.0
"""What people read while something runs: with rich where they sit at a terminal, as plain text everywhere else."""
