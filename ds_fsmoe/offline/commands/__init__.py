# SPDX-License-Identifier: Apache-2.0
"""The commands of the console script, one per file. Each loads what it needs when it runs."""
