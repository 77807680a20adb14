# SPDX-License-Identifier: Apache-2.0
"""All-to-alls: how blocks of slots travel between the ranks of a group. One algorithm per file."""
