# SPDX-License-Identifier: Apache-2.0
"""Experts: what is done to a token. One expert per file."""
