# SPDX-License-Identifier: Apache-2.0
"""This package measures what tasks and links cost on this machine and keeps the results. It returns data only."""
