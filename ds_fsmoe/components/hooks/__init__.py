# SPDX-License-Identifier: Apache-2.0
"""Hooks that come along: what may be done to what travels. One per file."""
