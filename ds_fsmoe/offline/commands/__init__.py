# SPDX-License-Identifier: Apache-2.0
"""Defines the commands of the console script, one per file. Each imports its dependencies when it runs."""
