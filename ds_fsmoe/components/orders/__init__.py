# SPDX-License-Identifier: Apache-2.0
"""Orders: from tokens to expert slots and back. One order per file."""
